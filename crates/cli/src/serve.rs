//! `kiln serve`: this machine as a device for others.

use kiln::device::Budget;
use kiln::remote::server::moves::Moves;
use kiln::remote::server::registry::{Config, Registry, Rules};
use kiln::remote::server::session::Quota;
use kiln::remote::server::{Event, Listen, Server};
use kiln::remote::{address, transport};
use serde_json::json;
use std::error::Error;
use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    /// Where to listen: HOST:PORT (port 0 picks one) or unix:/PATH; may be repeated.
    #[arg(long, default_value = "127.0.0.1:7717")]
    listen: Vec<String>,
    /// Devices to offer; the first is the one for clients that name none.
    #[arg(long, default_value = "cpu")]
    device: Vec<String>,
    /// File with the token that clients must know; else KILN_TOKEN, else (on loopback) one is made.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Certificate chain for TLS, in PEM.
    #[arg(long, requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key for TLS, in PEM.
    #[arg(long, requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The most bytes per session, such as 8G; else half of what the server may.
    #[arg(long, value_parser = bytes)]
    quota: Option<usize>,
    /// The most bytes that all sessions may hold together; else most of what the machine, its cgroup and its limits
    /// allow.
    #[arg(long, value_parser = bytes)]
    memory: Option<usize>,
    /// Seconds that one task may compute; a session that takes longer is ended.
    #[arg(long, default_value_t = 3600.0)]
    task_limit: f64,
    /// Seconds that sessions have to finish when the server is asked to stop (SIGTERM). Asked twice, it stops at once.
    #[arg(long, default_value_t = 10.0)]
    grace: f64,
    /// The most sessions at once.
    #[arg(long, default_value_t = 256)]
    max_sessions: usize,
    /// Seconds that a session outlives a lost connection.
    #[arg(long, default_value_t = 60.0)]
    lease: f64,
    /// Take sessions without TLS from other machines too, though there is a certificate.
    #[arg(long)]
    allow_plain: bool,
    /// Other servers that this one may fetch tensors from: HOST, HOST:PORT, unix:/PATH, or * for all hosts; may be
    /// repeated.
    #[arg(long, value_name = "PEER")]
    allow_peer: Vec<String>,
    /// Certificates that vouch for other servers, in PEM; else those that the system trusts.
    #[arg(long, value_name = "FILE")]
    peer_ca: Option<PathBuf>,
    /// How other servers reach this one, such as kiln://host:7717; else the way that the client has taken.
    #[arg(long, value_name = "URL")]
    advertise: Option<String>,
    /// Threads that take turns with the sessions; each may use all cores.
    #[arg(long)]
    workers: Option<usize>,
    /// Log in JSON lines.
    #[arg(long)]
    json: bool,
}

/// The least that sessions may have waiting in all.
const MOST_WAITING: usize = 64 << 20;

/// Threads for what would hold up the one that everybody waits for: devices that open, names that are looked up.
const BLOCKING: usize = 32;

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    raise_files();
    let log = Log::start(args.json);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(BLOCKING).build()?;
    let outcome = runtime.block_on(serve(args, &log));
    // What does not come to its end is left behind.
    runtime.shutdown_background();
    log.end();
    outcome
}

