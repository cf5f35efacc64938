//! A server in this process, on a port of this machine.

use kiln_cpu::{Cpu, Reference};
use kiln_device::{Driver, Error};
use kiln_remote::client::Patience;
use kiln_remote::server::moves::Moves;
use kiln_remote::server::registry::{Config, Registry};
use kiln_remote::server::session::Quota;
use kiln_remote::server::{Event, Listen, Server};
use kiln_remote::transport::server_tls;
use kiln_remote::{Address, Remote};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// What a server is started with.
pub struct Options {
    /// The port; 0 for any.
    pub port: u16,
    /// A Unix socket too.
    pub unix: Option<PathBuf>,
    /// TLS with the certificate of [`tls`].
    pub tls: bool,
    /// What clients must know.
    pub token: Option<Vec<u8>>,
    /// What a session may hold.
    pub quota: Quota,
    /// The most sessions.
    pub most_sessions: usize,
    /// How long a session outlives its connection.
    pub lease: Duration,
    /// How often each side speaks at least.
    pub heartbeat: Duration,
    /// Threads that compute.
    pub workers: usize,
    /// Opens the device of a session.
    pub device: fn() -> Arc<dyn Driver>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            port: 0,
            unix: None,
            tls: false,
            token: None,
            quota: Quota::default(),
            most_sessions: 512,
            lease: Duration::from_secs(10),
            heartbeat: Duration::from_secs(2),
            workers: 2,
            device: || Arc::new(Cpu::start()),
        }
    }
}

/// A running server. Dropping it ends it at once, as a crash would: no drain, no goodbye.
pub struct Serving {
    /// The server itself.
    pub server: Arc<Server>,
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
    stop: Option<oneshot::Sender<Stop>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

enum Stop {
    Drain,
    Crash,
}

impl Serving {
    /// Starts a server.
    pub fn start(options: Options) -> Serving {
        let Options { port, unix, tls, token, quota, most_sessions, lease, heartbeat, workers, device } =
            options;
        let state = Mutex::new(crate::Random(entropy()));
        let registry = Registry::new(Config {
            token,
            quota,
            most_sessions,
            lease,
            heartbeat,
            offered: vec!["cpu".into(), "reference".into()],
            devices: Box::new(move |name| match name {
                "reference" => Some(Arc::new(Reference::start())),
                _ => Some(device()),
            }),
            random: Box::new(move |bytes| {
                let mut random = state.lock().unwrap_or_else(|e| e.into_inner());
                bytes.iter_mut().for_each(|b| *b = random.bits() as u8);
            }),
        })
        .with_moves(Moves::new("", vec!["127.0.0.1".into()]));
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = log.clone();
        let server = Server::new(registry, move |event: Event<'_>| {
            lines.lock().unwrap_or_else(|e| e.into_inner()).push(format!("{event:?}"));
        });
        let (stop, stopped) = oneshot::channel();
        let (bound, listening) = std::sync::mpsc::channel();
        let running = server.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async move {
                let tcp = vec![SocketAddr::from(([127, 0, 0, 1], port))];
                let tls = tls.then(|| {
                    let acceptor = server_tls(&self::tls("cert.pem"), &self::tls("key.pem"));
                    acceptor.expect("the test certificate is there")
                });
                let listen = Listen { tcp, unix: unix.into_iter().collect(), tls };
                let sockets = listen.bind().await.expect("a free port");
                let _ = bound.send(sockets.addresses()[0]);
                let (send, receive) = oneshot::channel();
                let draining = async {
                    match stopped.await {
                        Ok(Stop::Drain) => {}
                        Ok(Stop::Crash) | Err(_) => {
                            let _ = send.send(());
                            std::future::pending::<()>().await
                        }
                    }
                };
                // A crash leaves everything where it is; the runtime's end closes the sockets.
                tokio::select! {
                    () = running.run(sockets, workers, draining, Duration::from_secs(5)) => {}
                    Ok(()) = receive => {}
                }
            });
        });
        let address = listening.recv().expect("the server has started");
        Serving { server, address, log, stop: Some(stop), thread: Some(thread) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL that clients open.
    pub fn url(&self) -> String {
        format!("kiln://{}", self.address)
    }

    /// What it has logged.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        self.server.registry.list().len()
    }

    /// Waits until something is so, and says whether it came to that.
    pub fn until(&self, limit: Duration, what: impl Fn(&Serving) -> bool) -> bool {
        let start = Instant::now();
        while start.elapsed() < limit {
            if what(self) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        what(self)
    }

    /// Drains it, as on SIGTERM, and waits for its end.
    pub fn drain(mut self) {
        self.end(Stop::Drain);
    }

    fn end(&mut self, how: Stop) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(how);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for client in self.server.registry.list() {
            client.end();
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end(Stop::Crash);
    }
}

/// A file of the test server's certificates: `cert.pem`, `key.pem`, and `ca.pem` for clients.
pub fn tls(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tls").join(file)
}

/// Differs from start to start: incarnations and secrets must.
fn entropy() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 ^ (std::process::id() as u64) << 32
}

/// Opens a device at a URL; it gives up after `patience`, and beats as often as the server wants.
pub fn open(url: &str, patience: Duration) -> Result<Arc<Remote>, Error> {
    let patience = Patience { give_up: patience, heartbeat: Duration::from_secs(2) };
    Remote::open_with(Address::parse_all(url)?, patience).map(Arc::new)
}
