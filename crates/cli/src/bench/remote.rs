//! What a server costs: bytes up and down, tiny operations in a row, one tiny read. A server is started for it, as a
//! process of its own on this machine, and plain TCP between two threads is measured beside it.

use super::{Machine, Setup};
use kiln::device::Bytes;
use kiln::prelude::*;
use kiln::{Data, Meta};
use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A name and what measures it.
pub(super) type Row = (&'static str, fn(&Peer, f64) -> Result<Value, Box<dyn Error>>);

pub(super) const TABLE: &[Row] = &[
    ("remote/upload_256m", upload),
    ("remote/download_256m", download),
    ("remote/tiny_ops", tiny),
    ("remote/read_latency", latency),
    ("remote/train_gpt", train),
];

const SIZE: usize = 256 << 20;
/// Bytes that a plain copy passes to the system at a time.
const PIECE: usize = 256 << 10;

/// Measures these against a server, over TCP and over a Unix socket. True if one failed.
pub(super) fn run(rows: &[&Row], seconds: f64, json: bool) -> Result<bool, Box<dyn Error>> {
    let mut failed = false;
    for way in ["tcp", "unix"] {
        let peer = Peer::start(way)?;
        for (name, measure) in rows {
            let mut line = json!({ "name": name, "peer": "kiln", "over": way });
            match measure(&peer, seconds) {
                Ok(figures) => line.as_object_mut().into_iter().for_each(|line| {
                    line.extend(figures.as_object().cloned().unwrap_or_default());
                }),
                Err(error) => {
                    failed = true;
                    line["error"] = json!(error.to_string());
                }
            }
            match json {
                true => println!("{line}"),
                false => print(&line),
            }
        }
    }
    Ok(failed)
}

fn print(line: &Value) {
    let text = |key: &str| line[key].as_str().unwrap_or("").to_string();
    print!("{:<24} {:<6}", text("name"), text("over"));
    for (key, value) in line.as_object().into_iter().flatten() {
        if !matches!(key.as_str(), "name" | "peer" | "over") {
            print!(" {key} {value}");
        }
    }
    println!();
}

/// A server in a process of its own.
pub(super) struct Peer {
    child: Child,
    device: Device,
}

impl Peer {
    fn start(way: &str) -> Result<Peer, Box<dyn Error>> {
        let socket = socket();
        let listen = match way {
            "unix" => format!("unix:{}", socket.display()),
            _ => "127.0.0.1:0".to_string(),
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", "--json", "--listen", &listen]).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let out = child.stdout.take().ok_or("the server has no output")?;
        let mut lines = BufReader::new(out);
        let mut first = String::new();
        lines.read_line(&mut first)?;
        // Its log is read, lest it fill the pipe and stop.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        let url = serde_json::from_str::<Value>(&first)?["url"].as_str().unwrap_or("").to_string();
        Ok(Peer { child, device: Device::open(&url)? })
    }
}

/// Where a server of this process listens without TCP.
fn socket() -> PathBuf {
    std::env::temp_dir().join(format!("kiln-bench-{}.sock", std::process::id()))
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.device.close();
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(socket());
    }
}

fn upload(peer: &Peer, seconds: f64) -> Result<Value, Box<dyn Error>> {
    let meta = Meta::new(DType::U8, [SIZE]);
    let data = Data::new(meta, Bytes::new(noise()));
    let once = || -> Result<(), kiln::Error> {
        let x = Tensor::from_data(data.clone(), &peer.device);
        peer.device.sync()?;
        drop(x);
        peer.device.sync()
    };
    moved(peer, seconds, once, (0, SIZE))
}

fn download(peer: &Peer, seconds: f64) -> Result<Value, Box<dyn Error>> {
    let meta = Meta::new(DType::U8, [SIZE]);
    let x = Tensor::from_data(Data::new(meta, Bytes::new(noise())), &peer.device);
    peer.device.sync()?;
    let once = || x.to_data().map(drop);
    moved(peer, seconds, once, (SIZE, 0))
}

/// Bytes that no transport could guess.
fn noise() -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = vec![0; SIZE];
    for word in bytes.chunks_exact_mut(8) {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
    }
    bytes
}

/// Times moves of [`SIZE`] bytes in turn with plain copies; `held` is what client and server must hold in any case.
fn moved(
    peer: &Peer,
    seconds: f64,
    once: impl Fn() -> Result<(), kiln::Error>,
    held: (usize, usize),
) -> Result<Value, Box<dyn Error>> {
    let mut raw = Raw::start()?;
    let sides = [std::process::id(), peer.child.id()];
    once()?;
    raw.once()?;
    // What is kept for reuse would hide what is taken anew.
    peer.device.cleanup();
    let before = sides.map(|pid| memory(pid, "VmRSS:"));
    sides.iter().for_each(|pid| drop(std::fs::write(format!("/proc/{pid}/clear_refs"), "5")));
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while ours.len() < 5 || start.elapsed().as_secs_f64() < seconds {
        ours.push(timed(&once)?);
        plain.push(timed(|| raw.once())?);
    }
    let peaks = sides.map(|pid| memory(pid, "VmHWM:"));
    let extra = |side: usize, held: usize| {
        let grown = peaks[side].saturating_sub(before[side]) as f64 / (1 << 20) as f64;
        (grown - (held >> 20) as f64).max(0.0)
    };
    let (middle, plain_middle) = (median(&mut ours), median(&mut plain));
    // Sorted by now: the best of each is what the machine allows when it has nothing else to do.
    let (best, plain_best) = (ours[0], plain[0]);
    let rate = |time: Duration| super::rounded(SIZE as f64 / time.as_secs_f64() / 1e9);
    Ok(json!({
        "median_ms": super::rounded(middle.as_secs_f64() * 1e3), "gbs": rate(middle),
        "raw_tcp_gbs": rate(plain_middle), "best_gbs": rate(best), "best_raw_tcp_gbs": rate(plain_best),
        "of_raw": super::rounded(plain_middle.as_secs_f64() / middle.as_secs_f64()),
        "best_of_raw": super::rounded(plain_best.as_secs_f64() / best.as_secs_f64()), "calls": ours.len(),
        "client_extra_mib": super::rounded(extra(0, held.0)), "server_extra_mib": super::rounded(extra(1, held.1)),
    }))
}