async fn serve(args: Args, output: &Log) -> Result<ExitCode, Box<dyn Error>> {
    let (mut tcp, mut unix): (Vec<SocketAddr>, Vec<PathBuf>) = (Vec::new(), Vec::new());
    for listen in &args.listen {
        match listen.strip_prefix("unix:") {
            Some(path) => unix.push(path.strip_prefix("//").unwrap_or(path).into()),
            None => tcp.extend(resolve(listen)?),
        }
    }
    let public = tcp.iter().any(|a| !a.ip().is_loopback());
    let given = token(args.token_file.as_deref())?;
    if public && given.is_none() {
        return Err("a server that others can reach needs a token: --token-file FILE or KILN_TOKEN".into());
    }
    if public && args.tls_cert.is_none() {
        eprintln!(
            "kiln: warning: tokens and tensors are not encrypted; --tls-cert and --tls-key would do that"
        );
    }
    let (token, token_file) = match given {
        Some(token) => (token, args.token_file.clone()),
        None => {
            let path = default_token_file()?;
            (made_token(&path)?, Some(path))
        }
    };
    if let Some(url) = &args.advertise {
        address::Address::parse(url).map_err(|e| format!("--advertise: {e}"))?;
    }
    let allow = args.allow_peer.iter().map(|peer| match peer.starts_with("unix:") {
        true => peer.clone(),
        false => peer.to_ascii_lowercase(),
    });
    let mut moves = Moves::new(args.advertise.clone().unwrap_or_default(), allow.collect());
    // Read once and now: later there is no time for files.
    if args.peer_ca.is_some() || !args.allow_peer.is_empty() {
        let ca = args.peer_ca.as_deref();
        moves = moves.with_tls(transport::client_tls(ca).map_err(|e| format!("--peer-ca: {e}"))?);
    }
    for device in &args.device {
        open(device)
            .ok_or_else(|| format!("there is no device `{device}`: known are cpu, cpu:N and reference"))?;
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(transport::server_tls(cert, key)?),
        _ => None,
    };
    let scheme = if tls.is_some() { "kilns" } else { "kiln" };
    let budget = Budget::process();
    if let Some(bytes) = args.memory {
        budget.set_limit(bytes);
    }
    // An eighth is for what has come and waits, and for what waits to be sent.
    let network = Budget::new((budget.limit() / 8).max(MOST_WAITING));
    budget.set_limit(budget.limit() - budget.limit() / 8);
    let quota = args.quota.unwrap_or(budget.limit() / 2);
    let grace = Duration::try_from_secs_f64(args.grace)?;
    let rules = Rules {
        allow_plain: args.allow_plain,
        task_limit: Duration::try_from_secs_f64(args.task_limit).map_err(|e| format!("--task-limit: {e}"))?,
        network,
    };
    let registry = Registry::new(Config {
        token: Some(token),
        quota: Quota { bytes: quota, ..Quota::default() },
        most_sessions: args.max_sessions,
        lease: Duration::try_from_secs_f64(args.lease)?,
        heartbeat: Duration::from_secs(5),
        offered: args.device.clone(),
        devices: Box::new(open),
        // Without randomness there are no secrets, and so no server.
        random: Box::new(|bytes| getrandom::fill(bytes).expect("the system gives random bytes")),
    })
    .with_moves(moves)
    .with_rules(rules);
    let json = args.json;
    let lines = output.lines.clone();
    let server = Server::new(registry, move |event| drop(lines.try_send(LogLine::Told(log(event, json)))));
    let bound = Listen { tcp, unix: unix.clone(), tls }.bind().await?;
    let option = token_file.map(|path| format!("?token-file={}", path.display())).unwrap_or_default();
    // A client does not send its token in clear to another machine unless it is told to.
    let clear = |a: &SocketAddr| match scheme == "kiln" && !option.is_empty() && !a.ip().is_loopback() {
        true => "&clear=1",
        false => "",
    };
    let urls: Vec<String> = (bound.addresses().iter().map(|a| format!("{scheme}://{a}{option}{}", clear(a))))
        .chain(unix.iter().map(|path| format!("unix:{}", path.display())))
        .collect();
    for url in &urls {
        output.say(match json {
            true => json!({ "event": "listening", "url": url }).to_string(),
            false => format!("serving {} at {url}", args.device.join(", ")),
        });
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let workers = args.workers.unwrap_or(cores.max(2));
    let stop = stopped(grace)?;
    server.run(bound, workers, async move { drop(stop.await) }, grace).await;
    Ok(ExitCode::SUCCESS)
}

/// Lines of the log that may wait for a slow reader; further ones are dropped.
const MOST_LINES: usize = 4096;
/// How long the last lines may take.
const LAST_LINES: Duration = Duration::from_millis(500);

/// The log, written by a thread of its own: a full disk, a pipe that nobody reads or that is closed costs its lines and
/// nothing else.
struct Log {
    lines: SyncSender<LogLine>,
}

enum LogLine {
    /// For standard output if it is JSON, else for standard error.
    Told(String),
    /// For standard output.
    Said(String),
    /// Everything before is written.
    Mark(SyncSender<()>),
}

impl Log {
    fn start(json: bool) -> Log {
        let (lines, taken) = sync_channel::<LogLine>(MOST_LINES);
        let write = move || {
            for line in taken {
                let _ = match line {
                    LogLine::Told(text) if !json => writeln!(std::io::stderr(), "{text}"),
                    LogLine::Told(text) | LogLine::Said(text) => writeln!(std::io::stdout(), "{text}"),
                    LogLine::Mark(here) => {
                        let _ = here.try_send(());
                        Ok(())
                    }
                };
                let _ = std::io::stdout().flush();
            }
        };
        let _ = std::thread::Builder::new().name("kiln-log".into()).spawn(write);
        Log { lines }
    }

    fn say(&self, text: String) {
        let _ = self.lines.try_send(LogLine::Said(text));
    }

    /// Waits a moment for what was said.
    fn end(&self) {
        let (here, marked) = sync_channel(1);
        if self.lines.try_send(LogLine::Mark(here)).is_ok() {
            let _ = marked.recv_timeout(LAST_LINES);
        }
    }
}

/// As many open files as the system lets this process have: each connection is one.
fn raise_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls only read and write the struct that they are given.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && limit.rlim_cur < limit.rlim_max {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Ready when the process is asked to stop. The second time, or when the grace is over whatever runs, it ends at once.
fn stopped(grace: Duration) -> Result<tokio::sync::oneshot::Receiver<()>, Box<dyn Error>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (asked, stop) = tokio::sync::oneshot::channel();
    // On a thread of its own: it must come through even if nothing else does.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut terminate, mut interrupt) = {
        let _inside = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let wait = async move {
        let mut asked = Some(asked);
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            match asked.take() {
                Some(asked) => drop(asked.send(())),
                None => std::process::exit(ENDED_EARLY),
            }
            tokio::spawn(async move {
                tokio::time::sleep(grace).await;
                std::process::exit(ENDED_EARLY);
            });
        }
    };
    std::thread::Builder::new().name("kiln-signals".into()).spawn(move || runtime.block_on(wait))?;
    Ok(stop)
}

