//! The project's own commands: `cargo xtask check` is all of CI.
//!
//! A check is a list of steps; each prints its command and its time, and the first that fails ends the run. Quick
//! steps come first. Lints, tests and examples share the dev profile, so what one has built the next one finds.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Instant;
use std::{env, fs, io};

mod guide;
mod invariants;
mod readme;
mod size;

const USAGE: &str = "\
usage: cargo xtask <command>

  check          format, dependencies, invariants, lints, tests, MPI where there is one (always with CI set), examples, a device outside, documentation, packages, CONTRIBUTING's guide, README
  check --fast   format, dependencies, invariants, lints, tests
  invariants     what documents and module heads say of the whole tree
  guide          follow CONTRIBUTING's page on adding an operation, in a copy of the tree
  bench          the benchmarks of kiln-tensor
  size [DIR]     counts of the tree's shape: lines, long files and functions, names of several types
  chaos [OPTIONS]
                 training, sessions, servers and ranks under faults, with real processes; --seed N and --only NAME reproduce
  fuzz [OPTIONS] the fuzz targets; --target NAME, --executions N, --seed N, --keep N new inputs for the corpus";

/// Crates that talk to networks or people: the tensor core must build without them.
const DENIED: &str = "actix-web async-std axum clap crossterm h2 hyper indicatif mio native-tls openssl \
    quinn ratatui reqwest rustls smol socket2 tokio tonic tungstenite ureq";

/// The examples that take a number of steps.
const TRAINING: [&str; 2] = ["digits", "two_processes"];

