//! Everything that works locally works on a server: what a device is asked besides computing.

use kiln::Generator;
use kiln::ir::custom::{CustomOp, register};
use kiln::ir::{CustomCall, Meta, Op, OpError, V};
use kiln::nn::NonFinite;
use kiln::prelude::*;
use kiln_chaos::program::handle;
use kiln_chaos::{At, Options, Proxy, Serving, Way, What, open};
use kiln_cpu::Cpu;
use kiln_device::{Control as _, Driver as _, Observe as _, Trace};
use kiln_remote::Remote;
use kiln_remote::protocol::message::kind;
use kiln_remote::server::session::Quota;
use smallvec::{SmallVec, smallvec};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

fn connect(server: &Serving, device: &str) -> Arc<Remote> {
    open(&format!("{}{device}", server.url()), PATIENCE).unwrap()
}

fn bits(x: &Tensor) -> Vec<u8> {
    x.to_data().unwrap().bytes.to_vec()
}

#[test]
fn what_it_can_do_is_what_the_servers_device_can() {
    let server = Serving::start(Options::default());
    let (remote, local) = (connect(&server, ""), Cpu::start());
    let (there, here) = (remote.info(), local.info());
    assert_eq!(there.name, "remote<fusion<cpu>>");
    // Of the server's devices, `cpu` and `reference`, one is of this kind; in a process there are more.
    assert_eq!((there.count, here.count), (1, kiln_cpu::CPUS as usize));
    let reference = connect(&server, "/reference").info();
    assert_eq!((reference.name.as_str(), reference.count), ("remote<reference>", 1));
    assert_eq!((there.numerics.as_str(), there.threads()), (here.numerics.as_str(), here.threads()));
    for dtype in DType::ALL {
        assert_eq!(there.usage(dtype), here.usage(dtype), "{dtype}");
    }
    let add = kiln::ir::text::parse_op("add").unwrap();
    let metas = [Meta::new(DType::F32, [2]); 2];
    assert!(remote.supports(&add, &metas) && local.supports(&add, &metas));
}

#[test]
fn memory_is_counted_limited_and_cleaned_up_there() {
    let server = Serving::start(Options::default());
    let device = handle(connect(&server, ""));
    let start = device.memory();
    let x = device.persistent(|| Tensor::from_vec(vec![1f32; 1 << 16], [1 << 16], &device));
    let y = &x + 1.0;
    device.sync().unwrap();
    let held = device.memory();
    assert_eq!(held.values, start.values + 2);
    assert!(held.live_bytes >= start.live_bytes + (2 << 18) && held.peak_bytes >= held.live_bytes);
    assert!(held.persistent_bytes >= start.persistent_bytes + (1 << 18));
    device.set_memory_limit(Some(held.live_bytes + (1 << 18)));
    assert_eq!(device.memory().limit, Some(held.live_bytes + (1 << 18)));
    let error = Tensor::ones([1 << 20], &device).exp().to_data().unwrap_err();
    assert!(matches!(error.root(), Error::OutOfMemory { .. }), "{error}");
    device.set_memory_limit(None);
    assert_eq!(Tensor::ones([1 << 20], &device).sum(()).item::<f32>().unwrap(), (1 << 20) as f32);
    drop((x, y));
    device.sync().unwrap();
    device.cleanup();
    let end = device.memory();
    assert_eq!((end.values, end.live_bytes, end.cached_bytes), (start.values, start.live_bytes, 0));
}