/// What a server ends with that could not finish: as after SIGTERM.
const ENDED_EARLY: i32 = 128 + libc::SIGTERM;

fn open(device: &str) -> Option<Arc<dyn kiln::device::Driver>> {
    match device {
        "reference" => Some(Arc::new(kiln::device::Reference::start())),
        "cpu" => Some(Arc::new(kiln::device::Cpu::start())),
        // Devices of one kind differ in their name alone: every session has one of its own anyway.
        name => {
            name.strip_prefix("cpu:")?.parse::<u32>().ok()?;
            open("cpu")
        }
    }
}

fn resolve(text: &str) -> Result<Vec<SocketAddr>, Box<dyn Error>> {
    let with_port = match text.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') || host.ends_with(']') => text.to_string(),
        _ => format!("{text}:{}", address::PORT),
    };
    let with_host = if with_port.starts_with(':') { format!("127.0.0.1{with_port}") } else { with_port };
    let found: Vec<SocketAddr> =
        with_host.to_socket_addrs().map_err(|e| format!("--listen {text}: {e}"))?.take(1).collect();
    Ok(found)
}

/// The token that was given, if one was.
fn token(file: Option<&Path>) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
    let text = match file {
        Some(path) => std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?,
        None => kiln_env::TOKEN.read()?.unwrap_or_default(),
    };
    let token = text.trim();
    match (token.is_empty(), file) {
        (false, _) => Ok(Some(token.into())),
        (true, Some(path)) => Err(format!("{}: the file holds no token", path.display()).into()),
        (true, None) => Ok(None),
    }
}

