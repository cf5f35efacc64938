//! A training loop in full: data, model, loss, backward, optimiser.
//!
//!     cargo run --release --example digits

use kiln::data::{batches, digits};
use kiln::prelude::*;

#[derive(Module)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.output.forward(&self.hidden.forward(x).relu())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps: usize = std::env::args().nth(1).map_or(Ok(400), |steps| steps.parse())?;
    let device = Device::default();
    seed(1);
    let mut model = Mlp { hidden: Linear::new(64, 64, &device), output: Linear::new(64, 10, &device) };
    let mut optimizer = Sgd::new(0.1).momentum(0.9);
    let train = &digits().train;
    let (mut first, mut last) = (f32::NAN, f32::NAN);
    for step in 0..steps {
        let epoch = batches(train.len(), 32, 1, (step / 45) as u64);
        let rows = &epoch[step % epoch.len()];
        let pixels = rows.iter().flat_map(|&r| train.image(r as usize).to_vec()).collect::<Vec<f32>>();
        let labels = rows.iter().map(|&r| train.labels[r as usize]).collect::<Vec<i64>>();
        let x = Tensor::from_vec(pixels, [rows.len(), 64], &device);
        let y = Tensor::from_vec(labels, [rows.len()], &device);
        let loss = model.forward(&x).cross_entropy(&y);
        let gradients = loss.backward();
        optimizer.step(&mut model, &gradients);
        last = loss.item()?;
        if step == 0 {
            first = last;
        }
    }
    println!("loss {first:.3} before, {last:.3} after {steps} steps");
    assert!(last < first * 0.9, "the loss should fall");
    Ok(())
}
