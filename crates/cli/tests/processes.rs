//! Servers and clients as processes of their own: stopped, killed, drained, and ignorant of each other's operations.

use kiln::Tensor;
use kiln::ir::custom::{CustomOp, register};
use kiln::ir::{CustomCall, Meta, Op, OpError};
use kiln_chaos::program::{handle, train};
use kiln_chaos::{Options, Process, Serving, open, process};
use kiln_device::Error;
use smallvec::{SmallVec, smallvec};
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

fn kiln() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_kiln"))
}

/// The URL of a server, with the token that it wants.
fn url(server: &Process) -> String {
    let path = std::env::temp_dir().join("kiln-chaos-token");
    std::fs::write(&path, "chaos").unwrap();
    format!("kiln://{}?token-file={}", server.address(), path.display())
}

#[test]
fn a_stopped_server_goes_on_where_it_was() {
    let server = Process::serve(kiln(), 0, &[]);
    let remote = open(&url(&server), PATIENCE).unwrap();
    let id = server.id();
    let pause = std::thread::spawn(move || {
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(20));
            process::signal(id, "STOP");
            std::thread::sleep(Duration::from_millis(400));
            process::signal(id, "CONT");
        }
    });
    let want = train(Arc::new(kiln_cpu::Cpu::start()), 40).unwrap();
    assert_eq!(train(remote.clone(), 40).unwrap(), want);
    pause.join().unwrap();
    assert_eq!(remote.stats().replayed, 0);
}

#[test]
fn sigterm_drains_and_the_exit_is_clean() {
    let mut server = Process::serve(kiln(), 0, &[]);
    let remote = open(&url(&server), Duration::from_secs(2)).unwrap();
    let device = handle(remote.clone());
    let mut x = Tensor::ones([64], &device);
    for _ in 0..2000 {
        x = (&x * 0.5) + 1.0;
    }
    let answer = x.to_data_async();
    server.signal("TERM");
    assert!(answer.wait().is_ok(), "what was sent is answered");
    assert_eq!(server.ended(Duration::from_secs(12)), Some(true));
}

#[test]
fn a_killed_client_leaves_nothing_behind() {
    let lease = Duration::from_millis(500);
    let server = Serving::start(Options { lease, ..Options::default() });
    let mut client = Command::new(kiln());
    client.args(["train", "digits", "--steps", "1000000", "--device", &server.url()]);
    let mut client = client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let works = |s: &Serving| s.server.registry.list().iter().any(|c| c.session().load().1 > 100);
    assert!(server.until(Duration::from_secs(20), works), "it trains");
    let device = Arc::downgrade(server.server.registry.list()[0].executor().device());
    client.kill().unwrap();
    client.wait().unwrap();
    let start = Instant::now();
    assert!(server.until(Duration::from_secs(5), |s| s.sessions() == 0 && device.strong_count() == 0));
    assert!(start.elapsed() < lease + Duration::from_secs(1), "{:?}", start.elapsed());
}

struct Mine;

impl CustomOp for Mine {
    fn name(&self) -> &str {
        "processes.mine"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec![ins[0]])
    }

    fn eval(&self, _: &[u8], ins: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        outs[0].1.copy_from_slice(ins[0].1);
        Ok(())
    }
}

#[test]
fn an_operation_that_the_server_does_not_know_is_told_with_the_line() {
    register(Mine).unwrap();
    let server = Process::serve(kiln(), 0, &[]);
    let remote = open(&url(&server), PATIENCE).unwrap();
    let device = handle(remote.clone());
    let x = Tensor::ones([4], &device);
    let call = CustomCall { name: "processes.mine".into(), attrs: Vec::new() };
    let line = line!() + 1;
    let y = Tensor::apply(Op::Custom(Arc::new(call)), &[&x]).swap_remove(0);
    for error in [device.sync().unwrap_err(), y.exp().to_data().unwrap_err()] {
        let Error::Failed { origin: Some(origin), .. } = &error else { panic!("{error:?}") };
        assert!(origin.to_string().contains(&format!("processes.rs:{line}")), "{error}");
        assert_eq!(error.root(), &Error::Op(OpError::UnknownCustom { name: "processes.mine".into() }));
    }
    assert_eq!((&x + 1.0).to_vec::<f32>().unwrap(), [2.0; 4]);
}

