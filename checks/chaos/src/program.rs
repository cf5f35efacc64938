//! Programs whose results can be compared: a training with a digest, and random streams at the seam.

use crate::Random;
use kiln::prelude::*;
use kiln_device::{Batch, Bytes, Data, Driver, Pending, Place, Urgency};
use kiln_ir::text::parse_op;
use kiln_ir::{DType, Id, Item, Meta, Node};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Module)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.second.forward(&self.first.forward(x).tanh())
    }
}

/// A handle for a device of one's own.
pub fn handle(driver: Arc<dyn Driver>) -> Device {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("chaos-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    Device::wrap(&name, driver).expect("the name is new")
}

/// Trains a small network for `steps` steps, with uploads, random numbers and reads in between, and gives the sha256 of
/// its parameters and of every loss that was read.
pub fn train(driver: Arc<dyn Driver>, steps: u64) -> Result<String, Error> {
    let device = handle(driver);
    let random = Generator::new(7);
    let mut model = kiln::with_generator(random.child(&[1 << 40]), || Mlp {
        first: Linear::new(12, 24, &device),
        second: Linear::new(24, 5, &device),
    });
    let mut optimizer = Adam::new(1e-2);
    let mut hash = Sha256::new();
    for step in 0..steps {
        // Some data come from the host, some are drawn on the device.
        let pixels: Vec<f32> =
            (0..16 * 12).map(|i| ((i as u64 * 31 + step * 17) % 97) as f32 / 97.0).collect();
        let labels: Vec<i64> = (0..16).map(|i| ((i + step) % 5) as i64).collect();
        let x = Tensor::from_vec(pixels, [16, 12], &device);
        let y = Tensor::from_vec(labels, [16], &device);
        let noise = kiln::with_generator(random.child(&[step]), || Tensor::randn([16, 12], &device)) * 0.1;
        let loss = model.forward(&(x + noise)).cross_entropy(&y);
        let gradients = loss.backward();
        optimizer.step(&mut model, &gradients);
        if step % 4 == 3 {
            hash.update(loss.item::<f32>()?.to_bits().to_le_bytes());
        }
    }
    for (path, parameter) in model.parameters() {
        let data = parameter.to_data()?;
        hash.update(format!("{path} {}\n", data.meta));
        hash.update(&data.bytes[..]);
    }
    device.sync()?;
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// A random stream of `length` calls over small vectors, the same for the same seed. Gives the content of every read, or
/// the error's text.
pub fn stream(driver: &dyn Driver, seed: u64, length: usize) -> Vec<Result<Vec<u8>, String>> {
    let mut random = Random(seed);
    let meta = Meta::new(DType::F32, [8]);
    let (mut live, mut next): (Vec<Id>, u64) = (Vec::new(), Id::TOOLS.first.0);
    let mut reads: Vec<Pending<Data>> = Vec::new();
    let ops = ["add", "mul", "sub", "maximum"].map(|name| parse_op(name).expect("a known operation"));
    for _ in 0..length {
        match random.below(10) {
            0 | 1 => {
                let number = |r: &mut Random| ((r.below(2000) as f32 - 1000.0) / 512.0).to_le_bytes();
                let content: Vec<u8> = (0..8).flat_map(|_| number(&mut random)).collect();
                driver.write(Id(next), Data::new(meta, Bytes::new(content)), Place::Reuse);
                live.push(Id(next));
                next += 1;
            }
            2..=6 if live.len() >= 2 => {
                let mut items = Vec::new();
                for _ in 0..1 + random.below(4) {
                    let op = ops[random.at(4)].clone();
                    let (a, b) = (live[random.at(live.len())], live[random.at(live.len())]);
                    items.push(Item::Run(Node::new(op, &[a, b], &[Id(next)])));
                    live.push(Id(next));
                    next += 1;
                    if live.len() > 6 {
                        items.push(Item::Free(live.swap_remove(random.at(live.len()))));
                    }
                }
                driver.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
            }
            _ if !live.is_empty() => reads.push(driver.read(live[random.at(live.len())])),
            _ => {}
        }
    }
    driver.submit(Batch {
        items: live.into_iter().map(Item::Free).collect(),
        urgency: Urgency::Now,
        ..Batch::default()
    });
    let answer = |read: Pending<Data>| read.wait().map(|d| d.bytes.to_vec()).map_err(|e| e.to_string());
    reads.into_iter().map(answer).collect()
}
