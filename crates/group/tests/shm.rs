//! Collectives between processes of this machine. Each test starts this program again, once for each rank.
#![cfg(target_os = "linux")]

mod common;
use common::{config, contribution, digest, expected};
use kiln_group::{Call, Config, Error, Group, Identity, Loss, Op, Reduce, Rendezvous, flight};
use kiln_ir::DType;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What a rank does: its group if it joined, its scene's argument; the answer is a line of text.
type Scene = fn(&Rendezvous, &str) -> String;

const SCENES: [(&str, Scene); 9] = [
    ("digest", scene_digest),
    ("die", scene_die),
    ("loop", scene_loop),
    ("stop", scene_stop),
    ("refuse", scene_refuse),
    ("groups", scene_groups),
    ("leak", scene_leak),
    ("flight", scene_flight),
    ("full", scene_full),
];

/// The body of the processes that the tests start; does nothing when run as a test.
#[test]
fn child() {
    let Ok(scene) = std::env::var("KILN_TEST_SCENE") else { return };
    let (_, body) = SCENES.iter().find(|(name, _)| *name == scene).expect("a scene");
    let at = Rendezvous::from_env().unwrap().expect("started as a rank");
    let answer = body(&at, &std::env::var("KILN_TEST_ARGUMENT").unwrap_or_default());
    println!("\nANSWER {answer}");
}

struct Rank(Child);

/// Nobody outlives a test.
impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Rank {
    /// What it said at its end; empty if it died.
    fn answer(&mut self) -> String {
        let mut text = String::new();
        self.0.stdout.take().expect("piped").read_to_string(&mut text).unwrap();
        self.0.wait().unwrap();
        text.lines().find_map(|l| l.strip_prefix("ANSWER ")).unwrap_or_default().to_string()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child.
        unsafe { libc::kill(self.0.id() as i32, signal) };
    }
}

fn start(world: usize, scene: &str, argument: impl Fn(usize) -> String) -> Vec<Rank> {
    static JOBS: AtomicU64 = AtomicU64::new(0);
    let job = format!("{}-{}", std::process::id(), JOBS.fetch_add(1, Relaxed));
    let rank = |rank: usize| {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env("KILN_TEST_SCENE", scene)
            .env("KILN_TEST_ARGUMENT", argument(rank))
            .env("KILN_RANK", rank.to_string())
            .env("KILN_WORLD", world.to_string())
            .env("KILN_JOB", &job)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Rank(child)
    };
    (0..world).map(rank).collect()
}

fn run(world: usize, scene: &str, argument: &str) -> Vec<String> {
    start(world, scene, |_| argument.to_string()).iter_mut().map(Rank::answer).collect()
}

fn join(at: &Rendezvous, config: Config) -> Group {
    // A model of many layers: its signature is longer than a message.
    Group::join(at, Identity::new(&"layer.weight f32[3, 4], ".repeat(20_000), "f32", "1"), config).unwrap()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

fn scene_digest(at: &Rendezvous, _: &str) -> String {
    let group = join(at, config(8));
    assert_eq!(group.engine(), "shm");
    let digest = digest(&group).unwrap();
    group.barrier().unwrap();
    group.close().unwrap();
    digest.to_string()
}

#[test]
fn processes_give_the_bits_of_one_rank() {
    let want = expected().to_string();
    for world in [1, 2, 3, 4, 8] {
        if world > 1 {
            assert_eq!(run(world, "digest", ""), vec![want.clone(); world], "{world} processes");
        }
    }
}

/// The last rank kills itself in the phase that the argument names; the others tell when they knew, and what.
fn scene_die(at: &Rendezvous, phase: &str) -> String {
    let group = join(at, config(at.world));
    group.barrier().unwrap();
    let die = |micros: u64| {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(micros));
            println!("\nANSWER {}", now());
            // SAFETY: ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        })
    };
    let victim = at.rank == at.world - 1;
    let reduce = || group.all_reduce(Reduce::Sum, DType::F32, group.buffer(16 << 20).unwrap());
    let error = match (phase, victim) {
        ("before", true) => {
            die(20_000).join().unwrap();
            unreachable!("it is dead")
        }
        ("posted", true) => {
            let _pending = group.all_reduce(Reduce::Sum, DType::F32, group.buffer(64).unwrap());
            die(0).join().unwrap();
            unreachable!("it is dead")
        }
        (phase, true) => {
            die(phase.parse().unwrap());
            loop {
                reduce().unwrap().wait().unwrap();
            }
        }
        ("posted", false) => {
            let small = group.all_reduce(Reduce::Sum, DType::F32, group.buffer(64).unwrap()).unwrap().wait();
            match small {
                Ok(_) => group.barrier().unwrap_err(),
                Err(error) => error,
            }
        }
        (_, false) => loop {
            if let Err(error) = reduce().and_then(|p| p.wait()) {
                break error;
            }
        },
    };
    format!("{} {}", now(), serde_json::to_string(&error).unwrap())
}

