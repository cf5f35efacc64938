//! Recordings that replay, files that are damaged, and profiles.

use kiln_device::replay;
use kiln_tensor::{Device, Error, Tensor};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kiln-record-{}-{name}", std::process::id()))
}

/// A few steps of a tiny training, with reads, a failure and a weight kept apart.
fn train(device: &Device) -> Vec<f32> {
    let x = Tensor::from_vec((0..12).map(|i| (i % 5) as f32 - 2.0).collect(), [4, 3], device);
    let y = Tensor::from_vec(vec![0.5f32, -1.0, 2.0, 0.0], [4, 1], device);
    let mut w =
        device.persistent(|| Tensor::from_vec(vec![0.1f32, -0.2, 0.3], [3, 1], device)).requires_grad();
    let mut losses = Vec::new();
    for _ in 0..3 {
        let loss = (x.matmul(&w).tanh() - &y).square().mean(());
        let grads = loss.backward();
        w = (w.detach() - grads.get(&w).unwrap() * 0.1).requires_grad();
        losses.push(loss.item::<f32>().unwrap());
    }
    losses.extend(w.to_vec::<f32>().unwrap());
    let at = Tensor::from_vec(vec![9i64], [1], device);
    assert!(w.index_select(0, &at).to_data().is_err());
    losses
}

#[test]
fn a_recording_replays_with_equal_reads_on_cpu_and_reference() {
    let path = file("step");
    let device = Device::open("cpu:40").unwrap().recorded(&path).unwrap();
    assert_eq!(device.info().name, "record<fusion<cpu>>");
    let plain = train(&Device::open("cpu:40").unwrap());
    assert_eq!(train(&device), plain, "recording changes nothing");
    device.flush().unwrap();
    for driver in [Device::open("cpu:41").unwrap(), Device::reference()] {
        let done = replay(&path, driver.driver().as_ref()).unwrap();
        assert_eq!((done.reads, done.writes, done.differing.as_slice()), (5, 4, &[][..]), "{driver}");
        assert!(done.items > 30, "{done:?}");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_damaged_recording_is_an_error_at_every_byte() {
    let path = file("damage");
    let device = Device::open("cpu:42").unwrap().recorded(&path).unwrap();
    train(&device);
    device.flush().unwrap();
    let whole = std::fs::read(&path).unwrap();
    assert!(whole.len() > 2000, "{} bytes", whole.len());
    let victim = file("victim");
    std::fs::write(&victim, &whole).unwrap();
    let driver = kiln_cpu::Reference::start();
    assert!(replay(&victim, &driver).unwrap().differing.is_empty());
    let mut open = OpenOptions::new().write(true).open(&victim).unwrap();
    let refused = |what: &str, at: usize| match replay(&victim, &driver) {
        Err(Error::Recording { .. } | Error::File { .. }) => {}
        other => panic!("{what} at {at} of {}: {other:?}", whole.len()),
    };
    for (at, &byte) in whole.iter().enumerate() {
        for flip in [1u8 << (at % 8), 0xff] {
            put(&mut open, at, byte ^ flip);
            refused("flipped", at);
        }
        put(&mut open, at, byte);
    }
    for length in (0..whole.len()).rev() {
        open.set_len(length as u64).unwrap();
        refused("truncated", length);
    }
    std::fs::remove_file(&victim).unwrap();
    refused("no file", 0);
    std::fs::remove_file(path).unwrap();
}

fn put(file: &mut File, at: usize, byte: u8) {
    file.seek(SeekFrom::Start(at as u64)).unwrap();
    file.write_all(&[byte]).unwrap();
}

#[test]
fn a_recording_that_was_never_flushed_is_whole() {
    let path = file("crash");
    let device = Device::open("cpu:43").unwrap().recorded(&path).unwrap();
    let x = Tensor::from_vec(vec![1f32, 2.0], [2], &device);
    assert_eq!((&x + 1.0).to_vec::<f32>().unwrap(), [2.0, 3.0]);
    let _later = x.exp();
    device.submit();
    let done = replay(&path, &kiln_cpu::Reference::start()).unwrap();
    assert_eq!((done.reads, done.differing.len()), (1, 0));
    assert!(done.items >= 3, "exp, which nobody read, is there too: {done:?}");
    std::fs::remove_file(path).unwrap();
    assert!(matches!(
        Device::cpu().profiled(Some("/nonexistent/folder/file".into())),
        Err(Error::File { .. })
    ));
    assert!(matches!(Device::cpu().recorded("/nonexistent/folder/file"), Err(Error::File { .. })));
}

#[test]
fn a_replay_that_differs_says_which_read() {
    let path = file("differ");
    let device = Device::open("cpu:44").unwrap().recorded(&path).unwrap();
    let x = Tensor::from_vec(vec![1f32], [1], &device);
    x.to_data().unwrap();
    x.exp().to_data().unwrap();
    device.flush().unwrap();
    // A device without this value: the second read fails instead.
    struct Deaf(kiln_cpu::Reference);
    impl kiln_device::Decorator for Deaf {
        fn inner(&self) -> &dyn kiln_device::Driver {
            &self.0
        }
        fn submit(&self, _: kiln_device::Batch) {}
    }
    let done = replay(&path, &Deaf(kiln_cpu::Reference::start())).unwrap();
    assert_eq!(done.differing, [1]);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_profile_counts_operations_and_bytes_and_writes_a_trace() {
    let path = file("trace.json");
    let (device, profile) = Device::open("cpu:45").unwrap().profiled(Some(path.clone())).unwrap();
    assert_eq!(device.info().name, "profile<fusion<cpu>>");
    let x = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], [4], &device);
    let y = kiln_tensor::scope("block", || (&x + &x).add(&x).add(&x).exp());
    assert!((y.to_vec::<f32>().unwrap()[0] - 4f32.exp()).abs() < 1e-4);
    device.sync().unwrap();
    let row = |name: &str| profile.rows().into_iter().find(|r| r.name == name).map(|r| (r.count, r.bytes));
    assert_eq!(row("write"), Some((1, 16)));
    assert_eq!(row("add"), Some((3, 3 * 48)));
    assert_eq!(row("exp"), Some((1, 32)));
    assert!(profile.rows().iter().all(|r| r.seconds >= 0.0));
    device.flush().unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(events.len(), 5);
    for event in events {
        assert!(
            event["ph"] == "X" && event["ts"].is_number() && event["dur"].as_f64().unwrap() >= 0.0,
            "{event}"
        );
    }
    let exp = events.iter().find(|e| e["name"] == "exp").unwrap();
    assert_eq!(exp["args"]["bytes"], 32);
    let origin = exp["args"]["origin"].as_str().unwrap();
    assert!(origin.contains(file!()) && origin.ends_with(" in block"), "{origin}");
    std::fs::remove_file(path).unwrap();
}
