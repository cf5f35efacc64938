//! `kiln-chaos`: long runs that break remote devices and ranks of jobs on purpose. `cargo xtask chaos` and `cargo xtask fuzz` start it.
//! Every run prints its seed and the command that does the same again.
#![forbid(unsafe_code)]

mod hostile;
mod ranks;
mod scenarios;

use kiln_chaos::fuzz;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
usage: kiln-chaos chaos [--seed N] [--only NAME]...
       kiln-chaos fuzz [--target NAME] [--executions N] [--seed N] [--keep N]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| value(name).map_or(Some(default), |v| v.parse().ok());
    let (Some(seed), Some(executions), Some(keep)) =
        (number("--seed", 1), number("--executions", 1_000_000), number("--keep", 0))
    else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let fine = match args.first().map(String::as_str) {
        Some("chaos") => {
            let only: Vec<&str> =
                args.windows(2).filter(|w| w[0] == "--only").map(|w| w[1].as_str()).collect();
            scenarios::run(seed, &only)
        }
        // What `hostile` starts.
        Some("attack") => {
            let (class, address) = (value("--class"), value("--address").and_then(|a| a.parse().ok()));
            class.zip(address).is_some_and(|(class, address)| hostile::attack(class, address, seed))
        }
        Some("fuzz") => fuzzed(value("--target").map(String::as_str), executions, seed, keep as usize),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn fuzzed(only: Option<&str>, executions: u64, seed: u64, keep: usize) -> bool {
    let targets: Vec<_> = fuzz::TARGETS.iter().filter(|t| only.is_none_or(|name| name == t.name)).collect();
    fuzz::quiet();
    let mut fine = !targets.is_empty();
    for target in targets {
        let name = target.name;
        match fuzz::run(target, executions, Duration::MAX, seed, keep) {
            Ok(report) => println!(
                "{name}: {} executions in {:.1} s, {} outcomes, {} of them new",
                report.executions,
                report.time.as_secs_f64(),
                report.kept,
                report.new
            ),
            Err(crash) => {
                fine = false;
                let path = fuzz::folder(target).join(format!("crash-{seed}"));
                let _ = std::fs::create_dir_all(fuzz::folder(target));
                let _ = std::fs::write(&path, &crash.input);
                println!("{name}: FAILED: {}\n  the input is in {}", crash.message, path.display());
                println!("  again: cargo xtask fuzz --target {name} --seed {seed}");
            }
        }
    }
    fuzz::clean();
    fine
}
