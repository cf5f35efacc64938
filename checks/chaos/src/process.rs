//! The program `kiln` in processes of its own, which can be killed, stopped and looked at.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A running `kiln serve`.
pub struct Process {
    child: Child,
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

impl Process {
    /// Starts `kiln serve` on a port (0 for any) without a wait for clients' tokens: the token is `chaos`.
    pub fn serve(kiln: &Path, port: u16, args: &[&str]) -> Process {
        let mut command = Command::new(kiln);
        command.args(["serve", "--json", "--allow-peer", "127.0.0.1"]);
        command.args(["--listen", &format!("127.0.0.1:{port}")]).args(args);
        Process::start(command)
    }

    /// Starts a command that ends up as `kiln serve --json`; the token is `chaos`.
    pub fn start(mut command: Command) -> Process {
        command.env("KILN_TOKEN", "chaos").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let output = child.stdout.take().expect("it is piped");
        let mut lines = BufReader::new(output).lines();
        let first = lines.next().and_then(Result::ok).unwrap_or_default();
        let event: serde_json::Value = serde_json::from_str(&first).unwrap_or_default();
        let url = event["url"].as_str().unwrap_or_default();
        let place = url.trim_start_matches("kiln://").split(['?', '/']).next().unwrap_or_default();
        let address = place.parse().unwrap_or_else(|_| panic!("kiln serve said `{first}`"));
        // Read all the time: a full pipe would stop it.
        let log = Arc::new(Mutex::new(Vec::new()));
        let said = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                said.lock().unwrap_or_else(|e| e.into_inner()).push(line);
            }
        });
        Process { child, address, log }
    }

    /// What it has logged.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills it with SIGKILL.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal by name, such as STOP.
    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Waits for its end; whether it ended well. `None` if it did not end in time.
    pub fn ended(&mut self, limit: Duration) -> Option<bool> {
        let start = std::time::Instant::now();
        while start.elapsed() < limit {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status.success());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process.
pub fn signal(id: u32, name: &str) {
    let _ = Command::new("kill").args([format!("-{name}"), id.to_string()]).status();
}

/// What a process uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Resident bytes.
    pub memory: u64,
    /// Open files and sockets.
    pub files: usize,
    /// Threads.
    pub threads: usize,
}

/// What a process uses now, from /proc.
pub fn usage(id: u32) -> Usage {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|l| l.starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|v| v.parse::<u64>().ok()).unwrap_or(0)
    };
    let files = std::fs::read_dir(format!("/proc/{id}/fd")).map_or(0, |d| d.count());
    Usage { memory: field("VmRSS:") * 1024, files, threads: field("Threads:") as usize }
}

/// The program `kiln` beside the running one, where cargo puts it.
pub fn kiln() -> Option<PathBuf> {
    let here = std::env::current_exe().ok()?;
    let folder = here.parent()?;
    [folder, folder.parent()?].iter().map(|f| f.join("kiln")).find(|path| path.is_file())
}