#[test]
fn a_profile_shows_the_servers_own_kernels_on_its_own_clock() {
    let server = Serving::start(Options::default());
    // Every answer takes this long on its way: a clock on this side would show it.
    let way = Duration::from_millis(300);
    let proxy = Proxy::start(server.address());
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    let path = std::env::temp_dir().join(format!("kiln-there-{}.json", std::process::id()));
    let (device, profile) = handle(remote.clone()).profiled(Some(path.clone())).unwrap();
    assert_eq!(device.info().name, "profile<remote<fusion<cpu>>>");
    let x = Tensor::from_vec(vec![0.5f32; 64], [8, 8], &device);
    device.sync().unwrap();
    proxy.delay(way);
    let replies = remote.stats().replies;
    let steps = 3;
    for _ in 0..steps {
        let y = (&x * 2.0).tanh() + &x;
        let z = x.matmul(&x).exp();
        device.mark();
        drop((y.abs(), z));
    }
    let y = ((&x * 2.0).tanh() + &x).to_vec::<f32>().unwrap();
    assert!(y.iter().all(|v| *v == kiln::ir::math::single::tanh(1f32) + 0.5));
    assert_eq!(
        remote.stats().replies,
        replies + 2,
        "steps wait for nothing; a read brings what ran before it"
    );
    let rows = profile.rows();
    let row = |has: &dyn Fn(&str) -> bool| {
        let found = rows.iter().find(|row| has(&row.name));
        found.unwrap_or_else(|| panic!("it is missing in {rows:?}")).clone()
    };
    // What ran as one there is one row with its operations; nothing here knows of groups.
    let group = row(&|name| name.contains(": ") && name.contains("mul") && name.contains("tanh"));
    assert!(group.count >= 1 && group.bytes >= 2 * 256, "{group:?}");
    let product = row(&|name| name.contains("dot"));
    assert!(product.count == steps && product.bytes >= 256, "{product:?}");
    assert_eq!(row(&|name| name == "write").bytes, 256);
    assert!(rows.iter().all(|row| row.seconds < way.as_secs_f64()), "{rows:?}");
    // Nothing is flushed or closed: the trace is whole.
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let _ = std::fs::remove_file(&path);
    let events = trace["traceEvents"].as_array().unwrap();
    let process = |pid: u64| events.iter().filter(move |e| e["pid"] == pid && e["ph"] == "X");
    assert_eq!(profile.lost(), 0);
    assert!(process(2).any(|e| e["name"] == group.name.as_str() && e["args"]["nodes"].as_u64() >= Some(2)));
    // The read of this side spans the way there and back, and what ran for it there lies within.
    let span = |e: &serde_json::Value| {
        let from = e["ts"].as_f64().unwrap();
        (from, from + e["dur"].as_f64().unwrap())
    };
    let read = span(process(1).find(|e| e["name"] == "read").unwrap());
    assert!(read.1 - read.0 >= way.as_secs_f64() * 1e6, "{read:?}");
    let there = span(process(2).rfind(|e| e["name"] == "read").unwrap());
    assert!(read.0 < there.0 && there.1 < read.1, "{there:?} is not within {read:?}");
}

#[test]
fn a_trace_counts_against_the_quota() {
    let quota = Quota { bytes: 6 << 20, ..Quota::default() };
    let server = Serving::start(Options { quota, ..Options::default() });
    let device = connect(&server, "");
    let available = |device: &Remote| device.memory().limit.unwrap();
    assert_eq!(available(&device), 6 << 20);
    device.trace(true).unwrap();
    assert_eq!(available(&device), (6 << 20) - Trace::BYTES);
    device.limit(Some(1 << 20));
    assert_eq!(available(&device), 1 << 20);
    device.limit(None);
    assert_eq!(available(&device), (6 << 20) - Trace::BYTES);
    device.trace(false).unwrap();
    assert_eq!(available(&device), 6 << 20);
    assert_eq!(device.spans(9).wait().unwrap(), kiln_device::Spans::default());
    let x = Tensor::zeros([3 << 18], &handle(device.clone()));
    assert_eq!(x.sum(()).item::<f32>().unwrap(), 0.0);
    let full = x.exp();
    full.device().sync().unwrap();
    let error = device.trace(true).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit, .. } if limit == 6 << 20), "{error:?}");
}

#[test]
fn a_trace_goes_on_on_the_server_that_takes_over() {
    let servers = [Serving::start(Options::default()), Serving::start(Options::default())];
    let remote = open(&servers.each_ref().map(Serving::url).join(","), PATIENCE).unwrap();
    let (device, profile) = handle(remote.clone()).profiled(None).unwrap();
    let x = Tensor::from_vec(vec![0.5f32; 64], [8, 8], &device);
    let tanh = (&x * 2.0).tanh().to_vec::<f32>().unwrap();
    let [first, second] = servers;
    drop(first);
    let sin = (&x * 2.0).sin().to_vec::<f32>().unwrap();
    assert_eq!((tanh[0], sin[0]), (kiln::ir::math::single::tanh(1f32), kiln::ir::math::single::sin(1f32)));
    assert_eq!(remote.stats().replayed, 1);
    let rows = profile.rows();
    assert!(rows.iter().any(|row| row.name.contains("sin")), "{rows:?}");
    drop(second);
}

