//! `kiln` built with MPI: ranks by `mpirun` train, the world ends with a rank that dies, and the next one goes on.
#![cfg(all(target_os = "linux", feature = "mpi"))]

mod common;
use common::{Folder, Said, children, is_gone, kill, kiln, said, until};
use std::io::Read;
use std::process::{Command, Stdio};

const STEPS: &str = "3000";

fn mpirun(args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["100", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]);
    command.arg(env!("CARGO_BIN_EXE_kiln"));
    command.args(["train", "digits", "--digest", "--shards", "4"]).args(args);
    command.env("KILN_ENGINE", "mpi").env("KILN_THREADS", "1").stdin(Stdio::null());
    command
}

fn digest(said: &Said) -> &str {
    assert!(said.well, "{}{}", said.text, said.errors);
    let is_digest = |line: &&str| line.len() == 64 && line.bytes().all(|byte| byte.is_ascii_hexdigit());
    said.text.lines().rev().find(is_digest).unwrap_or_else(|| panic!("no digest: {}", said.text))
}

/// The ranks that a process has started, itself or by helpers of MPI's.
fn ranks(of: u32) -> Vec<u32> {
    let program = std::fs::canonicalize(env!("CARGO_BIN_EXE_kiln")).unwrap();
    let (mut found, mut open) = (Vec::new(), children(of));
    while let Some(child) = open.pop() {
        open.extend(children(child));
        if std::fs::read_link(format!("/proc/{child}/exe")).is_ok_and(|exe| exe == program) {
            found.push(child);
        }
    }
    found.sort_unstable();
    found
}

#[test]
fn a_world_that_ends_with_a_rank_is_started_again_where_it_was() {
    let alone = said(&mut kiln(&["train", "digits", "--digest", "--shards", "4", "--steps", STEPS]));
    let want = digest(&alone);
    let folder = Folder::new("mpi");
    let saves = ["--steps", STEPS, "--checkpoint", folder.text(), "--every", "50"];
    let mut job = mpirun(&saves).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    until("a first checkpoint", || folder.names().iter().any(|name| name.starts_with("step-")));
    let ranks = ranks(job.id());
    assert_eq!(ranks.len(), 2);
    // The one that does not speak for all is the last to be started.
    kill(ranks[1]);
    let mut text = String::new();
    job.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(!job.wait().unwrap().success(), "the world outlived a rank");
    assert!(text.contains("in 2 ranks") && !text.contains(want), "{text}");
    until("the ranks' end", || ranks.iter().all(|&rank| is_gone(rank)));
    let again = said(mpirun(&saves).arg("--resume"));
    assert_eq!(digest(&again), want);
    let from =
        again.errors.lines().find_map(|line| line.strip_prefix("going on from step ")?.split(' ').next());
    let from: u64 = from.unwrap_or_else(|| panic!("it began again: {}", again.errors)).parse().unwrap();
    assert!(from >= 50 && from.is_multiple_of(50), "{from}");
}
