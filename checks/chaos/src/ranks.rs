//! Ranks of a job killed at random moments under `kiln launch`: the job starts again by itself and ends with the same
//! parameters.

use crate::scenarios::{Outcome, Setup};
use kiln_chaos::Random;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SEEDS: u64 = 20;
const STEPS: &str = "1500";

pub fn killed(setup: &Setup) -> Outcome {
    let begun = Instant::now();
    let want = digest(&train(&setup.kiln, None).output().map_err(|e| e.to_string())?.stdout)?;
    let alone = begun.elapsed();
    let (mut hit, mut restarts, mut shared) = (0, 0, 0);
    for seed in setup.seed..setup.seed + SEEDS {
        let mut random = Random(seed);
        let ranks = 2 + 2 * (seed % 2);
        let folder = std::env::temp_dir().join(format!("kiln-ranks-{}-{seed}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let mut launch = Command::new(&setup.kiln);
        launch.args(["launch", "-n", &ranks.to_string(), "--max-restarts", "3", "--json", "--"]);
        let program = train(&setup.kiln, Some(&folder));
        launch.arg(program.get_program()).args(program.get_args());
        let mut job =
            launch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|e| e.to_string())?;
        // Any moment from the first steps to the end: forward, backward, exchange, optimiser or checkpoint.
        let moment = alone.as_millis() as u64;
        std::thread::sleep(Duration::from_millis(20 + random.below(moment.max(1))));
        let children = children(job.id());
        shared += children.iter().filter(|&&child| shares(child)).count();
        if let Some(&victim) = children.get(random.at(children.len())) {
            kiln_chaos::process::signal(victim, "KILL");
        }
        let (text, events) = ended(&mut job)?;
        // Shared memory has no name: it stays only with a process that does.
        if let Some(left) = children.iter().find(|&&child| shares(child)) {
            return Err(format!("seed {seed}: process {left} of an ended job holds shared memory"));
        }
        let got = digest(text.as_bytes()).map_err(|e| format!("seed {seed}: {e}\n{events}"))?;
        let _ = std::fs::remove_dir_all(&folder);
        if got != want {
            return Err(format!("seed {seed}, {ranks} ranks: {got}, not {want}"));
        }
        hit += events.contains("killed by signal 9") as u32;
        restarts += events.matches("\"restarting\"").count();
    }
    if shared == 0 {
        return Err("no rank was seen with shared memory".into());
    }
    Ok(format!(
        "{SEEDS} seeds, {hit} ranks killed while they trained, {restarts} restarts, one digest {want}"
    ))
}

/// Whether a process has mapped the shared memory of a group.
fn shares(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/maps"))
        .is_ok_and(|maps| maps.contains("memfd:kiln-group"))
}

/// A training of 8 shards.
fn train(kiln: &Path, folder: Option<&Path>) -> Command {
    let mut command = Command::new(kiln);
    command.args(["train", "digits", "--digest", "--json", "--shards", "8", "--steps", STEPS]);
    if let Some(folder) = folder {
        command.args(["--every", "100", "--checkpoint"]).arg(folder);
    }
    command
}

/// The digest in the last line of a training, which a launcher may have marked with the rank.
fn digest(text: &[u8]) -> Result<String, String> {
    let text = String::from_utf8_lossy(text);
    let find = |line: &str| {
        let from = line.find("\"digest\":\"")? + 10;
        line.get(from..from + 64).map(String::from)
    };
    text.lines().rev().find_map(find).ok_or_else(|| format!("no digest in: {text}"))
}

/// Waits for the end of a job, at most two minutes. Gives what it said and what was said of it.
fn ended(job: &mut Child) -> Result<(String, String), String> {
    let (mut text, mut events) = (String::new(), String::new());
    let (out, err) = (job.stdout.take(), job.stderr.take());
    let id = job.id();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| out.map(|mut out| out.read_to_string(&mut text)));
        let told = scope.spawn(|| err.map(|mut err| err.read_to_string(&mut events)));
        let until = Instant::now() + Duration::from_secs(120);
        let status = loop {
            match job.try_wait() {
                Ok(Some(status)) => break Ok(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
                Ok(None) | Err(_) => {
                    kiln_chaos::process::signal(id, "KILL");
                    break Err("the job did not end");
                }
            }
        };
        let _ = (read.join(), told.join());
        status
    })?;
    Ok((text, events))
}

/// The processes that a process has started.
fn children(of: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}
