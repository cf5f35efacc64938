//! What `KILN_PROFILE` and `KILN_RECORD` leave behind when a program ends, in every way in which one can. No harness:
//! the program under test is this one, started again, because the end of `main` is part of it.

use kiln_tensor::{Device, Tensor};
use std::path::PathBuf;
use std::process::Command;

/// Says which way the child ends.
const END: &str = "KILN_TEST_END";

fn main() {
    match std::env::var(END) {
        Ok(end) => program(&end),
        Err(_) => ["return", "exit", "panic", "abort"].into_iter().for_each(check),
    }
}

/// A program of a user's: it reads once, leaves something unread, and never flushes.
fn program(end: &str) {
    let device = Device::default();
    let x = Tensor::from_vec(vec![1f32, 2.0], [2], &device);
    assert_eq!((&x + 1.0).to_vec::<f32>().unwrap(), [2.0, 3.0]);
    let _unread = x.exp();
    device.submit();
    let _waiting = x.sin();
    match end {
        "return" => {}
        "exit" => std::process::exit(3),
        "panic" => panic!("on purpose"),
        _ => std::process::abort(),
    }
}

fn check(end: &str) {
    let file = |what: &str| -> PathBuf {
        std::env::temp_dir().join(format!("kiln-ends-{}-{end}.{what}", std::process::id()))
    };
    let (trace, recording) = (file("json"), file("rec"));
    let child = Command::new(std::env::current_exe().unwrap())
        .env(END, end)
        .env("KILN_DEVICE", "cpu")
        .env("KILN_PROFILE", &trace)
        .env("KILN_RECORD", &recording)
        .output()
        .unwrap();
    let want = match end {
        "return" => Some(0),
        "exit" => Some(3),
        "panic" => Some(101),
        _ => None,
    };
    assert_eq!(child.status.code(), want, "{end}: {}", String::from_utf8_lossy(&child.stderr));
    let text = std::fs::read(&trace).unwrap();
    let whole: serde_json::Value = serde_json::from_slice(&text)
        .unwrap_or_else(|e| panic!("{end}: {e} in {}", String::from_utf8_lossy(&text)));
    let events = whole["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events.iter().map(|event| event["name"].as_str().unwrap()).collect();
    assert!(["write", "add", "exp"].iter().all(|name| names.contains(name)), "{end}: {names:?}");
    // What was still waiting to be submitted is computed when its thread ends, which an abort does not let happen.
    assert_eq!(names.contains(&"sin"), end != "abort", "{end}: {names:?}");
    let done = kiln_device::replay(&recording, &kiln_cpu::Reference::start()).unwrap();
    assert_eq!((done.writes, done.reads, done.differing.len()), (1, 1, 0), "{end}");
    // The number 1, the sum, exp and, except after an abort, sin; frees besides.
    let least = if end == "abort" { 3 } else { 4 };
    assert!(done.items >= least, "{end}: {done:?}");
    [trace, recording].iter().for_each(|file| std::fs::remove_file(file).unwrap());
}
