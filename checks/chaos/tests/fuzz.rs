//! Six seconds of each fuzz target, and its kept inputs. `cargo xtask fuzz` runs them for as long as one likes.

use kiln_chaos::fuzz::{self, TARGETS};
use std::time::Duration;

#[test]
fn targets_stand_mutated_inputs() {
    fuzz::quiet();
    let seed = kiln_env::SEED.get().unwrap_or(1);
    for target in TARGETS {
        match fuzz::run(target, u64::MAX, Duration::from_secs(6), seed, 0) {
            Ok(report) => {
                println!("{}: {report:?}", target.name);
                // Of plans that are not the program's nearly all are passed over in the same way.
                let least = if target.name == "plans" { 2 } else { 10 };
                assert!(report.executions > 200 && report.kept > least, "{}: {report:?}", target.name);
            }
            Err(crash) => {
                let _ = std::panic::take_hook();
                panic!("{}: {}\ninput {:?}\nKILN_SEED={seed}", target.name, crash.message, crash.input)
            }
        }
    }
    let _ = std::panic::take_hook();
    fuzz::clean();
}