/// Kills the last rank in a phase: how long after its death, in microseconds, the last of the others knew.
fn named_after(world: usize, phase: &str) -> u64 {
    let mut ranks = start(world, "die", |_| phase.to_string());
    let pid = ranks[world - 1].0.id();
    let answers: Vec<String> = ranks.iter_mut().map(Rank::answer).collect();
    let death: u64 = answers[world - 1].parse().unwrap();
    let late = answers[..world - 1].iter().map(|answer| {
        let (time, error) = answer.split_once(' ').unwrap_or_else(|| panic!("{phase}: {answer}"));
        let error: Error = serde_json::from_str(error).unwrap();
        assert_eq!(error, Error::RankLost { rank: world - 1, cause: Loss::Died { pid } }, "{phase}");
        time.parse::<u64>().unwrap().saturating_sub(death)
    });
    late.max().unwrap()
}

#[test]
fn a_killed_process_is_named_by_every_survivor_within_250_ms() {
    for world in [2, 4] {
        for phase in ["before", "posted", "0", "500", "1000", "2500", "5000", "10000", "20000", "40000"] {
            // A machine that is busy with something else may be late once, and not three times.
            let tries: Vec<u64> =
                (0..3).map(|_| named_after(world, phase)).take_while(|&t| t >= 250_000).collect();
            assert!(tries.len() < 3, "{phase}: known after {tries:?} µs");
        }
    }
}

/// Sums of a whole buffer, and of one in ranges, in turn.
fn scene_loop(at: &Rendezvous, _: &str) -> String {
    let group = join(at, config(at.world));
    let bytes = 1 << 20;
    let whole = || group.all_reduce(Reduce::Sum, DType::F32, group.buffer(bytes)?)?.wait();
    let ranges = || {
        let cuts: Vec<usize> = (1..8).map(|i| i * bytes / 8).collect();
        let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32);
        let (mut promise, pending) = group.promise_cut(call, bytes, &cuts)?;
        cuts.iter().try_for_each(|&cut| promise.reach(cut).map(drop))?;
        promise.give()?;
        pending.wait()
    };
    loop {
        if let Err(error) = whole().and_then(|_| ranges()) {
            return format!("{} {}", now(), serde_json::to_string(&error).unwrap());
        }
    }
}

#[test]
fn killed_from_outside_at_any_moment() {
    let mut late = 0;
    for seed in 0..10u64 {
        let mut ranks = start(3, "loop", |_| String::new());
        let victim = seed as usize % 3;
        std::thread::sleep(Duration::from_millis(150 + seed * 7));
        let (death, pid) = (now(), ranks[victim].0.id());
        ranks[victim].signal(libc::SIGKILL);
        for (rank, process) in ranks.iter_mut().enumerate() {
            let answer = process.answer();
            if rank == victim {
                assert_eq!(answer, "");
                continue;
            }
            let (time, error) = answer.split_once(' ').unwrap();
            let error: Error = serde_json::from_str(error).unwrap();
            assert_eq!(error, Error::RankLost { rank: victim, cause: Loss::Died { pid } });
            late += usize::from(time.parse::<u64>().unwrap() - death >= 250_000);
        }
    }
    // A machine that is busy with something else may be late now and then.
    assert!(late <= 4, "{late} of 20 knew too late");
}

/// Rank 1 says when it may be stopped and goes on when it is continued.
fn scene_stop(at: &Rendezvous, deadline: &str) -> String {
    let deadline = Duration::from_millis(deadline.parse().unwrap());
    let group = join(at, Config { deadline, ..config(at.world) });
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1500) {
        let mut buffer = group.buffer(1 << 18).unwrap();
        buffer.fill(1);
        match group.all_reduce(Reduce::Sum, DType::U8, buffer).and_then(|p| p.wait()) {
            Ok(sum) => assert!(sum.iter().all(|&b| b == 3)),
            Err(error) => return serde_json::to_string(&error).unwrap(),
        }
        // All ranks must leave the loop together: rank 0 decides.
        let on = group.buffer_of(&[(begun.elapsed() < Duration::from_millis(1400)) as u8]).unwrap();
        match group.broadcast(0, DType::U8, on).and_then(|p| p.wait()) {
            Ok(on) if on[0] == 1 => {}
            Ok(_) => break,
            Err(error) => return serde_json::to_string(&error).unwrap(),
        }
    }
    let waited = group.traffic().waited;
    let worst = (0..at.world).max_by_key(|&r| waited[r]).unwrap();
    format!("fine {worst} {}", waited[worst].as_millis())
}

