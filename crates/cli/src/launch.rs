//! `kiln launch`: one program as several ranks on this machine, ended and started again together.

use serde_json::json;
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Ranks to start.
    #[arg(short = 'n', long, default_value_t = 1)]
    ranks: usize,
    /// How often the job is started again after a rank has failed.
    #[arg(long, default_value_t = 0)]
    max_restarts: u32,
    /// Folder for the flight records of a failed job.
    #[arg(long)]
    flight: Option<PathBuf>,
    /// Seconds that other ranks have to end by themselves after one has failed.
    #[arg(long, default_value_t = 5.0)]
    grace: f64,
    /// Lets every rank run on all cores, not only on its share of them.
    #[arg(long)]
    no_bind: bool,
    /// What happens to the ranks, as JSON lines on standard error.
    #[arg(long)]
    json: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

/// The signal that is to be passed on; 0 for none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: i32) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    if args.ranks == 0 {
        return Err("a job has at least one rank".into());
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler = note as extern "C" fn(i32);
        // SAFETY: the handler only stores to an atomic, which is allowed in one.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    for attempt in 0..=args.max_restarts {
        let outcome = attempt_of(&args, attempt)?;
        match outcome {
            Outcome::Done => return Ok(ExitCode::SUCCESS),
            Outcome::Stopped(signal) => return Ok(ExitCode::from(128u8.saturating_add(signal as u8))),
            Outcome::Failed { rank, why } => {
                let again = attempt < args.max_restarts;
                tell(&args, "failed", Some(rank), &why);
                if again {
                    let left = args.max_restarts - attempt;
                    tell(
                        &args,
                        "restarting",
                        None,
                        &format!("all {} ranks, {left} times at most", args.ranks),
                    );
                }
            }
        }
    }
    Ok(ExitCode::FAILURE)
}

enum Outcome {
    Done,
    Failed { rank: usize, why: String },
    Stopped(i32),
}

