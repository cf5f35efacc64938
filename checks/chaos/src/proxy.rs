//! A proxy that knows where frames begin. It forwards between client and server, and does to the bytes what it is told
//! to, at the byte or the frame it is told to. It counts what it did: a fault that never happened proves nothing.

use kiln_remote::protocol::frame::HEAD;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// From client to server.
    Up,
    /// From server to client.
    Down,
}

/// Where a fault happens. Bytes and frames are counted over all connections of the proxy, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    /// Before this byte of the direction is forwarded.
    Byte(u64),
    /// Before the n-th frame of a kind is forwarded.
    Before(u8, u64),
    /// After the n-th frame of a kind was forwarded.
    After(u8, u64),
}

/// What happens there.
pub enum What {
    /// The connection ends, both ways.
    Cut,
    /// A bit of the next byte is flipped.
    Flip(u8),
    /// The connection stays open and nothing passes any more.
    Stall,
    /// Something of the test's own, such as killing the server.
    Call(Box<dyn FnOnce() + Send>),
}

/// A fault, which happens once.
pub struct Fault {
    /// In which direction it is looked for.
    pub way: Way,
    /// Where.
    pub at: At,
    /// What.
    pub what: What,
}

/// What a proxy has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Connections accepted.
    pub connections: u64,
    /// Faults that happened, by sort.
    pub cuts: u64,
    /// See `cuts`.
    pub flips: u64,
    /// See `cuts`.
    pub stalls: u64,
    /// See `cuts`.
    pub calls: u64,
    /// Bytes forwarded up and down.
    pub bytes: [u64; 2],
    /// Frames that began, up and down, by kind.
    pub frames: [Vec<u64>; 2],
}

/// The proxy. Dropping it ends all connections.
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    upstream: Mutex<SocketAddr>,
    state: Mutex<State>,
    /// Nanoseconds that a byte takes each way.
    delay: AtomicU64,
    /// Bytes forwarded at a time, and the pause after them in microseconds; 0 for as they come.
    trickle: [AtomicU64; 2],
    refusing: AtomicBool,
    over: AtomicBool,
}

struct State {
    faults: Vec<Fault>,
    counts: Counts,
    connections: Vec<Arc<Connection>>,
}

struct Connection {
    client: TcpStream,
    server: TcpStream,
    stalled: AtomicBool,
    over: AtomicBool,
}