#[test]
fn a_stopped_process_is_waited_for_and_then_named() {
    // Stopped for less than the deadline: a straggler, nothing worse.
    let mut ranks = start(3, "stop", |_| "5000".into());
    std::thread::sleep(Duration::from_millis(400));
    ranks[1].signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(700));
    ranks[1].signal(libc::SIGCONT);
    let answers: Vec<String> = ranks.iter_mut().map(Rank::answer).collect();
    for rank in [0, 2] {
        let parts: Vec<&str> = answers[rank].split(' ').collect();
        assert_eq!(&parts[..2], ["fine", "1"], "{answers:?}");
        assert!(parts[2].parse::<u64>().unwrap() > 300, "{answers:?}");
    }
    assert!(answers[1].starts_with("fine"));
    // For longer: named, and said to be stopped.
    let mut ranks = start(3, "stop", |_| "500".into());
    std::thread::sleep(Duration::from_millis(400));
    ranks[1].signal(libc::SIGSTOP);
    for rank in [0, 2] {
        let error: Error = serde_json::from_str(&ranks[rank].answer()).unwrap();
        let Error::Deadline { missing, stopped, .. } = error else { panic!("{error}") };
        assert_eq!((missing, stopped), (vec![1], vec![1]));
    }
    ranks[1].signal(libc::SIGCONT);
    let error: Error = serde_json::from_str(&ranks[1].answer()).unwrap();
    assert!(matches!(error, Error::Deadline { missing, .. } if missing == [1]));
}

fn scene_refuse(at: &Rendezvous, argument: &str) -> String {
    let mut at = at.clone();
    let mut shards = None;
    let mut identity = Identity::new("m", "f32", "1");
    match argument {
        "version" => identity.version = "0.0.0".into(),
        "model" => identity.model = "n".into(),
        "dtype" => identity.dtype = "bf16".into(),
        "numerics" => identity.numerics = "2".into(),
        "world size" => (at.world, at.local_world) = (9, 9),
        "number of shards" => shards = Some(12),
        "absent" => return String::new(),
        _ => {}
    }
    let config = Config { deadline: Duration::from_secs(1), shards, ..Config::default() };
    match Group::join(&at, identity, config) {
        Ok(_) => "joined".into(),
        Err(error) => serde_json::to_string(&error).unwrap(),
    }
}

#[test]
fn a_rank_that_differs_is_refused_with_the_difference() {
    for what in ["version", "model", "dtype", "numerics", "world size", "number of shards"] {
        let mut ranks = start(3, "refuse", |rank| if rank == 2 { what.into() } else { String::new() });
        for answer in ranks.iter_mut().map(Rank::answer).collect::<Vec<_>>() {
            // A rank that had not come when rank 0 gave up finds nobody, or sees it go.
            match serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{what}: {answer}")) {
                Error::Refused { rank, field, want, got } => {
                    assert_eq!((rank, &*field), (2, what));
                    assert_ne!(want, got);
                }
                Error::Absent { missing, .. } => assert_eq!(missing, [0]),
                Error::RankLost { rank, .. } => assert_eq!(rank, 0),
                other => panic!("{what}: {other}"),
            }
        }
    }
    let mut ranks = start(3, "refuse", |rank| if rank == 2 { "absent".into() } else { String::new() });
    let error: Error = serde_json::from_str(&ranks[0].answer()).unwrap();
    assert_eq!(error, Error::Absent { missing: vec![2], after: Duration::from_secs(1) });
    assert!(ranks[1].answer().contains("RankLost") || ranks[1].answer().contains("Absent"));
}

/// Concurrent groups from several threads, over processes.
fn scene_groups(at: &Rendezvous, _: &str) -> String {
    let world = join(at, config(at.world));
    let members: Vec<usize> = (0..at.world).rev().collect();
    let groups: Vec<Group> =
        (0..8).map(|i| world.subgroup(&format!("g{i}"), &members, None).unwrap()).collect();
    for schedule in 0..100usize {
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let groups = &groups;
                scope.spawn(move || {
                    let start = |k: usize| {
                        let i = (k * (1 + 2 * at.rank) + schedule) % 4 + 4 * thread;
                        let mut buffer =
                            groups[i].buffer(if i.is_multiple_of(3) { 100_000 } else { 100 }).unwrap();
                        buffer.fill(i as u8 + 1);
                        (i, groups[i].all_reduce(Reduce::Sum, DType::U8, buffer).unwrap())
                    };
                    for (i, pending) in (0..4).map(start).collect::<Vec<_>>() {
                        let sum = pending.wait().unwrap();
                        assert!(sum.iter().all(|&b| b == (at.world * (i + 1)) as u8));
                    }
                });
            }
        });
    }
    if at.rank < 2 {
        let pair = world.subgroup("pair", &[0, 1], Some(5)).unwrap();
        pair.barrier().unwrap();
    }
    world.barrier().unwrap();
    "fine".into()
}

