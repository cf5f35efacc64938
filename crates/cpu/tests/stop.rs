//! A device that is stopped leaves what it computes, however long that would take.

use kiln_cpu::Cpu;
use kiln_device::{Batch, Control, Driver, Error, Urgency};
use kiln_ir::{Id, Item, text};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Has a device compute a program of hours, stops it, and gives how long the answer took from then on.
fn stopped(device: impl Driver + Control, program: &str) -> Duration {
    let device = Arc::new(device);
    let items = text::parse(program).unwrap().items;
    let run = |item: &Item| if let Item::Run(node) = item { Some(node.outs[0]) } else { None };
    let last = items.iter().rev().find_map(run).unwrap();
    device.submit(Batch { items, urgency: Urgency::Background, ..Batch::default() });
    let (first, second, sync) = (device.read(last), device.read(last), device.sync());
    let (sender, receiver) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || {
        let answer = first.wait();
        let _ = sender.send(());
        answer
    });
    // It has begun, or is about to; it must not be over.
    assert!(receiver.recv_timeout(Duration::from_millis(300)).is_err(), "{program} ended by itself");
    let start = Instant::now();
    device.stop();
    assert_eq!(waiter.join().unwrap().unwrap_err(), Error::Stopped, "{program}");
    let took = start.elapsed();
    assert_eq!(second.wait().unwrap_err(), Error::Stopped);
    assert_eq!(sync.wait().unwrap_err(), Error::Stopped);
    // What comes afterwards fails too.
    let items = text::parse("a = full shape=[2] value=f32:1.0\nb = exp a").unwrap().items;
    device.submit(Batch { items, ..Batch::default() });
    assert_eq!(device.read(Id(1)).wait().unwrap_err(), Error::Stopped);
    took
}

/// Generous: what is measured are microseconds, on a machine that may be busy.
const SOON: Duration = Duration::from_secs(5);

#[test]
fn kernels_end_soon_after_the_device_is_stopped() {
    for program in [
        // Rows onto each other, rows, a single row, and both fused with what is before them.
        "a = full shape=[68719476736,512] value=f32:1.0\nb = sum a axes=[0] keep=false",
        "a = full shape=[8,1099511627776] value=f32:1.0\nb = sum a axes=[1] keep=false",
        "a = full shape=[8796093022208] value=f32:1.0\nb = sum a axes=[0] keep=false",
        "a = full shape=[1048576,16777216] value=f32:1.0\nb = exp a\nc = sum b axes=[1] keep=false\nfree b",
        // Products: skinny, and with a long K.
        "a = full shape=[1,8796093022208] value=f32:1.0\nb = full shape=[8796093022208,1] value=f32:1.0\nc = dot a b transpose=false",
        "a = full shape=[32,1099511627776] value=f32:1.0\nb = full shape=[1099511627776,32] value=f32:1.0\nc = dot a b transpose=false",
        "a = full shape=[32,1099511627776] value=i32:1\nb = full shape=[1099511627776,32] value=i32:1\nc = dot a b transpose=false",
    ] {
        let took = stopped(Cpu::start(), program);
        assert!(took < SOON, "{took:?} after stopping {program}");
    }
}
