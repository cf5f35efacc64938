//! What makes distributed programs hang, done on purpose: each ends in an error that names the cause, within 10 s at a
//! deadline of 5 s. Each scene is two processes, of which rank 1 misbehaves; the test starts this program again for
//! each. The twelfth, the death of the launcher, is tested with `kiln launch`.
#![cfg(target_os = "linux")]

use kiln_dist::{
    Collective, Compress, Config, Error, GradientSync, Group, Identity, Reduce, Rendezvous, SyncConfig,
};
use kiln_nn::{Linear, Module, Optimizer, Sgd};
use kiln_tensor::{DType, Device, Tensor};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(5);
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Module)]
struct Model {
    first: Linear,
    second: Linear,
}
fn loss(model: &Model, device: &Device, all: bool) -> Tensor {
    let x = model.first.forward(&Tensor::ones([4, 8], device)).relu();
    if all { model.second.forward(&x).square().mean(()) } else { x.square().mean(()) }
}

/// Never comes back.
struct Stuck;

impl Compress for Stuck {
    fn name(&self) -> &str {
        "stuck"
    }
    fn wire(&self, dtype: DType) -> DType {
        dtype
    }
    fn encode(&self, gradient: &Tensor) -> Tensor {
        std::thread::sleep(Duration::from_secs(60));
        gradient.clone()
    }
}

