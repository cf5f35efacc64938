//! Devices on servers as a program sees them: opened again, opened beside each other, and at the end of the process.

use kiln::prelude::*;
use kiln_chaos::program::handle;
use kiln_chaos::{Options, Proxy, Serving, open};
use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Control, Data, Decorator, DeviceInfo, Driver, Observe, Pending, Place};
use kiln_ir::text::parse_op;
use kiln_ir::{DType, Id, Item, Meta, Node};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

fn ones(device: &Device) -> Tensor {
    Tensor::from_vec(vec![1f32; 3], [3], device) * 2.0
}

fn works(device: &Device) {
    assert_eq!(ones(device).to_vec::<f32>().unwrap(), [2.0; 3]);
}

#[test]
fn a_closed_device_is_opened_again() {
    let server = Serving::start(Options::default());
    let first = Device::open(&server.url()).unwrap();
    let old = ones(&first);
    works(&first);
    assert_eq!(Device::open(&server.url().to_uppercase()).unwrap(), first);
    first.close();
    let error = old.to_vec::<f32>().unwrap_err();
    assert_eq!(error, Error::Closed { device: first.address().into() });
    let again = Device::open(&server.url()).unwrap();
    assert!(again != first && (again.id(), again.address()) == (first.id(), first.address()));
    assert_eq!(Device::by_id(first.id()).unwrap(), again);
    assert_eq!(Device::open(&server.url()).unwrap(), again);
    assert_eq!(Device::list().iter().filter(|d| d.address() == first.address()).count(), 1);
    works(&again);
    // What was there before stays lost, and does not get into what is new.
    assert_eq!((&old + 1.0).to_vec::<f32>().unwrap_err(), error);
    assert_eq!(ones(&first).to_vec::<f32>().unwrap_err(), error);
    assert_eq!(first.sync().unwrap_err(), error);
    let new = ones(&again);
    let mixed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| &new + &old));
    let text = *mixed.map(drop).unwrap_err().downcast::<String>().unwrap();
    assert!(text.contains("was opened again"), "{text}");
    drop((old, new));
    works(&again);
    assert_eq!(server.sessions(), 1);
    again.close();
}

#[test]
fn a_lost_device_is_opened_again() {
    let server = Serving::start(Options::default());
    // Nothing is kept for recovery, so that the loss is final at once.
    let url = format!("{}?recover=0", server.url());
    let first = Device::open(&url).unwrap();
    let old = ones(&first);
    works(&first);
    let port = server.address().port();
    drop(server);
    let lease = Duration::from_secs(3600);
    let server = Serving::start(Options { port, lease, ..Options::default() });
    let error = old.to_vec::<f32>().unwrap_err();
    assert!(matches!(error, Error::Disconnected { .. }), "{error}");
    let again = Device::open(&url).unwrap();
    works(&again);
    assert_eq!(old.to_vec::<f32>().unwrap_err(), error);
    assert_eq!(again.id(), first.id());
    // What the lost one had opened there does not wait for its lease.
    assert!(server.until(PATIENCE, |server| server.sessions() == 1), "{} sessions", server.sessions());
    again.close();
}

#[test]
fn a_device_that_is_still_connecting_holds_up_no_other() {
    // It takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("kiln://{}", silent.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for stream in silent.incoming() {
            held.push(stream);
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let openers: Vec<_> = (0..3)
        .map(|_| {
            let url = url.clone();
            std::thread::spawn(move || Device::open(&url))
        })
        .collect();
    let start = Instant::now();
    while asked.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    let server = Serving::start(Options::default());
    let other = Device::open(&server.url()).unwrap();
    works(&other);
    assert_eq!(Device::by_id(other.id()).unwrap(), other);
    assert!(Device::list().contains(&other));
    assert!(openers.iter().all(|opener| !opener.is_finished()), "it has not been waited for");
    let errors: Vec<_> = openers.into_iter().map(|opener| opener.join().unwrap().unwrap_err()).collect();
    assert!(
        matches!(&errors[0], Error::Disconnected { reason, .. } if reason.contains("no answer")),
        "{errors:?}"
    );
    // Whoever comes while it is being opened shares the outcome.
    assert_eq!(asked.load(Ordering::SeqCst), 1, "{errors:?}");
    other.close();
}

