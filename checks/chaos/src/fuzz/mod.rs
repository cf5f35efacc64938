//! Fuzz targets as plain functions, and the loop that mutates inputs for them. It runs on stable Rust: instead of
//! coverage, a target tells what came of an input, and inputs with a new outcome are kept and mutated further.

mod files;
pub mod grammar;
mod mutate;
mod seeds;
mod targets;

pub use files::clean;
pub use seeds::seeds;
pub use targets::{TARGETS, Target};

use crate::Random;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a run did.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Inputs executed.
    pub executions: u64,
    /// How long it took.
    pub time: Duration,
    /// Inputs with an outcome of their own.
    pub kept: usize,
    /// How many of them were not in the corpus.
    pub new: usize,
}

/// An input that a target does not stand.
#[derive(Debug)]
pub struct Crash {
    /// The input.
    pub input: Vec<u8>,
    /// What went wrong.
    pub message: String,
}

/// Inputs kept in memory at most.
const MOST_KEPT: usize = 4096;
/// The longest input.
const LONGEST: usize = 4096;

/// The folder of a target's kept inputs.
pub fn folder(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name)
}

/// The kept inputs of a target, in the order of their names.
pub fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder(target)).into_iter().flatten().flatten().map(|e| e.path()).collect();
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
}

/// Runs a target on its corpus and then on mutated inputs, until `executions` are done or the time is over. With `keep`,
/// inputs with new outcomes are written to the corpus, `keep` of them at most.
pub fn run(
    target: &Target,
    executions: u64,
    limit: Duration,
    seed: u64,
    keep: usize,
) -> Result<Report, Crash> {
    let start = Instant::now();
    let mut random = Random(seed);
    let mut known = HashSet::new();
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    let mut done = 0;
    let held = corpus(target);
    let from_disk = held.len();
    for input in held.into_iter().chain(seeds(target.name)) {
        done += 1;
        if known.insert(once(target, &input)?) {
            inputs.push(input);
        }
    }
    let (before, mut written) = (inputs.len(), 0);
    while done < executions && (done % 64 != 0 || start.elapsed() < limit) {
        done += 1;
        let input = mutate::mutated(&inputs, &mut random, LONGEST);
        if known.insert(once(target, &input)?) && inputs.len() < MOST_KEPT {
            if written < keep {
                written += 1;
                let _ = std::fs::create_dir_all(folder(target));
                let name = format!("{:05}", from_disk + written);
                let _ = std::fs::write(folder(target).join(name), &input);
            }
            inputs.push(input);
        }
    }
    Ok(Report { executions: done, time: start.elapsed(), kept: inputs.len(), new: inputs.len() - before })
}

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Counts panics instead of printing them: also one that somebody catches is a finding.
pub fn quiet() {
    std::panic::set_hook(Box::new(|info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        *LAST.lock().unwrap_or_else(|e| e.into_inner()) = info.to_string();
    }));
}

static LAST: std::sync::Mutex<String> = std::sync::Mutex::new(String::new());

/// One execution. A panic is a crash, even one that was caught on the way.
pub fn once(target: &Target, input: &[u8]) -> Result<u64, Crash> {
    let before = PANICS.load(Ordering::Relaxed);
    let crash = |message: String| Crash { input: input.to_vec(), message };
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let last = || LAST.lock().unwrap_or_else(|e| e.into_inner()).clone();
    match outcome {
        Err(_) => Err(crash(last())),
        Ok(_) if PANICS.load(Ordering::Relaxed) != before => Err(crash(last())),
        Ok(outcome) => Ok(outcome),
    }
}
