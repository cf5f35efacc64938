//! Jobs of several processes: the launcher's death, records of a failed job, and MPI's variables.
#![cfg(target_os = "linux")]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn kiln() -> Command {
    Command::new(env!("CARGO_BIN_EXE_kiln"))
}

/// `kiln launch` of ranks that train for long.
fn launch(ranks: &str, more: &[&str]) -> Command {
    let mut command = kiln();
    command.args(["launch", "-n", ranks]).args(more).arg("--");
    command.args([env!("CARGO_BIN_EXE_kiln"), "train", "digits", "--steps", "1000000", "--shards", "4"]);
    command.env("KILN_DEADLINE", "5").stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn children(of: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// The ranks of a launcher, once all have come that far.
fn ranks(launcher: u32, count: usize) -> Vec<u32> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let found = children(launcher);
        let busy = |&id: &u32| std::fs::read_dir(format!("/proc/{id}/task")).is_ok_and(|t| t.count() > 2);
        if found.len() == count && found.iter().all(busy) {
            return found;
        }
        assert!(Instant::now() < until, "the ranks did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_gone(id: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    state.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.trim_start().starts_with('Z'))
}

#[test]
fn no_rank_outlives_its_launcher() {
    let mut launcher = launch("2", &[]).spawn().unwrap();
    let ranks = ranks(launcher.id(), 2);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while !ranks.iter().all(|&id| is_gone(id)) {
        assert!(Instant::now() < until, "a rank is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn kiln_flight_names_the_rank_that_was_killed() {
    let folder: PathBuf = std::env::temp_dir().join(format!("kiln-launch-flight-{}", std::process::id()));
    let mut launcher = launch("3", &["--flight", folder.to_str().unwrap()]).spawn().unwrap();
    let ranks = ranks(launcher.id(), 3);
    // Long enough for the group to stand.
    std::thread::sleep(Duration::from_millis(700));
    let victim = ranks[1];
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let begun = Instant::now();
    assert!(!launcher.wait().unwrap().success());
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let text = kiln().arg("flight").arg(&folder).output().unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("culprit: rank 1"), "{text}");
    let json = kiln().arg("flight").arg(&folder).arg("--json").output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["culprits"], serde_json::json!([1]));
    assert_eq!(json["ranks"], serde_json::json!([0, 2]));
    std::fs::remove_dir_all(&folder).unwrap();
    let none = kiln().arg("flight").arg(&folder).output().unwrap();
    assert!(!none.status.success());
}

#[test]
fn ranks_of_any_launcher_give_the_digest_of_one_process() {
    let train = ["train", "digits", "--steps", "30", "--shards", "4", "--digest"];
    let alone = kiln().args(train).output().unwrap();
    let alone = String::from_utf8_lossy(&alone.stdout).lines().last().unwrap().to_string();
    // As torchrun and OpenMPI's mpirun name their ranks.
    for names in [
        ["RANK", "WORLD_SIZE", "MASTER_PORT"],
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"],
    ] {
        let job = format!("{}{}", std::process::id(), names[0].len());
        let start = |rank: usize| {
            let mut command = kiln();
            command.args(train).env(names[0], rank.to_string()).env(names[1], "3").env(names[2], &job);
            command.env("KILN_THREADS", "1").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
        };
        let ranks: Vec<_> = (0..3).map(start).collect();
        let outputs: Vec<_> = ranks.into_iter().map(|r| r.wait_with_output().unwrap()).collect();
        assert!(outputs.iter().all(|o| o.status.success()));
        let first = String::from_utf8_lossy(&outputs[0].stdout).into_owned();
        assert_eq!(first.lines().last(), Some(alone.as_str()));
    }
}

#[test]
fn ranks_have_cores_of_their_own() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let seen = |bind: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.args(["launch", "-n", "2"]).args(bind).args(["--", "nproc"]);
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        said.lines()
            .map(|line| line.split_once("] ").unwrap().1.parse::<usize>().unwrap())
            .collect::<Vec<_>>()
    };
    let own = seen(&[]);
    assert!(cores < 2 || own.iter().sum::<usize>() == cores, "{own:?} of {cores}");
    assert_eq!(seen(&["--no-bind"]), [cores; 2]);
}

#[test]
fn every_attempt_meets_where_nobody_can_guess() {
    let mut command = kiln();
    command.args(["launch", "-n", "2", "--max-restarts", "1", "--", "sh", "-c", "echo $KILN_JOB; exit 3"]);
    let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let mut jobs: Vec<&str> = said.lines().map(|line| line.split_once("] ").unwrap().1).collect();
    assert_eq!(jobs.len(), 4, "{said}");
    assert!(jobs.iter().all(|job| job.len() == 32 && job.bytes().all(|b| b.is_ascii_hexdigit())), "{said}");
    // One for all ranks of an attempt, and another for the next.
    jobs.dedup();
    assert_eq!(jobs.len(), 2, "{said}");
}

#[test]
fn a_line_without_an_end_is_passed_on_in_pieces() {
    const BYTES: usize = 3_000_000;
    let endless = format!("head -c {BYTES} /dev/zero | tr '\\0' x");
    let output = kiln().args(["launch", "-n", "1", "--", "sh", "-c", &endless]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let pieces: Vec<&str> = said.lines().map(|line| line.strip_prefix("[0] ").unwrap()).collect();
    assert_eq!(pieces.iter().map(|piece| piece.len()).sum::<usize>(), BYTES);
    assert!(pieces.iter().all(|piece| piece.len() <= 1 << 16 && piece.bytes().all(|byte| byte == b'x')));
}
