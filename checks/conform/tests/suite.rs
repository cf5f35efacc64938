//! The suite on every device of this workspace.

use kiln_conform::suite::{Totals, check};
use kiln_cpu::{Cpu, Reference, pool};
use kiln_device::{Driver, Profile, Record};
use std::sync::Arc;

fn passes(name: &str, device: Arc<dyn Driver>) -> Totals {
    let mut texts = Vec::new();
    let totals = check(device, &mut |finding| {
        if texts.len() < 20 {
            texts.push(finding.to_string());
        }
    });
    assert!(totals.findings == 0, "{name}: {} findings, such as\n{}", totals.findings, texts.join("\n"));
    totals
}

// The number of threads is the process's, so everything runs in one test.
#[test]
fn devices_conform_with_any_number_of_threads() {
    let plain = passes("reference", Arc::new(Reference::start()));
    assert!(plain.cases > 10_000, "{plain:?}");
    for threads in [1, 2, 3] {
        pool::set_threads(threads);
        assert_eq!(passes(&format!("cpu with {threads} threads"), Arc::new(Cpu::start())), plain);
    }
    passes("profile<cpu>", Arc::new(Profile::new(Arc::new(Cpu::start()), None).unwrap()));
    let dir = std::env::temp_dir().join(format!("kiln-suite-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("suite.rec");
    passes("record<cpu>", Arc::new(Record::new(Arc::new(Cpu::start()), &path).unwrap()));
    // Not on the reference: which of several NaNs a sum keeps is not promised, and a replay compares every bit.
    let again = kiln_device::replay(&path, &Cpu::start()).unwrap();
    assert!(
        again.differing.is_empty() && again.reads > 10_000,
        "{} reads, {} differ",
        again.reads,
        again.differing.len()
    );
    std::fs::remove_dir_all(&dir).unwrap();
}
