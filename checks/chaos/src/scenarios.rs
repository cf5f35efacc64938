//! The long runs, with servers and clients as processes of their own.

use kiln_chaos::process::{self, usage};
use kiln_chaos::program::stream;
use kiln_chaos::proxy::Counts;
use kiln_chaos::{At, Process, Proxy, Random, Way, What, open};
use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Data, Driver, Place, Urgency};
use kiln_ir::text::parse_op;
use kiln_ir::{DType, Id, Item, Meta, Node};
use kiln_remote::Remote;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) type Outcome = Result<String, String>;

type Scenario = (&'static str, fn(&Setup) -> Outcome);

const SCENARIOS: &[Scenario] = &[
    ("train", undisturbed),
    ("cuts", cuts),
    ("kills", kills),
    ("failover", failover),
    ("sessions", sessions),
    ("latency", latency),
    ("cycles", cycles),
    ("ranks", crate::ranks::killed),
    ("hostile", crate::hostile::hostile),
];

pub(crate) struct Setup {
    pub kiln: PathBuf,
    pub seed: u64,
    pub token: PathBuf,
}

/// Runs the scenarios, or those that are named, and says whether all went well.
pub fn run(seed: u64, only: &[&str]) -> bool {
    let Some(kiln) = process::kiln() else {
        println!("the program `kiln` is not built beside this one");
        return false;
    };
    let token = std::env::temp_dir().join(format!("kiln-chaos-token-{}", std::process::id()));
    let _ = std::fs::write(&token, "chaos");
    let setup = Setup { kiln, seed, token };
    let mut fine = true;
    for (name, scenario) in SCENARIOS.iter().filter(|(name, _)| only.is_empty() || only.contains(name)) {
        let start = Instant::now();
        let outcome = scenario(&setup);
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(text) => println!("{name}: passed in {seconds:.1} s, seed {seed}: {text}"),
            Err(text) => {
                fine = false;
                println!("{name}: FAILED after {seconds:.1} s: {text}");
                println!("  again: cargo xtask chaos --seed {seed} --only {name}");
            }
        }
    }
    let _ = std::fs::remove_file(&setup.token);
    fine
}

/// Steps of the training that is disturbed.
const STEPS: &str = "200";

/// Trains in a process of its own and gives the digest of the parameters.
fn train(kiln: &Path, device: Option<&str>) -> Result<(String, Duration), String> {
    let mut command = Command::new(kiln);
    command.args(["train", "digits", "--json", "--digest", "--steps", STEPS]).env("KILN_TOKEN", "chaos");
    if let Some(device) = device {
        command.args(["--device", device]);
    }
    let start = Instant::now();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|e| e.to_string())?;
    let id = child.id();
    let over = Arc::new(AtomicBool::new(false));
    let watch = over.clone();
    std::thread::spawn(move || {
        // Nothing here takes two minutes unless it hangs.
        while !watch.load(Ordering::Acquire) && start.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_millis(50));
        }
        if !watch.load(Ordering::Acquire) {
            process::signal(id, "KILL");
        }
    });
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    over.store(true, Ordering::Release);
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("training ended with {}: {}", output.status, text.trim()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last: serde_json::Value =
        text.lines().last().and_then(|l| serde_json::from_str(l).ok()).unwrap_or_default();
    last["digest"].as_str().map(|d| (d.to_string(), start.elapsed())).ok_or_else(|| format!("it said {text}"))
}

/// The local digest, and the bytes that a remote training takes.
fn measured(setup: &Setup) -> Result<(String, Counts), String> {
    let (local, _) = train(&setup.kiln, None)?;
    let server = Process::serve(&setup.kiln, 0, &[]);
    let proxy = Proxy::start(server.address());
    let (digest, _) = train(&setup.kiln, Some(&proxy.url("")))?;
    same(&digest, &local)?;
    Ok((local, proxy.counts()))
}

fn same(got: &str, want: &str) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("the digest is {got}, undisturbed it is {want}")) }
}

fn undisturbed(setup: &Setup) -> Outcome {
    let (digest, counts) = measured(setup)?;
    let [up, down] = counts.bytes;
    Ok(format!("{STEPS} steps, {up} bytes up, {down} down, sha256 {}…", &digest[..16]))
}

fn cuts(setup: &Setup) -> Outcome {
    let (local, counts) = measured(setup)?;
    let server = Process::serve(&setup.kiln, 0, &[]);
    let proxy = Proxy::start(server.address());
    let mut random = Random(setup.seed);
    for _ in 0..50 {
        let way = if random.one_in(2) { Way::Up } else { Way::Down };
        // The first connection is let in: nobody waits for a server that was never there.
        let greeting = 24 << 10;
        let at = greeting + random.below((counts.bytes[way as usize].saturating_sub(greeting)).max(1));
        proxy.arm(way, At::Byte(at), What::Cut);
    }
    let (digest, time) = train(&setup.kiln, Some(&proxy.url("")))?;
    same(&digest, &local)?;
    let counts = proxy.counts();
    match proxy.armed() {
        0 => Ok(format!("{} cuts, {} connections, {time:.1?}", counts.cuts, counts.connections)),
        left => Err(format!("{left} cuts never happened")),
    }
}

