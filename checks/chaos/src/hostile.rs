//! Hostile clients of every class against a server in a process of its own: it stays up, answers those who ask for its
//! health, and keeps its memory within its bounds.
//!
//! Attackers are processes that yield to all others, so that what is measured is the server and not the lack of cores.

use crate::scenarios::{Outcome, Setup, connect};
use kiln_chaos::fuzz::grammar;
use kiln_chaos::process::usage;
use kiln_chaos::program::stream;
use kiln_chaos::{Process, Random, Raw, hello};
use kiln_cpu::Cpu;
use kiln_device::{Error, Place};
use kiln_ir::text::parse_op;
use kiln_ir::{DType, Id, Item, Meta, Node};
use kiln_remote::protocol::frame::control;
use kiln_remote::protocol::greeting::Purpose;
use kiln_remote::protocol::message::{Capability, Message, kind};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// What a session may hold, and by how much more it may raise the process; by how much all strangers together may.
const QUOTA: u64 = 64 * MIB;
const MORE: u64 = 128 * MIB;
const STRANGERS: u64 = 64 * MIB;
/// What all sessions may hold where all classes come at once.
const MEMORY: u64 = 512 * MIB;
/// How long each class goes on.
const STRETCH: Duration = Duration::from_secs(4);
/// How long a right token may take beside strangers.
const SOON: Duration = Duration::from_secs(1);
/// Median and worst time of an answer about health.
const MEDIAN: Duration = Duration::from_millis(50);
const WORST: Duration = Duration::from_millis(500);
const GRACE: u64 = 3;

/// One way to harm a server.
struct Class {
    name: &'static str,
    /// How many at once.
    count: usize,
    /// They have the token.
    client: bool,
    /// One try: a connection's life.
    run: fn(SocketAddr, &mut Random) -> Option<()>,
}

const fn clients(name: &'static str, count: usize, run: fn(SocketAddr, &mut Random) -> Option<()>) -> Class {
    Class { name, count, client: true, run }
}

const fn strangers(
    name: &'static str,
    count: usize,
    run: fn(SocketAddr, &mut Random) -> Option<()>,
) -> Class {
    Class { name, count, client: false, run }
}

const CLASSES: [Class; 16] = [
    clients("programs", 1, programs),
    clients("many-programs", 4, programs),
    clients("endless-tasks", 1, endless_tasks),
    clients("pings", 1, pings),
    clients("reads", 1, reads),
    clients("recalls", 1, recalls),
    clients("poison", 1, poison),
    clients("exposures", 1, exposures),
    clients("uploads", 1, uploads),
    clients("templates", 1, templates),
    clients("small-values", 1, small_values),
    strangers("silent", 200, silent),
    strangers("wrong-tokens", 16, wrong_tokens),
    strangers("endless-hellos", 64, endless_hellos),
    strangers("endless-heads", 64, endless_heads),
    strangers("web-sockets", 64, web_sockets),
];

impl Class {
    /// By how much it may raise the server's memory.
    fn bound(&self) -> u64 {
        if self.client { self.count as u64 * (QUOTA + MORE) } else { STRANGERS }
    }
}