struct Rank {
    child: Child,
    output: Vec<JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

/// One attempt: all ranks, until all have ended.
fn attempt_of(args: &Args, attempt: u32) -> Result<Outcome, Box<dyn Error>> {
    // Nobody else knows where these ranks will meet, not even from the attempt before.
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|e| format!("no random bytes: {e}"))?;
    let job: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut ranks = Vec::new();
    for rank in 0..args.ranks {
        match start(args, rank, attempt, &job) {
            Ok(started) => ranks.push(started),
            Err(e) => {
                end(&mut ranks, libc::SIGKILL);
                return Err(format!("{}: {e}", args.program[0]).into());
            }
        }
    }
    let mut failed: Option<(usize, String, Instant)> = None;
    // Whether that one was killed, and whether ranks were told to end.
    let (mut killed, mut asked) = (false, false);
    let mut stopped: Option<(i32, Instant)> = None;
    let grace = Duration::try_from_secs_f64(args.grace)?;
    loop {
        for (rank, r) in ranks.iter_mut().enumerate() {
            if r.ended.is_none()
                && let Some(status) = r.child.try_wait()?
            {
                r.ended = Some(status);
                // A rank that was killed is the cause; others may have ended with an error of theirs before it is seen.
                let cause = failed.is_none() || status.signal().is_some() && !killed && !asked;
                if !status.success() && stopped.is_none() && cause {
                    killed = status.signal().is_some();
                    let since = failed.map_or_else(Instant::now, |(_, _, since)| since);
                    failed = Some((rank, reason(status), since));
                }
            }
        }
        if ranks.iter().all(|r| r.ended.is_some()) {
            break;
        }
        let signal = SIGNAL.swap(0, Ordering::Relaxed);
        if signal != 0 {
            end(&mut ranks, signal);
            stopped.get_or_insert((signal, Instant::now()));
        }
        // Survivors learn of the loss by themselves; who does not is asked, then ended.
        let since = failed.as_ref().map(|f| f.2).or(stopped.map(|s| s.1));
        asked |= since.is_some_and(|at| at.elapsed() > grace);
        match since.map(|at| at.elapsed()) {
            Some(waited) if waited > 2 * grace => end(&mut ranks, libc::SIGKILL),
            Some(waited) if waited > grace => end(&mut ranks, libc::SIGTERM),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // All that was said comes before what is said of it.
    ranks.into_iter().flat_map(|r| r.output).for_each(|thread| drop(thread.join()));
    Ok(match (stopped, failed) {
        (Some((signal, _)), _) => Outcome::Stopped(signal),
        (None, Some((rank, why, _))) => Outcome::Failed { rank, why },
        (None, None) => Outcome::Done,
    })
}

fn start(args: &Args, rank: usize, attempt: u32, job: &str) -> std::io::Result<Rank> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut command = Command::new(&args.program[0]);
    command.args(&args.program[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for (name, number) in [
        (kiln_env::RANK.name(), rank),
        (kiln_env::WORLD.name(), args.ranks),
        (kiln_env::LOCAL_RANK.name(), rank),
        (kiln_env::LOCAL_WORLD.name(), args.ranks),
        (kiln_env::RESTART.name(), attempt as usize),
    ] {
        command.env(name, number.to_string());
    }
    // Each sees only its share.
    command.env(kiln_env::CORES.name(), cores.to_string());
    command.env(kiln_env::JOB.name(), job);
    if kiln_env::THREADS.get().is_none() {
        command.env(kiln_env::THREADS.name(), (cores / args.ranks).max(1).to_string());
    }
    if let Some(folder) = &args.flight {
        command.env(kiln_env::FLIGHT.name(), folder);
    }
    let launcher = std::process::id();
    let share = if args.no_bind { None } else { share(rank, args.ranks) };
    // SAFETY: between fork and exec only prctl, getppid and sched_setaffinity are called, which are safe to call there.
    unsafe {
        command.pre_exec(move || {
            if let Some(share) = &share {
                // Refused where cores are somebody else's business: then the rank runs anywhere.
                libc::sched_setaffinity(0, size_of_val(share), share);
            }
            // No rank outlives the launcher, whatever ends it.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() as u32 != launcher {
                return Err(std::io::Error::other("the launcher has ended"));
            }
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        output.push(prefixed(rank, args.ranks, stdout, std::io::stdout));
    }
    if let Some(stderr) = child.stderr.take() {
        output.push(prefixed(rank, args.ranks, stderr, std::io::stderr));
    }
    Ok(Rank { child, output, ended: None })
}

/// A rank's even share of the cores that this process may use; `None` if there are more ranks than cores. A rank's
/// threads wait for each other in turns, and the system puts threads that wake each other on one core: without shares
/// two ranks are seen to compute on the same core while another is idle.
fn share(rank: usize, ranks: usize) -> Option<libc::cpu_set_t> {
    // SAFETY: a set of cores is plain bits, of which none are set.
    let (mut all, mut share) = unsafe { std::mem::zeroed::<(libc::cpu_set_t, libc::cpu_set_t)>() };
    // SAFETY: the set is as large as is said.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&all), &mut all) } != 0 {
        return None;
    }
    // SAFETY: every number is below the set's size.
    let cores: Vec<usize> =
        (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &all) }).collect();
    if cores.len() < ranks {
        return None;
    }
    for &core in &cores[rank * cores.len() / ranks..(rank + 1) * cores.len() / ranks] {
        // SAFETY: as above.
        unsafe { libc::CPU_SET(core, &mut share) };
    }
    Some(share)
}

/// The longest line that is passed on as one. A rank that ends none must not fill the launcher's memory.
const LINE: u64 = 64 << 10;

/// Passes lines on, each with its rank before it.
fn prefixed<W: Write + 'static>(
    rank: usize,
    ranks: usize,
    from: impl Read + Send + 'static,
    to: fn() -> W,
) -> JoinHandle<()> {
    let width = (ranks - 1).to_string().len();
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.by_ref().take(LINE).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            // One write a line, so that lines of different ranks do not mix.
            let whole = [format!("[{rank:>width$}] ").as_bytes(), &line].concat();
            let _ = to().write_all(&whole);
            line.clear();
        }
    })
}

/// Sends a signal to every rank that has not ended.
fn end(ranks: &mut [Rank], signal: i32) {
    for rank in ranks.iter().filter(|r| r.ended.is_none()) {
        // SAFETY: a plain system call; the child has not been waited for, so the number is still its own.
        unsafe { libc::kill(rank.child.id() as i32, signal) };
    }
}

fn reason(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}

fn tell(args: &Args, event: &str, rank: Option<usize>, detail: &str) {
    match (args.json, rank) {
        (true, _) => eprintln!("{}", json!({ "event": event, "rank": rank, "detail": detail })),
        (false, Some(rank)) => eprintln!("kiln launch: rank {rank} {detail}"),
        (false, None) => eprintln!("kiln launch: {event} {detail}"),
    }
}
