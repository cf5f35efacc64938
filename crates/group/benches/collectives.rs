//! All-reduce of f32 sums between processes of this machine: ours, OpenMPI's (feature `mpi`) and Gloo's, in one run.
//!
//! `cargo bench -p kiln-group --features mpi` starts 2 and then 4 processes of each, or as many
//! as follow `--`. `KILN_GLOO` is a Python with
//! torch; without it that column is empty. Figures are medians of microseconds, and bus bandwidth 2 (n - 1) / n S / t.
//! Each is measured as usual, with the same buffers again and again, and with buffers that each rank has just filled,
//! as a backward does: then every line has to come from another core.
#![allow(missing_docs)]

use kiln_group::{Call, Config, Group, Identity, Op, Reduce, Rendezvous};
use kiln_ir::DType;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SIZES: [usize; 6] = [4, 64 << 10, 1 << 20, 25 << 20, 64 << 20, 0];

fn main() {
    match std::env::var("KILN_BENCH_SIDE").as_deref() {
        Ok("shm") => shm(),
        #[cfg(feature = "mpi")]
        Ok("mpi") => openmpi::run(),
        _ => compare(),
    }
}

/// How often a size is measured.
fn rounds(bytes: usize) -> usize {
    match bytes {
        0..=4096 => 20_000,
        4097..=200_000 => 2000,
        200_001..=2_000_000 => 400,
        _ => 30,
    }
}

/// What happens before each round, outside the time.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    Nothing,
    /// The buffer is written and all ranks meet.
    Fill,
}

/// The median time of one round, in microseconds; a fifth more rounds come before.
fn median<S>(bytes: usize, state: &mut S, before: impl Fn(&mut S), round: impl Fn(&mut S)) -> f64 {
    let n = rounds(bytes);
    let mut times: Vec<Duration> = (0..n + n / 5 + 1)
        .map(|_| {
            before(state);
            let begun = Instant::now();
            round(state);
            begun.elapsed()
        })
        .skip(n / 5 + 1)
        .collect();
    times.sort();
    times[n / 2].as_secs_f64() * 1e6
}

fn report(rank: usize, before: Before, bytes: usize, micros: f64) {
    if rank == 0 {
        println!("TIME {} {bytes} {micros}", (before == Before::Fill) as u8);
    }
}

fn shm() {
    let at = Rendezvous::from_env().expect("variables").expect("started as a rank");
    let group = Group::join(&at, Identity::new("bench", "f32", ""), Config::default()).expect("all ranks");
    for (before, bytes) in cases() {
        let mut buffer = Some(group.buffer(bytes).expect("memory"));
        let fill = |buffer: &mut Option<kiln_group::Buffer>| {
            if before == Before::Fill {
                buffer.as_mut().expect("a buffer").fill(0);
                group.barrier().expect("all ranks");
            }
        };
        let micros = median(bytes, &mut buffer, fill, |buffer| {
            let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32);
            *buffer = Some(group.run(call, buffer.take().expect("a buffer")).expect("a sum"));
        });
        report(at.rank, before, bytes, micros);
        group.barrier().expect("all ranks");
        if before == Before::Nothing && bytes >= 1 << 20 {
            payload(&group, bytes);
        }
    }
}

/// Tells what one all-reduce makes this rank read from and write to the memory of others.
fn payload(group: &Group, bytes: usize) {
    let earlier = group.traffic();
    let buffer = group.buffer(bytes).expect("memory");
    let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32);
    drop(group.run(call, buffer).expect("a sum"));
    let now = group.traffic();
    let (read, written) = (now.read - earlier.read, now.written - earlier.written);
    let n = group.ranks() as f64;
    let bound = 2.0 * (n - 1.0) / n * bytes as f64;
    println!(
        "PAYLOAD rank {} of {n}: {bytes} bytes: {read} read and {written} written, {:.3} of 2(n-1)/n S",
        group.rank(),
        (read + written) as f64 / bound
    );
}

fn cases() -> impl Iterator<Item = (Before, usize)> {
    let filled = SIZES.into_iter().filter(|&bytes| bytes > 4);
    SIZES.into_iter().map(|bytes| (Before::Nothing, bytes)).chain(filled.map(|bytes| (Before::Fill, bytes)))
}

#[cfg(feature = "mpi")]
mod openmpi {
    use super::{Before, cases, median, report};
    use mpi::collective::SystemOperation;
    use mpi::traits::*;

