//! The training loop: shards of a batch over workers, checkpoints, reports.
//!
//! A job is cut into logical shards; a worker is a device with its own copy of the model and some of the shards. What
//! the shards' gradients come to does not depend on who computed them, so any number of workers gives the same bits.

use super::report::Report;
use kiln::dist::{self, GradientSync, Group, Identity, Layout, Rendezvous, SyncConfig};
use kiln::nn::{NonFinite, Optimizer};
use kiln::prelude::*;
use kiln::store::Checkpoint;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// What every recipe can be told.
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    /// Optimiser steps, counted from the job's start.
    #[arg(long)]
    pub steps: Option<u64>,
    /// Seed of initial weights and of the order of samples.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Device to train on: cpu, cpu:1, reference, kiln://host:port, …; repeated, the work is shared out.
    #[arg(long)]
    pub device: Vec<String>,
    /// Workers of this process that share the work, each a logical CPU device.
    #[arg(long, conflicts_with = "device")]
    pub workers: Option<usize>,
    /// Logical shards of each batch; the number of workers by default. Decides the bits, as the seed does.
    #[arg(long)]
    pub shards: Option<usize>,
    /// Threads that compute; all cores by default.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Folder for checkpoints.
    #[arg(long)]
    pub checkpoint: Option<PathBuf>,
    /// Steps between checkpoints.
    #[arg(long, default_value_t = 200, requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    pub every: u64,
    /// Checkpoints of this job to keep, the newest; all by default.
    #[arg(long, requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep: Option<u64>,
    /// Go on from the newest checkpoint.
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,
    /// Steps between comparisons of all workers' parameters; 0 for none.
    #[arg(long, default_value_t = 1000)]
    pub check: u64,
    /// What becomes of a step whose gradients are infinite or NaN. One that could not be computed refuses its step in any
    /// case.
    #[arg(long, value_enum, default_value_t = Infinite::Error)]
    pub nonfinite: Infinite,
    /// End with the sha256 of the parameters.
    #[arg(long)]
    pub digest: bool,
    /// One JSON object a report.
    #[arg(long)]
    pub json: bool,
}

/// What becomes of a step whose gradients are not finite.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Infinite {
    /// It is applied.
    Continue,
    /// It is left out.
    Skip,
    /// The training ends, with the parameter's name.
    Error,
}

impl From<Infinite> for NonFinite {
    fn from(policy: Infinite) -> NonFinite {
        match policy {
            Infinite::Continue => NonFinite::Continue,
            Infinite::Skip => NonFinite::Skip,
            Infinite::Error => NonFinite::Error,
        }
    }
}

/// What is trained, on what, and how.
pub trait Recipe {
    /// The model.
    type Model: Module;

    /// Its name, and everything that decides its bits besides steps, seed and shards.
    fn signature(&self) -> String;

    /// Steps if none are asked for.
    fn steps(&self) -> u64;

    /// A new model; its weights come from the current generator.
    fn model(&self, device: &Device) -> Self::Model;

    fn optimizer(&self) -> Adam;

    /// The learning rate of a step. It depends on the step alone, so that a longer run begins as a shorter one did.
    fn lr(&self, step: u64) -> f64;

    /// The samples of a step's global batch.
    fn batch(&self, step: u64) -> Vec<u32>;

    /// The mean loss over some samples. `path` names the step, and the shard where there are several: randomness may
    /// depend on it and on nothing else.
    fn loss(&self, model: &Self::Model, step: u64, path: &[u64], samples: &[u32], device: &Device) -> Tensor;

    /// What is being trained on, for people.
    fn about(&self) -> String;

