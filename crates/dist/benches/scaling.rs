//! What gradient sync costs: two processes of one thread each, with and without it, and one process alone.
//!
//! `cargo bench -p kiln-dist` starts the processes. In each, stretches of steps with and without sync take turns, and
//! all processes do the same at the same time; figures are medians over pairs of stretches. `weak` is the time of a step
//! without sync over that with it, two processes at once; without sync the optimiser is part of the products that give
//! the gradients, so beside it is the figure against steps that keep their gradients, as an exchange must, and that of
//! steps that exchange nothing but wait for each other. `cost` is what a sync adds with one worker. `hidden` is the
//! share of the exchange's time that backward covers on a link made slow on purpose, with buckets of 1 MiB. `KILN_GLOO`
//! is a Python with torch, whose DDP is measured beside it.
#![allow(missing_docs)]

use kiln_dist::{Config, GradientSync, Group, Identity, Rendezvous, SyncConfig};
use kiln_nn::{Adam, Embedding, GptBlock, LayerNorm, Linear, Module, Optimizer};
use kiln_tensor::{DType, Device, Tensor};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Steps of a stretch, and stretches, by model.
const MODELS: [(&str, usize, usize); 2] = [("mlp", 24, 31), ("gpt", 2, 15)];

fn main() {
    match std::env::var("KILN_BENCH_SIDE").as_deref() {
        Ok(side) => rank(side),
        Err(_) => compare(),
    }
}

#[derive(Module)]
struct Mlp {
    layers: Vec<Linear>,
}
#[derive(Module)]
struct Gpt {
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
    head: Linear,
}
/// Something to train. Its data is random: on data that is learnt at once gradients become denormal, which are slow.
trait Task: Module {
    fn batch(device: &Device) -> [Tensor; 2];
    fn loss(&self, batch: &[Tensor; 2]) -> Tensor;
}

impl Task for Mlp {
    fn batch(device: &Device) -> [Tensor; 2] {
        [Tensor::randn([256, 784], device), Tensor::randint(0, 10, [256], device)]
    }

    fn loss(&self, [x, y]: &[Tensor; 2]) -> Tensor {
        let first = self.layers[0].forward(x);
        let logits = self.layers[1..].iter().fold(first, |x, layer| layer.forward(&x.relu()));
        logits.cross_entropy(y)
    }
}

const VOCABULARY: usize = 1000;

impl Task for Gpt {
    fn batch(device: &Device) -> [Tensor; 2] {
        [0, 1].map(|_| Tensor::randint(0, VOCABULARY as i64, [8, 128], device))
    }

    fn loss(&self, [ids, next]: &[Tensor; 2]) -> Tensor {
        let x = self.tokens.forward(ids) + &self.places.weight;
        let x = self.blocks.iter().fold(x, |x, block| block.forward(&x));
        let logits = self.head.forward(&self.norm.forward(&x)).reshape([-1, VOCABULARY as isize]);
        logits.cross_entropy(&next.reshape([-1]))
    }
}

fn mlp(device: &Device) -> Mlp {
    let sizes = [784, 512, 512, 10];
    Mlp { layers: sizes.windows(2).map(|pair| Linear::new(pair[0], pair[1], device)).collect() }
}

fn gpt(device: &Device) -> Gpt {
    let width = 256;
    Gpt {
        tokens: Embedding::new(VOCABULARY, width, device),
        places: Embedding::new(128, width, device),
        blocks: (0..4).map(|_| GptBlock::new(width, 4, device)).collect(),
        norm: LayerNorm::new(width, device),
        head: Linear::new(width, VOCABULARY, device).without_bias(),
    }
}

fn rank(side: &str) {
    kiln_tensor::set_threads(1);
    let at = Rendezvous::from_env().expect("variables").expect("started as a rank");
    let (what, name) = side.split_once(' ').expect("a measurement and a model");
    let device = Device::cpu();
    match name {
        "mlp" => measure(&at, what, name, &mut mlp(&device), &device),
        _ => measure(&at, what, name, &mut gpt(&device), &device),
    }
}

