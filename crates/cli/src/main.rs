//! The program `kiln`: trains, checks, replays, measures and shows devices. Every command exits with 0 only if it did
//! what it was asked, says what went wrong on standard error, and speaks JSON lines with `--json`.

mod bench;
mod conform;
mod demo;
mod devices;
mod flight;
// It ends ranks with their launcher and gives each its cores by calls that Linux alone has.
#[cfg(target_os = "linux")]
mod launch;
mod replay;
mod serve;
mod train;
mod watch;

use clap::{Parser, Subcommand};
use std::io::Write;
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
    #[cfg(target_os = "linux")]
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
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    let command = Cli::parse().command;
    if let Err(invalid) = kiln_env::check() {
        eprintln!("kiln: {invalid}");
        return ExitCode::FAILURE;
    }
    let done = match command {
        Command::Train(args) => train::run(args),
        Command::Conform(args) => conform::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Devices(args) => devices::run(args),
        #[cfg(target_os = "linux")]
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
            // Some of it may be what a server says: it must not steer the terminal.
            let steers = |c: &char| c.is_control() && !matches!(c, '\n' | '\t');
            let text: String = error.to_string().chars().filter(|c| !steers(c)).collect();
            let _ = writeln!(std::io::stderr(), "kiln: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Warnings, such as that a server is lost, go to standard error.
struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn && metadata.target().starts_with("kiln")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            // Nobody may read it any more.
            let _ = writeln!(std::io::stderr(), "kiln: warning: {}", record.args());
        }
    }

    fn flush(&self) {}
}

/// The device named on the command line, else the default one.
fn open(address: Option<&str>) -> Result<kiln::Device, kiln::Error> {
    match address {
        Some(address) => kiln::Device::open(address),
        None => kiln::Device::try_default(),
    }
}

/// Ends the program, as a signal would, when nobody reads its output any more: `kiln bench | head`, or `2>&1 | head`. The signal itself
/// stays off, because it would also come from the sockets of a server that went away.
fn end_when_unread() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let unread = |text: &str| text.starts_with("failed printing to std") && text.contains("Broken pipe");
        if panic.payload().downcast_ref::<String>().is_some_and(|text| unread(text)) {
            // As SIGPIPE would.
            std::process::exit(128 + 13);
        }
        usual(panic)
    }));
}
