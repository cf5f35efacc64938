//! Runs the golden cases of a folder: `golden DIR [DEVICE] [--eager]`.

use kiln_conform::golden;
use kiln_tensor::Device;
use std::process::ExitCode;

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (eager, words): (Vec<_>, Vec<_>) = words.iter().partition(|w| *w == "--eager");
    let dir = words.first().ok_or("usage: golden DIR [DEVICE] [--eager]")?;
    let device = Device::open(words.get(1).map_or("cpu", |w| w.as_str()))?;
    device.set_eager(!eager.is_empty());
    let summary = golden::run(dir.as_ref(), &device, &mut |outcome| {
        if let Some(failure) = &outcome.failure {
            println!("{}: {failure}", outcome.id);
        }
    })?;
    println!("{} passed, {} failed", summary.passed, summary.failed);
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