/// Whether steps exchange their gradients, or else keep them (then the optimiser is not part of what computes them), or
/// only wait for each other.
#[derive(Clone, Copy)]
enum How<'a> {
    Plain,
    Kept,
    Waits,
    Synced(&'a GradientSync),
}

/// A model being trained.
struct Run<'a, T> {
    model: &'a mut T,
    batch: [Tensor; 2],
    optimizer: Adam,
    device: Device,
    steps: usize,
}

impl<T: Task> Run<'_, T> {
    /// The time of a step, over some that all processes begin together, until the last of them is done: without sync
    /// too a job takes as long as its slowest core.
    fn stretch(&mut self, group: &Group, how: How<'_>) -> Duration {
        group.barrier().expect("all ranks");
        let begun = Instant::now();
        for _ in 0..self.steps {
            let loss = self.model.loss(&self.batch);
            match how {
                How::Synced(sync) => {
                    let mut round = sync.begin(self.model).expect("a round");
                    round.backward(&loss).expect("a backward");
                    round.step(self.model, &mut self.optimizer).expect("gradients");
                }
                How::Plain | How::Kept | How::Waits => {
                    let gradients = loss.backward();
                    if let How::Kept = how {
                        self.device.submit();
                    }
                    self.optimizer.step(self.model, &gradients);
                    if let How::Waits = how {
                        self.device.sync().expect("computed");
                        group.barrier().expect("all ranks");
                    }
                }
            }
        }
        self.device.sync().expect("computed");
        group.barrier().expect("all ranks");
        begun.elapsed() / self.steps as u32
    }
}

