//! `kiln demo`: two compute servers, training across both, one of them killed half-way, and the same bits at the end.

use serde_json::{Value, json};
use std::error::Error;
use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Steps of training.
    #[arg(long, default_value_t = 600)]
    steps: u64,
    /// Only the outcome, as a JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let say = |text: &str| {
        if !args.json {
            println!("{text}");
        }
    };
    let start = Instant::now();
    let folder = Folder::new()?;
    say("starting two compute servers on this machine");
    let mut servers = [Server::start(&folder.0.join("a.sock"))?, Server::start(&folder.0.join("b.sock"))?];
    for server in &servers {
        say(&format!("  unix:{} (process {})", server.socket.display(), server.child.id()));
    }
    say(&format!("training the digits across both, {} steps, undisturbed", args.steps));
    let quiet = train(&servers, args.steps, |_| Ok(()))?;
    say(&format!("  digest of the parameters: {quiet}"));
    say("training again; half-way the second server is killed");
    let mut killed = None;
    let [_, victim] = &mut servers;
    let socket = victim.socket.clone();
    let disturbed = {
        let addresses = [folder.0.join("a.sock"), socket];
        train_at(&addresses, args.steps, |step| {
            if step >= args.steps / 2 && killed.is_none() {
                let process = victim.child.id();
                victim.child.kill()?;
                victim.child.wait()?;
                say(&format!("  step {step}: process {process} was killed, with all its tensors"));
                std::thread::sleep(Duration::from_millis(300));
                *victim = Server::start(&victim.socket.clone())?;
                say(&format!("  a new server starts as process {}; training goes on", victim.child.id()));
                killed = Some(step);
            }
            Ok(())
        })?
    };
    say(&format!("  digest of the parameters: {disturbed}"));
    let same = quiet == disturbed;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let line = json!({
            "same": same, "digest": quiet, "disturbed": disturbed, "killed_at": killed, "seconds": seconds,
        });
        println!("{line}");
    }
    say(match same {
        true => "the same bits: what the server lost was computed again from the client's record of it",
        false => "the digests differ: this is a bug",
    });
    say(&format!("{seconds:.1} s in all"));
    Ok(if same && killed.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A folder that is gone afterwards.
struct Folder(PathBuf);

impl Folder {
    /// One that nobody else can have prepared, and nobody else can look into.
    fn new() -> Result<Folder, Box<dyn Error>> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| format!("no random bytes: {e}"))?;
        Ok(Folder(fresh(&std::env::temp_dir(), u64::from_ne_bytes(random))?))
    }
}

/// Makes a private folder in `parent`, which must not be there yet in any form: whoever made it could look into it.
fn fresh(parent: &Path, number: u64) -> Result<PathBuf, String> {
    let path = parent.join(format!("kiln-demo-{number:016x}"));
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => Ok(path),
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server in a process of its own, ended with this value.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(socket: &Path) -> Result<Server, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", "--json", "--listen"])
            .arg(format!("unix:{}", socket.display()))
            // Tensors go from one to the other without a detour.
            .args(["a.sock", "b.sock"].iter().flat_map(|peer| {
                ["--allow-peer".into(), format!("unix:{}", socket.with_file_name(peer).display())]
            }))
            .env("KILN_TOKEN", "demo")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        let first = lines.next().ok_or("the server did not start")??;
        if !first.contains("listening") {
            return Err(format!("the server did not start: {first}").into());
        }
        // Its further words are read and dropped, lest it wait for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Server { child, socket: socket.into() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn train(
    servers: &[Server; 2],
    steps: u64,
    each: impl FnMut(u64) -> Result<(), Box<dyn Error>>,
) -> Result<String, Box<dyn Error>> {
    train_at(&servers.each_ref().map(|s| s.socket.clone()), steps, each)
}

/// Trains across the servers at these sockets; `each` is called with the step at every report. Gives the digest.
fn train_at(
    sockets: &[PathBuf; 2],
    steps: u64,
    mut each: impl FnMut(u64) -> Result<(), Box<dyn Error>>,
) -> Result<String, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["train", "digits", "--digest", "--json", "--steps", &steps.to_string()]);
    for socket in sockets {
        command.arg("--device").arg(format!("unix:{}", socket.display()));
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
    let lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let mut digest = None;
    for line in lines {
        let line: Value = serde_json::from_str(&line?)?;
        if let Some(step) = line["step"].as_u64() {
            each(step)?;
        }
        digest = line["digest"].as_str().map(String::from).or(digest);
    }
    let status = child.wait()?;
    if !status.success() {
        return Err(format!("training ended with {status}").into());
    }
    digest.ok_or_else(|| "training gave no digest".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_folder_that_somebody_has_prepared_is_refused() {
        let parent = std::env::temp_dir().join(format!("kiln-demo-folder-{}", std::process::id()));
        std::fs::create_dir_all(&parent).unwrap();
        let made = fresh(&parent, 1).unwrap();
        assert_eq!(std::fs::metadata(&made).unwrap().permissions().mode() & 0o777, 0o700);
        // It is there; or it leads elsewhere.
        symlink(&made, parent.join("kiln-demo-0000000000000002")).unwrap();
        for number in [1, 2] {
            let refused = fresh(&parent, number).unwrap_err();
            assert!(refused.contains("kiln-demo-"), "{refused}");
        }
        std::fs::remove_dir_all(&parent).unwrap();
    }
}