#[test]
fn threads_that_open_the_same_address_get_the_same_device() {
    let server = Serving::start(Options::default());
    let (barrier, url) = (Barrier::new(8), server.url());
    let devices: Vec<Device> = std::thread::scope(|scope| {
        let open = || {
            barrier.wait();
            Device::open(&url).unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(devices.iter().all(|device| *device == devices[0]));
    works(&devices[0]);
    assert_eq!(server.sessions(), 1);
    devices[0].close();
}

const ROLE: &str = "KILN_TEST_ROLE";
const URL: &str = "KILN_TEST_URL";

/// What the children of the tests below do. Without a role: nothing.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role.contains("logger") {
        log::set_logger(&Shouting).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    }
    if role == "spill" {
        return spill_child();
    }
    let device = Device::open(&std::env::var(URL).unwrap()).unwrap();
    let x = ones(&device);
    works(&device);
    // After this the other side may kill a server.
    println!("\nready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    if role.contains("read") {
        assert_eq!(x.to_vec::<f32>().unwrap(), [2.0; 3]);
    }
    match role.contains("exit") {
        true => std::process::exit(7),
        false => std::mem::forget(x),
    }
}

struct Shouting;

impl log::Log for Shouting {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        eprintln!("LOGGED {} {}: {}", record.level(), record.target(), record.args());
    }

    fn flush(&self) {}
}

/// A child in that role, which has computed something on a server.
fn started(role: &str, url: &str) -> Child {
    started_with(role, url, &[])
}

fn started_with(role: &str, url: &str, more: &[(&str, &str)]) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .envs([(ROLE, role), (URL, url)])
        .envs(more.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"), "the child has failed");
    child
}

/// Lets it go on to its end, and gives its status and what it said on standard error.
fn ended(mut child: Child) -> (Option<i32>, String) {
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    // Whatever else it says must not hold it up.
    let mut stdout = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    reader.join().unwrap().unwrap();
    (child.wait().unwrap().code(), said)
}

#[test]
fn the_end_of_the_process_ends_its_sessions() {
    let server = Serving::start(Options { lease: Duration::from_secs(3600), ..Options::default() });
    for (role, code) in [("return", 0), ("exit", 7)] {
        let child = started(role, &server.url());
        assert_eq!(server.sessions(), 1);
        let (status, said) = ended(child);
        assert_eq!(status, Some(code), "{said}");
        assert!(server.until(PATIENCE, |s| s.sessions() == 0), "{role}: the session waits for its lease");
    }
}

#[test]
fn a_server_that_is_gone_does_not_hold_up_the_end_of_the_process() {
    let server = Serving::start(Options::default());
    let child = started("return", &server.url());
    drop(server);
    let start = Instant::now();
    assert_eq!(ended(child).0, Some(0));
    // It would be tried for a minute.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn people_are_told_that_a_server_is_lost_and_that_it_is_back() {
    for role in ["read", "read logger"] {
        let (first, second) = (Serving::start(Options::default()), Serving::start(Options::default()));
        let child = started(role, &format!("{},{}", first.url(), second.url()));
        let (lost, instead) = (first.url(), second.url());
        drop(first);
        let (status, said) = ended(child);
        assert_eq!(status, Some(0), "{said}");
        let lines = |start: &str| -> Vec<String> {
            said.lines().filter_map(|line| line.strip_prefix(start)).map(String::from).collect()
        };
        let (own, logged) = (lines("kiln: "), lines("LOGGED WARN kiln::remote: "));
        let told = if role.contains("logger") { &logged } else { &own };
        assert!(told.iter().any(|line| line.starts_with(&lost) && line.contains("is lost")), "{said}");
        assert!(
            told.iter().any(|line| line.starts_with(&instead) && line.contains("stands in for")),
            "{said}"
        );
        // A program with a logger says it itself; without one only these two are said.
        match role.contains("logger") {
            true => assert!(own.is_empty() && told.iter().any(|l| l.contains("rebuilding")), "{said}"),
            false => assert_eq!(told.len(), 2, "{said}"),
        }
    }
}