fn measure<T: Task>(at: &Rendezvous, what: &str, name: &str, model: &mut T, device: &Device) {
    let hidden = what == "hidden";
    let bytes: usize = model.parameters().iter().map(|(_, p)| p.meta().bytes()).sum();
    let join = |job: &str, rate: Option<u64>| {
        let at = Rendezvous { job: format!("{}-{job}", at.job), ..at.clone() };
        let config = Config { rate, threads: 1, ..Config::default() };
        Group::join(&at, Identity::new(name, "f32", ""), config).expect("all ranks")
    };
    let others = if hidden { 1 << 20 } else { 25 << 20 };
    let settings = SyncConfig { check: None, others, ..SyncConfig::default() };
    let group = join("free", None);
    let sync = GradientSync::start(&group, model, settings.clone()).expect("a sync");
    let (_, steps, stretches) = MODELS.into_iter().find(|(n, ..)| *n == name).expect("a model");
    let (batch, device) = (T::batch(device), device.clone());
    let mut run = Run { model, batch, optimizer: Adam::new(1e-5), device, steps };
    // Plans, buffers and caches.
    run.stretch(&group, How::Plain);
    run.stretch(&group, How::Kept);
    run.stretch(&group, How::Synced(&sync));
    let mut warm = [(); 5].map(|_| run.stretch(&group, How::Synced(&sync)));
    warm.sort();
    let mut comm = Duration::ZERO;
    let slow = hidden.then(|| {
        // The exchange takes a third of a step, by the clock of rank 0.
        let own = group.buffer_of(&(warm[2].as_nanos() as u64).to_le_bytes()).expect("memory");
        let first = group.broadcast(0, DType::U8, own).and_then(|p| p.wait()).expect("all ranks");
        comm = Duration::from_nanos(first.iter().rev().fold(0, |n, &b| n << 8 | b as u64)) / 3;
        let slow = join("slow", Some((bytes as f64 / comm.as_secs_f64()) as u64));
        let sync = GradientSync::start(&slow, run.model, settings).expect("a sync");
        run.stretch(&group, How::Synced(&sync));
        sync
    });
    let (without, with) = match &slow {
        Some(slow) => (How::Synced(&sync), How::Synced(slow)),
        None => (How::Plain, How::Synced(&sync)),
    };
    // The others are told beside weak scaling alone.
    let kinds = if what == "weak" { 4 } else { 2 };
    let mut times = [without, with, How::Kept, How::Waits].map(|how| (how, Vec::new()));
    for _ in 0..stretches {
        times[..kinds].iter_mut().for_each(|(how, times)| times.push(run.stretch(&group, *how)));
    }
    let millis = |t: &Duration| t.as_secs_f64() * 1e3;
    if at.rank == 0 {
        // Neighbours are compared, because a shared machine changes its speed.
        let [without, with, kept, waits] = times.map(|(_, times)| times);
        let ratio =
            |a: &[Duration], b: &[Duration]| median(a.iter().zip(b).map(|(a, b)| millis(a) / millis(b)));
        let step = median(without.iter().map(millis));
        let (kept, waits) = (ratio(&kept, &with), ratio(&without, &waits));
        println!("TIME {step} {} {} {kept} {waits}", step / ratio(&without, &with), millis(&comm));
        let stats = sync.stats();
        println!("COPIED {}", stats.copied / stats.rounds.max(1));
    }
    group.barrier().expect("all ranks");
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Milliseconds a step without and with, and of the exchange, and the efficiency against steps that keep their
/// gradients; that of steps that only wait for each other; bytes copied a step.
fn ours(world: usize, what: &str, name: &str) -> Option<([f64; 5], u64)> {
    let exe = std::env::current_exe().expect("a path");
    let start = |rank: usize| {
        // A core each, as `kiln launch` has it.
        Command::new("taskset")
            .args(["-c", &rank.to_string()])
            .arg(&exe)
            .env("KILN_BENCH_SIDE", format!("{what} {name}"))
            .env("KILN_THREADS", "1")
            .env("KILN_CORES", std::thread::available_parallelism().map_or(1, |n| n.get()).to_string())
            .env("KILN_RANK", rank.to_string())
            .env("KILN_WORLD", world.to_string())
            .env("KILN_JOB", format!("scaling-{}", std::process::id()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process")
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    let texts = ranks.into_iter().map(|r| r.wait_with_output().expect("an end").stdout);
    let text: String = texts.map(|t| String::from_utf8_lossy(&t).into_owned()).collect();
    let line = |word: &str| text.lines().find_map(|l| l.strip_prefix(word));
    let mut times = line("TIME ")?.split(' ').map(|t| t.parse().ok());
    let times = [times.next()??, times.next()??, times.next()??, times.next()??, times.next()??];
    Some((times, line("COPIED ")?.parse().ok()?))
}

/// The same of PyTorch's DDP.
fn ddp(world: usize, name: &str) -> Option<[f64; 2]> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/ddp.py");
    let python = kiln_env::GLOO.get()?;
    let out = Command::new(python).args([script, &world.to_string(), name]).output().ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let mut times = text.lines().find_map(|l| l.strip_prefix("TIME "))?.split(' ').map(|t| t.parse().ok());
    Some([times.next()??, times.next()??])
}

fn compare() {
    println!("{:>8} {:>6} {:>12} {:>12}  figure", "what", "model", "without", "with");
    for (name, ..) in MODELS {
        for (what, world) in [("weak", 2), ("cost", 1), ("hidden", 2)] {
            let Some(([a, b, comm, kept, waits], copied)) = ours(world, what, name) else {
                println!("{what:>8} {name:>6} failed");
                continue;
            };
            let figure = match what {
                "weak" => {
                    format!(
                        "efficiency {:.3}, gradients kept {kept:.3}, only waiting {waits:.3}, {copied} bytes copied a step",
                        a / b
                    )
                }
                "cost" => format!("{:+.1} %", (b / a - 1.0) * 100.0),
                _ => format!("{:.0} % of {comm:.1} ms hidden", (1.0 - (b - a) / comm) * 100.0),
            };
            println!("{what:>8} {name:>6} {a:>9.2} ms {b:>9.2} ms  {figure}");
        }
        if let Some([a, b]) = ddp(2, name) {
            println!("{:>8} {name:>6} {a:>9.2} ms {b:>9.2} ms  efficiency {:.3}", "DDP", a / b);
        }
    }
}
