//! Where lanes are sealed, and what a drop never does.

use kiln_cpu::Cpu;
use kiln_device::{Batch, Decorator, Driver};
use kiln_tensor::{Device, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[test]
fn a_loop_without_marks_is_sealed_between_rounds() {
    let gate = Arc::new(Gate::new(None));
    let device = Device::wrap("lanes-loop", gate.clone()).unwrap();
    let mut x = Tensor::from_vec(vec![0.5f32; 8], [8], &device);
    let w = Tensor::from_vec(vec![0.25f32; 8], [8], &device);
    for _ in 0..8_000 {
        x = (&x * &w + 0.5).tanh().abs();
    }
    device.sync().unwrap();
    let windows = gate.windows.lock().unwrap().clone();
    let [_, inner @ .., _] = &windows[..] else { panic!("{windows:?}") };
    assert!(inner.len() >= 12 && inner.iter().all(|window| *window == inner[0]), "{windows:?}");
    // Rounds that fill a lane exactly would show nothing.
    assert!((2048..4096).contains(&inner[0].0), "{windows:?}");
    let stats = gate.inner.fusion();
    assert!(stats.planned <= 3 && stats.windows >= 14, "{stats:?}");
    let want = (0..8_000).fold(0.5f32, |x, _| kiln_ir::math::single::tanh(x * 0.25 + 0.5));
    assert_eq!(x.to_vec::<f32>().unwrap(), [want; 8]);
}

/// A device whose submissions wait while the gate is shut.
struct Gate {
    inner: Cpu,
    submits: AtomicUsize,
    /// Each submission of something computed waits for a word.
    open: Option<Mutex<Receiver<()>>>,
    /// How many items each had, and the name of the first operation.
    windows: Mutex<Vec<(usize, String)>>,
}

impl Gate {
    fn new(open: Option<Receiver<()>>) -> Gate {
        let (submits, windows) = (AtomicUsize::new(0), Mutex::default());
        Gate { inner: Cpu::start(), submits, open: open.map(Mutex::new), windows }
    }
}

impl Decorator for Gate {
    fn inner(&self) -> &dyn Driver {
        &self.inner
    }
    fn submit(&self, batch: Batch) {
        let name = |item: &kiln_ir::Item| match item {
            kiln_ir::Item::Run(node) => Some(node.op.name().to_string()),
            kiln_ir::Item::Free(_) => None,
        };
        self.submits.fetch_add(1, Ordering::SeqCst);
        if let Some(first) = batch.items.iter().find_map(name) {
            self.windows.lock().unwrap().push((batch.items.len(), first));
            if let Some(open) = &self.open {
                let _ = open.lock().unwrap().recv();
            }
        }
        self.inner.submit(batch);
    }
}

#[test]
fn dropping_a_value_of_an_ending_thread_neither_waits_nor_submits() {
    let (word, open) = channel();
    let gate = Arc::new(Gate::new(Some(open)));
    let device = Device::wrap("lanes-gate", gate.clone()).unwrap();
    let (give, given) = channel();
    let recorder = {
        let device = device.clone();
        std::thread::spawn(move || {
            let x = Tensor::from_vec(vec![1f32, 2.0], [2], &device);
            give.send(x.exp()).unwrap();
            // Its end submits what it recorded, and waits at the gate with its lane locked.
        })
    };
    let value: Tensor = given.recv().unwrap();
    while gate.submits.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let (done, dropped) = channel();
    std::thread::spawn(move || {
        drop(value);
        done.send(()).unwrap();
    });
    let told = dropped.recv_timeout(Duration::from_secs(20));
    let submits = gate.submits.load(Ordering::SeqCst);
    word.send(()).unwrap();
    assert_eq!((told, submits), (Ok(()), 1), "a drop waits for nobody and submits nothing");
    drop(word);
    recorder.join().unwrap();
    device.sync().unwrap();
    assert_eq!(device.memory().values, 0, "and the value is freed all the same");
}
