//! A device that computes later, on a thread of its own: what it takes whole, what waits for it and what does not, and what
//! becomes of kernels that fail after they were launched.

mod late;

use kiln_cpu::Reference;
use kiln_device::{Batch, Bytes, Data, Driver, Error, Origin, Place, Urgency};
use kiln_host::HostDevice;
use kiln_ir::{DType, Id, Meta, Op, text};
use late::{Late, Stream};
use std::sync::Arc;
use std::time::Duration;

type Device = Arc<HostDevice<Late>>;

fn start(claims: Option<fn(&Op, &[Meta]) -> bool>, fails: &'static str) -> (Device, Arc<Stream>) {
    let (kernels, stream) = Late::new(claims, fails);
    (Arc::new(HostDevice::new(kernels)), stream)
}

/// Writes what a program takes in and submits it; everything is launched when this returns.
#[track_caller]
fn submit(device: &dyn Driver, program: &str, inputs: &[Data]) {
    let program = text::parse(program).unwrap();
    for ((id, meta), data) in program.inputs.iter().zip(inputs) {
        assert_eq!(*meta, data.meta);
        device.write(*id, data.clone(), Place::Reuse);
    }
    let origins = vec![Origin::here(); program.items.len()];
    device.submit(Batch { items: program.items, origins, urgency: Urgency::Now, ..Batch::default() });
}

fn floats(shape: &[usize]) -> Data {
    let numbers = (0..shape.iter().product::<usize>()).flat_map(|i| (0.37 * i as f32 - 1.0).to_le_bytes());
    Data::new(Meta::new(DType::F32, shape), Bytes::new(numbers.collect::<Vec<u8>>()))
}

fn integers(numbers: &[i32]) -> Data {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    Data::new(Meta::new(DType::I32, [numbers.len()]), Bytes::new(bytes))
}

/// What the reference has for value `id` of a program.
#[track_caller]
fn want(program: &str, inputs: &[Data], id: Id) -> Vec<u8> {
    let reference = Reference::start();
    submit(&reference, program, inputs);
    reference.read(id).wait().unwrap().bytes.to_vec()
}

#[track_caller]
fn read(device: &dyn Driver, id: Id) -> Vec<u8> {
    device.read(id).wait().unwrap().bytes.to_vec()
}

#[test]
fn a_composite_that_is_claimed_runs_whole_and_others_as_primitives() {
    let (device, stream) = start(Some(|op, _| op.name() == "softmax"), "");
    stream.open();
    let program = "a = input f32[3,5]\ns = softmax a axis=1\nl = log_softmax a axis=1";
    let inputs = [floats(&[3, 5])];
    submit(&*device, program, &inputs);
    assert_eq!(device.fusion().windows, 1, "the window was planned");
    let names = stream.names();
    assert_eq!(names.iter().filter(|name| *name == "softmax").count(), 1, "{names:?}");
    assert!(!names.contains(&"log_softmax".into()) && names.len() > 5, "{names:?}");
    for id in [Id(1), Id(2)] {
        assert_eq!(read(&*device, id), want(program, &inputs, id));
    }
    assert!(!device.info().supports_all);
    let metas = [inputs[0].meta];
    let op = |text: &str| text::parse_op(text).unwrap();
    assert!(device.supports(&op("softmax axis=1"), &metas) && device.supports(&op("exp"), &metas));
    assert!(!device.supports(&op("log_softmax axis=1"), &metas));
}

/// Both windows have the same structure; a plan for one must not be taken for the other.
#[test]
fn what_is_claimed_may_depend_on_sizes() {
    let (device, stream) = start(Some(|_, ins| ins[0].shape[1] <= 4), "");
    stream.open();
    for (n, whole) in [(4, true), (5, false), (3, true)] {
        let program = format!("a = input f32[2,{n}]\ns = softmax a axis=1\nb = exp s\nc = neg b\nfree b");
        let (before, inputs) = (stream.names().len(), [floats(&[2, n])]);
        submit(&*device, &program, &inputs);
        let names = &stream.names()[before..];
        assert_eq!(names.contains(&"softmax".into()), whole, "{n}: {names:?}");
        assert_eq!(names.last().map(String::as_str), Some("pair"), "{n}: {names:?}");
        assert_eq!(read(&*device, Id(3)), want(&program, &inputs, Id(3)), "{n}");
    }
    let stats = device.fusion();
    assert_eq!((stats.windows, stats.planned, stats.hits), (3, 2, 1), "{stats:?}");
}

#[test]
fn neither_sync_nor_read_holds_others_up() {
    let (device, stream) = start(None, "");
    let program = "a = input f32[4]\nb = exp a\nc = neg b\nfree b";
    let inputs = [floats(&[4])];
    submit(&*device, program, &inputs);
    assert_eq!((stream.names(), stream.done()), (vec!["write".to_string(), "pair".into()], 0));
    let (sync, content) = (device.sync(), device.read(Id(2)));
    let waiters = [std::thread::spawn(move || sync.wait().map(|()| None))]
        .into_iter()
        .chain([std::thread::spawn(move || content.wait().map(Some))])
        .collect::<Vec<_>>();
    stream.promised(2);
    // Planning, launching and asking go on meanwhile.
    let more = text::parse("x = full shape=[4] value=f32:2\ny = exp x\nz = neg y\nfree y").unwrap();
    let shift = |id: &mut Id| id.0 += 10;
    let mut items = more.items;
    for item in &mut items {
        match item {
            kiln_ir::Item::Run(node) => node.ins.iter_mut().chain(&mut node.outs).for_each(shift),
            kiln_ir::Item::Free(id) => shift(id),
        }
    }
    device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
    assert_eq!((stream.names().len(), stream.done(), device.fusion().windows), (4, 0, 2));
    assert!(device.sync().wait_timeout(Duration::from_millis(20)).is_err(), "nothing is done yet");
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    assert!(!Driver::observe(&*device).unwrap().is_idle());
    stream.open();
    let answers: Vec<Option<Data>> = waiters.into_iter().map(|w| w.join().unwrap().unwrap()).collect();
    assert!(stream.done() >= 2);
    let data = answers.into_iter().flatten().next().unwrap();
    assert_eq!(data.bytes.to_vec(), want(program, &inputs, Id(2)));
    device.sync().wait().unwrap();
    assert_eq!(stream.done(), 4);
    assert!(Driver::observe(&*device).unwrap().is_idle());
}