fn timed<E>(f: impl FnOnce() -> Result<(), E>) -> Result<Duration, E> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// A line of a process's status, in bytes.
fn memory(pid: u32, key: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("0");
    line.split_ascii_whitespace().next().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0) << 10
}

/// A plain copy over TCP on this machine: one thread writes, another reads into memory of the same size.
struct Raw {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Raw {
    fn start() -> std::io::Result<Raw> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (mut far, _) = listener.accept()?;
        std::thread::spawn(move || {
            let mut buffer = vec![1; SIZE];
            let mut all = |far: &mut TcpStream| buffer.chunks_mut(PIECE).try_for_each(|p| far.read_exact(p));
            while all(&mut far).is_ok() && far.write_all(&[1]).is_ok() {}
        });
        stream.set_nodelay(true)?;
        Ok(Raw { stream, bytes: noise() })
    }

    fn once(&mut self) -> std::io::Result<()> {
        self.bytes.chunks(PIECE).try_for_each(|piece| self.stream.write_all(piece))?;
        self.stream.read_exact(&mut [0])
    }
}

/// Additions of 16 numbers, submitted a thousand at a time and waited for at the end.
fn tiny(peer: &Peer, seconds: f64) -> Result<Value, Box<dyn Error>> {
    let (x, y) = (Tensor::ones([16], &peer.device), Tensor::ones([16], &peer.device));
    let chain = || (0..1000).fold(x.clone(), |z, _| z + &y);
    drop(chain());
    peer.device.sync()?;
    let (mut count, start) = (0, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        for _ in 0..20 {
            drop(chain());
            peer.device.submit();
            count += 1000;
        }
    }
    peer.device.sync()?;
    let rate = count as f64 / start.elapsed().as_secs_f64();
    let end = chain().to_vec::<f32>()?;
    if end != [1001.0; 16] {
        return Err(format!("a chain of additions gave {end:?}").into());
    }
    Ok(json!({ "operations": count, "operations_per_second": rate.round() }))
}

/// Rounds of training, here and there in turn.
const ROUNDS: usize = 5;

/// Steps of `train/gpt` a second, waited for at the end of a round only, beside those on this process's own device.
fn train(peer: &Peer, seconds: f64) -> Result<Value, Box<dyn Error>> {
    let devices = [Device::cpu(), peer.device.clone()];
    let mut works = devices.each_ref().map(|device| {
        super::train::gpt_small(&Setup { device: device.clone(), machine: Machine::Host, scale: 1 })
    });
    let mut round = |side: usize, least: usize, seconds: f64| -> Result<f64, kiln::Error> {
        let (mut steps, start) = (0, Instant::now());
        while steps < least || start.elapsed().as_secs_f64() < seconds {
            drop((works[side].call)());
            steps += 1;
            // Not further ahead than a loop that looks at its loss now and then.
            if steps % 10 == 0 {
                devices[side].sync()?;
            }
        }
        devices[side].sync()?;
        Ok(steps as f64 / start.elapsed().as_secs_f64())
    };
    for side in [0, 1] {
        round(side, 10, 0.0)?;
    }
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (side, rates) in rates.iter_mut().enumerate() {
            rates.push(round(side, 10, seconds.max(0.5))?);
        }
    }
    let ratios: Vec<f64> = rates[1].iter().zip(&rates[0]).map(|(there, here)| there / here).collect();
    let middle = |rates: &[f64]| {
        let mut rates = rates.to_vec();
        rates.sort_by(f64::total_cmp);
        super::rounded(rates[rates.len() / 2])
    };
    Ok(json!({
        "steps_per_second": middle(&rates[1]), "local_steps_per_second": middle(&rates[0]),
        "of_local": middle(&ratios), "of_local_by_round": ratios.into_iter().map(super::rounded).collect::<Vec<_>>(),
    }))
}

/// Reading one number that is there.
fn latency(peer: &Peer, seconds: f64) -> Result<Value, Box<dyn Error>> {
    let x = Tensor::ones([1], &peer.device);
    x.to_vec::<f32>()?;
    let (mut times, start) = (Vec::new(), Instant::now());
    while times.len() < 100 || start.elapsed().as_secs_f64() < seconds && times.len() < 100_000 {
        times.push(timed(|| x.to_vec::<f32>().map(drop))?);
    }
    let middle = median(&mut times);
    let micros = |time: Duration| super::rounded(time.as_secs_f64() * 1e6);
    Ok(json!({
        "median_us": micros(middle), "min_us": micros(times[0]),
        "p99_us": micros(times[times.len() * 99 / 100]), "reads": times.len(),
    }))
}