impl Connection {
    fn cut(&self) {
        self.over.store(true, Ordering::Release);
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

impl Proxy {
    /// A proxy before `upstream`, on a port of its own.
    pub fn start(upstream: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on this machine");
        let address = listener.local_addr().expect("a bound socket has an address");
        let counts = Counts {
            connections: 0,
            cuts: 0,
            flips: 0,
            stalls: 0,
            calls: 0,
            bytes: [0; 2],
            frames: [vec![0; 256], vec![0; 256]],
        };
        let shared = Arc::new(Shared {
            upstream: Mutex::new(upstream),
            state: Mutex::new(State { faults: Vec::new(), counts, connections: Vec::new() }),
            delay: AtomicU64::new(0),
            trickle: [AtomicU64::new(0), AtomicU64::new(0)],
            refusing: AtomicBool::new(false),
            over: AtomicBool::new(false),
        });
        let serving = shared.clone();
        std::thread::spawn(move || accept(&serving, &listener));
        Proxy { shared, address }
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL that clients open, with these options behind it.
    pub fn url(&self, options: &str) -> String {
        format!("kiln://{}{options}", self.address)
    }

    /// Arms a fault.
    pub fn arm(&self, way: Way, at: At, what: What) {
        self.shared.state().faults.push(Fault { way, at, what });
    }

    /// Disarms what has not happened.
    pub fn disarm(&self) {
        self.shared.state().faults.clear();
    }

    /// How long a byte takes each way, from now on.
    pub fn delay(&self, each_way: Duration) {
        self.shared.delay.store(each_way.as_nanos() as u64, Ordering::Release);
    }

    /// Forwards `bytes` at a time with a pause after them, from now on; 0 as they come.
    pub fn trickle(&self, bytes: u64, pause: Duration) {
        self.shared.trickle[1].store(pause.as_micros() as u64, Ordering::Release);
        self.shared.trickle[0].store(bytes, Ordering::Release);
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refusing.store(refuse, Ordering::Release);
    }

    /// Ends all connections now.
    pub fn cut_all(&self) {
        self.shared.state().connections.iter().for_each(|c| c.cut());
    }

    /// Where new connections go from now on.
    pub fn redirect(&self, upstream: SocketAddr) {
        *self.shared.upstream.lock().unwrap_or_else(|e| e.into_inner()) = upstream;
    }

    /// What it has done.
    pub fn counts(&self) -> Counts {
        self.shared.state().counts.clone()
    }

    /// Faults that are armed and have not happened.
    pub fn armed(&self) -> usize {
        self.shared.state().faults.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        self.cut_all();
        // Lets the accepting thread see that it is over.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    for client in listener.incoming() {
        if shared.over.load(Ordering::Acquire) {
            return;
        }
        let Ok(client) = client else { continue };
        if shared.refusing.load(Ordering::Acquire) {
            continue;
        }
        let upstream = *shared.upstream.lock().unwrap_or_else(|e| e.into_inner());
        let Ok(server) = TcpStream::connect(upstream) else { continue };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let (stalled, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let connection = Arc::new(Connection { client, server, stalled, over });
        {
            let mut state = shared.state();
            state.counts.connections += 1;
            state.connections.retain(|c| !c.over.load(Ordering::Acquire));
            state.connections.push(connection.clone());
        }
        for way in [Way::Up, Way::Down] {
            let (shared, connection) = (shared.clone(), connection.clone());
            std::thread::spawn(move || direction(&shared, &connection, way));
        }
    }
}

/// Reads in one thread and forwards in another, so that a delay delays and does not slow down.
fn direction(shared: &Arc<Shared>, connection: &Arc<Connection>, way: Way) {
    let (send, receive) = sync_channel::<(Instant, Vec<u8>)>(1024);
    let forwarding = {
        let (shared, connection) = (shared.clone(), connection.clone());
        std::thread::spawn(move || {
            forward(&shared, &connection, way, receive);
            connection.cut();
        })
    };
    let mut from = match way {
        Way::Up => &connection.client,
        Way::Down => &connection.server,
    };
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut buffer) {
        let delay = Duration::from_nanos(shared.delay.load(Ordering::Acquire));
        if n == 0 || send.send((Instant::now() + delay, buffer[..n].to_vec())).is_err() {
            break;
        }
    }
    drop(send);
    let _ = forwarding.join();
}

/// Where in its frames a direction is.
#[derive(Default)]
struct Position {
    held: Vec<u8>,
    /// Bytes left of the frame that is being forwarded, and its kind.
    left: usize,
    kind: u8,
    nth: u64,
    /// What comes is no frames: a browser, or noise.
    plain: bool,
}

fn forward(shared: &Shared, connection: &Connection, way: Way, from: Receiver<(Instant, Vec<u8>)>) {
    let mut place = Position::default();
    for (due, bytes) in from {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        place.held.extend_from_slice(&bytes);
        loop {
            while connection.stalled.load(Ordering::Acquire) {
                if connection.over.load(Ordering::Acquire) || shared.over.load(Ordering::Acquire) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            match stretch(shared, connection, way, &mut place) {
                Some(0) => break,
                Some(_) => {}
                None => return,
            }
        }
    }
    // What was held back because it is no whole head.
    let _ = write(shared, connection, way, &place.held);
}

/// Forwards up to the next place where something may happen. `None` if the connection ends.
fn stretch(shared: &Shared, connection: &Connection, way: Way, place: &mut Position) -> Option<usize> {
    if place.held.is_empty() {
        return Some(0);
    }
    if place.left == 0 && !place.plain {
        // What is encrypted, and what a browser says, has no frames to see.
        let plain = |held: &[u8]| match held {
            [b'G', b'E', b'T', b' ', ..] | [b'H', b'T', b'T', b'P', ..] => true,
            [0x16, 3, 1..=3, ..] => place.nth == 0,
            _ => false,
        };
        if place.held.len() >= 4 && plain(&place.held) {
            place.plain = true;
        } else if place.held.len() < HEAD {
            return Some(0);
        } else {
            let len = u32::from_le_bytes([place.held[0], place.held[1], place.held[2], place.held[3]]);
            place.kind = place.held[16];
            place.nth = {
                let mut state = shared.state();
                let count = &mut state.counts.frames[way as usize][place.kind as usize];
                *count += 1;
                *count
            };
            let at = At::Before(place.kind, place.nth);
            if !happen(shared, connection, way, at, &mut place.held) {
                return None;
            }
            if connection.stalled.load(Ordering::Acquire) {
                // Counted again when it goes on, which it never does.
                return Some(1);
            }
            place.left = HEAD + len as usize;
        }
    }
    let sent = shared.state().counts.bytes[way as usize];
    let mut most = place.held.len();
    if !place.plain {
        most = most.min(place.left);
    }
    // Up to the next byte that something happens at.
    let next = {
        let state = shared.state();
        let bytes = state.faults.iter().filter(|f| f.way == way).filter_map(|f| match f.at {
            At::Byte(n) => Some(n.max(sent + 1)),
            At::Before(..) | At::After(..) => None,
        });
        bytes.min()
    };
    if let Some(next) = next {
        most = most.min((next - 1 - sent) as usize);
        if most == 0 {
            if !happen(shared, connection, way, At::Byte(next), &mut place.held) {
                return None;
            }
            return Some(1);
        }
    }
    let out: Vec<u8> = place.held.drain(..most).collect();
    if !write(shared, connection, way, &out) {
        return None;
    }
    if !place.plain {
        place.left -= most;
        if place.left == 0 {
            let at = At::After(place.kind, place.nth);
            if !happen(shared, connection, way, at, &mut place.held) {
                return None;
            }
        }
    }
    Some(most)
}

/// Does what is armed for this place. False if the connection ends by it.
fn happen(shared: &Shared, connection: &Connection, way: Way, at: At, next: &mut [u8]) -> bool {
    let due = |f: &Fault| {
        f.way == way
            && match (f.at, at) {
                (At::Byte(want), At::Byte(now)) => want <= now,
                (want, now) => want == now,
            }
    };
    loop {
        let fault = {
            let mut state = shared.state();
            let Some(found) = state.faults.iter().position(due) else { return true };
            let fault = state.faults.swap_remove(found);
            let counts = &mut state.counts;
            *match fault.what {
                What::Cut => &mut counts.cuts,
                What::Flip(_) => &mut counts.flips,
                What::Stall => &mut counts.stalls,
                What::Call(_) => &mut counts.calls,
            } += 1;
            fault
        };
        match fault.what {
            What::Cut => {
                connection.cut();
                return false;
            }
            What::Flip(bit) => {
                if let Some(byte) = next.first_mut() {
                    *byte ^= 1 << (bit % 8);
                }
            }
            What::Stall => {
                connection.stalled.store(true, Ordering::Release);
                return true;
            }
            What::Call(f) => f(),
        }
    }
}

fn write(shared: &Shared, connection: &Connection, way: Way, bytes: &[u8]) -> bool {
    let mut to = match way {
        Way::Up => &connection.server,
        Way::Down => &connection.client,
    };
    let [size, pause] = &shared.trickle;
    let mut bytes = bytes;
    while !bytes.is_empty() {
        let most = match size.load(Ordering::Acquire) {
            0 => bytes.len(),
            n => bytes.len().min(n as usize),
        };
        if to.write_all(&bytes[..most]).is_err() {
            return false;
        }
        shared.state().counts.bytes[way as usize] += most as u64;
        bytes = &bytes[most..];
        if most < bytes.len() || size.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_micros(pause.load(Ordering::Acquire)));
        }
    }
    true
}