/// Kills the server and starts it again on the same port.
fn again(server: &Arc<Mutex<Option<Process>>>, kiln: &Path, port: u16) {
    let mut server = server.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(old) = server.take() {
        old.kill();
    }
    *server = Some(Process::serve(kiln, port, &[]));
}

fn kills(setup: &Setup) -> Outcome {
    let (local, counts) = measured(setup)?;
    let first = Process::serve(&setup.kiln, 0, &[]);
    let (address, port) = (first.address(), first.address().port());
    let server = Arc::new(Mutex::new(Some(first)));
    let proxy = Proxy::start(address);
    let mut random = Random(setup.seed ^ 0xdead);
    for _ in 0..10 {
        let greeting = 24 << 10;
        let at = greeting + random.below(counts.bytes[0].saturating_sub(greeting).max(1));
        let (server, kiln) = (server.clone(), setup.kiln.clone());
        proxy.arm(Way::Up, At::Byte(at), What::Call(Box::new(move || again(&server, &kiln, port))));
    }
    let (digest, time) = train(&setup.kiln, Some(&proxy.url("")))?;
    same(&digest, &local)?;
    match proxy.counts().calls {
        10 => Ok(format!("10 kills, {} connections, {time:.1?}", proxy.counts().connections)),
        n => Err(format!("only {n} kills happened")),
    }
}

fn failover(setup: &Setup) -> Outcome {
    let (local, counts) = measured(setup)?;
    let (first, second) = (Process::serve(&setup.kiln, 0, &[]), Process::serve(&setup.kiln, 0, &[]));
    let proxy = Proxy::start(first.address());
    let first = Mutex::new(Some(first));
    let at = 24 * 1024 + Random(setup.seed ^ 0xfa11).below(counts.bytes[0] / 2);
    let kill = move || drop(first.lock().unwrap_or_else(|e| e.into_inner()).take());
    proxy.arm(Way::Up, At::Byte(at), What::Call(Box::new(kill)));
    let url = format!("{},kiln://{}", proxy.url(""), second.address());
    let (digest, time) = train(&setup.kiln, Some(&url))?;
    same(&digest, &local)?;
    match proxy.counts().calls {
        1 => Ok(format!("the first server was killed at byte {at}, {time:.1?}")),
        _ => Err("the first server was never killed".into()),
    }
}

pub(crate) fn connect(setup: &Setup, server: &Process) -> Result<Arc<Remote>, String> {
    let url = format!("kiln://{}?token-file={}", server.address(), setup.token.display());
    open(&url, Duration::from_secs(20)).map_err(|e| e.to_string())
}

/// Many sessions at once: right, fair, bounded.
fn sessions(setup: &Setup) -> Outcome {
    const COUNT: usize = 256;
    let server = Process::serve(&setup.kiln, 0, &["--max-sessions", "300", "--quota", "64M"]);
    let before = usage(server.id());
    let wants: Vec<_> = (0..8).map(|kind| stream(&Cpu::start(), setup.seed ^ kind, 60)).collect();
    let wants = Arc::new(wants);
    let remotes: Result<Vec<_>, String> = (0..COUNT).map(|_| connect(setup, &server)).collect();
    let remotes = remotes?;
    // Mixed work, every session's own.
    let seed = setup.seed;
    let threads: Vec<_> = remotes
        .iter()
        .enumerate()
        .map(|(i, remote)| {
            let (remote, wants) = (remote.clone(), wants.clone());
            std::thread::spawn(move || {
                let kind = i % 8;
                stream(&*remote, seed ^ kind as u64, 60) == wants[kind]
            })
        })
        .collect();
    let wrong = threads.into_iter().map(|t| t.join()).filter(|r| !matches!(r, Ok(true))).count();
    if wrong > 0 {
        return Err(format!("{wrong} sessions got other bits"));
    }
    // The same work for all: how many rounds does each get?
    let over = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = remotes
        .iter()
        .map(|remote| {
            let (remote, over) = (remote.clone(), over.clone());
            std::thread::spawn(move || {
                upload(&*remote, 1, &[64, 64]);
                let mut rounds = 0u64;
                while !over.load(Ordering::Acquire) {
                    if product(&*remote, 1).is_err() {
                        return 0;
                    }
                    rounds += 1;
                }
                rounds
            })
        })
        .collect();
    std::thread::sleep(Duration::from_secs(10));
    over.store(true, Ordering::Release);
    let rounds: Vec<u64> = threads.into_iter().map(|t| t.join().unwrap_or(0)).collect();
    let (least, most) =
        (rounds.iter().min().copied().unwrap_or(0), rounds.iter().max().copied().unwrap_or(0));
    let after = usage(server.id());
    let grown = after.memory.saturating_sub(before.memory) >> 20;
    let text = format!(
        "{COUNT} sessions, all bits right, {least} to {most} rounds each ({:.2}), {grown} MiB and {} threads more",
        most as f64 / least.max(1) as f64,
        after.threads.saturating_sub(before.threads)
    );
    let fair = least > 0 && most <= 3 * least;
    if fair && grown < 1024 { Ok(text) } else { Err(text) }
}

