//! What asks for more than a device may hold fails with an error, and the process grows by no more than the limit and a
//! constant. One test, since what is measured is the process.
#![cfg(target_os = "linux")]

use kiln_cpu::{Cpu, Reference};
use kiln_device::{Batch, Bytes, Control, Data, Driver, Error, Place};
use kiln_ir::{DType, Id, Item, Meta, text};
use std::sync::Arc;
use std::time::Duration;

const MIB: usize = 1 << 20;
const LIMIT: usize = 64 * MIB;

/// A figure of this process, in bytes.
fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// Why the last value of a program is not there.
fn failure(device: &dyn Driver, program: &str) -> Option<Error> {
    let program = text::parse(program).unwrap();
    for (id, meta) in &program.inputs {
        device.write(*id, Data::new(*meta, Bytes::new(vec![0; meta.bytes()])), Place::Reuse);
    }
    let run = |item: &Item| if let Item::Run(node) = item { Some(node.outs.clone()) } else { None };
    let last = program.items.iter().rev().find_map(run).unwrap()[0];
    let defined: Vec<Id> = program.items.iter().filter_map(run).flatten().collect();
    device.submit(Batch { items: program.items, ..Batch::default() });
    let answer = device.read(last).wait();
    let given = program.inputs.iter().map(|(id, _)| *id).chain(defined);
    device.submit(Batch { items: given.map(Item::Free).collect(), ..Batch::default() });
    let _ = device.sync().wait();
    answer.err()
}

/// Small in bytes, large in what they ask for.
const HOSTILE: &[&str] = &[
    "a = random_uniform shape=[35184372088832] dtype=f32 key=1 offset=2",
    "a = random_normal shape=[1073741824] dtype=f64 key=1 offset=2",
    "a = random_bits shape=[40000000] dtype=u8 key=1 offset=2",
    "a = iota shape=[35184372088832] dtype=i64 axis=0",
    "a = iota shape=[20000000] dtype=f16 axis=0",
    "a = full shape=[5000000000] value=f32:1.0\nb = exp a",
    "a = full shape=[5000000000] value=f32:1.0\nb = exp a\nc = mul b a\nd = cast c dtype=i8",
    "a = full shape=[1048576,1048576] value=f32:1.0\nb = cumsum a axis=1 reverse=false",
    "a = full shape=[1,1,1048576] value=i32:1\nb = full shape=[1,1,3] value=i32:1\n\
     c = conv a b stride=[1,1,1] low=[4000000000,0,0] high=[4000000000,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1",
    "a = full shape=[1,1,1048576] value=f32:1.0\nb = full shape=[1,1,3] value=f32:1.0\n\
     c = conv a b stride=[1,1,1] low=[4000000000,0,0] high=[4000000000,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1",
    "a = full shape=[1,1,40000] value=f32:1.0\n\
     b = sum_pool a kernel=[65536,1,1] stride=[1,1,1] low=[65535,0,0] high=[65535,0,0] dilation=[1,1,1] extent=[0,0,0]",
    "a = full shape=[17000000] value=i64:5\nb, c = sort a axis=0 descending=false take=17000000",
    "a = full shape=[17000000] value=f32:5.0\nb = argmax a axes=[0] keep=false",
    "a = full shape=[4,4] value=f32:5.0\nb = full shape=[17000000] value=u8:1\nc = take a b axis=0",
    "a = full shape=[4,4] value=f32:5.0\nb = full shape=[4,8000000] value=u8:1\nc = gather a b axis=1",
    "a = full shape=[4] value=f32:5.0\nb = full shape=[60000000] value=u8:1\nc = full shape=[60000000] value=f32:1.0\n\
     d = scatter_add a b c axis=0",
    "a = full shape=[65536,65536] value=f32:1.0\nb = permute a order=[1,0]\nc = reshape b shape=[4294967296]",
    "a = full shape=[3000000000] value=f32:1.0\nb = cast a dtype=q8",
    "a = full shape=[1048576,8192] value=f32:1.0\nb = softmax a axis=1",
];