fn failures(device: &dyn Driver) -> Vec<Error> {
    device.failures()
}

const REMAINDERS: &str = "a = input i32[2]\nz = input i32[2]\nb = remainder a z\nc = add b a\nd = add a a";

#[test]
fn a_kernel_that_fails_later_poisons_what_came_of_it_and_nothing_else() {
    let (device, stream) = start(None, "");
    let inputs = [integers(&[7, 8]), integers(&[3, 0])];
    submit(&*device, REMAINDERS, &inputs);
    let line = line!() - 1;
    // Asked for before anybody can know.
    let (lost, fine) = (device.read(Id(3)), device.read(Id(4)));
    let waiter = std::thread::spawn(move || (lost.wait(), fine.wait()));
    stream.promised(2);
    assert_eq!((stream.names().len(), failures(&*device)), (5, vec![]));
    stream.open();
    let (lost, fine) = waiter.join().unwrap();
    let error = lost.unwrap_err();
    let Error::Failed { op, value, origin: Some(origin), .. } = &error else { panic!("{error:?}") };
    assert_eq!((&op[..], *value, origin.line.line()), ("remainder", Id(2), line));
    assert!(error.root().to_string().contains("divided by zero"), "{error}");
    assert_eq!(fine.unwrap().bytes.to_vec(), integers(&[14, 16]).bytes.to_vec());
    // Told once, by the one that failed by itself.
    assert_eq!(failures(&*device), std::slice::from_ref(&error));
    // What is computed from it now is not even launched.
    let program = text::parse(
        "a = input i32[2]\nb = input i32[2]\nx = input i32[2]\nc = input i32[2]\ny = neg c\nw = neg y",
    );
    let items = program.unwrap().items;
    device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
    assert_eq!(stream.names().len(), 5);
    assert_eq!(device.read(Id(5)).wait().unwrap_err(), error);
    assert_eq!(failures(&*device), []);
}

#[test]
fn failures_are_known_when_a_sync_is_answered() {
    let (device, stream) = start(None, "");
    submit(&*device, REMAINDERS, &[integers(&[7, 8]), integers(&[3, 0])]);
    assert_eq!(failures(&*device), []);
    stream.open();
    device.sync().wait().unwrap();
    let failures = failures(&*device);
    assert!(
        matches!(&failures[..], [Error::Failed { op, value: Id(2), .. }] if op == "remainder"),
        "{failures:?}"
    );
}

#[test]
fn a_group_that_fails_later_poisons_its_results() {
    let (device, stream) = start(None, "tanh");
    let program = "a = input f32[4]\nb = exp a\nc = tanh b\nfree b\nd = sin c\ne = sin a";
    let inputs = [floats(&[4])];
    submit(&*device, program, &inputs);
    assert_eq!(stream.names(), ["write", "pair", "sin", "sin"]);
    stream.open();
    let error = device.read(Id(3)).wait().unwrap_err();
    assert!(matches!(&error, Error::Failed { op, origin: Some(_), .. } if op == "pair"), "{error:?}");
    assert!(error.root().to_string().contains("it was to fail"), "{error}");
    assert_eq!(read(&*device, Id(4)), want(program, &inputs, Id(4)));
    assert_eq!(failures(&*device), [error]);
}

/// A guard looks at facts: it waits for what may still fail.
#[test]
fn a_step_is_refused_by_a_gradient_that_fails_later() {
    let step = "g = input f32[2]\np = input f32[2]\nx = sin g\nn = sub p x\nok = guard x finite=false\nq = commit ok n p";
    let inputs = [floats(&[2]), floats(&[2])];
    for (fails, applied) in [("", true), ("sin", false)] {
        let (device, stream) = start(None, fails);
        stream.open();
        submit(&*device, step, &inputs);
        let want = if applied { want(step, &inputs, Id(3)) } else { inputs[1].bytes.to_vec() };
        assert_eq!(read(&*device, Id(5)), want, "{fails}");
        let ops: Vec<String> = failures(&*device).iter().map(|e| e.root().to_string()).collect();
        assert_eq!(ops.is_empty(), applied, "{ops:?}");
    }
}

#[test]
fn what_waits_for_a_device_that_is_stopped_is_answered() {
    let (device, stream) = start(None, "");
    submit(&*device, "a = input f32[4]\nb = exp a", &[floats(&[4])]);
    let (sync, content) = (device.sync(), device.read(Id(1)));
    let waiter = std::thread::spawn(move || (sync.wait(), content.wait().map(drop)));
    stream.promised(2);
    Driver::control(&*device).unwrap().stop();
    assert_eq!(waiter.join().unwrap(), (Err(Error::Stopped), Err(Error::Stopped)));
    assert_eq!(device.read(Id(1)).wait().map(drop), Err(Error::Stopped));
}