#[test]
fn a_default_device_that_is_none_names_the_variable_and_the_line() {
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "default_child", "--nocapture"])
        .envs([(ROLE, "default"), ("KILN_DEVICE", "cuda")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success());
    for part in ["KILN_DEVICE=cuda", "tests/client.rs", "cpu:N", "kilns://", "unix:", "wss://", "reference"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn default_child() {
    if std::env::var(ROLE).is_ok_and(|role| role == "default") {
        let _ = Device::default();
    }
}

/// A server's device that is not like the others.
struct Odd {
    inner: Cpu,
    way: Oddity,
}

#[derive(PartialEq)]
enum Oddity {
    Numerics,
    Bits,
    Shape,
}

impl Odd {
    fn serve(device: fn() -> Arc<dyn Driver>) -> Serving {
        Serving::start(Options { device, ..Options::default() })
    }

    fn start(way: Oddity) -> Arc<dyn Driver> {
        Arc::new(Odd { inner: Cpu::start(), way })
    }
}

impl Decorator for Odd {
    fn inner(&self) -> &dyn Driver {
        &self.inner
    }

    fn info(&self) -> DeviceInfo {
        let info = self.inner.info();
        match self.way {
            Oddity::Numerics => DeviceInfo { numerics: "odd-1".into(), ..info },
            Oddity::Bits | Oddity::Shape => info,
        }
    }

    fn read(&self, id: Id, _: Option<Meta>) -> Pending<Data> {
        Pending::ready(self.inner.read(id).wait().map(|data| match self.way {
            Oddity::Bits => {
                let mut bytes = data.bytes.to_vec();
                bytes[0] ^= 1;
                Data::new(data.meta, Bytes::new(bytes))
            }
            Oddity::Shape => Data::new(Meta::new(DType::U8, [data.bytes.len()]), data.bytes),
            Oddity::Numerics => data,
        }))
    }
}

#[test]
fn a_server_with_other_numerics_does_not_stand_in() {
    let odd = Odd::serve(|| Odd::start(Oddity::Numerics));
    let (first, third) = (Serving::start(Options::default()), Serving::start(Options::default()));
    let urls = [first.url(), odd.url(), third.url()];
    let session = |urls: &[String], patience| {
        let remote = open(&urls.join(","), patience).unwrap();
        let x = ones(&handle(remote.clone()));
        assert_eq!(x.to_vec::<f32>().unwrap(), [2.0; 3]);
        (remote, x)
    };
    let (both, x) = session(&urls[..2], Duration::from_millis(300));
    let (all, y) = session(&urls, PATIENCE);
    // It may be begun there.
    let alone = session(&urls[1..2], PATIENCE);
    drop(first);
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0; 3]);
    assert_eq!((all.stats().replayed, third.sessions()), (1, 1));
    let error = x.to_vec::<f32>().unwrap_err();
    let want = Cpu::start().info().numerics;
    assert_eq!(error, Error::NumericsDiffer { peer: odd.url(), want, got: "odd-1".into() });
    // What it had opened for them is gone.
    assert!(odd.until(PATIENCE, |odd| odd.sessions() == 1), "{} sessions", odd.sessions());
    drop((both, alone));
}

#[test]
fn a_server_that_computes_other_bits_is_found_out() {
    let (first, odd) = (Serving::start(Options::default()), Odd::serve(|| Odd::start(Oddity::Bits)));
    let remote = open(&format!("{},{}", first.url(), odd.url()), PATIENCE).unwrap();
    let x = ones(&handle(remote.clone()));
    // What was read is known, and what is computed from it must fit.
    assert_eq!(x.to_vec::<f32>().unwrap(), [2.0; 3]);
    drop(first);
    let error = (&x + 1.0).to_vec::<f32>().unwrap_err();
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
    assert!(matches!(remote.ended(), Some(Error::Diverged { .. })));
    assert!(odd.until(PATIENCE, |odd| odd.sessions() == 0), "{} sessions", odd.sessions());
}

