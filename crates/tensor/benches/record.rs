//! What recording costs: nanoseconds per operation on a tensor of 16 elements, submission included, execution apart.
//!
//!     cargo bench -p kiln-tensor --bench record
//!
//! The first figure is for recording into batches that are submitted to a device which discards them; the others also
//! execute, so they bound what a user sees.

use kiln_device::{Batch, Data, DeviceInfo, Driver, Memory, Pending, Place};
use kiln_ir::Id;
use kiln_tensor::{Device, Tensor};
use std::sync::Arc;
use std::time::Instant;

const OPS: usize = 1000;

/// Takes everything and computes nothing, so that only recording is measured.
struct Sink;

impl Driver for Sink {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { supports_all: true, ..DeviceInfo::new("sink", "none") }
    }
    fn submit(&self, batch: Batch) {
        std::hint::black_box(&batch);
    }
    fn write(&self, _: Id, _: Data, _: Place) {}
    fn read(&self, _: Id) -> Pending<Data> {
        Pending::ready(Err(kiln_device::Error::Stopped))
    }
    fn sync(&self) -> Pending<()> {
        Pending::ready(Ok(()))
    }
    fn memory(&self) -> Memory {
        Memory::default()
    }
}

fn main() {
    let sink = Device::wrap("sink", Arc::new(Sink)).expect("a new name");
    report("record and submit, untracked", &sink, chain);
    report("record and submit, tracked with backward (per forward operation)", &sink, tracked);
    let cpu = Device::cpu();
    report("record, submit and execute on cpu", &cpu, chain);
    cpu.set_eager(true);
    report("record, submit and execute on cpu, eager", &cpu, chain);
}

fn chain(x: &Tensor, y: &Tensor) {
    let mut z = x.clone();
    for _ in 0..OPS {
        z = z + y;
    }
    z.device().sync().expect("the device answers");
}

fn tracked(x: &Tensor, y: &Tensor) {
    let x = x.clone().requires_grad();
    let mut z = x.clone();
    for _ in 0..OPS {
        z = z + y;
    }
    std::hint::black_box(z.sum(()).backward());
    z.device().sync().expect("the device answers");
}

fn report(name: &str, device: &Device, f: fn(&Tensor, &Tensor)) {
    let x = Tensor::from_vec(vec![1.0f32; 16], [16], device);
    let y = Tensor::from_vec(vec![1e-3f32; 16], [16], device);
    f(&x, &y);
    let mut times: Vec<f64> = (0..300)
        .map(|_| {
            let start = Instant::now();
            f(&x, &y);
            start.elapsed().as_secs_f64() * 1e9 / OPS as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{name}: median {:.0} ns, best {:.0} ns an operation", times[times.len() / 2], times[0]);
}