/// A matrix under this name.
fn upload(device: &dyn Driver, id: u64, shape: &[usize; 2]) {
    let meta = Meta::new(DType::F32, *shape);
    device.write(Id(id), Data::new(meta, Bytes::new(vec![0u8; meta.bytes()])), Place::Reuse);
}

/// One product of a matrix with itself, waited for by reading one of its elements.
fn product(device: &dyn Driver, of: u64) -> Result<(), String> {
    // A session names nothing twice.
    static NAMES: AtomicU64 = AtomicU64::new(Id::TOOLS.first.0 + (1 << 20));
    let to = NAMES.fetch_add(2, Ordering::Relaxed);
    let dot = parse_op("dot transpose=false").expect("a known operation");
    let sum = parse_op("sum axes=[0,1] keep=false").expect("a known operation");
    let items = vec![
        Item::Run(Node::new(dot, &[Id(of), Id(of)], &[Id(to)])),
        Item::Run(Node::new(sum, &[Id(to)], &[Id(to + 1)])),
        Item::Free(Id(to)),
    ];
    device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
    let read = device.read(Id(to + 1));
    device.submit(Batch { items: vec![Item::Free(Id(to + 1))], urgency: Urgency::Now, ..Batch::default() });
    read.wait().map(drop).map_err(|e| e.to_string())
}

/// How long small reads take, sorted.
fn times(device: &dyn Driver, count: usize) -> Result<Vec<Duration>, String> {
    let mut times = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        product(device, 1)?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times)
}

/// One who asks for little beside one who asks for much.
fn latency(setup: &Setup) -> Outcome {
    let server = Process::serve(&setup.kiln, 0, &[]);
    let interactive = connect(setup, &server)?;
    upload(&*interactive, 1, &[16, 16]);
    times(&*interactive, 200)?;
    let alone = times(&*interactive, 2000)?;
    let over = Arc::new(AtomicBool::new(false));
    let heavy = connect(setup, &server)?;
    let going = over.clone();
    let thread = std::thread::spawn(move || {
        upload(&*heavy, 1, &[384, 384]);
        let mut done = 0u64;
        while !going.load(Ordering::Acquire) && product(&*heavy, 1).is_ok() {
            done += 1;
        }
        done
    });
    std::thread::sleep(Duration::from_millis(300));
    let beside = times(&*interactive, 1000)?;
    over.store(true, Ordering::Release);
    let done = thread.join().unwrap_or(0);
    let p99 = |times: &[Duration]| times[times.len() * 99 / 100];
    let (alone, beside) = (p99(&alone), p99(&beside));
    let allowed = 2 * (2 * alone + kiln_remote::server::schedule::QUANTUM);
    let text = format!("p99 {alone:.1?} alone, {beside:.1?} beside {done} products, {allowed:.1?} allowed");
    if done > 0 && beside <= allowed { Ok(text) } else { Err(text) }
}

/// Sessions that come and go: nothing stays behind, on either side.
fn cycles(setup: &Setup) -> Outcome {
    const COUNT: usize = 10_000;
    let server = Process::serve(&setup.kiln, 0, &[]);
    let settled = |sessions: usize| -> Result<[process::Usage; 2], String> {
        for _ in 0..sessions {
            let remote = connect(setup, &server)?;
            upload(&*remote, 1, &[8, 8]);
            product(&*remote, 1)?;
        }
        std::thread::sleep(Duration::from_millis(500));
        Ok([usage(server.id()), usage(std::process::id())])
    };
    let before = settled(1000)?;
    let after = settled(COUNT)?;
    let grown = |i: usize| after[i].memory as i64 - before[i].memory as i64;
    let text = format!(
        "{COUNT} sessions; server {:?}, then {:?}; client {:?}, then {:?}",
        before[0], after[0], before[1], after[1]
    );
    let same = |i: usize| after[i].files <= before[i].files && after[i].threads <= before[i].threads;
    let fine = (0..2).all(|i| grown(i) < 16 << 20 && same(i));
    if fine { Ok(text) } else { Err(text) }
}