/// Enough to run every line of an example, too few to train.
const EXAMPLE_STEPS: &str = "20";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let start = Instant::now();
    let outcome = match args[..] {
        ["check"] => check_fast().and_then(|()| check_rest()),
        ["check", "--fast"] => check_fast(),
        ["invariants"] => invariants(),
        ["guide"] => guide::follow(),
        ["bench"] => step("bench", cargo("bench -p kiln-tensor")),
        ["size"] => size::print(&root()).map_err(|e| e.to_string()),
        ["size", dir] => size::print(Path::new(dir)).map_err(|e| e.to_string()),
        ["chaos" | "fuzz", ..] => chaos(&args),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    match outcome {
        Ok(()) => println!("\nxtask: passed in {seconds:.1} s"),
        Err(failure) => {
            eprintln!("\nxtask: FAILED after {seconds:.1} s: {failure}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn check_fast() -> Result<(), String> {
    step("format", cargo("fmt --all -- --check"))?;
    invariants()?;
    core()?;
    step("lint", cargo("clippy --workspace --all-targets -- -D warnings"))?;
    step("test", cargo("test --workspace --no-fail-fast"))?;
    mpi()
}

/// That the tensor core compiles without what it must not depend on.
fn core() -> Result<(), String> {
    core_dependencies()?;
    step("core", cargo("check -p kiln --no-default-features"))
}

fn invariants() -> Result<(), String> {
    timed("invariants", "what documents and module heads say of the tree", || invariants::check(&root()))
}

/// The engine between MPI ranks, where this machine has an MPI.
fn mpi() -> Result<(), String> {
    let there =
        |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !there("mpirun") || !there("mpicc") {
        let text = "no mpirun and mpicc here, not tested (.ci/run installs OpenMPI)";
        if env::var_os("CI").is_some_and(|ci| !ci.is_empty()) {
            return Err(format!("mpi: {text}"));
        }
        println!("\n==> mpi: {text}");
        return Ok(());
    }
    // The engine alone, then the program with it.
    let mut test = cargo("test -p kiln-group -p kiln-cli --features kiln-group/mpi,kiln-cli/mpi --test mpi");
    // OpenMPI runs as root, and more ranks than cores, only if told.
    for name in
        ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"]
    {
        test.env(name, "1");
    }
    step("mpi", test)
}

fn check_rest() -> Result<(), String> {
    for name in examples()? {
        let mut run = cargo("run -q -p kiln --example");
        run.arg(&name);
        if TRAINING.contains(&name.as_str()) {
            run.args(["--", EXAMPLE_STEPS]);
        }
        step(&format!("example {name}"), run)?;
    }
    // A device outside the workspace; it shares the folder of built crates.
    let mut toy = cargo("test -q --manifest-path examples/toy-device/Cargo.toml");
    toy.env("CARGO_TARGET_DIR", root().join("target"));
    step("toy device", toy)?;
    let mut doc = cargo("doc --workspace --no-deps");
    doc.env("RUSTDOCFLAGS", "-D warnings");
    step("doc", doc)?;
    // That every crate can be packaged; the packages themselves are built from the same files as everything above.
    step("package", cargo("package --workspace --no-verify --allow-dirty --offline --quiet"))?;
    guide::follow()?;
    readme_blocks()
}

/// Breaks remote devices on purpose, or feeds them nonsense. The program `kiln` is built first, for its processes.
fn chaos(args: &[&str]) -> Result<(), String> {
    step("build", cargo("build --release -p kiln-cli -p kiln-chaos"))?;
    let mut run = cargo("run --release -q -p kiln-chaos --");
    run.args(args);
    if args[0] == "fuzz" {
        // Threads that come and go leave gaps in heaps of their own, which would look like a leak.
        run.env("MALLOC_ARENA_MAX", "1");
    }
    step(args[0], run)
}

/// Runs a command as a step of its own.
fn step(name: &str, mut command: Command) -> Result<(), String> {
    timed(name, &shown(&command), || ended(command.stdin(Stdio::null()).status()))
}

/// Does some work between a line that names it and a line with its time.
fn timed(name: &str, text: &str, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    println!("\n==> {name}: {text}");
    let start = Instant::now();
    let outcome = work().map_err(|failure| format!("{name}: {failure}"));
    println!("<== {name}: {:.1} s", start.elapsed().as_secs_f64());
    outcome
}

fn ended(status: io::Result<ExitStatus>) -> Result<(), String> {
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("the command ended with {status}")),
        Err(error) => Err(format!("the command did not start: {error}")),
    }
}

fn core_dependencies() -> Result<(), String> {
    let mut tree = cargo("tree -p kiln --no-default-features -e normal --prefix none");
    timed("core dependencies", &shown(&tree), || {
        let output = tree.stderr(Stdio::inherit()).output().map_err(|e| e.to_string())?;
        ended(Ok(output.status))?;
        let found = denied(&String::from_utf8_lossy(&output.stdout));
        if found.is_empty() { Ok(()) } else { Err(format!("kiln must not depend on {}", found.join(", "))) }
    })
}

/// The denied crates in the output of `cargo tree --prefix none`, whose lines begin with a crate's name.
fn denied(tree: &str) -> Vec<&'static str> {
    let names: Vec<&str> = tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    DENIED.split(' ').filter(|name| names.contains(name)).collect()
}

/// The names of kiln's examples, in order; none where there is no such folder.
fn examples() -> Result<Vec<String>, String> {
    let entries = match fs::read_dir(root().join("examples")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("examples: {error}")),
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

fn readme_blocks() -> Result<(), String> {
    let text = fs::read_to_string(root().join("README.md")).map_err(|e| format!("README.md: {e}"))?;
    for block in readme::marked(&text).map_err(|fault| format!("README.md: {fault}"))? {
        let mut sh = Command::new("sh");
        sh.args(["-e", "-c", block.script.trim_end()]).current_dir(root());
        step(&format!("README.md line {}", block.line), sh)?;
    }
    Ok(())
}

/// The cargo that runs this program, so that a chosen toolchain stays chosen; `args` are separated by spaces.
fn cargo(args: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args.split_whitespace()).current_dir(root());
    command
}

fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_stem().unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_crates_are_found_by_whole_name() {
        let tree = "kiln v0.1.0 (/somewhere/tokio)\nhalf v2.4.1\nclap_lex v0.7.0\nrustls v0.23.1 (*)\ntokio v1.0.0\n";
        assert_eq!(denied(tree), ["rustls", "tokio"]);
    }
}
