//! `kiln conform`: the golden cases of a folder.

use kiln_conform::golden;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// Folder with cases.jsonl and cases.safetensors.
    dir: PathBuf,
    /// Device to run on: cpu, cpu:1, reference.
    #[arg(long)]
    device: Option<String>,
    /// Submit one operation at a time.
    #[arg(long)]
    eager: bool,
    /// One JSON object a failing case, and one for the totals.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let device = crate::open(args.device.as_deref())?;
    if args.eager {
        device.set_eager(true);
    }
    let summary = golden::run(&args.dir, &device, &mut |outcome| {
        let Some(failure) = &outcome.failure else { return };
        if args.json {
            println!("{}", serde_json::json!({ "case": outcome.id, "failure": failure }));
        } else {
            println!("{}: {failure}", outcome.id);
        }
    })?;
    device.flush()?;
    if args.json {
        println!("{}", serde_json::json!({ "passed": summary.passed, "failed": summary.failed }));
    } else {
        println!("{} passed, {} failed", summary.passed, summary.failed);
    }
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
