//! `kiln serve` as a process: how it ends, what it writes, and how much it takes.

use kiln::ir::text::parse_op;
use kiln::ir::{Id, Item, Node};
use kiln::remote::protocol::frame::control;
use kiln::remote::protocol::greeting::Purpose;
use kiln::remote::protocol::message::{Message, kind};
use kiln_chaos::process::{signal, usage};
use kiln_chaos::{Process, Raw, hello, open};
use kiln_device::{Batch, Driver, Error, Urgency};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

fn kiln() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_kiln"))
}

fn url(address: SocketAddr) -> String {
    let path = std::env::temp_dir().join("kiln-chaos-token");
    std::fs::write(&path, "chaos").unwrap();
    format!("kiln://{address}?token-file={}", path.display())
}

/// Two operations, no memory, and hours of work.
fn endless(device: &dyn Driver) {
    let op = |text: &str, ins: &[Id], out| Item::Run(Node::new(parse_op(text).unwrap(), ins, &[Id(out)]));
    let items = vec![
        op("full shape=[68719476736,64] value=f32:1.0", &[], 1),
        op("sum axes=[0] keep=false", &[Id(1)], 2),
    ];
    device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
}

/// Waits until the server says that a session computes: its values cannot be counted meanwhile.
fn busy(address: SocketAddr) {
    let start = Instant::now();
    let address = kiln::remote::Address::parse(&url(address)).unwrap();
    kiln::remote::client::watch(&address, |look| {
        assert!(start.elapsed() < PATIENCE, "nobody computes: {look}");
        look["sessions"].as_array().is_none_or(|sessions| !sessions.iter().any(|s| s["values"].is_null()))
    })
    .unwrap();
}

#[test]
fn sigterm_ends_a_server_whatever_it_computes() {
    let mut server = Process::serve(kiln(), 0, &["--grace", "3"]);
    let remote = open(&url(server.address()), PATIENCE).unwrap();
    endless(&*remote);
    busy(server.address());
    let start = Instant::now();
    server.signal("TERM");
    assert!(server.ended(PATIENCE).is_some(), "it is still there");
    // The grace, and what a busy machine needs besides.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_second_sigterm_ends_it_at_once() {
    let mut server = Process::serve(kiln(), 0, &["--grace", "600"]);
    let remote = open(&url(server.address()), PATIENCE).unwrap();
    endless(&*remote);
    busy(server.address());
    server.signal("TERM");
    let start = Instant::now();
    while !server.log().iter().any(|line| line.contains("draining")) {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(10));
    }
    server.signal("TERM");
    assert_eq!(server.ended(PATIENCE), Some(false), "it did not finish");
}

#[test]
fn a_task_ends_at_its_limit_and_others_compute_meanwhile() {
    let server = Process::serve(kiln(), 0, &["--task-limit", "4", "--workers", "1"]);
    let remote = open(&url(server.address()), PATIENCE).unwrap();
    endless(&*remote);
    busy(server.address());
    let other = open(&url(server.address()), PATIENCE).unwrap();
    let device = kiln_chaos::program::handle(other.clone());
    assert_eq!(kiln::Tensor::ones([3], &device).exp().to_vec::<f32>().unwrap(), [std::f32::consts::E; 3]);
    let error = remote.sync().wait().unwrap_err();
    assert!(matches!(&error, Error::Refused { reason, .. } if reason.contains("--task-limit")), "{error:?}");
    assert_eq!((kiln::Tensor::ones([3], &device) * 2.0).to_vec::<f32>().unwrap(), [2.0; 3]);
}

fn healthy(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.ends_with("ok\n"), "{answer}");
}

/// Sessions that open and say goodbye: two lines of the log each.
fn come_and_go(address: SocketAddr, times: usize) {
    for _ in 0..times {
        let mut raw = Raw::connect(address);
        raw.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let open = Purpose::Open { device: String::new() };
        let start = Instant::now();
        // Those that said goodbye are on their way out.
        while let Err(refusal) = raw.greet(&hello(b"chaos", open.clone())) {
            assert!(start.elapsed() < PATIENCE, "{refusal}");
            std::thread::sleep(Duration::from_millis(20));
            raw = Raw::connect(address);
        }
        let (kind, body) = Message::Bye.encode();
        raw.bytes(&control(kind, &body.fields));
    }
}

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let mut command = Command::new(kiln());
    command.args(["serve", "--json", "--listen", "127.0.0.1:0", "--lease", "1"]).env("KILN_TOKEN", "chaos");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    output.read_line(&mut first).unwrap();
    let line: serde_json::Value = serde_json::from_str(&first).unwrap();
    let place = line["url"].as_str().unwrap().trim_start_matches("kiln://").to_string();
    let address: SocketAddr = place.split('?').next().unwrap().parse().unwrap();
    // More than a pipe holds.
    come_and_go(address, 500);
    healthy(address);
    // And then nobody is there any more to read.
    drop(output);
    come_and_go(address, 300);
    healthy(address);
    let start = Instant::now();
    let left = || {
        let address = kiln::remote::Address::parse(&url(address)).unwrap();
        let mut left = 1;
        let count = |look: serde_json::Value| {
            left = look["sessions"].as_array().map_or(1, Vec::len);
            false
        };
        kiln::remote::client::watch(&address, count).unwrap();
        left
    };
    while left() > 0 {
        assert!(start.elapsed() < PATIENCE, "sessions stay for ever");
        std::thread::sleep(Duration::from_millis(200));
    }
    signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_crowd_of_wrong_tokens_takes_neither_descriptors_nor_a_right_token_s_place() {
    let mut command = Command::new("sh");
    let script = "ulimit -n 300; exec \"$0\" serve --json --listen 127.0.0.1:0";
    command.args(["-c", script]).arg(kiln());
    let server = Process::start(command);
    let address = server.address();
    let before = usage(server.id());
    let wrong = control(kind::HELLO, &hello(&[b'x'; 90 << 10], Purpose::Watch).encode());
    let mut crowd = Vec::new();
    for i in 0..600 {
        let mut raw = Raw::connect(address);
        // Whole ones, and such as never end.
        raw.bytes(if i % 2 == 0 { &wrong } else { &wrong[..wrong.len() - 1] });
        crowd.push(raw);
        if i % 100 == 99 {
            let start = Instant::now();
            let open = Purpose::Open { device: String::new() };
            let mut right = Raw::connect(address);
            right.stream.set_read_timeout(Some(PATIENCE)).unwrap();
            assert!(right.greet(&hello(b"chaos", open)).is_ok());
            healthy(address);
            // One second, on a machine that has nothing else to do.
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        }
    }
    let used = usage(server.id());
    assert!(used.files < 280, "{used:?}");
    assert!(used.memory < before.memory + (64 << 20), "{before:?} {used:?}");
    assert!(!server.log().iter().any(|line| line.contains("starved")), "{:?}", server.log());
    assert!(server.log().len() < 600, "a line for each of them");
}

