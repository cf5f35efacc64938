//! Servers and clients as processes of their own: stopped, killed, drained, and ignorant of each other's operations.

use kiln::Tensor;
use kiln::ir::custom::{CustomOp, register};
use kiln::ir::{CustomCall, Meta, Op, OpError};
use kiln_chaos::program::{handle, train};
use kiln_chaos::{Options, Process, Serving, open, process};
use kiln_device::{Device, Error};
use smallvec::{SmallVec, smallvec};
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
    device.sync().unwrap();
    let failures = remote.failures();
    assert_eq!(failures.len(), 1, "{failures:?}");
    for error in [failures[0].clone(), y.exp().to_data().unwrap_err()] {
        let Error::Failed { origin: Some(origin), .. } = &error else { panic!("{error:?}") };
        assert!(origin.to_string().contains(&format!("processes.rs:{line}")), "{error}");
        assert_eq!(error.root(), &Error::Op(OpError::UnknownCustom { name: "processes.mine".into() }));
    }
    assert_eq!((&x + 1.0).to_vec::<f32>().unwrap(), [2.0; 4]);
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