    /// Figures of the trained model: a name and a number each.
    fn figures(&self, model: &Self::Model, device: &Device) -> Result<Vec<(&'static str, f64)>, kiln::Error>;
}

/// One copy of the model and its optimiser.
struct Worker<M> {
    device: Device,
    model: M,
    optimizer: Adam,
}

/// Brings the gradients of all workers together; one for each of this process.
fn syncs<M: Module>(
    workers: &mut [Worker<M>],
    group: Option<&Group>,
    shards: usize,
    config: SyncConfig,
) -> Result<Vec<GradientSync>, dist::Error> {
    match group {
        Some(group) => Ok(vec![GradientSync::start(group, &mut workers[0].model, config)?]),
        None => {
            let mut models: Vec<&mut dyn Module> = workers.iter_mut().map(|w| &mut w.model as _).collect();
            GradientSync::over(&mut models, shards, config)
        }
    }
}

pub fn run<R: Recipe>(recipe: &R, args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    if let Some(threads) = args.threads {
        kiln::set_threads(threads);
    }
    let place = Rendezvous::from_env()?.filter(|place| place.world > 1);
    let devices = devices(args, place.as_ref())?;
    let ranks = place.as_ref().map_or(devices.len(), |place| place.world);
    if let Some(folder) = args.checkpoint.as_ref().filter(|_| place.as_ref().is_none_or(|p| p.rank == 0)) {
        Checkpoint::prepare(folder)?;
    }
    let saved = saved(args)?;
    let before = saved.as_ref().and_then(|c| c.words.get("shards")).and_then(|k| k.parse().ok());
    let count = args.shards.or(before).unwrap_or(ranks);
    let layout = Layout::new(count, ranks)?;
    let steps = args.steps.unwrap_or(recipe.steps());
    let words = BTreeMap::from([
        ("recipe".to_string(), recipe.signature()),
        ("seed".to_string(), args.seed.to_string()),
        ("shards".to_string(), count.to_string()),
    ]);
    let mut workers: Vec<Worker<R::Model>> = devices
        .into_iter()
        .map(|device| {
            // Every copy starts from the same weights.
            kiln::seed(args.seed);
            let model = recipe.model(&device);
            Worker { device, model, optimizer: recipe.optimizer().nonfinite(args.nonfinite.into()) }
        })
        .collect();
    let first = match &saved {
        Some(checkpoint) => restore(args, checkpoint, &words, &mut workers)?,
        None => 0,
    };
    let group = place.map(|place| join(&place, &workers[0], count)).transpose()?;
    let config = SyncConfig { check: Some(args.check).filter(|&n| n > 0), ..Default::default() };
    let syncs = syncs(&mut workers, group.as_ref(), count, config)?;
    // One rank speaks and writes for all.
    let speaks = group.as_ref().is_none_or(|group| group.rank() == 0);
    if speaks && !args.json {
        let names: Vec<_> = workers.iter().map(|w| w.device.address().to_string()).collect();
        let cut = if count > 1 { format!(", {count} shards") } else { String::new() };
        let parameters = workers[0].model.parameter_count();
        let ranks = group.as_ref().map(|g| format!(" in {} ranks", g.ranks())).unwrap_or_default();
        println!(
            "training {parameters} parameters on {}{ranks}{cut}: {}",
            names.join(" and "),
            recipe.about()
        );
    }
    let start = Instant::now();
    let mut report = Report::new(args.json, first, steps);
    for step in first..steps {
        let loss = advance(recipe, layout, &syncs, step, &mut workers)?;
        if speaks {
            report.step(step + 1, &loss)?;
        }
        let due = (step + 1) % args.every == 0 || step + 1 == steps;
        if let Some(folder) = args.checkpoint.as_ref().filter(|_| due && speaks) {
            Checkpoint::save(folder, step + 1, &words, &state(&workers[0]))?;
            if let Some(keep) = args.keep {
                Checkpoint::prune(folder, &words, step + 1, usize::try_from(keep).unwrap_or(usize::MAX))?;
            }
        }
    }
    report.done();
    // What no read has told of ends the job on the worker that it happened to.
    workers.iter().try_for_each(|w| w.device.sync())?;
    let late = syncs[0].stats().late;
    if let Some(group) = &group {
        group.barrier()?;
    }
    syncs.iter().try_for_each(|sync| sync.close())?;
    if let Some(group) = &group {
        group.close()?;
    }
    if !speaks {
        return Ok(ExitCode::SUCCESS);
    }
    let worker = &workers[0];
    let figures = recipe.figures(&worker.model, &worker.device)?;
    let digest = args.digest.then(|| digest(&worker.model)).transpose()?;
    let seconds = start.elapsed().as_secs_f64();
    workers.iter().try_for_each(|w| w.device.flush())?;
    if args.json {
        let mut line = serde_json::json!({ "steps": steps, "seconds": seconds, "digest": digest });
        figures.iter().for_each(|(name, figure)| line[*name] = (*figure).into());
        println!("{line}");
        return Ok(ExitCode::SUCCESS);
    }
    println!("{} steps in {seconds:.2} s", steps - first.min(steps));
    let slowest = late.iter().enumerate().max_by_key(|(_, waited)| **waited);
    if let Some((rank, waited)) = slowest.filter(|(_, waited)| waited.as_secs_f64() > 0.1 * seconds) {
        println!("{:.1} s of it waiting for rank {rank}, the last to come", waited.as_secs_f64());
    }
    for (name, figure) in figures {
        match name {
            "accuracy" => println!("test accuracy {:.2}%", figure * 100.0),
            _ => println!("{name} {figure:.4}"),
        }
    }
    if let Some(digest) = digest {
        println!("{digest}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The devices of this process: one for a rank of several.
fn devices(args: &Args, place: Option<&Rendezvous>) -> Result<Vec<Device>, kiln::Error> {
    if let Some(place) = place {
        let own = args.device.get(place.rank % args.device.len().max(1));
        return Ok(vec![own.map_or_else(Device::try_default, |address| Device::open(address))?]);
    }
    match (args.workers, args.device.is_empty()) {
        (Some(workers), _) => (0..workers.max(1)).map(|i| Device::open(&format!("cpu:{i}"))).collect(),
        (None, false) => args.device.iter().map(|address| Device::open(address)).collect(),
        (None, true) => Ok(vec![Device::try_default()?]),
    }
}

/// Meets the other ranks, which must train the same model in the same way.
fn join<M: Module>(place: &Rendezvous, worker: &Worker<M>, shards: usize) -> Result<Group, dist::Error> {
    let model: Vec<String> =
        worker.model.parameters().iter().map(|(path, p)| format!("{path} {}", p.meta())).collect();
    let identity = Identity::new(&model.join(", "), "f32", &worker.device.info().numerics);
    let config = dist::Config { shards: Some(shards), threads: kiln::threads(), ..Default::default() };
    Ok(Group::join(place, identity, config)?)
}

/// The checkpoint that the job goes on from, if it does.
fn saved(args: &Args) -> Result<Option<Checkpoint>, Box<dyn Error>> {
    let Some(folder) = &args.checkpoint else { return Ok(None) };
    // A launcher that starts a job again says so.
    let restarted = kiln_env::RESTART.get().is_some_and(|attempt| attempt > 0);
    // Another rank makes the folder.
    if !folder.exists() {
        return Ok(None);
    }
    let (newest, bad) = Checkpoint::latest(folder)?;
    bad.iter().for_each(|e| eprintln!("kiln: warning: {e}; using an older checkpoint"));
    let Some(newest) = newest else {
        if args.resume {
            eprintln!("no checkpoint in {} yet: starting at step 0", folder.display());
        }
        return Ok(None);
    };
    if !args.resume && !restarted {
        let message = format!("{} holds checkpoints; --resume goes on from them", folder.display());
        return Err(message.into());
    }
    Ok(Some(newest))
}

/// Brings all copies to a checkpoint. Gives the first step to do.
fn restore<M: Module>(
    args: &Args,
    newest: &Checkpoint,
    words: &BTreeMap<String, String>,
    workers: &mut [Worker<M>],
) -> Result<u64, Box<dyn Error>> {
    words.iter().try_for_each(|(word, want)| newest.expect(word, want))?;
    for worker in workers {
        let device = worker.device.clone();
        newest.restore("model.", &mut worker.model)?;
        let saved =
            newest.tensors.iter().filter_map(|(name, data)| Some((name.strip_prefix("optimizer.")?, data)));
        let saved = saved.map(|(name, data)| (name.to_string(), Tensor::from_data(data.clone(), &device)));
        worker.optimizer.restore(newest.step, saved.collect());
    }
    if !args.json {
        // In one piece: every rank says so, and what starts them may let their pieces mix.
        let line = format!("going on from step {} ({})\n", newest.step, newest.path.display());
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    Ok(newest.step)
}

/// Everything that a worker would need to go on.
fn state<M: Module>(worker: &Worker<M>) -> Vec<(String, Tensor)> {
    let model = worker
        .model
        .distinct()
        .into_iter()
        .chain(worker.model.buffers())
        .map(|(path, t)| (format!("model.{path}"), t));
    let optimizer = worker.optimizer.state().into_iter().map(|(name, t)| (format!("optimizer.{name}"), t));
    model.chain(optimizer).collect()
}

/// One step of all workers. Gives the loss over the whole batch, on the first worker's device.
fn advance<R: Recipe>(
    recipe: &R,
    layout: Layout,
    syncs: &[GradientSync],
    step: u64,
    workers: &mut [Worker<R::Model>],
) -> Result<Tensor, dist::Error> {
    let batch = recipe.batch(step);
    let mut rounds = Vec::new();
    for (worker, sync) in workers.iter().zip(syncs) {
        let mut round = sync.begin(&worker.model)?;
        for shard in round.shards() {
            let samples = &batch[dist::samples(&layout, batch.len(), shard)];
            if samples.is_empty() {
                round.skip()?;
                continue;
            }
            let path = [step, shard as u64];
            let path = if layout.shards() == 1 { &path[..1] } else { &path };
            let loss = recipe.loss(&worker.model, step, path, samples, &worker.device);
            round.backward_of(&loss, samples.len(), batch.len())?;
        }
        // What is recorded starts while the next worker's part is being recorded.
        if syncs.len() > 1 {
            worker.device.submit();
        }
        rounds.push(round);
    }
    let mut loss = None;
    for (worker, round) in workers.iter_mut().zip(rounds) {
        worker.optimizer.lr = recipe.lr(step);
        let stepped = round.step(&mut worker.model, &mut worker.optimizer)?;
        loss = loss.or(Some(stepped.loss));
        if syncs.len() > 1 {
            worker.device.submit();
        }
    }
    Ok(loss.unwrap_or_else(|| unreachable!("there is at least one worker")))
}

/// The sha256 of all parameters: path, dtype and shape, and bytes of each, in the model's order.
fn digest(model: &dyn Module) -> Result<String, kiln::Error> {
    let mut hash = Sha256::new();
    for (path, parameter) in model.parameters() {
        let data = parameter.to_data()?;
        hash.update(format!("{path} {}\n", data.meta));
        hash.update(&data.bytes[..]);
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