    pub fn run() {
        let universe = mpi::initialize().expect("MPI");
        let world = universe.world();
        for (before, bytes) in cases() {
            // Not zeros: pages that nobody has written are all one page.
            let mut state = (vec![1f32; bytes / 4], vec![2f32; bytes / 4]);
            let fill = |state: &mut (Vec<f32>, Vec<f32>)| {
                if before == Before::Fill {
                    state.0.fill(0.0);
                    world.barrier();
                }
            };
            let micros = median(bytes, &mut state, fill, |(give, take)| {
                if bytes == 0 {
                    world.barrier();
                } else {
                    world.all_reduce_into(&give[..], &mut take[..], SystemOperation::sum());
                }
            });
            report(world.rank() as usize, before, bytes, micros);
        }
    }
}

/// Microseconds by whether buffers were filled before, and bytes.
type Times = BTreeMap<(u8, usize), f64>;

fn times(text: &str) -> Times {
    let line = |l: &str| {
        let mut words = l.strip_prefix("TIME ")?.split(' ');
        let mut next = || words.next();
        Some(((next()?.parse().ok()?, next()?.parse().ok()?), next()?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn ours(world: usize) -> Times {
    let exe = std::env::current_exe().expect("a path");
    let start = |rank: usize| {
        Command::new(&exe)
            .env("KILN_BENCH_SIDE", "shm")
            .env("KILN_RANK", rank.to_string())
            .env("KILN_WORLD", world.to_string())
            .env("KILN_JOB", format!("bench-{}", std::process::id()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process")
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    let texts = ranks.into_iter().map(|r| String::from_utf8(r.wait_with_output().expect("an end").stdout));
    let texts: Vec<String> = texts.flatten().collect();
    // Counts are the same every time.
    static TOLD: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());
    let mut told = TOLD.lock().expect("one thread");
    if !told.contains(&world) {
        told.push(world);
        let lines = texts.iter().flat_map(|text| text.lines());
        lines.filter_map(|l| l.strip_prefix("PAYLOAD ")).for_each(|l| println!("{l}"));
    }
    texts.iter().map(|text| times(text)).fold(Times::new(), |a, b| a.into_iter().chain(b).collect())
}

fn theirs(world: usize) -> Times {
    if !cfg!(feature = "mpi") {
        return Times::new();
    }
    let exe = std::env::current_exe().expect("a path");
    let out = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &world.to_string()])
        .arg(exe)
        .env("KILN_BENCH_SIDE", "mpi")
        .output();
    out.map(|o| times(&String::from_utf8_lossy(&o.stdout))).unwrap_or_default()
}

fn gloo(world: usize) -> Times {
    let Some(python) = kiln_env::GLOO.get() else { return Times::new() };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gloo.py");
    let out = Command::new(python).arg(script).arg(world.to_string()).stderr(Stdio::inherit()).output();
    out.map(|o| times(&String::from_utf8_lossy(&o.stdout))).unwrap_or_default()
}

fn compare() {
    println!(
        "{:>5} {:>15} {:>22} {:>22} {:>22}  best of them / ours",
        "ranks", "bytes", "kiln shm", "OpenMPI", "Gloo"
    );
    let asked: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    for world in if asked.is_empty() { vec![2, 4] } else { asked } {
        // Interleaved, the best of three: the machine is shared.
        let mut best = [Times::new(), Times::new(), Times::new()];
        for _ in 0..3 {
            for (best, side) in best.iter_mut().zip([ours, theirs, gloo]) {
                for (case, micros) in side(world) {
                    let entry = best.entry(case).or_insert(micros);
                    *entry = entry.min(micros);
                }
            }
        }
        for (before, bytes) in cases() {
            let at = |side: usize| best[side].get(&((before == Before::Fill) as u8, bytes)).copied();
            let text = |side: usize| match at(side) {
                None => "-".to_string(),
                Some(t) if bytes <= 4 => format!("{t:.2} µs"),
                Some(t) => {
                    let bus = 2.0 * (world - 1) as f64 / world as f64 * bytes as f64 / t / 1e3;
                    format!("{t:.0} µs {bus:.2} GB/s")
                }
            };
            let peer = [at(1), at(2)].into_iter().flatten().fold(f64::INFINITY, f64::min);
            let ratio = at(0).map_or(f64::NAN, |t| peer / t);
            let filled = if before == Before::Fill { "filled " } else { "" };
            let name = if bytes == 0 { "barrier".to_string() } else { format!("{filled}{bytes}") };
            println!("{world:>5} {name:>15} {:>22} {:>22} {:>22}  {ratio:.2}", text(0), text(1), text(2));
        }
    }
}