#[test]
fn what_waits_for_long_is_submitted_while_a_server_has_nothing_to_do() {
    let server = Serving::start(Options::default());
    let device = handle(connect(&server, ""));
    let x = Tensor::from_vec(vec![0.5f32; 8], [8], &device);
    let y = x.exp();
    // Nobody reads, syncs or marks.
    let executed =
        |s: &Serving| s.server.registry.list().iter().any(|c| c.try_held().is_some_and(|held| held.2 >= 1));
    assert!(server.until(Duration::from_secs(20), executed));
    // And again, after what was there is gone.
    let z = y.exp();
    let both =
        |s: &Serving| s.server.registry.list().iter().any(|c| c.try_held().is_some_and(|held| held.2 >= 2));
    assert!(server.until(Duration::from_secs(20), both));
    assert_eq!(
        z.to_vec::<f32>().unwrap(),
        [kiln::ir::math::single::exp(kiln::ir::math::single::exp(0.5f32)); 8]
    );
}

#[test]
fn seeds_and_packed_weights_give_the_local_bits() {
    let server = Serving::start(Options::default());
    let program = |device: &Device| {
        kiln::with_generator(Generator::new(77).child(&[3, 1]), || {
            let w = Tensor::randn([64, 32], device);
            let x = Tensor::rand([5, 64], device) - 0.5;
            let coins = Tensor::bernoulli(0.25, [7], device);
            let dice = Tensor::randint(1, 7, [20], device);
            let [q8, q4] = [DType::Q8, DType::Q4].map(|dtype| {
                let packed = w.transpose(0, 1).quantize(dtype);
                (
                    packed.dtype(),
                    bits(&packed),
                    bits(&x.matmul(&packed.dequantize(DType::F32).transpose(0, 1))),
                )
            });
            (bits(&w), bits(&coins), bits(&dice), q8, q4)
        })
    };
    let remote = handle(connect(&server, ""));
    assert_eq!(program(&remote), program(&handle(Arc::new(Cpu::start()))));
}

/// x³, which counts how often it ran.
struct Cube;

static RUNS: AtomicU64 = AtomicU64::new(0);

impl CustomOp for Cube {
    fn name(&self) -> &str {
        "device.cube"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        match ins {
            [x] if x.dtype == DType::F32 => Ok(smallvec![*x]),
            _ => Err(OpError::Custom { op: "device.cube".into(), message: "it takes one f32 tensor".into() }),
        }
    }

    fn eval(&self, _: &[u8], ins: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        RUNS.fetch_add(1, Ordering::Relaxed);
        for (x, y) in ins[0].1.chunks_exact(4).zip(outs[0].1.chunks_exact_mut(4)) {
            let x = f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
            y.copy_from_slice(&(x * x * x).to_le_bytes());
        }
        Ok(())
    }

    fn grad<'a>(
        &self,
        _: &[u8],
        grads: &[Option<V<'a>>],
        ins: &[V<'a>],
        _: &[V<'a>],
        _: usize,
    ) -> Option<V<'a>> {
        Some(grads[0]? * 3.0 * ins[0].square())
    }
}

/// Gives another number each time.
struct Counter;

impl CustomOp for Counter {
    fn name(&self) -> &str {
        "device.counter"
    }

    fn infer(&self, _: &[u8], _: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec![Meta::new(DType::U8, [1])])
    }

    fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        outs[0].1[0] = NEXT.fetch_add(1, Ordering::Relaxed) as u8;
        Ok(())
    }

    fn pure(&self) -> bool {
        false
    }
}

fn custom(name: &str, ins: &[&Tensor]) -> Tensor {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        register(Cube).unwrap();
        register(Counter).unwrap();
    });
    let call = CustomCall { name: name.into(), attrs: Vec::new() };
    Tensor::apply(Op::Custom(Arc::new(call)), ins).swap_remove(0)
}

