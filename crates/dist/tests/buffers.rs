//! Buffers in rounds: running statistics are combined over shards, and their bits do not depend on the workers.

use kiln_device::{Decorator, DeviceInfo, Driver, Locality};
use kiln_dist::{GradientSync, SyncConfig, samples};
use kiln_group::Layout;
use kiln_nn::{BatchNorm1d, Linear, Module, Sgd};
use kiln_tensor::{Device, Tensor, no_grad, seed};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A CPU that says it is on a server, so that gradients go by moves.
struct Elsewhere(kiln_cpu::Cpu);

impl Decorator for Elsewhere {
    fn inner(&self) -> &dyn Driver {
        &self.0
    }
    fn info(&self) -> DeviceInfo {
        DeviceInfo { locality: Locality::Server("elsewhere".into()), places_outputs: false, ..self.0.info() }
    }
}

fn device(elsewhere: bool) -> Device {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("buffers-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    match elsewhere {
        true => Device::wrap(&name, Arc::new(Elsewhere(kiln_cpu::Cpu::start()))).unwrap(),
        false => Device::wrap(&name, Arc::new(kiln_cpu::Cpu::start())).unwrap(),
    }
}

#[derive(Module)]
struct Net {
    inner: Linear,
    norm: BatchNorm1d,
    out: Linear,
}

impl Net {
    fn new(device: &Device) -> Net {
        seed(1);
        Net {
            inner: Linear::new(6, 10, device),
            norm: BatchNorm1d::new(10, device),
            out: Linear::new(10, 2, device),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        self.out.forward(&self.norm.forward(&self.inner.forward(x)).relu())
    }
}

/// Sample `i` of a step.
fn batch(step: usize, range: std::ops::Range<usize>, device: &Device) -> Tensor {
    let (from, n) = (range.start, range.len());
    let x = (0..n * 6).map(|i| (((from * 6 + i) * 37 + step * 11) % 101) as f32 / 50.0 - 1.0);
    Tensor::from_vec(x.collect(), [n, 6], device)
}

fn bits(model: &Net) -> Vec<u64> {
    let all = model.parameters().into_iter().chain(model.buffers());
    all.flat_map(|(_, t)| t.to_dtype(kiln_tensor::DType::F64).to_vec::<f64>().unwrap())
        .map(f64::to_bits)
        .collect()
}

const SHARDS: usize = 5;
const SAMPLES: usize = 23;
const STEPS: usize = 3;

/// What three steps make of the model; `skipped` has no samples.
fn trained(workers: usize, elsewhere: bool, skipped: Option<usize>) -> Vec<Vec<u64>> {
    let devices: Vec<Device> = (0..workers).map(|_| device(elsewhere)).collect();
    let mut models: Vec<Net> = devices.iter().map(Net::new).collect();
    // Only the first one's buffers count.
    for model in &models[1..] {
        model.norm.running_mean.as_ref().unwrap().load(Tensor::ones([10], &model.inner.weight.device()));
    }
    let mut list: Vec<&mut dyn Module> = models.iter_mut().map(|m| m as _).collect();
    let syncs = GradientSync::over(&mut list, SHARDS, SyncConfig::default()).unwrap();
    let layout = Layout::new(SHARDS, workers).unwrap();
    let mut optimizers: Vec<Sgd> = models.iter().map(|_| Sgd::new(0.1)).collect();
    for step in 0..STEPS {
        let mut rounds = Vec::new();
        for (worker, sync) in syncs.iter().enumerate() {
            let model = &models[worker];
            let mut round = sync.begin(model).unwrap();
            for shard in round.shards() {
                if skipped == Some(shard) {
                    round.skip().unwrap();
                    continue;
                }
                let range = samples(&layout, SAMPLES, shard);
                let n = range.len();
                let loss = model.forward(&batch(step, range, &devices[worker])).square().mean(());
                round.backward_of(&loss, n, SAMPLES).unwrap();
            }
            rounds.push(round);
        }
        for (worker, round) in rounds.into_iter().enumerate() {
            round.step(&mut models[worker], &mut optimizers[worker]).unwrap();
        }
    }
    models.iter().map(bits).collect()
}

#[test]
fn bits_of_running_statistics_do_not_depend_on_the_workers() {
    for skipped in [None, Some(0), Some(3)] {
        let alone = trained(1, false, skipped).remove(0);
        for workers in [2, 3] {
            for elsewhere in [false, true] {
                for own in trained(workers, elsewhere, skipped) {
                    assert!(own == alone, "{workers} workers, elsewhere {elsewhere}, skipped {skipped:?}");
                }
            }
        }
    }
}

#[test]
fn running_statistics_follow_the_mean_over_shards_by_samples() {
    let device = device(false);
    let model = Net::new(&device);
    let sync = GradientSync::alone(SHARDS, SyncConfig::default()).unwrap();
    let layout = Layout::new(SHARDS, 1).unwrap();
    let mut round = sync.begin(&model).unwrap();
    let mut want = [0.0f64; 10];
    for shard in round.shards() {
        let range = samples(&layout, SAMPLES, shard);
        let x = batch(0, range.clone(), &device);
        let mean = no_grad(|| model.inner.forward(&x).mean(0)).to_vec::<f32>().unwrap();
        want.iter_mut()
            .zip(mean)
            .for_each(|(w, m)| *w += 0.1 * m as f64 * range.len() as f64 / SAMPLES as f64);
        round.backward_of(&model.forward(&x).square().mean(()), range.len(), SAMPLES).unwrap();
    }
    let zeros = model.norm.running_mean.as_ref().unwrap().get().to_vec::<f32>().unwrap();
    assert_eq!(zeros, [0.0; 10], "every shard begins with what there was");
    round.wait().unwrap();
    let got = model.norm.running_mean.as_ref().unwrap().get().to_vec::<f32>().unwrap();
    assert!(got.iter().zip(want).all(|(g, w)| (*g as f64 - w).abs() < 1e-6), "{got:?}, not {want:?}");
    let count = model.norm.num_batches_tracked.as_ref().unwrap().get();
    assert_eq!(count.item::<i64>().unwrap(), 1, "a step is one batch");
}

#[test]
fn a_round_that_is_dropped_leaves_buffers_as_they_were() {
    let device = device(false);
    let model = Net::new(&device);
    let before = bits(&model);
    let sync = GradientSync::alone(SHARDS, SyncConfig::default()).unwrap();
    let mut round = sync.begin(&model).unwrap();
    round.backward(&model.forward(&batch(0, 0..4, &device)).square().mean(())).unwrap();
    let _ = model.forward(&batch(0, 4..8, &device));
    drop(round);
    assert!(bits(&model) == before);
}
