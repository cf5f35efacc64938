//! Training in several processes: each has a copy of the model and computes some shards of every batch.
//!
//!     cargo build --release --example two_processes
//!     kiln launch -n 2 -- target/release/examples/two_processes
//!
//! Started by itself it does all the work alone, and ends with the same bits.

use kiln::data::{batches, digits};
use kiln::dist::{self, Config, GradientSync, Group, Identity, Rendezvous, SyncConfig};
use kiln::prelude::*;

/// Parts that each batch is cut into. They decide the bits; how many processes share them does not.
const SHARDS: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps: usize = std::env::args().nth(1).map_or(Ok(200), |steps| steps.parse())?;
    let device = Device::default();
    seed(1);
    let mut model = Linear::new(64, 10, &device);
    let mut optimizer = Sgd::new(0.1).momentum(0.9);

    // What the launcher says; nothing if this process is alone. `mpirun`, `srun` and `torchrun` are understood too.
    let group = match Rendezvous::from_env()? {
        Some(place) => {
            // What has to be the same in all processes: a mismatch is an error at the start, not wrong numbers later.
            let identity = Identity::new("linear 64 10", "f32", &device.info().numerics);
            let config = Config { shards: Some(SHARDS), threads: kiln::threads(), ..Config::default() };
            Some(Group::join(&place, identity, config)?)
        }
        None => None,
    };
    // Every process gets the parameters of rank 0.
    let sync = match &group {
        Some(group) => GradientSync::start(group, &mut model, SyncConfig::default())?,
        None => GradientSync::alone(SHARDS, SyncConfig::default())?,
    };

    let train = &digits().train;
    let mut losses = Vec::new();
    for step in 0..steps {
        // All processes draw the same batch; each takes the rows of its own shards.
        let epoch = batches(train.len(), 32, 1, (step / 45) as u64);
        let batch = &epoch[step % epoch.len()];
        let mut round = sync.begin(&model)?;
        for shard in round.shards() {
            let rows = &batch[dist::samples(&sync.layout(), batch.len(), shard)];
            let pixels: Vec<f32> = rows.iter().flat_map(|&r| train.image(r as usize).to_vec()).collect();
            let labels: Vec<i64> = rows.iter().map(|&r| train.labels[r as usize]).collect();
            let x = Tensor::from_vec(pixels, [rows.len(), 64], &device);
            let y = Tensor::from_vec(labels, [rows.len()], &device);
            // The mean over these rows counts as so many of the whole batch. Gradients leave while backward runs.
            round.backward_of(&model.forward(&x).cross_entropy(&y), rows.len(), batch.len())?;
        }
        // Waits for the others' gradients; the loss is that of the whole batch, the same everywhere.
        let stepped = round.step(&mut model, &mut optimizer)?;
        if step == 0 || step + 1 == steps {
            losses.push(stepped.loss.item::<f32>()?);
        }
    }
    sync.close()?;
    let (rank, ranks) = group.as_ref().map_or((0, 1), |group| (group.rank(), group.ranks()));
    if rank == 0 {
        println!("{ranks} processes: loss {:?} before, {:?} after {steps} steps", losses[0], losses[1]);
    }
    assert!(losses[1] < losses[0] * 0.9, "the loss should fall");
    if let Some(group) = group {
        group.close()?;
    }
    Ok(())
}
