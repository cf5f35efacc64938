//! `kiln train`: recipes that run as they are.

mod chargpt;
mod digits;
mod job;
mod report;

use std::error::Error;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    recipe: Recipe,
}

#[derive(clap::Subcommand)]
enum Recipe {
    /// Handwritten digits of 8 by 8 pixels, with a two-layer network.
    Digits(digits::Args),
    /// A small transformer that learns to write like a text, character by character.
    Chargpt(chargpt::Args),
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    match args.recipe {
        Recipe::Digits(args) => job::run(&digits::Digits::new(&args.job), &args.job),
        Recipe::Chargpt(args) => job::run(&chargpt::CharGpt::new(&args)?, &args.job),
    }
}