/// What a rank does; what it gives is what the user would see.
fn scene(name: &str, group: &Group) -> Result<(), Error> {
    let odd = group.rank() == 1;
    let device = Device::cpu();
    let mut model = Model { first: Linear::new(8, 300, &device), second: Linear::new(300, 4, &device) };
    let mut config = SyncConfig { deadline: DEADLINE, ..SyncConfig::default() };
    match name {
        "order" if odd => config.first = 1,
        "stuck" if odd => config.compress = Some(Arc::new(Stuck)),
        _ => {}
    }
    let sync = GradientSync::start(group, &mut model, config)?;
    let mut optimizer = Sgd::new(0.1);
    let steps = if name == "uneven" && odd { 3 } else { 6 };
    let x = Tensor::ones([5], &device);
    for step in 0..steps {
        let late = odd && step == 2;
        match name {
            "exit" if late => std::process::exit(0),
            "stop" if late => {
                // SAFETY: stops this process until its parent ends it.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            "extra" if late => drop(x.all_reduce(group, Reduce::Sum)?),
            "conditional" if !odd && step == 2 => drop(x.all_reduce(group, Reduce::Sum)?.wait()?),
            "shape" if step == 2 => {
                let n = if odd { 6 } else { 5 };
                drop(Tensor::ones([n], &device).all_reduce(group, Reduce::Sum)?.wait()?);
            }
            _ => {}
        }
        group.barrier()?;
        let mut round = sync.begin(&model)?;
        if name == "exception" && late {
            // As `?` does where data cannot be read; the rank goes on with the next step.
            drop(round);
            continue;
        }
        round.backward(&loss(&model, &device, !(name == "unused" && late)))?;
        let reduced = round.wait()?;
        optimizer.step(&mut model, &reduced.gradients);
    }
    // An early end, as by fewer batches: the others are not waited for.
    sync.close()?;
    group.close()?;
    Ok(())
}

/// The body of the processes; does nothing when run as a test.
#[test]
fn child() {
    let Ok(name) = std::env::var("KILN_TEST_SCENE") else { return };
    let at = Rendezvous::from_env().unwrap().expect("started as a rank");
    let config = Config { deadline: DEADLINE, ..Config::default() };
    let group = Group::join(&at, Identity::new("m", "f32", ""), config).unwrap();
    println!("\nHOLDERS {}", holders(&at.job));
    if name == "disk" {
        // Where the flight record would be written there is no space left.
        let folder = kiln_env::FLIGHT.get().unwrap();
        std::fs::create_dir_all(&folder).unwrap();
        let file = format!(".rank-{}.{}", at.rank, std::process::id());
        std::os::unix::fs::symlink("/dev/full", folder.join(file)).unwrap();
    }
    let name = if name == "disk" { "shape" } else { &name };
    match scene(name, &group) {
        Ok(()) => println!("\nANSWER fine"),
        Err(error) => println!("\nANSWER {error}"),
    }
}

struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What was seen of a scene.
struct Play {
    /// What rank 0 answers, and what it says on standard error.
    answer: String,
    errors: String,
    took: Duration,
    /// Whether rank 0 left a record of its last calls.
    record: bool,
    /// Processes of the job that held shared memory while it ran, and after all had ended.
    holders: [usize; 2],
}

/// The processes of a job that have shared memory of a group, mapped or open.
fn holders(job: &str) -> usize {
    let own = format!("KILN_JOB={job}");
    let holds = |process: &std::path::Path| {
        let environment = std::fs::read(process.join("environ")).unwrap_or_default();
        let maps = std::fs::read_to_string(process.join("maps")).unwrap_or_default();
        let mut files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        environment.split(|&byte| byte == 0).any(|variable| variable == own.as_bytes())
            && (maps.contains("memfd:kiln-group")
                || files.any(|file| {
                    let to = std::fs::read_link(file.path()).unwrap_or_default();
                    to.to_string_lossy().contains("memfd:kiln-group")
                }))
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes.filter(|process| holds(process)).count()
}

fn play(name: &str) -> Play {
    let folder = std::env::temp_dir().join(format!("kiln-hang-{name}-{}", std::process::id()));
    let job = format!("hang-{name}-{}", std::process::id());
    let start = |rank: usize| {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env("KILN_TEST_SCENE", name)
            .env("KILN_RANK", rank.to_string())
            .env("KILN_WORLD", "2")
            .env("KILN_JOB", &job)
            .env("KILN_THREADS", "1")
            .env("KILN_FLIGHT", &folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Rank(child)
    };
    let begun = Instant::now();
    let mut ranks = [start(0), start(1)];
    let (mut text, mut errors) = (String::new(), String::new());
    ranks[0].0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let took = begun.elapsed();
    ranks[0].0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    let record = folder.join("rank-0.json").is_file();
    drop(ranks);
    let _ = std::fs::remove_dir_all(&folder);
    let line = |name: &str| text.lines().find_map(|l| l.strip_prefix(name));
    let holders = [line("HOLDERS ").map_or(0, |n| n.parse().unwrap()), holders(&job)];
    let answer = line("ANSWER ").unwrap_or("nothing").to_string();
    Play { answer, errors, took, record, holders }
}

#[test]
fn every_cause_of_a_hang_ends_in_an_error_that_names_it() {
    let scenes: [(&str, &[&str]); 11] = [
        ("exit", &["rank 1 is lost"]),
        ("extra", &["barrier", "all_reduce sum of 5 f32", "rank 1"]),
        ("conditional", &["barrier", "all_reduce sum of 5 f32", "rank 1"]),
        ("exception", &["contribution of rank 1 is poisoned", "given up"]),
        ("uneven", &["rank 1 is lost: it left the group"]),
        ("unused", &["rank 1: the loss does not depend on second.weight, second.bias"]),
        ("order", &["rank 1", "all_reduce sum of"]),
        ("stuck", &["gave up after 5s waiting for rank 1"]),
        ("stop", &["gave up after 5s waiting for rank 1 (stopped: rank 1)"]),
        ("shape", &["all_reduce sum of 5 f32", "all_reduce sum of 6 f32"]),
        ("disk", &["all_reduce sum of 5 f32", "all_reduce sum of 6 f32"]),
    ];
    // Those that wait for the deadline wait at the same time.
    for scenes in scenes.chunks(6) {
        std::thread::scope(|scope| {
            let plays: Vec<_> =
                scenes.iter().map(|(name, want)| (name, want, scope.spawn(move || play(name)))).collect();
            for (name, want, play) in plays {
                let Play { answer, errors, took, record, holders } = play.join().unwrap();
                want.iter().for_each(|part| assert!(answer.contains(part), "{name}: {answer}"));
                assert!(took < LIMIT, "{name}: {took:?}");
                // Shared memory has no name: it is gone with the processes that hold it.
                assert!(holders[0] > 0 && holders[1] == 0, "{name}: {holders:?}");
                // A failed group leaves a record, unless the disk is full, which is told beside the failure.
                match *name {
                    "shape" => assert!(record && !errors.contains("flight record"), "{errors}"),
                    "disk" => {
                        let told = "rank 0: no flight record: ";
                        assert!(
                            !record && errors.contains(told) && errors.contains("No space left"),
                            "{errors}"
                        );
                    }
                    _ => {}
                }
            }
        });
    }
}
