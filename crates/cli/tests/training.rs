//! What `kiln train`, `launch` and `demo` promise: the same bits whatever computes them and whatever is killed.
#![cfg(target_os = "linux")]

mod common;
use common::{Folder, Said, children, is_gone, kill, kiln, said, text, until};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

/// A training of the digits in four shards.
fn digits(args: &[&str]) -> Command {
    let mut command = kiln(&["train", "digits", "--digest", "--json", "--shards", "4"]);
    command.args(args);
    command
}

/// A training of a small transformer.
fn chargpt(text: &Path, args: &[&str]) -> Command {
    let mut command = kiln(&["train", "chargpt", "--digest", "--json", "--shards", "2", "--text"]);
    command.arg(text).args(["--width", "32", "--layers", "2", "--context", "16", "--batch", "8"]).args(args);
    command
}

#[test]
fn threads_and_instruction_sets_change_no_bit() {
    let folder = Folder::new("sweep");
    let text = text(&folder);
    let trained = |args: &[&str], isa: &str| {
        let both = [
            said(digits(&["--steps", "30"]).args(args).env("KILN_ISA", isa)),
            said(chargpt(&text, &["--steps", "6"]).args(args).env("KILN_ISA", isa)),
        ];
        // One that this processor lacks is told and not followed: then nothing was swept.
        let told = both.iter().any(|said| said.errors.contains("KILN_ISA"));
        (both.map(|said| said.digest()), told)
    };
    let (want, told) = trained(&["--threads", "1"], "");
    assert!(!told);
    assert_eq!(trained(&["--threads", "2"], ""), (want.clone(), false));
    assert_eq!(trained(&["--threads", "3"], ""), (want.clone(), false));
    let refused = said(digits(&["--steps", "30"]).env("KILN_ISA", "none-such"));
    assert!(!refused.well && refused.errors.contains("KILN_ISA"), "{}", refused.errors);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let has = |flag: &str| cpu.split_whitespace().any(|word| word == flag);
    let here = [("avx512", has("avx512f")), ("avx2", has("avx2") && has("fma")), ("interp", true)];
    for (isa, here) in here {
        assert_eq!(trained(&["--threads", "2"], isa), (want.clone(), !here), "{isa}");
    }
    // Digests tell trainings apart.
    let other = said(&mut digits(&["--steps", "30", "--seed", "1"])).digest();
    assert_ne!(other, want[0]);
}

#[test]
fn a_transformer_learns_alike_on_one_worker_and_on_two() {
    let folder = Folder::new("chargpt");
    let text = text(&folder);
    let run = |workers: &str| said(&mut chargpt(&text, &["--steps", "60", "--workers", workers]));
    let (one, two) = (run("1"), run("2"));
    assert_eq!(one.digest(), two.digest());
    let losses = |said: &Said| -> Vec<f64> {
        let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
        said.text.lines().filter_map(loss).collect()
    };
    let (losses, same) = (losses(&one), losses(&two));
    assert_eq!(losses, same);
    assert!(losses[losses.len() - 1] < 0.9 * losses[0], "it learns nothing: {losses:?}");
    assert!(one.last()["test loss"].as_f64().unwrap() < losses[0]);
}

#[test]
fn a_training_goes_on_with_another_number_of_workers() {
    let want = said(&mut digits(&["--steps", "60", "--workers", "1"])).digest();
    for (before, after) in [("1", "4"), ("3", "2")] {
        let folder = Folder::new("resume");
        let saves = ["--checkpoint", folder.text(), "--every", "15"];
        let half = said(digits(&["--steps", "30", "--workers", before]).args(saves)).digest();
        assert_ne!(half, want);
        // A folder with checkpoints is not overwritten by a training that does not go on from them.
        let names = folder.names();
        let refused = said(digits(&["--steps", "60", "--workers", after]).args(saves));
        assert!(!refused.well && refused.text.is_empty(), "{}", refused.text);
        assert!(refused.errors.contains("holds checkpoints; --resume"), "{}", refused.errors);
        assert_eq!(folder.names(), names);
        // Nor by one of another seed.
        let other = said(digits(&["--steps", "60", "--resume", "--seed", "1"]).args(saves));
        assert!(!other.well && other.errors.contains("seed"), "{}", other.errors);
        assert_eq!(folder.names(), names);
        let resumed = said(digits(&["--steps", "60", "--workers", after, "--resume"]).args(saves));
        assert_eq!(resumed.digest(), want, "{before} workers, then {after}");
        let first: serde_json::Value = serde_json::from_str(resumed.text.lines().next().unwrap()).unwrap();
        assert!(first["step"].as_u64().unwrap() > 30, "it began again: {first}");
    }
}