fn default_token_file() -> Result<PathBuf, Box<dyn Error>> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let folder = state.or_else(home).ok_or("neither HOME nor XDG_STATE_HOME is set: use --token-file")?;
    Ok(folder.join("kiln").join("token"))
}

/// The token in this file, which is made if it is missing; only its owner can read it.
fn made_token(path: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
    if let Ok(file) = std::fs::metadata(path) {
        if file.permissions().mode() & 0o077 != 0 {
            let path = path.display();
            return Err(
                format!("{path}: others can read or change the token; chmod 600 it, or remove it").into()
            );
        }
        return token(Some(path))?.ok_or_else(|| "the token file is empty".into());
    }
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut random = [0; 24];
    getrandom::fill(&mut random).map_err(|e| e.to_string())?;
    let fresh: String = random.iter().map(|b| format!("{b:02x}")).collect();
    // Written whole before it has its name: a server that is killed meanwhile leaves no empty one behind, and of two
    // that start at once both have the same.
    let draft = path.with_extension(format!("{}.draft", std::process::id()));
    let named = |e: std::io::Error| format!("{}: {e}", path.display());
    let _ = std::fs::remove_file(&draft);
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft).map_err(named)?;
    let linked = file
        .write_all(fresh.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::hard_link(&draft, path));
    let _ = std::fs::remove_file(&draft);
    match linked {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(named(e).into()),
        _ => token(Some(path))?.ok_or_else(|| "the token file is empty".into()),
    }
}

/// A number of bytes with an optional K, M, G or T.
fn bytes(text: &str) -> Result<usize, String> {
    let bad = || format!("`{text}` is not a number of bytes such as 512M");
    let upper = text.trim().to_ascii_uppercase();
    let digits = upper.trim_end_matches(['B', 'I']).to_string();
    let (number, unit) = match digits.chars().last() {
        Some('K') => (&digits[..digits.len() - 1], 1usize << 10),
        Some('M') => (&digits[..digits.len() - 1], 1 << 20),
        Some('G') => (&digits[..digits.len() - 1], 1 << 30),
        Some('T') => (&digits[..digits.len() - 1], 1 << 40),
        _ => (&digits[..], 1),
    };
    number.parse::<usize>().ok().and_then(|n| n.checked_mul(unit)).ok_or_else(bad)
}

/// An event as a line of the log.
fn log(event: Event<'_>, json: bool) -> String {
    let (name, session, detail, peer) = match event {
        Event::Opened { session, program, peer } => ("opened", Some(session), program, peer),
        Event::Resumed { session, peer } => ("resumed", Some(session), "", peer),
        Event::Lost { session, reason } => ("lost", Some(session), reason, ""),
        Event::Ended { session, reason } => ("ended", Some(session), reason, ""),
        Event::Detour { session, reason } => ("detour", Some(session), reason, ""),
        Event::Refused { peer, reason } => ("refused", None, reason, peer),
        Event::Starved { reason } => ("starved", None, reason, ""),
        Event::Restarted { part } => ("restarted", None, part, ""),
        Event::LeftOut { lines } => {
            return match json {
                true => json!({ "event": "left out", "lines": lines }).to_string(),
                false => format!("left out: {lines} lines"),
            };
        }
        Event::Draining { sessions } => {
            return match json {
                true => json!({ "event": "draining", "sessions": sessions }).to_string(),
                false => format!("draining: {sessions} sessions"),
            };
        }
    };
    let session = session.map(|s| format!("{s:016x}"));
    match json {
        true => json!({ "event": name, "session": session, "detail": detail, "peer": peer }).to_string(),
        // What others wrote moves no cursor and begins no line.
        false => format!("{name} {} {peer} {detail}", session.unwrap_or_default())
            .replace(|c: char| c.is_control(), "?"),
    }
}