#[test]
fn groups_from_several_threads_do_not_block_each_other() {
    assert_eq!(run(3, "groups", ""), ["fine"; 3]);
}

/// Open descriptors, mappings of shared memory, threads.
fn held() -> (usize, usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        count("/proc/self/fd"),
        maps.lines().filter(|l| l.contains("kiln-group")).count(),
        count("/proc/self/task"),
    )
}

fn scene_leak(at: &Rendezvous, _: &str) -> String {
    let before = held();
    assert_eq!(before.1, 0);
    for round in 0..5 {
        let at = Rendezvous { job: format!("{}-{round}", at.job), ..at.clone() };
        let group = join(&at, config(at.world));
        for bytes in [100, 1 << 16, 3 << 20] {
            let pending: Vec<_> = (0..3)
                .map(|i| {
                    let buffer = contribution(&group, Reduce::Sum, DType::F32, bytes / 4, i);
                    group.all_reduce(Reduce::Sum, DType::F32, buffer).unwrap()
                })
                .collect();
            pending.into_iter().for_each(|p| drop(p.wait().unwrap()));
        }
        let sub = group.subgroup("s", &(0..at.world).collect::<Vec<_>>(), None).unwrap();
        sub.barrier().unwrap();
        group.barrier().unwrap();
        // Slots of two groups and large buffers are there, and are seen.
        let now = held();
        assert!(now.0 > before.0 && now.1 > 2 && now.2 > before.2, "{before:?} {now:?}");
    }
    let until = Instant::now() + Duration::from_secs(2);
    while held() != before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    format!("{:?} {:?}", before, held())
}

#[test]
fn nothing_is_left_when_groups_are_gone() {
    for answer in run(3, "leak", "") {
        let (before, after) = answer.split_once(") ").unwrap();
        assert_eq!(format!("{before})"), after);
    }
}

/// Rank 1 may have no more than a megabyte in a file, as on a machine whose memory is used up.
fn scene_full(at: &Rendezvous, _: &str) -> String {
    let group = join(at, config(at.world));
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: libc::RLIM_INFINITY };
    if at.rank == 1 {
        // SAFETY: plain calls; the signal that says so too would end the process.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
        }
    }
    let large = group.buffer(8 << 20).map(drop);
    let small = contribution(&group, Reduce::Sum, DType::F32, 1000, 0);
    group.all_reduce(Reduce::Sum, DType::F32, small).and_then(|p| p.wait()).unwrap();
    group.barrier().unwrap();
    large.map_or_else(|e| e.to_string(), |()| "fine".into())
}

#[test]
fn memory_that_cannot_be_shared_is_an_error_before_it_is_touched() {
    let answers = run(2, "full", "");
    assert_eq!(answers[0], "fine");
    assert!(answers[1].starts_with("memory: 8388608 bytes to share: "), "{answers:?}");
}

fn scene_flight(at: &Rendezvous, folder: &str) -> String {
    let group = join(at, Config { flight: Some(folder.into()), ..config(at.world) });
    for i in 0..10 {
        if at.rank == 1 && i == 6 {
            continue;
        }
        let buffer = group.buffer(100 * (i + 1)).unwrap();
        if let Err(error) = group.all_reduce(Reduce::Sum, DType::F32, buffer).and_then(|p| p.wait()) {
            return error.to_string();
        }
    }
    "fine".into()
}

#[test]
fn a_mismatch_leaves_flight_records() {
    let folder = std::env::temp_dir().join(format!("kiln-flight-{}", std::process::id()));
    let answers = run(3, "flight", &folder.display().to_string());
    assert!(answers.iter().all(|a| a.contains("collective 7")), "{answers:?}");
    let verdict = flight::judge(&flight::read(&folder).unwrap());
    assert_eq!((&verdict.ranks[..], &verdict.culprits[..]), (&[0, 1, 2][..], &[1][..]), "{verdict}");
    assert!(matches!(verdict.finding, flight::Finding::Differs { sequence: 7, .. }), "{verdict}");
    std::fs::remove_dir_all(&folder).unwrap();
    // A folder that cannot be written hides nothing.
    let answers = run(3, "flight", "/proc/no/such");
    assert!(answers.iter().all(|a| a.contains("collective 7")), "{answers:?}");
}