#[test]
fn a_token_that_others_can_read_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let state = std::env::temp_dir().join(format!("kiln-open-state-{}", std::process::id()));
    std::fs::create_dir_all(state.join("kiln")).unwrap();
    let path = state.join("kiln/token");
    std::fs::write(&path, "known-to-all").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = Command::new(kiln())
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env_remove("KILN_TOKEN")
        .env("XDG_STATE_HOME", &state)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && told.contains("others can read"), "{told}");
    let _ = std::fs::remove_dir_all(&state);
}

/// Sends until the other side has had enough, or it is over.
fn flood(
    address: SocketAddr,
    over: Arc<AtomicBool>,
    words: impl Fn(u64) -> Vec<u8> + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while !over.load(Ordering::SeqCst) {
            let mut raw = Raw::connect(address);
            let _ = raw.stream.set_write_timeout(Some(Duration::from_millis(200)));
            if raw.greet(&hello(b"chaos", Purpose::Open { device: String::new() })).is_err() {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            let mut n = 0;
            while !over.load(Ordering::SeqCst) && raw.bytes(&words(n)) {
                n += 1;
            }
        }
    })
}

#[test]
fn health_is_answered_while_clients_do_what_they_like() {
    let args = ["--quota", "64M", "--memory", "1G", "--lease", "1", "--max-sessions", "32"];
    let server = Process::serve(kiln(), 0, &args);
    let address = server.address();
    let over = Arc::new(AtomicBool::new(false));
    let mut floods = Vec::new();
    let ping = |n: u64| {
        let (kind, body) = Message::Ping(n).encode();
        control(kind, &body.fields).repeat(4000)
    };
    let frame = |seq: u64, message: &Message<'_>| {
        let (kind, body) = message.encode();
        [&kiln::remote::protocol::frame::head(seq, kind, [&body.fields, &[]])[..], &body.fields].concat()
    };
    // Questions whose answers nobody reads, of a value that there is not; then questions by number, outside the window.
    let reads = move |n: u64| frame(n + 1, &Message::Read { request: n, id: Id(7), background: false });
    let recalls = move |n: u64| frame(n + 1, &Message::Recall { request: n, capability: [7; 32] });
    let poisons = move |n: u64| {
        let error = Error::Peer { message: "x".repeat(60_000) };
        frame(n + 1, &Message::Poison { id: Id(n + 1), error })
    };
    for _ in 0..2 {
        floods.push(flood(address, over.clone(), ping));
        floods.push(flood(address, over.clone(), reads));
        floods.push(flood(address, over.clone(), recalls));
        floods.push(flood(address, over.clone(), poisons));
    }
    let going = over.clone();
    floods.push(std::thread::spawn(move || {
        while !going.load(Ordering::SeqCst) {
            let mut raw = Raw::connect(address);
            raw.bytes(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        }
    }));
    let before = usage(server.id()).memory;
    let mut times: Vec<Duration> = (0..60)
        .map(|_| {
            let start = Instant::now();
            healthy(address);
            let time = start.elapsed();
            std::thread::sleep(Duration::from_millis(20));
            time
        })
        .collect();
    let used = usage(server.id()).memory;
    over.store(true, Ordering::SeqCst);
    floods.into_iter().for_each(|flood| drop(flood.join()));
    times.sort();
    // On a machine of its own: 50 ms, and 500 ms at most.
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!("median {median:?}, worst {worst:?}, {} MiB more", used.saturating_sub(before) >> 20);
    assert!(median < Duration::from_millis(500) && worst < Duration::from_secs(5), "{times:?}");
    assert!(used < before + (1 << 30), "{before} {used}");
}