/// What takes long, but little memory: until the device is stopped.
const LONG: &[&str] = &[
    "a = full shape=[35184372088832] value=f32:1.0\nb = sum a axes=[0] keep=false",
    "a = full shape=[68719476736,512] value=f32:1.0\nb = sum a axes=[0] keep=false",
    "a = full shape=[1,1,262144] value=f32:1.0\n\
     b = sum_pool a kernel=[262144,1,1] stride=[1,1,1] low=[262143,0,0] high=[262143,0,0] dilation=[1,1,1] extent=[0,0,0]",
    "a = full shape=[1,8796093022208] value=f32:1.0\nb = full shape=[8796093022208,1] value=f32:1.0\n\
     c = dot a b transpose=false",
];

#[test]
fn what_does_not_fit_is_an_error_and_is_never_taken() {
    for (name, device) in
        [("cpu", Box::new(Cpu::start()) as Box<dyn Driver>), ("reference", Box::new(Reference::start()))]
    {
        device.limit(Some(LIMIT));
        // What runs once for the process is not the programs' doing.
        assert_eq!(
            failure(
                &*device,
                "a = full shape=[100000] value=f32:1.0\nb = exp a\nc = sum b axes=[0] keep=false"
            ),
            None
        );
        // The interpreter finds the places of a window one by one, which takes time, but no memory.
        for program in HOSTILE.iter().filter(|p| name == "cpu" || !p.contains("sum_pool")) {
            let before = status("VmRSS:");
            let error = failure(&*device, program).unwrap_or_else(|| panic!("{name} computed {program}"));
            let root = error.root();
            // With a cap on elements, some are refused before.
            assert!(
                matches!(root, Error::OutOfMemory { limit: LIMIT, .. } | Error::Op(_)),
                "{name}: {program}: {error}"
            );
            let grown = status("VmHWM:").saturating_sub(before);
            assert!(grown <= LIMIT + 128 * MIB, "{name} grew by {} MiB for {program}", grown / MIB);
            assert_eq!(device.memory().live_bytes, 0, "{name}: {program}");
        }
    }
    for program in LONG {
        let device = Arc::new(Cpu::start());
        device.limit(Some(LIMIT));
        let before = status("VmRSS:");
        let running = device.clone();
        let thread = std::thread::spawn(move || failure(&*running, program));
        std::thread::sleep(Duration::from_millis(500));
        device.stop();
        assert_eq!(thread.join().unwrap(), Some(Error::Stopped), "{program}");
        let grown = status("VmHWM:").saturating_sub(before);
        assert!(grown <= LIMIT + 128 * MIB, "grew by {} MiB for {program}", grown / MIB);
    }
}

#[test]
fn temporaries_count() {
    // The values alone would fit.
    let program = "a = full shape=[3000000] value=f32:1.0\nb, c = sort a axis=0 descending=false take=1";
    for device in [Box::new(Cpu::start()) as Box<dyn Driver>, Box::new(Reference::start())] {
        device.limit(Some(24 * MIB));
        let error = failure(&*device, program).unwrap();
        assert!(matches!(error.root(), Error::OutOfMemory { limit: 25_165_824, .. }), "{error}");
        device.limit(Some(128 * MIB));
        assert_eq!(failure(&*device, program), None);
        assert!(device.memory().peak_bytes >= 60_000_000, "{:?}", device.memory());
    }
}

#[test]
fn an_interpreter_has_a_limit() {
    let device = Reference::start();
    device.limit(Some(1000));
    assert_eq!(device.memory().limit, Some(1000));
    let meta = Meta::new(DType::F32, [300]);
    device.write(Id(1), Data::new(meta, Bytes::new(vec![0; 1200])), Place::Reuse);
    let error = device.read(Id(1)).wait().unwrap_err();
    assert_eq!(error.root(), &Error::OutOfMemory { asked: 1200, free: 1000, limit: 1000 });
    device.limit(None);
    device.write(Id(1), Data::new(meta, Bytes::new(vec![0; 1200])), Place::Reuse);
    assert!(device.read(Id(1)).wait().is_ok());
}