#[test]
fn a_server_without_file_descriptors_says_so_and_recovers() {
    let mut command = Command::new("sh");
    let script = "ulimit -n 40; exec \"$0\" serve --json --listen 127.0.0.1:0";
    command.args(["-c", script]).arg(kiln());
    let server = Process::start(command);
    let first = open(&url(&server), PATIENCE).unwrap();
    let device = handle(first.clone());
    let x = Tensor::ones([8], &device);
    // Strangers take the rest. Whoever comes now is not served in time, which is a typed error.
    let strangers: Vec<_> = (0..60).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let starved = || server.log().iter().filter(|line| line.contains("starved")).count();
    let start = Instant::now();
    while starved() == 0 {
        assert!(start.elapsed() < PATIENCE, "{:?}", server.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(server.log().iter().any(|line| line.contains("open files")), "{:?}", server.log());
    // Who is in goes on, and is not disturbed.
    for i in 0..100 {
        assert_eq!((&x + i as f64).to_vec::<f32>().unwrap(), [1.0 + i as f32; 8]);
    }
    assert_eq!((first.stats().resumed, first.stats().replayed), (0, 0));
    drop(strangers);
    let second = handle(open(&url(&server), PATIENCE).unwrap());
    assert_eq!((Tensor::ones([2], &second) * 3.0).to_vec::<f32>().unwrap(), [3.0; 2]);
    assert!(starved() < 10, "told once, not at every try: {:?}", server.log());
    assert!(process::usage(server.id()).files < 40);
}

/// A library that makes the wall clock jump by days, forward and back, at every look. Other clocks stay as they are.
const JUMPING: &str = r#"
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long day(void) { static long n; n = n * 1103515245 + 12345; return ((n >> 16) % 2000 - 1000) * 86400; }
int clock_gettime(clockid_t clock, struct timespec *t) {
    int outcome = syscall(SYS_clock_gettime, clock, t);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) t->tv_sec += day();
    return outcome;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"#;

#[test]
fn a_wall_clock_that_jumps_disturbs_nobody() {
    let folder = std::env::temp_dir().join(format!("kiln-clock-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
    std::fs::write(&source, JUMPING).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).status();
    assert!(built.unwrap().success());
    // The library does what it says.
    let date = Command::new("date").arg("+%s").env("LD_PRELOAD", &library).output().unwrap();
    let date: i64 = String::from_utf8_lossy(&date.stdout).trim().parse().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
    assert!((date - now).abs() > 3600, "the clock did not jump");

    let mut command = Command::new(kiln());
    command.args(["serve", "--json", "--lease", "5", "--listen", "127.0.0.1:0"]).env("LD_PRELOAD", &library);
    let server = Process::start(command);
    let digest = |device: Option<&str>| {
        let mut client = Command::new(kiln());
        client.args(["train", "digits", "--json", "--digest", "--steps", "100"]).env("KILN_TOKEN", "chaos");
        if let Some(device) = device {
            client.args(["--device", device]).env("LD_PRELOAD", &library);
        }
        let output = client.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last["digest"].as_str().unwrap().to_string()
    };
    assert_eq!(digest(Some(&format!("kiln://{}", server.address()))), digest(None));
    // One connection from the beginning to the goodbye: no lease ended early, no heartbeat was missed.
    let log = server.log().join("\n");
    assert!(log.contains("opened") && !log.contains("resumed"), "{log}");
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_made_token_is_private_and_survives_restarts() {
    use std::os::unix::fs::PermissionsExt;
    let state = std::env::temp_dir().join(format!("kiln-state-{}", std::process::id()));
    let start = || {
        let mut command = Command::new(kiln());
        command.args(["serve", "--json", "--listen", "127.0.0.1:0"]).env_remove("KILN_TOKEN");
        command.env("XDG_STATE_HOME", &state).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let line: serde_json::Value = serde_json::from_str(&first).unwrap();
        (child, line["url"].as_str().unwrap().to_string())
    };
    let path = state.join("kiln/token");
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let (mut child, url) = start();
        assert!(url.ends_with(&format!("?token-file={}", path.display())), "{url}");
        // The printed address is all that a client needs.
        assert!(open(&url, PATIENCE).is_ok());
        tokens.push(std::fs::read_to_string(&path).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(tokens[0] == tokens[1] && tokens[0].len() >= 32);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let left = std::fs::read_dir(state.join("kiln")).unwrap().count();
    assert_eq!(left, 1, "no draft is left behind");
    // A folder that nobody can write to is told.
    let output = Command::new(kiln())
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env_remove("KILN_TOKEN")
        .env("XDG_STATE_HOME", "/proc/none")
        .output()
        .unwrap();
    assert!(!output.status.success() && !output.stderr.is_empty());
    let _ = std::fs::remove_dir_all(&state);
}

#[test]
fn the_devices_of_a_server_are_listed_and_its_socket_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let socket = std::env::temp_dir().join(format!("kiln-devices-{}.sock", std::process::id()));
    let unix = format!("unix:{}", socket.display());
    let listen = ["--listen", unix.as_str(), "--device", "cpu", "--device", "cpu:1", "--device", "reference"];
    let server = Process::serve(kiln(), 0, &listen);
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    for url in [url(&server), unix.clone()] {
        let output = Command::new(kiln()).args(["devices", "--json", &url]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = |l: &str| serde_json::from_str::<serde_json::Value>(l).unwrap();
        let lines: Vec<_> = text.lines().map(line).collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[2]["name"].as_str().unwrap().contains("reference"), "{text}");
        assert_eq!(lines[0]["numerics"], lines[1]["numerics"]);
    }
    for command in ["ps", "top"] {
        let mut child = Command::new(kiln());
        let child = child.args([command, "--json", &unix]).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let look: serde_json::Value = serde_json::from_str(&first).unwrap();
        assert!(look["sessions"].is_array() && look["devices"].as_array().unwrap().len() == 3, "{look}");
        let _ = child.kill();
        child.wait().unwrap();
    }
}

#[test]
fn a_server_is_one_device_however_it_is_spelled() {
    let server = Process::serve(kiln(), 0, &[]);
    let url = url(&server);
    let device = kiln::Device::open(&url).unwrap();
    for other in [url.replace("kiln://", "KILN://"), url.replace('?', "/?"), format!(" {url}&compress=0")] {
        assert_eq!(kiln::Device::open(&other).unwrap().id(), device.id(), "{other}");
    }
    assert!(!format!("{device} {device:?}").contains("token"));
    // The default device of a program that names none.
    let digest = |variables: &[(&str, &str)]| {
        let mut client = Command::new(kiln());
        client
            .args(["train", "digits", "--json", "--digest", "--steps", "5"])
            .envs(variables.iter().copied());
        let output = client.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last["digest"].as_str().unwrap().to_string()
    };
    let opened = || server.log().iter().filter(|line| line.contains("opened")).count();
    let (local, before) = (digest(&[]), opened());
    assert_eq!(digest(&[("KILN_DEVICE", &url)]), local);
    assert_eq!(digest(&[("KILN_DEVICE", "remote"), ("KILN_REMOTE_ADDRESS", &url)]), local);
    assert_eq!(opened(), before + 2);
}

#[test]
fn a_public_server_without_encryption_is_warned_of() {
    let mut command = Command::new(kiln());
    command.args(["serve", "--listen", "0.0.0.0:0"]).env("KILN_TOKEN", "chaos");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut first).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(first.contains("warning") && first.contains("not encrypted"), "{first}");
}

#[test]
fn a_public_server_without_a_token_does_not_start() {
    let output = Command::new(kiln())
        .args(["serve", "--listen", "0.0.0.0:0"])
        .env_remove("KILN_TOKEN")
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("needs a token"));
}

#[test]
fn a_wrong_token_names_the_server_and_not_the_token() {
    let server = Process::serve(kiln(), 0, &[]);
    let path = std::env::temp_dir().join("kiln-chaos-wrong-token");
    std::fs::write(&path, "not-the-token").unwrap();
    let address = format!("kiln://{}", server.address());
    let error = open(&format!("{address}?token-file={}", path.display()), PATIENCE).map(drop).unwrap_err();
    let Error::Refused { peer, reason } = &error else { panic!("{error:?}") };
    assert_eq!((peer.as_str(), reason.as_str()), (address.as_str(), "the token is wrong"));
}

#[test]
fn a_program_whose_output_nobody_reads_ends_quietly() {
    let mut listing = Command::new(kiln())
        .args(["bench", "--json", "--seconds", "0", "--only", "train/mlp_small", "overhead/"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(listing.stdout.take());
    let ended = listing.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(141), "as after SIGPIPE");
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
}

#[test]
fn a_snapshot_in_files_outlives_the_next_crash() {
    let train = |device: &str| {
        let mut command = Command::new(kiln());
        command.args(["train", "digits", "--steps", "2000", "--digest", "--device", device]);
        command.env("KILN_SNAPSHOT", "100000").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let digest = |run: std::process::Child| {
        let ended = run.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(ended.status.success(), "{}{}", text(&ended.stdout), text(&ended.stderr));
        text(&ended.stdout).lines().last().unwrap().to_string()
    };
    let want = digest(train("cpu"));
    let mut server = Process::serve(kiln(), 0, &[]);
    let (port, url) = (server.address().port(), url(&server));
    let mut run = train(&url);
    let (files, start) = (format!("/proc/{}/fd", run.id()), Instant::now());
    let spilled = || {
        let open = std::fs::read_dir(&files).unwrap().flatten();
        let spill = |path: &std::path::Path| {
            std::fs::read_link(path).is_ok_and(|name| name.to_string_lossy().contains("kiln-spill"))
        };
        let large = |path: &std::path::Path| std::fs::metadata(path).is_ok_and(|file| file.len() > 100_000);
        open.map(|entry| entry.path()).any(|path| spill(&path) && large(&path))
    };
    while !server.log().iter().any(|line| line.contains("session")) {
        assert!(start.elapsed() < PATIENCE, "{:?}", server.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    // The first crash makes the client take a snapshot, the second makes it use that.
    server.kill();
    server = Process::serve(kiln(), port, &[]);
    while !spilled() {
        assert!(start.elapsed() < PATIENCE, "no snapshot went to a file");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.kill();
    server = Process::serve(kiln(), port, &[]);
    assert!(run.try_wait().unwrap().is_none(), "the second crash came too late");
    assert_eq!(digest(run), want);
    drop(server);
}
