//! `kiln flight`: what the ranks of a failed job left behind, read together: who is to blame, what differed first, who
//! came late.

use kiln::dist::flight::{judge, read};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// The folder that `kiln launch --flight` or `KILN_FLIGHT` named.
    folder: PathBuf,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let verdict = judge(&read(&args.folder)?);
    if args.json {
        println!("{}", serde_json::to_string(&verdict)?);
    } else {
        print!("{verdict}");
    }
    Ok(ExitCode::SUCCESS)
}