/// Attacks until standard input ends, then prints how often it tried.
pub fn attack(class: &str, address: SocketAddr, seed: u64) -> bool {
    static TRIES: AtomicU64 = AtomicU64::new(0);
    let Some(class) = CLASSES.iter().find(|c| c.name == class) else { return false };
    for i in 0..class.count as u64 {
        let mut random = Random(seed ^ i << 32);
        std::thread::spawn(move || {
            loop {
                TRIES.fetch_add(1, Ordering::Relaxed);
                let outcome = (class.run)(address, &mut random);
                if class.client {
                    // What a session held that was ended is given back before the next one comes: each is counted alone.
                    std::thread::sleep(Duration::from_millis(150));
                } else if outcome.is_none() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        });
    }
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    println!("{}", TRIES.load(Ordering::Relaxed));
    true
}

fn connected(address: SocketAddr) -> Option<Raw> {
    let stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
    let raw = Raw::over(stream);
    let timeout = Some(Duration::from_millis(500));
    raw.stream.set_write_timeout(timeout).ok()?;
    raw.stream.set_read_timeout(timeout).ok()?;
    Some(raw)
}

fn session(address: SocketAddr) -> Option<Raw> {
    let mut raw = connected(address)?;
    raw.greet(&hello(b"chaos", Purpose::Open { device: String::new() })).ok()?;
    Some(raw)
}

/// Says goodbye: what is left of the session would count as another's beside the next one.
fn bye(mut raw: Raw) -> Option<()> {
    raw.bytes(&control(kind::BYE, &[])).then_some(())
}

fn upload(raw: &mut Raw, id: u64, bytes: usize) -> Option<()> {
    let meta = Meta::new(DType::U8, [bytes]);
    let place = Place::Reuse;
    raw.send(&Message::Upload { transfer: id, id: Id(id), meta, place }).then_some(())?;
    let piece = vec![7u8; 256 << 10];
    for at in (0..bytes).step_by(piece.len()) {
        raw.send(&Message::Piece { of: id, bytes: &piece[..piece.len().min(bytes - at)] }).then_some(())?;
    }
    Some(())
}

fn run(op: &str, ins: &[Id], out: u64) -> Item {
    Item::Run(Node::new(parse_op(op).expect("a known operation"), ins, &[Id(out)]))
}

fn capability(i: u64) -> Capability {
    std::array::from_fn(|k| i.to_le_bytes()[k % 8] ^ k as u8)
}

/// Programs of any operation with hostile extents, names and transfers.
fn programs(address: SocketAddr, random: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    for (kind, payload) in grammar::client(random.bits()) {
        raw.send_kind(kind, &payload).then_some(())?;
    }
    while raw.answer().is_some_and(|(kind, _)| kind != kind::DONE && kind != kind::ENDED) {}
    bye(raw)
}

/// Products without end, called again and again.
fn endless_tasks(address: SocketAddr, _: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    let items = |first: u64| -> Vec<Item> {
        let mut items = vec![run("full shape=[1536,1536] value=f32:0.5", &[], first)];
        for id in first + 1..first + 500 {
            items.push(run("dot transpose=false", &[Id(first), Id(id - 1)], id));
            if id > first + 1 {
                items.push(Item::Free(Id(id - 1)));
            }
        }
        items.extend([Item::Free(Id(first)), Item::Free(Id(first + 499))]);
        items
    };
    for template in 0..64 {
        raw.define(template, &items(1 + 500 * template)).then_some(())?;
    }
    raw.frame();
    std::thread::sleep(Duration::from_secs(1));
    bye(raw)
}

/// More pings than anybody answers, and no answer read.
fn pings(address: SocketAddr, _: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    let (kind, body) = Message::Ping(1).encode();
    let many = control(kind, &body.fields).repeat(10_000);
    while raw.bytes(&many) {}
    Some(())
}

/// Values asked for again and again, and none read.
fn reads(address: SocketAddr, random: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    upload(&mut raw, 1, 4 << random.below(22))?;
    (0..100_000).all(|request| raw.send(&Message::Read { request, id: Id(1), background: request % 2 == 0 }));
    bye(raw)
}

fn recalls(address: SocketAddr, _: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    upload(&mut raw, 1, 4 << 20)?;
    let capability = capability(raw.stream.local_addr().ok()?.port() as u64);
    raw.send(&Message::Expose { id: Id(1), capability, fetches: u64::MAX, milliseconds: 3_600_000 });
    (0..100_000).all(|request| raw.send(&Message::Recall { request, capability }));
    bye(raw)
}

/// Errors with long texts.
fn poison(address: SocketAddr, _: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    let message = "long ".repeat(100_000);
    (1..10_000)
        .all(|id| raw.send(&Message::Poison { id: Id(id), error: Error::Peer { message: message.clone() } }));
    bye(raw)
}

/// Everything exposed, to nobody.
fn exposures(address: SocketAddr, random: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    (1..20_000).all(|id| {
        let capability = capability(random.bits());
        raw.send(&Message::Expose { id: Id(id), capability, fetches: u64::MAX, milliseconds: u64::MAX })
    });
    bye(raw)
}

/// Transfers that are announced and never whole, and pieces of what was never announced.
fn uploads(address: SocketAddr, random: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    let piece = vec![7u8; 256 << 10];
    (1..5_000u64).all(|id| {
        let meta = Meta::new(DType::U8, [1 << (10 + random.below(30))]);
        let (transfer, place) = (id, Place::Persistent);
        raw.send(&Message::Upload { transfer, id: Id(id), meta, place })
            && raw.send(&Message::Piece { of: id + random.below(2), bytes: &piece })
    });
    bye(raw)
}

/// Batches that are all new, and kept.
fn templates(address: SocketAddr, random: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    upload(&mut raw, 1, 1 << 10)?;
    (0..10_000).all(|template| {
        let mut items = Vec::new();
        for i in 0..200 {
            let id = 2 + 200 * template + i;
            let at = random.below(1000);
            let slice = format!("slice axis=0 start={at} end={} step=1", at + 1 + random.below(24));
            items.extend([run(&slice, &[Id(1)], id), Item::Free(Id(id))]);
        }
        raw.define(template, &items)
    });
    bye(raw)
}

/// As many values as fit.
fn small_values(address: SocketAddr, _: &mut Random) -> Option<()> {
    let mut raw = session(address)?;
    (0..10_000).all(|template| {
        let first = 1 + 4096 * template;
        let items: Vec<Item> =
            (first..first + 4096).map(|id| run("full shape=[] value=f32:1.0", &[], id)).collect();
        raw.define(template, &items)
    });
    bye(raw)
}

/// Says nothing until it is closed.
fn silent(address: SocketAddr, _: &mut Random) -> Option<()> {
    let mut raw = connected(address)?;
    raw.stream.set_read_timeout(None).ok()?;
    raw.stream.read(&mut [0]).ok().map(drop)
}

fn wrong_tokens(address: SocketAddr, random: &mut Random) -> Option<()> {
    let mut raw = connected(address)?;
    raw.stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let token = random.bits().to_le_bytes();
    raw.greet(&hello(&token, Purpose::Open { device: String::new() })).ok().map(drop)
}

/// Sends this again and again until it is closed.
fn endless(mut raw: Raw, begin: &[u8], again: &[u8]) -> Option<()> {
    raw.bytes(begin).then_some(())?;
    while raw.bytes(again) {}
    Some(())
}

fn endless_hellos(address: SocketAddr, _: &mut Random) -> Option<()> {
    // The longest payload that a frame may have, and no right sum.
    let mut head = control(kind::HELLO, &[]);
    head[..4].copy_from_slice(&(1u32 << 20).to_le_bytes());
    endless(connected(address)?, &head, &[1; 8 << 10])
}

fn endless_heads(address: SocketAddr, _: &mut Random) -> Option<()> {
    endless(connected(address)?, b"GET /healthz HTTP/1.1\r\n", &b"X-More: and more\r\n".repeat(100))
}

fn web_sockets(address: SocketAddr, _: &mut Random) -> Option<()> {
    let upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
        Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    // The first part of a message, then parts that are never its last; all with a mask of zeros.
    let part = |head: u8| [&[head, 0x80 | 126, 0x10, 0, 0, 0, 0, 0][..], &[0; 4096]].concat();
    endless(connected(address)?, &[&upgrade[..], &part(0x02)].concat(), &part(0x00))
}

/// Attackers of a class; dropped, they end.
struct Attackers(Child);

impl Attackers {
    fn start(class: &Class, address: SocketAddr, seed: u64) -> Result<Attackers, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(program).args(["attack", "--class", class.name]);
        command.args(["--address", &address.to_string(), "--seed", &seed.to_string()]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        child.map(Attackers).map_err(|e| e.to_string())
    }

    /// Ends them: how often they tried.
    fn end(mut self) -> u64 {
        drop(self.0.stdin.take());
        let mut text = String::new();
        let _ = self.0.stdout.take().map(|mut out| out.read_to_string(&mut text));
        text.trim().parse().unwrap_or(0)
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What was seen of a server.
#[derive(Default)]
struct Seen {
    /// The most resident bytes.
    memory: u64,
    /// How long answers about its health took, sorted.
    times: Vec<Duration>,
    unanswered: usize,
}

impl Seen {
    fn median(&self) -> Duration {
        self.times.get(self.times.len() / 2).copied().unwrap_or(Duration::MAX)
    }

    fn worst(&self) -> Duration {
        self.times.last().copied().unwrap_or(Duration::MAX)
    }

    fn check(&self, what: &str, grown: u64, bound: u64) -> Result<(), String> {
        let (median, worst) = (self.median(), self.worst());
        if self.unanswered > 0 {
            return Err(format!("{what}: {} questions about its health were not answered", self.unanswered));
        }
        if median > MEDIAN || worst > WORST {
            return Err(format!("{what}: its health took {median:.1?}, {worst:.1?} at worst"));
        }
        if grown > bound {
            return Err(format!("{what}: it grew by {} MiB, {} are allowed", grown / MIB, bound / MIB));
        }
        Ok(())
    }
}

/// Looks at a server until it is told to end.
struct Watcher {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Watcher {
    fn start(server: &Process) -> Watcher {
        let over = Arc::new(AtomicBool::new(false));
        let (ends, id, address) = (over.clone(), server.id(), server.address());
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !ends.load(Ordering::Acquire) {
                let start = Instant::now();
                match healthy(address) {
                    Some(()) => seen.times.push(start.elapsed()),
                    None => seen.unanswered += 1,
                }
                for _ in 0..10 {
                    seen.memory = seen.memory.max(usage(id).memory);
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            seen.times.sort();
            seen
        });
        Watcher { over, thread }
    }

    fn end(self) -> Result<Seen, String> {
        self.over.store(true, Ordering::Release);
        self.thread.join().map_err(|_| "the watcher panicked".to_string())
    }
}

fn healthy(address: SocketAddr) -> Option<()> {
    let patience = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.ends_with("ok\n").then_some(())
}

fn serve(setup: &Setup, more: &[&str]) -> Process {
    let quota = QUOTA.to_string();
    let grace = GRACE.to_string();
    Process::serve(&setup.kiln, 0, &[&["--quota", &quota, "--grace", &grace], more].concat())
}

/// Somebody else's program, which gets its bits.
fn honest(setup: &Setup, server: &Process) -> Result<Duration, String> {
    let start = Instant::now();
    let remote = connect(setup, server)?;
    let took = start.elapsed();
    let right = stream(&*remote, setup.seed, 60) == stream(&Cpu::start(), setup.seed, 60);
    if right { Ok(took) } else { Err("an honest client got other bits".into()) }
}

/// One class: by how much the server grew, and what was seen.
fn one(setup: &Setup, class: &Class) -> Result<(u64, String, Seen), String> {
    let server = serve(setup, &[]);
    honest(setup, &server)?;
    let before = usage(server.id()).memory;
    let watcher = Watcher::start(&server);
    let attackers = Attackers::start(class, server.address(), setup.seed)?;
    std::thread::sleep(STRETCH / 2);
    if !class.client {
        for _ in 0..4 {
            let took = honest(setup, &server)?;
            if took > SOON {
                return Err(format!("a right token waited for {took:.1?}"));
            }
        }
    }
    std::thread::sleep(STRETCH / 2);
    let tries = attackers.end();
    let seen = watcher.end()?;
    honest(setup, &server)?;
    if tries == 0 {
        return Err("nobody attacked".into());
    }
    let count = |event: &str| server.log().iter().filter(|line| line.contains(event)).count();
    let (opened, refused) = (count("\"event\":\"opened\""), count("\"event\":\"refused\""));
    // Honest ones open sessions too: twice for clients, and while strangers are there.
    if class.client && opened <= 2 {
        return Err("no attacker got a session".into());
    }
    let did = format!("{tries} tries, {opened} sessions, {refused} refused");
    Ok((seen.memory.saturating_sub(before), did, seen))
}

pub fn hostile(setup: &Setup) -> Outcome {
    let mut told = Vec::new();
    let (mut median, mut worst) = (Duration::ZERO, Duration::ZERO);
    for class in &CLASSES {
        let (grown, did, seen) = one(setup, class).map_err(|e| format!("{}: {e}", class.name))?;
        println!(
            "  {}: {did}, {} MiB more, health {:.2?}, {:.1?} at worst",
            class.name,
            grown / MIB,
            seen.median(),
            seen.worst()
        );
        seen.check(class.name, grown, class.bound())?;
        (median, worst) = (median.max(seen.median()), worst.max(seen.worst()));
        told.push(format!("{} {}", class.name, grown / MIB));
    }
    // All at once, then the end: its grace begins when somebody asks for it.
    let mut server = serve(setup, &["--memory", &MEMORY.to_string()]);
    honest(setup, &server)?;
    let before = usage(server.id()).memory;
    let watcher = Watcher::start(&server);
    let attackers: Result<Vec<_>, _> =
        CLASSES.iter().map(|class| Attackers::start(class, server.address(), setup.seed)).collect();
    let attackers = attackers?;
    std::thread::sleep(3 * STRETCH);
    let seen = watcher.end()?;
    let grown = seen.memory.saturating_sub(before);
    let start = Instant::now();
    server.signal("TERM");
    let ended = server.ended(Duration::from_secs(GRACE + 1));
    let end = start.elapsed();
    drop(attackers);
    seen.check("all at once", grown, MEMORY + MORE + STRANGERS)?;
    if ended.is_none() {
        return Err(format!("it did not end within {} s of SIGTERM", GRACE + 1));
    }
    Ok(format!(
        "MiB more: {}; health {median:.2?}, {worst:.1?} at worst; all at once {} MiB, health {:.2?}, {:.1?} at worst, \
         ended {end:.1?} after SIGTERM",
        told.join(", "),
        grown / MIB,
        seen.median(),
        seen.worst(),
    ))
}