#[test]
fn an_operation_of_ones_own_runs_there_with_its_gradient() {
    let server = Serving::start(Options::default());
    let device = handle(connect(&server, ""));
    let x = Tensor::from_vec(vec![1.0f32, -2.0, 0.5], [3], &device).requires_grad();
    let before = RUNS.load(Ordering::Relaxed);
    let y = custom("device.cube", &[&x]);
    let gradient = grad(&y.sum(()), &[&x]).remove(0);
    assert_eq!(y.to_vec::<f32>().unwrap(), [1.0, -8.0, 0.125]);
    assert_eq!(gradient.to_vec::<f32>().unwrap(), [3.0, 12.0, 0.75]);
    assert_eq!(RUNS.load(Ordering::Relaxed), before + 1, "it ran once, on the server");
}

/// Waits until a session has taken a snapshot more than it had.
fn snapshot(remote: &Remote, before: u64) {
    let start = Instant::now();
    while remote.stats().held.snapshots == before {
        assert!(start.elapsed() < PATIENCE, "no snapshot: {:?}", remote.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_cannot_be_run_again_is_not_recovered_before_a_snapshot() {
    for covered in [false, true] {
        let server = Serving::start(Options { lease: Duration::from_millis(100), ..Options::default() });
        let proxy = Proxy::start(server.address());
        let remote = open(&proxy.url(""), PATIENCE).unwrap();
        let device = handle(remote.clone());
        let x = Tensor::ones([4], &device);
        let drawn = custom("device.counter", &[&x]);
        device.sync().unwrap();
        let events = remote.events();
        assert!(events.iter().any(|e| e.contains("no recovery until the next snapshot")), "{events:?}");
        let want = if covered { Some(bits(&drawn)) } else { None };
        if covered {
            remote.snapshot();
            snapshot(&remote, 0);
        }
        proxy.refuse(true);
        proxy.cut_all();
        assert!(server.until(PATIENCE, |s| s.sessions() == 0), "the lease has ended");
        proxy.refuse(false);
        match (drawn.to_data(), want) {
            (Ok(data), Some(want)) => assert_eq!(data.bytes[..], want[..]),
            (Err(Error::Disconnected { reason, .. }), None) => {
                assert!(reason.contains("not pure"), "{reason}")
            }
            (got, want) => panic!("{got:?}, {want:?}"),
        }
    }
}

#[test]
fn a_server_has_several_devices() {
    let server = Serving::start(Options::default());
    let (cpu, reference) = (connect(&server, "/cpu:0"), connect(&server, "/reference"));
    assert!(cpu.info().name.contains("cpu"), "{}", cpu.info().name);
    assert!(reference.info().name.contains("reference"), "{}", reference.info().name);
    let error = open(&format!("{}/gpu", server.url()), PATIENCE).map(drop).unwrap_err();
    assert!(matches!(&error, Error::Refused { reason, .. } if reason.contains("`gpu`")), "{error}");
    let program =
        |device: &Device| bits(&(Tensor::arange(0, 100, 1, device).to_dtype(DType::F32) * 0.1).exp());
    assert_eq!(program(&handle(cpu)), program(&handle(reference)));
}

#[test]
fn a_move_between_devices_of_one_server_does_not_pass_through_the_client() {
    let server = Serving::start(Options::default());
    let proxy = Proxy::start(server.address());
    let remotes = ["/cpu", "/reference"].map(|device| open(&proxy.url(device), PATIENCE).unwrap());
    let [from, to] = remotes.map(|remote| handle(remote));
    let x = Tensor::rand([512, 512], &from);
    from.sync().unwrap();
    let before = proxy.counts();
    let y = x.to_device(&to).unwrap();
    to.sync().unwrap();
    let after = proxy.counts();
    let bytes = (0..2).map(|way| after.bytes[way] - before.bytes[way]).sum::<u64>();
    assert!(bytes < 4096, "{bytes} bytes for a value of a megabyte");
    // Nor does it go over a connection between servers.
    assert_eq!(after.connections, before.connections);
    assert_eq!(bits(&y), bits(&x));
}

/// An index that is out of range, and the line that asked for it.
fn wrong(device: &Device) -> (Tensor, u32) {
    let x = Tensor::ones([3, 2], device);
    // Known on the device alone.
    let index = Tensor::from_vec(vec![0i64, 8], [2], device) + 1;
    (x.index_select(0, &index), line!())
}

fn is_wrong(error: &Error, line: u32) {
    let Error::Failed { origin: Some(origin), .. } = error else { panic!("{error:?}") };
    assert!(origin.to_string().contains(&format!("device.rs:{line}")), "{error}");
    assert_eq!(error.root(), &Error::Index { op: "take".into(), index: 9, length: 3 });
}

#[test]
fn a_failed_value_that_is_moved_keeps_the_users_line() {
    let servers = [Serving::start(Options::default()), Serving::start(Options::default())];
    let [a, b] = servers.each_ref().map(|server| handle(connect(server, "")));
    let beside = handle(connect(&servers[0], ""));
    let (bad, line) = wrong(&a);
    // To another server, to another session of the same, and on from there.
    let moved = bad.to_device(&b).unwrap();
    let further = moved.exp().to_device(&beside).unwrap();
    for failed in [&bad, &moved, &further, &bad.to_device(&beside).unwrap()] {
        is_wrong(&failed.to_data().unwrap_err(), line);
    }
    assert!((Tensor::ones([1], &b) + 1.0).to_data().is_ok());
}

#[test]
fn a_failed_value_is_a_part_of_snapshots_and_fails_again_on_another_server() {
    let server = Serving::start(Options { lease: Duration::from_millis(100), ..Options::default() });
    let proxy = Proxy::start(server.address());
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    let device = handle(remote.clone());
    let (bad, line) = wrong(&device);
    let fine = Tensor::ones([4], &device).exp();
    is_wrong(&device.sync().unwrap_err(), line);
    remote.snapshot();
    snapshot(&remote, 0);
    let held = remote.stats().held;
    proxy.refuse(true);
    proxy.cut_all();
    assert!(server.until(PATIENCE, |s| s.sessions() == 0), "the lease has ended");
    proxy.refuse(false);
    is_wrong(&bad.to_data().unwrap_err(), line);
    is_wrong(&(&bad + 1.0).to_data().unwrap_err(), line);
    assert_eq!(fine.to_vec::<f32>().unwrap(), [std::f32::consts::E; 4]);
    assert_eq!(proxy.counts().frames[0][kind::POISON as usize], 1, "told, not computed again");
    assert!(remote.stats().replayed == 1 && held.snapshots == 1 && held.entries < 4, "{held:?}");
    device.sync().expect("told once");
}

/// Kinds of frames that a training has none of: questions, failures, moves, snapshots and what follows a lost server.
#[test]
fn a_cut_at_the_rarer_kinds_of_frames_changes_nothing() {
    let up = [kind::QUERY, kind::EXPOSE, kind::FETCH];
    let down = [kind::ANSWER, kind::FAULT, kind::FAILED];
    let ways = up.iter().map(|k| (Way::Up, *k)).chain(down.iter().map(|k| (Way::Down, *k)));
    let server = Serving::start(Options::default());
    for (way, kind) in ways {
        for before in [true, false] {
            let what = format!("{way:?}, kind {kind}, before: {before}");
            let proxy = Proxy::start(server.address());
            let [remote, other] = [0; 2].map(|_| open(&proxy.url(""), PATIENCE).unwrap());
            let (device, second) = (handle(remote.clone()), handle(other.clone()));
            proxy.arm(way, if before { At::Before(kind, 1) } else { At::After(kind, 1) }, What::Cut);
            let (bad, line) = wrong(&device);
            let x = Tensor::arange(0, 1000, 1, &device).to_dtype(DType::F32);
            let y = (&x * 0.5).to_device(&second).unwrap();
            assert!(device.memory().values >= 2, "{what}");
            is_wrong(&bad.to_data().unwrap_err(), line);
            assert_eq!(bits(&y.to_device(&device).unwrap()), bits(&(&x * 0.5)), "{what}");
            device.sync().unwrap_or_else(|e| panic!("{what}: told twice: {e}"));
            assert_eq!((proxy.counts().cuts, proxy.armed()), (1, 0), "{what}");
            let replayed = remote.stats().replayed + other.stats().replayed;
            assert_eq!(replayed, 0, "{what}: sessions went on");
        }
    }
}

/// The kinds that only a lost server brings.
#[test]
fn a_cut_while_a_session_is_rebuilt_changes_nothing() {
    for (way, kind) in [(Way::Up, kind::DIGEST), (Way::Up, kind::POISON), (Way::Down, kind::ANSWER)] {
        for before in [true, false] {
            let what = format!("{way:?}, kind {kind}, before: {before}");
            let server = Serving::start(Options { lease: Duration::from_millis(300), ..Options::default() });
            let proxy = Proxy::start(server.address());
            let remote = open(&proxy.url(""), PATIENCE).unwrap();
            let device = handle(remote.clone());
            let (bad, line) = wrong(&device);
            is_wrong(&device.sync().unwrap_err(), line);
            remote.snapshot();
            snapshot(&remote, 0);
            let x = Tensor::ones([16], &device).exp();
            let want = bits(&x);
            proxy.arm(way, if before { At::Before(kind, 1) } else { At::After(kind, 1) }, What::Cut);
            proxy.refuse(true);
            proxy.cut_all();
            assert!(server.until(PATIENCE, |s| s.sessions() == 0), "the lease has ended");
            proxy.refuse(false);
            assert_eq!(bits(&x), want, "{what}");
            is_wrong(&bad.to_data().unwrap_err(), line);
            assert_eq!(proxy.counts().cuts, 1, "{what}");
        }
    }
}

#[test]
fn a_recurring_step_asks_nothing_and_one_that_is_refused_is_told() {
    let servers = [Serving::start(Options::default()), Serving::start(Options::default())];
    let remote = connect(&servers[0], "");
    let device = handle(remote.clone());
    let elsewhere = handle(connect(&servers[1], ""));
    for policy in [NonFinite::Continue, NonFinite::Error] {
        let mut layer = kiln::nn::Linear::new(6, 4, &device);
        let x = Tensor::randn([8, 6], &device);
        let mut optimizer = Adam::new(0.01).nonfinite(policy);
        let mut step = |layer: &mut kiln::nn::Linear, factor: &Tensor| {
            let gradients = (layer.forward(&x).square() * factor).mean(()).backward();
            optimizer.step(layer, &gradients);
        };
        let one = Tensor::ones([], &device);
        (0..5).for_each(|_| step(&mut layer, &one));
        device.sync().unwrap();
        let before = remote.stats();
        (0..20).for_each(|_| step(&mut layer, &one));
        device.submit();
        let after = remote.stats();
        assert_eq!(after.replies, before.replies, "{policy:?}: nothing is read back");
        assert_eq!(after.defined, before.defined, "{policy:?}: it is the same step");
        assert_eq!(after.called - before.called, 20, "{policy:?}");
        let kept = bits(&layer.weight);

        // What fails on the device, and what failed before the device has seen it.
        let (bad, line) = wrong(&device);
        let (far, _) = wrong(&elsewhere);
        let moved = far.to_device(&device).unwrap();
        for bad in [bad, moved] {
            step(&mut layer, &bad.sum(()).to_dtype(DType::F32));
            match device.sync().unwrap_err() {
                Error::StepRefused { path, origin: Some(origin), cause: Some(cause), .. } => {
                    assert_eq!(path, "weight");
                    assert!(origin.to_string().contains("device.rs"), "{origin}");
                    is_wrong(&cause, line);
                }
                other => panic!("{policy:?}: {other:?}"),
            }
            assert_eq!(bits(&layer.weight), kept, "{policy:?}");
        }
        step(&mut layer, &(&one * f32::INFINITY));
        let outcome = layer.bias.as_ref().unwrap().to_vec::<f32>();
        match policy {
            NonFinite::Continue => assert!(outcome.unwrap().iter().any(|x| !x.is_finite())),
            NonFinite::Skip | NonFinite::Error => {
                assert!(matches!(outcome, Err(Error::StepRefused { cause: None, .. })), "{outcome:?}");
                assert_eq!(bits(&layer.weight), kept);
            }
        }
    }
}
