//! The program `kiln` as people run it: commands and what they say, folders, servers that can be killed.
#![allow(dead_code)]

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Machines on which tests run are busy: nothing that is expected is waited for less long.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn kiln(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.args(args).env("KILN_TOKEN", "proofs").stdin(Stdio::null());
    command
}

/// What a command that ended has said.
pub struct Said {
    pub well: bool,
    pub text: String,
    pub errors: String,
}

pub fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said { well: output.status.success(), text: text(&output.stdout), errors: text(&output.stderr) }
}

impl Said {
    /// The last line, as an object.
    pub fn last(&self) -> Value {
        assert!(self.well, "{}{}", self.text, self.errors);
        serde_json::from_str(self.text.lines().last().unwrap_or_default())
            .unwrap_or_else(|e| panic!("{e}: {}{}", self.text, self.errors))
    }

    /// The digest that a training with `--digest --json` ends with.
    pub fn digest(&self) -> String {
        let last = self.last();
        let digest = last["digest"].as_str().unwrap_or_else(|| panic!("no digest: {last}"));
        assert_eq!(digest.len(), 64);
        digest.to_string()
    }
}

/// Waits until something is so.
pub fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A new folder, gone afterwards.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Relaxed);
        let path = std::env::temp_dir().join(format!("kiln-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    pub fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// The names in it, in order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `kiln serve` in a process of its own; it ends with this value.
pub struct Server {
    child: Child,
    args: Vec<String>,
    /// Where it listens, in order.
    pub urls: Vec<String>,
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// On any port of this machine.
    pub fn new() -> Server {
        Server::start(&["--listen", "127.0.0.1:0"])
    }

    /// Each of `args` that is `--listen` gives an address.
    pub fn start(args: &[&str]) -> Server {
        let mut command = kiln(&["serve", "--json"]);
        let mut child =
            command.args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("kiln serve");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let count = args.iter().filter(|arg| **arg == "--listen").count();
        let urls: Vec<String> = lines
            .by_ref()
            .filter_map(|line| serde_json::from_str::<Value>(&line).ok()?["url"].as_str().map(String::from))
            .take(count)
            .collect();
        assert_eq!(urls.len(), count, "kiln serve {args:?} did not start");
        let log = Arc::new(Mutex::new(Vec::new()));
        let said = log.clone();
        std::thread::spawn(move || lines.for_each(|line| said.lock().unwrap().push(line)));
        Server { child, args: args.iter().map(|arg| arg.to_string()).collect(), urls, log }
    }

    pub fn url(&self) -> &str {
        &self.urls[0]
    }

    /// HOST:PORT of the first address.
    pub fn place(&self) -> &str {
        self.url().split("://").nth(1).unwrap().split(['?', '/']).next().unwrap()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How many lines of its log have this.
    pub fn times(&self, text: &str) -> usize {
        self.log.lock().unwrap().iter().filter(|line| line.contains(text)).count()
    }

    /// Kills it with all that it holds, and starts another at the same place.
    pub fn replace(&mut self) {
        self.end();
        let place = self.place().to_string();
        let args: Vec<&str> =
            self.args.iter().map(|arg| if arg == "127.0.0.1:0" { place.as_str() } else { arg }).collect();
        *self = Server::start(&args);
    }

    /// Kills it.
    pub fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// A running training that reports in JSON lines; killed with this value.
pub struct Training {
    child: Child,
    pub lines: Box<dyn Iterator<Item = Value>>,
}

impl Training {
    pub fn start(command: &mut Command) -> Training {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let lines = lines.map(|line| serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}")));
        Training { child, lines: Box::new(lines) }
    }

    /// Waits for the report of a step.
    pub fn reaches(&mut self, step: u64) {
        let mut steps = self.lines.by_ref().filter_map(|line| line["step"].as_u64());
        assert!(steps.any(|done| done >= step), "the training ended before step {step}");
    }

    /// Whether it goes on.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// The digest at its end.
    pub fn digest(mut self) -> String {
        let last = self.lines.by_ref().last().expect("a last line");
        assert!(self.child.wait().unwrap().success());
        last["digest"].as_str().expect("a digest").to_string()
    }
}

impl Drop for Training {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes that a process has started.
pub fn children(of: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

pub fn kill(process: u32) {
    assert!(Command::new("kill").args(["-9", &process.to_string()]).status().unwrap().success());
}

/// Whether a process has ended, waited for or not.
pub fn is_gone(process: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    state.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.trim_start().starts_with('Z'))
}

/// A text of a few thousand characters that can be learnt from.
pub fn text(folder: &Folder) -> PathBuf {
    let path = folder.0.join("text");
    let line = |i: usize| format!("{} kilns fire {} pots, and {} of them are blue.\n", i % 7, i % 11, i % 5);
    std::fs::write(&path, (0..120).map(line).collect::<String>()).unwrap();
    path
}

/// A folder of this crate.
pub fn beside(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
