//! `kiln serve`: this machine as a device for others.

use kiln::remote::server::moves::Moves;
use kiln::remote::server::registry::{Config, Registry};
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
    /// The most bytes a session may hold, such as 8G.
    #[arg(long, value_parser = bytes)]
    quota: Option<usize>,
    /// The most sessions at once.
    #[arg(long, default_value_t = 256)]
    max_sessions: usize,
    /// Seconds that a session outlives a lost connection.
    #[arg(long, default_value_t = 60.0)]
    lease: f64,
    /// Hosts of other servers that this one may fetch tensors from, besides those on this machine: HOST, HOST:PORT
    /// or *; may be repeated.
    #[arg(long, value_name = "HOST")]
    allow_peer: Vec<String>,
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

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args))
}

async fn serve(args: Args) -> Result<ExitCode, Box<dyn Error>> {
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
    let allow = args.allow_peer.iter().map(|host| host.to_ascii_lowercase()).collect();
    let moves = Moves::new(args.advertise.clone().unwrap_or_default(), allow);
    for device in &args.device {
        open(device)
            .ok_or_else(|| format!("there is no device `{device}`: known are cpu, cpu:N and reference"))?;
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(transport::server_tls(cert, key)?),
        _ => None,
    };
    let scheme = if tls.is_some() { "kilns" } else { "kiln" };
    let registry = Registry::new(Config {
        token: Some(token),
        quota: Quota { bytes: args.quota.unwrap_or(usize::MAX), ..Quota::default() },
        most_sessions: args.max_sessions,
        lease: Duration::try_from_secs_f64(args.lease)?,
        heartbeat: Duration::from_secs(5),
        offered: args.device.clone(),
        devices: Box::new(open),
        // Without randomness there are no secrets, and so no server.
        random: Box::new(|bytes| getrandom::fill(bytes).expect("the system gives random bytes")),
    })
    .with_moves(moves);
    let json = args.json;
    let server = Server::new(registry, move |event| log(event, json));
    let bound = Listen { tcp, unix: unix.clone(), tls }.bind().await?;
    let option = token_file.map(|path| format!("?token-file={}", path.display())).unwrap_or_default();
    let urls: Vec<String> = (bound.addresses().iter().map(|a| format!("{scheme}://{a}{option}")))
        .chain(unix.iter().map(|path| format!("unix:{}", path.display())))
        .collect();
    for url in &urls {
        match json {
            true => println!("{}", json!({ "event": "listening", "url": url })),
            false => println!("serving {} at {url}", args.device.join(", ")),
        }
    }
    std::io::stdout().flush()?;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let workers = args.workers.unwrap_or(cores.max(2));
    server.run(bound, workers, stopped(), Duration::from_secs(10)).await;
    Ok(ExitCode::SUCCESS)
}

/// Ready when the process is asked to stop.
async fn stopped() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        _ => std::future::pending().await,
    }
}

fn open(device: &str) -> Option<Arc<dyn kiln::device::Device>> {
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
        None => std::env::var("KILN_TOKEN").unwrap_or_default(),
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
    use std::os::unix::fs::OpenOptionsExt;
    if path.exists() {
        return token(Some(path))?.ok_or_else(|| "the token file is empty".into());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
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

fn log(event: Event<'_>, json: bool) {
    let (name, session, detail, peer) = match event {
        Event::Opened { session, program, peer } => ("opened", Some(session), program, peer),
        Event::Resumed { session, peer } => ("resumed", Some(session), "", peer),
        Event::Lost { session, reason } => ("lost", Some(session), reason, ""),
        Event::Ended { session, reason } => ("ended", Some(session), reason, ""),
        Event::Refused { peer, reason } => ("refused", None, reason, peer),
        Event::Starved { reason } => ("starved", None, reason, ""),
        Event::Draining { sessions } => {
            return match json {
                true => println!("{}", json!({ "event": "draining", "sessions": sessions })),
                false => eprintln!("draining: {sessions} sessions"),
            };
        }
    };
    let session = session.map(|s| format!("{s:016x}"));
    match json {
        true => println!("{}", json!({ "event": name, "session": session, "detail": detail, "peer": peer })),
        false => eprintln!("{name} {} {peer} {detail}", session.unwrap_or_default()),
    }
}