#[test]
fn a_job_whose_rank_is_killed_starts_again_by_itself_where_it_was() {
    const STEPS: &str = "4000";
    let want = said(&mut digits(&["--steps", STEPS])).digest();
    let folder = Folder::new("restart");
    let mut launch = kiln(&["launch", "-n", "2", "--max-restarts", "2", "--json", "--"]);
    launch.arg(env!("CARGO_BIN_EXE_kiln"));
    launch.args(["train", "digits", "--digest", "--shards", "4", "--steps", STEPS, "--every", "50"]);
    launch.args(["--checkpoint", folder.text()]);
    let mut job = launch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("a first checkpoint", || folder.names().iter().any(|name| name.starts_with("step-")));
    let ranks = children(job.id());
    assert_eq!(ranks.len(), 2);
    kill(ranks[1]);
    let (mut text, mut errors) = (String::new(), String::new());
    let (mut out, mut err) = (job.stdout.take().unwrap(), job.stderr.take().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| err.read_to_string(&mut errors).unwrap());
        out.read_to_string(&mut text).unwrap();
    });
    assert!(job.wait().unwrap().success(), "{errors}");
    assert!(ranks.iter().all(|&rank| is_gone(rank)));
    let events: Vec<serde_json::Value> =
        errors.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let named: Vec<_> = events.iter().map(|e| (e["event"].as_str().unwrap(), e["rank"].as_u64())).collect();
    assert_eq!(named, [("failed", Some(1)), ("restarting", None)], "{errors}");
    assert!(events[0]["detail"].as_str().unwrap().contains("killed by signal 9"), "{errors}");
    // Every rank says where it goes on from: a checkpoint, not the beginning.
    for rank in 0..2 {
        let prefix = format!("[{rank}] going on from step ");
        let mut from = errors.lines().filter_map(|line| line.strip_prefix(&prefix)?.split(' ').next());
        let step: u64 = from.next().unwrap_or_else(|| panic!("{errors}")).parse().unwrap();
        assert!(step >= 50 && step.is_multiple_of(50), "{step}");
    }
    assert_eq!(text.lines().last(), Some(format!("[0] {want}").as_str()), "{text}{errors}");
}

#[test]
fn the_demo_ends_with_the_same_bits() {
    let temporary = Folder::new("demo-temporary");
    let said = said(kiln(&["demo", "--steps", "200", "--json"]).env("TMPDIR", &temporary.0));
    let last = said.last();
    let want = common::said(
        kiln(&["train", "digits", "--json", "--digest", "--steps", "200"]).args(["--workers", "2"]),
    );
    assert_eq!(last["same"], true, "{last}");
    assert_eq!(last["digest"], want.digest(), "{last}");
    assert_eq!(last["disturbed"], last["digest"]);
    assert!((100..200).contains(&last["killed_at"].as_u64().unwrap()), "{last}");
    assert!(temporary.names().is_empty(), "{:?}", temporary.names());
}

#[test]
fn a_full_disk_costs_a_checkpoint_and_nothing_else() {
    let folder = Folder::new("disk");
    let saves = ["--checkpoint", folder.text(), "--every", "20"];
    let want = said(&mut digits(&["--steps", "40"])).digest();
    said(digits(&["--steps", "20"]).args(saves)).digest();
    let names = folder.names();
    let [first] = &names[..] else { panic!("{names:?}") };
    let half = std::fs::metadata(folder.0.join(first)).unwrap().len() / 2;
    // No file may be longer than half a checkpoint; the signal that says so is ignored, so that the write fails.
    let limited = format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", half / 512);
    let program = digits(&["--steps", "40", "--resume"]);
    let mut sh = Command::new("sh");
    sh.args(["-c", &limited, "sh"]).arg(program.get_program()).args(program.get_args()).args(saves);
    let failed = said(&mut sh);
    assert!(!failed.well && !failed.text.contains("digest"), "{}", failed.text);
    let reason = failed.errors.lines().last().unwrap_or_default();
    assert!(reason.starts_with("kiln: ") && reason.contains(folder.text()), "{}", failed.errors);
    assert!(reason.contains("File too large"), "{reason}");
    // Nothing half-written stays, and what was there is whole.
    assert_eq!(folder.names(), names);
    let resumed = said(digits(&["--steps", "40", "--resume"]).args(saves));
    assert_eq!(resumed.digest(), want);
    assert_eq!(folder.names().len(), 2);

    // The same on a disk that has no room for a second checkpoint, where one can be mounted.
    let small = Folder::new("disk-small");
    let mounted = "mount -t tmpfs -o size=$1 none \"$2\" || exit 77; cp \"$3\" \"$2\" || exit 78; shift 3; \
                   before=$(ls -A \"$KILN_TEST_FOLDER\"); \"$@\"; code=$?; \
                   [ \"$before\" = \"$(ls -A \"$KILN_TEST_FOLDER\")\" ] || exit 79; exit $code";
    let mut sh = Command::new("unshare");
    let bytes = 3 * half;
    sh.args(["-rm", "sh", "-c", mounted, "sh", &bytes.to_string(), small.text()]);
    sh.arg(folder.0.join(first)).env("KILN_TEST_FOLDER", &small.0);
    let program = digits(&["--steps", "40", "--resume", "--every", "20", "--checkpoint", small.text()]);
    sh.arg(program.get_program()).args(program.get_args());
    let output = sh.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(77) => println!("nothing can be mounted here: {errors}"),
        None if errors.contains("unshare") => println!("no namespaces here: {errors}"),
        Some(1) if errors.starts_with("unshare") => println!("no namespaces here: {errors}"),
        code => {
            assert_eq!(code, Some(1), "{errors}");
            assert!(errors.contains("No space left on device") && errors.contains("kiln: "), "{errors}");
        }
    }
}
