//! The program `kiln`: trains, checks, replays, measures and shows devices. Every command exits with 0 only if it did
//! what it was asked, says what went wrong on standard error, and speaks JSON lines with `--json`.

mod bench;
mod conform;
mod demo;
mod devices;
mod flight;
mod launch;
mod replay;
mod serve;
mod train;
mod watch;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Deep learning in Rust: one tensor program, run anywhere.
#[derive(Parser)]
#[command(name = "kiln", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model.
    Train(train::Args),
    /// Run the golden operator cases of a folder on a device.
    Conform(conform::Args),
    /// Run a recorded stream again and compare its results.
    Replay(replay::Args),
    /// Time a fixed list of workloads.
    Bench(bench::Args),
    /// Show the devices of this machine, or of a server.
    Devices(devices::Args),
    /// Start a program as several ranks of one job.
    Launch(launch::Args),
    /// Say which rank of a failed job is to blame, from the records that its ranks left.
    Flight(flight::Args),
    /// Train across two servers, kill one, and end with the same bits.
    Demo(demo::Args),
    /// Let others compute on this machine.
    Serve(serve::Args),
    /// Show the sessions of a server.
    Ps(watch::Args),
    /// Watch the sessions of a server.
    Top(watch::Args),
}

fn main() -> ExitCode {
    end_when_unread();
    let done = match Cli::parse().command {
        Command::Train(args) => train::run(args),
        Command::Conform(args) => conform::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Flight(args) => flight::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Ps(args) => watch::ps(args),
        Command::Top(args) => watch::top(args),
    };
    // Servers need not wait for the end of a lease.
    kiln::Device::close_all();
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kiln: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The device named on the command line, else the default one.
fn open(address: Option<&str>) -> Result<kiln::Device, kiln::Error> {
    match address {
        Some(address) => kiln::Device::open(address),
        None => Ok(kiln::Device::default()),
    }
}

/// Ends the program, as a signal would, when nobody reads its output any more: `kiln bench | head`, or `2>&1 | head`. The signal itself
/// stays off, because it would also come from the sockets of a server that went away.
fn end_when_unread() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let unread = |text: &str| text.starts_with("failed printing to std") && text.contains("Broken pipe");
        if panic.payload().downcast_ref::<String>().is_some_and(|text| unread(text)) {
            std::process::exit(128 + libc::SIGPIPE);
        }
        usual(panic)
    }));
}
