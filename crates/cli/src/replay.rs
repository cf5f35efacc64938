//! `kiln replay`: a recorded stream, run again.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// A file written with KILN_RECORD=FILE.
    file: PathBuf,
    /// Device to run on: cpu, cpu:1, reference.
    #[arg(long)]
    device: Option<String>,
    /// The outcome as one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let device = crate::open(args.device.as_deref())?;
    let done = kiln::device::replay(&args.file, device.driver().as_ref())?;
    if args.json {
        println!("{}", serde_json::to_string(&done)?);
    } else {
        println!(
            "replayed {} items, {} writes and {} reads on {device}",
            done.items, done.writes, done.reads
        );
        match done.differing.as_slice() {
            [] => println!("all reads equal"),
            differing => println!("{} reads differ, the first is read {}", differing.len(), differing[0]),
        }
    }
    Ok(if done.differing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