#[test]
fn another_value_than_was_asked_for_is_an_error() {
    let odd = Odd::serve(|| Odd::start(Oddity::Shape));
    let remote = open(&odd.url(), PATIENCE).unwrap();
    let x = ones(&handle(remote.clone()));
    let (want, got) = (Meta::new(DType::F32, [3]), Meta::new(DType::U8, [12]));
    match x.to_data().unwrap_err() {
        Error::OtherValue { want: w, got: g, .. } => assert_eq!((w, g), (want, got)),
        error => panic!("{error}"),
    }
    // Nothing else is lost.
    assert_eq!((odd.sessions(), remote.ended(), remote.stats().resumed), (1, None, 0));
}

#[test]
fn what_no_frame_can_say_fails_by_itself() {
    const COUNT: usize = 1_100_000;
    let server = Serving::start(Options::default());
    let proxy = Proxy::start(server.address());
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    let meta = Meta::new(DType::U8, [1]);
    let run = |op: &str, ins: &[Id], out| Item::Run(Node::new(parse_op(op).unwrap(), ins, &[Id(out)]));
    remote.write(Id(1), Data::new(meta, Bytes::new(vec![7u8])), Place::Reuse);
    let items = vec![
        run("add", &[Id(1), Id(1)], 2),
        run("cat axis=0", &vec![Id(1); COUNT], 3),
        run("add", &[Id(2), Id(1)], 4),
        run("add", &[Id(3), Id(1)], 5),
    ];
    remote.submit(Batch { items, ..Batch::default() });
    let check = || {
        assert_eq!(*remote.read(Id(4)).wait().unwrap().bytes, [21]);
        for id in [3, 5] {
            let error = remote.read(Id(id)).wait().unwrap_err();
            let Error::TooLong { op, bytes, most } = error.root() else { panic!("{error}") };
            assert!(op == "cat" && *bytes > COUNT && *most == 1 << 20, "{error}");
        }
    };
    check();
    assert_eq!((remote.stats().resumed, proxy.counts().connections), (0, 1));
    let told = remote.failures();
    assert!(told.iter().any(|e| matches!(e.root(), Error::TooLong { .. })), "{told:?}");
    // It fails on the next server too.
    proxy.refuse(true);
    proxy.cut_all();
    server.server.registry.list().iter().for_each(|client| client.end());
    proxy.refuse(false);
    check();
    // Many operations that take more than a frame together are split.
    let many = (0..4000).map(|i| run("cat axis=0", &vec![Id(1); 300], 1000 + i)).collect();
    remote.submit(Batch { items: many, ..Batch::default() });
    assert_eq!(*remote.read(Id(4999)).wait().unwrap().bytes, [7; 300]);
}

/// Its snapshot is in a file, which it cuts.
fn spill_child() {
    let remote = open(&std::env::var(URL).unwrap(), PATIENCE).unwrap();
    let x = Tensor::ones([1 << 18], &handle(remote.clone())) * 2.0;
    assert_eq!(x.sum(()).item::<f32>().unwrap(), (1 << 19) as f32);
    remote.snapshot();
    let start = Instant::now();
    while remote.stats().held.stored == 0 {
        assert!(start.elapsed() < PATIENCE, "{:?}", remote.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut cut = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if std::fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().contains("kiln-spill-")) {
            std::fs::OpenOptions::new().write(true).open(entry.path()).unwrap().set_len(1000).unwrap();
            cut += 1;
        }
    }
    assert!(cut > 0, "the file is still open");
    println!("\nready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let error = x.to_vec::<f32>().unwrap_err();
    assert!(matches!(&error, Error::File { path, .. } if path.contains("snapshot")), "{error}");
    assert_eq!(remote.ended(), Some(error));
}

#[test]
#[cfg(target_os = "linux")]
fn a_snapshot_that_cannot_be_read_is_an_error_and_no_crash() {
    let server = Serving::start(Options::default());
    // Whatever a snapshot holds goes to a file.
    let child = started_with("spill", &server.url(), &[("KILN_SNAPSHOT", "1")]);
    let port = server.address().port();
    drop(server);
    let server = Serving::start(Options { port, ..Options::default() });
    let (status, said) = ended(child);
    assert_eq!(status, Some(0), "{said}");
    assert!(server.until(PATIENCE, |s| s.sessions() == 0), "nothing is left of it");
}
