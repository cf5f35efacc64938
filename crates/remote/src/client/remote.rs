//! The device at the other end: a session kept alive by a task on the IO thread.

use super::core::{Config, Core, Stats, Step};
use super::moves::{Errand, Move, Reach, Source};
use crate::address::Address;
use crate::protocol::frame::Decoder;
use crate::protocol::message::{Capability, Query, Refusal, decode_memory};
use crate::transport::{self, Gather, Stream};
use kiln_device::{Batch, Data, Device, DeviceInfo, Error, Keep, Memory, Pending, Place, Promise, pending};
use kiln_ir::{Id, Meta, Op};
use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Notify;

/// Bytes that may wait to be sent before the recording thread has to wait too.
const MOST_QUEUED: u64 = 32 << 20;
/// Tasks that may wait to be executed.
const MOST_UNEXECUTED: u64 = 4096;
/// How long an acknowledgement may wait for company.
const ACK_DELAY: Duration = Duration::from_millis(5);
/// The longest that connecting and being welcomed may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long closing may take.
const CLOSE: Duration = Duration::from_millis(500);
/// How long a value stays exposed for a server that does not come.
const EXPOSED: Duration = Duration::from_secs(30);

/// How a client behaves towards lost servers.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long a lost server is tried before the device fails.
    pub give_up: Duration,
    /// How often a silent connection is asked for a sign of life; after three it is taken for dead.
    pub heartbeat: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { give_up: Duration::from_secs(60), heartbeat: Duration::from_secs(2) }
    }
}

/// A device whose work is done by a server.
pub struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    core: Mutex<Core>,
    addresses: Vec<Address>,
    patience: Patience,
    /// There is something to send.
    wake: Notify,
    /// There is room, or news.
    room: Condvar,
    closed: AtomicBool,
    /// Nothing keeps the session connected any more.
    ended: AtomicBool,
    /// How other servers reach this one. Its lock is the last: nothing else is locked under it.
    reach: Mutex<Reach>,
    this: Weak<Shared>,
}

/// The thread that does all IO and never computes.
pub(crate) fn io() -> &'static tokio::runtime::Handle {
    static IO: LazyLock<tokio::runtime::Handle> = LazyLock::new(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap_or_else(|e| panic!("no IO on this system: {e}"));
        let handle = runtime.handle().clone();
        let thread = std::thread::Builder::new().name("kiln-io".into());
        thread
            .spawn(move || runtime.block_on(std::future::pending::<()>()))
            .unwrap_or_else(|e| panic!("the IO thread cannot be started: {e}"));
        handle
    });
    &IO
}

impl Remote {
    /// Opens a session with the first of these servers that takes one; the others stand in for it.
    pub fn open(addresses: Vec<Address>) -> Result<Remote, Error> {
        Remote::open_with(addresses, Patience::default())
    }

    /// Like [`Remote::open`], with other limits.
    pub fn open_with(addresses: Vec<Address>, patience: Patience) -> Result<Remote, Error> {
        let first = addresses
            .first()
            .ok_or_else(|| Error::Address { address: String::new(), reason: "it names no server".into() })?;
        let number = |name: &str, default: usize| {
            std::env::var(name).ok().and_then(|v| v.trim().parse().ok()).unwrap_or(default)
        };
        let config = Config {
            peer: addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(","),
            device: first.device.clone(),
            token: first.token()?,
            program: program(),
            recover: !first.options.no_recovery,
            compress: first.options.compress,
            most_lineage: number("KILN_LINEAGE", 4 << 30),
            replay_micros: 1_000_000,
            replay_bytes: 256 << 20,
            any_numerics: std::env::var("KILN_ANY_NUMERICS").is_ok_and(|v| v == "1"),
        };
        let shared = Arc::new_cyclic(|this| Shared {
            core: Mutex::new(Core::new(config)),
            addresses,
            patience,
            wake: Notify::new(),
            room: Condvar::new(),
            closed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            reach: Mutex::default(),
            this: this.clone(),
        });
        let driven = shared.clone();
        io().spawn(async move {
            drive(driven.clone()).await;
            driven.ended.store(true, Ordering::Release);
            driven.room.notify_all();
        });
        let mut core = shared.lock();
        loop {
            if let Some(error) = core.failure() {
                return Err(error.clone());
            }
            if core.info().is_some() {
                break;
            }
            core = shared.room.wait(core).unwrap_or_else(|e| e.into_inner());
        }
        drop(core);
        Ok(Remote { shared })
    }

    /// What the session has seen: bytes, replies, recoveries.
    pub fn stats(&self) -> Stats {
        self.shared.lock().stats()
    }

    /// What happened since this was last asked, in words.
    pub fn events(&self) -> Vec<String> {
        self.shared.lock().events()
    }

    fn ask<T>(&self, f: impl FnOnce(&mut Core, Promise<T>)) -> Pending<T> {
        let (promise, answer) = pending(None);
        f(&mut self.shared.lock(), promise);
        self.shared.settle();
        answer
    }

    fn query(&self, query: Query) -> Result<Memory, Error> {
        let content = self.ask(|core, promise| core.query(query, promise)).wait()?;
        decode_memory(&content).map_err(|e| Error::Peer { message: e.to_string() })
    }
}

fn program() -> String {
    let name = std::env::args().next().unwrap_or_default();
    let name = std::path::Path::new(&name).file_name().map(|n| n.to_string_lossy().into_owned());
    format!("{}[{}]", name.unwrap_or_default(), std::process::id())
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.wake.notify_one();
    }
}

impl Device for Remote {
    fn info(&self) -> DeviceInfo {
        let core = self.shared.lock();
        let info = core.info().cloned().unwrap_or_else(|| unreachable!("a session was opened"));
        DeviceInfo { name: format!("remote<{}>", info.name), ..info }
    }

    fn submit(&self, batch: Batch) {
        self.shared.lock().submit(batch);
        self.shared.settle();
        self.shared.hold();
    }

    fn write(&self, id: Id, data: Data, place: Place) {
        self.shared.lock().write(id, data, place);
        self.shared.settle();
        self.shared.hold();
    }

    fn read(&self, id: Id) -> Pending<Data> {
        self.ask(|core, promise| core.read(id, promise))
    }

    fn sync(&self) -> Pending<()> {
        self.ask(|core, promise| core.sync(promise))
    }

    fn supports(&self, op: &Op, _: &[Meta]) -> bool {
        self.shared.lock().knows(op)
    }

    fn memory(&self) -> Memory {
        self.query(Query::Memory).unwrap_or_default()
    }

    fn cleanup(&self) {
        super::pool::cleanup();
        let _ = self.query(Query::Cleanup);
    }

    fn failures(&self) -> Vec<Error> {
        self.shared.lock().failures()
    }

    fn limit(&self, bytes: Option<usize>) {
        let _ = self.query(Query::Limit(bytes.map(|b| b as u64)));
    }

    fn fetch(&self, id: Id, meta: Meta, place: Place, source: &dyn Device, from: Id, keep: Keep) -> bool {
        let Some(source) = source.any().and_then(|device| device.downcast_ref::<Remote>()) else {
            return false;
        };
        let mut capability = [0; 32];
        if getrandom::fill(&mut capability).is_err() {
            return false;
        }
        let source = Arc::new(Held { shared: source.shared.clone(), id: from });
        source.expose(capability);
        let moved = Move { id, meta, place, capability, source, keep };
        self.shared.lock().fetch(Arc::new(moved));
        self.shared.settle();
        self.shared.hold();
        true
    }

    fn events(&self) -> Vec<String> {
        Remote::events(self)
    }

    fn any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.wake.notify_one();
        let open = |_: &mut Core| !self.shared.ended.load(Ordering::Acquire);
        let core = self.shared.lock();
        drop(self.shared.room.wait_timeout_while(core, CLOSE, open).unwrap_or_else(|e| e.into_inner()));
        self.shared.fail(Error::Stopped);
    }
}

/// A value on a server.
struct Held {
    shared: Arc<Shared>,
    id: Id,
}

impl Source for Held {
    fn reach(&self) -> Reach {
        self.shared.reach.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    fn expose(&self, capability: Capability) {
        self.shared.lock().expose(self.id, capability, 1, EXPOSED.as_millis() as u64);
        self.shared.settle();
    }

    fn recall(&self, capability: Capability) -> Pending<Data> {
        let (promise, answer) = pending(None);
        self.shared.lock().recall(capability, promise);
        self.shared.settle();
        answer
    }
}

/// Passes the bytes of a transfer on through the client. What is not exposed (any more) is exposed once again.
fn pass(target: Arc<Shared>, transfer: u64, moved: Arc<Move>, again: bool) {
    let source = moved.source.clone();
    source.recall(moved.capability).on_answer(move |answer| match answer {
        // The value itself failed: there is nothing to try again.
        Err(error) if again && !matches!(error, Error::Failed { .. }) => {
            moved.source.expose(moved.capability);
            pass(target, transfer, moved, false);
        }
        answer => {
            target.lock().supply(transfer, answer);
            target.settle();
        }
    });
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Hands answers over and gets the IO thread going.
    fn settle(&self) {
        let (answers, errands, settled) = {
            let mut core = self.lock();
            (core.answers(), core.errands(), core.settled())
        };
        self.wake.notify_one();
        drop(settled);
        answers.into_iter().for_each(|answer| answer.give());
        for errand in errands {
            match (errand, self.this.upgrade()) {
                (Errand::Expose(moved), _) => moved.source.expose(moved.capability),
                (Errand::Pass(transfer, moved), Some(this)) => pass(this, transfer, moved, true),
                (Errand::Pass(..), None) => {}
            }
        }
    }

    /// Waits while too much is under way.
    fn hold(&self) {
        let busy = |core: &mut Core| core.queued_bytes() > MOST_QUEUED || core.unexecuted() > MOST_UNEXECUTED;
        drop(self.room.wait_while(self.lock(), busy).unwrap_or_else(|e| e.into_inner()));
    }

    fn fail(&self, error: Error) {
        self.lock().fail(error);
        self.settle();
        self.room.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Why a connection ended.
enum End {
    /// The device was dropped.
    Closed,
    /// It broke, or the server went away: another is tried.
    Broken(String),
    /// The session is not there any more: a new one is opened.
    Forgotten,
    /// The server asks to go elsewhere.
    Leaving,
    /// No other attempt would do better.
    Final(Error),
}

/// Keeps the session connected until the device is dropped or fails.
async fn drive(shared: Arc<Shared>) {
    let mut at = 0;
    let mut elsewhere = false;
    let mut lost: Option<Instant> = None;
    let mut attempts = 0u32;
    loop {
        let mut welcomed = false;
        let end = connection(&shared, &shared.addresses[at], elsewhere, &mut welcomed).await;
        shared.lock().disconnected();
        if welcomed {
            (lost, attempts, elsewhere) = (None, 0, false);
        }
        match end {
            End::Closed => return,
            End::Final(error) => return shared.fail(error),
            End::Forgotten => {
                elsewhere = true;
                continue;
            }
            _ if shared.is_closed() || shared.lock().failure().is_some() => {
                // The server's last word was that it is over: whoever waits is told.
                shared.settle();
                shared.room.notify_all();
                return;
            }
            End::Leaving => {
                at = (at + 1) % shared.addresses.len();
                elsewhere = true;
            }
            End::Broken(reason) => {
                let since = *lost.get_or_insert_with(Instant::now);
                // Nobody waits for a server that was never there.
                let patience =
                    if shared.lock().info().is_some() { shared.patience.give_up } else { Duration::ZERO };
                attempts += 1;
                let tried_all = attempts as usize >= shared.addresses.len();
                if since.elapsed() >= patience && tried_all {
                    let peer = shared.addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(",");
                    return shared.fail(Error::Disconnected { peer, reason });
                }
                // The same server first; when it does not answer, the next.
                let gone = attempts >= 2 || shared.lock().info().is_none();
                if gone && shared.addresses.len() > 1 {
                    at = (at + 1) % shared.addresses.len();
                    elsewhere = true;
                }
                let pause = Duration::from_millis(10 << attempts.min(6));
                tokio::time::sleep(pause.min(Duration::from_millis(500))).await;
            }
        }
    }
}

/// One connection, from the first byte to its end.
async fn connection(shared: &Shared, address: &Address, elsewhere: bool, welcomed: &mut bool) -> End {
    let broken = |e: io::Error| End::Broken(e.to_string());
    let shake = async {
        let stream = transport::connect(address).await?;
        let (mut reader, mut writer) = tokio::io::split(stream);
        let hello = shared.lock().hello(elsewhere);
        writer.write_all(&hello).await?;
        writer.flush().await?;
        let mut decoder = Decoder::default();
        loop {
            let step = {
                let frame = decoder.next().map_err(io::Error::other)?;
                frame.map(|frame| shared.lock().receive(&frame)).transpose().map_err(io::Error::other)?
            };
            if let Some(step) = step {
                return Ok((reader, writer, decoder, step));
            }
            read(&mut reader, &mut decoder).await?;
        }
    };
    let (reader, writer, decoder, step) = match tokio::time::timeout(HANDSHAKE, shake).await {
        Err(_) => return End::Broken(format!("no answer within {HANDSHAKE:?}")),
        Ok(Err(e)) => return broken(e),
        Ok(Ok(parts)) => parts,
    };
    match step {
        Step::Refused(Refusal::Session | Refusal::Fenced) => return End::Forgotten,
        Step::Refused(refusal @ (Refusal::Full(_) | Refusal::Draining)) => {
            return End::Broken(refusal.to_string());
        }
        Step::Refused(refusal) => {
            let (peer, reason) = (address.to_string(), refusal.to_string());
            return End::Final(Error::Refused { peer, reason });
        }
        Step::Leave => return End::Leaving,
        Step::Going | Step::Opened(_) => {}
    }
    *welcomed = true;
    let mut reach = shared.lock().reach();
    if reach.url.is_empty() {
        reach.url = Address { device: String::new(), ..address.clone() }.to_string();
    }
    *shared.reach.lock().unwrap_or_else(|e| e.into_inner()) = reach;
    shared.settle();
    shared.room.notify_all();
    let heard = Mutex::new(Instant::now());
    tokio::select! {
        end = receive(shared, reader, decoder, &heard) => end,
        end = send(shared, writer) => end,
        end = watch(shared, &heard) => end,
    }
}

async fn read(reader: &mut ReadHalf<Stream>, decoder: &mut Decoder) -> io::Result<()> {
    match reader.read(decoder.next_room()).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => {
            decoder.filled(n);
            Ok(())
        }
    }
}

async fn receive(
    shared: &Shared,
    mut reader: ReadHalf<Stream>,
    mut decoder: Decoder,
    heard: &Mutex<Instant>,
) -> End {
    loop {
        loop {
            let step = match decoder.next() {
                Ok(Some(frame)) => shared.lock().receive(&frame),
                Ok(None) => break,
                Err(e) => Err(e),
            };
            match step {
                Ok(Step::Going) => {}
                // With nowhere else to go, it stays for its answers.
                Ok(Step::Leave) if shared.addresses.len() == 1 && shared.lock().failure().is_none() => {}
                Ok(Step::Leave) => return End::Leaving,
                Ok(_) => return End::Broken("the server greets twice".into()),
                Err(e) => return End::Broken(e.to_string()),
            }
        }
        shared.settle();
        shared.room.notify_all();
        if let Err(e) = read(&mut reader, &mut decoder).await {
            return End::Broken(e.to_string());
        }
        *heard.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
    }
}

async fn send(shared: &Shared, mut writer: WriteHalf<Stream>) -> End {
    let mut gather = Gather::default();
    let mut soon = false;
    loop {
        if shared.is_closed() {
            let _ = writer.write_all(&Core::bye()).await;
            let _ = writer.shutdown().await;
            return End::Closed;
        }
        let owes = {
            let mut core = shared.lock();
            core.controls(soon, gather.controls());
            while gather.has_room()
                && let Some(out) = core.next()
            {
                gather.push(out);
            }
            core.owes()
        };
        if gather.is_empty() {
            // An acknowledgement waits a little for others.
            let woken = shared.wake.notified();
            if owes {
                soon = tokio::time::timeout(ACK_DELAY, woken).await.is_err();
            } else {
                woken.await;
            }
            continue;
        }
        soon = false;
        if let Err(e) = gather.write(&mut writer).await {
            return End::Broken(e.to_string());
        }
    }
}

/// Asks a silent server for a sign of life.
async fn watch(shared: &Shared, heard: &Mutex<Instant>) -> End {
    let wanted = shared.lock().heartbeat();
    let beat = wanted.map_or(shared.patience.heartbeat, |wanted| wanted.min(shared.patience.heartbeat));
    loop {
        tokio::time::sleep(beat).await;
        let silent = heard.lock().unwrap_or_else(|e| e.into_inner()).elapsed();
        if silent > 3 * beat {
            return End::Broken(format!("it has been silent for {silent:.1?}"));
        }
        shared.lock().ping();
        shared.wake.notify_one();
    }
}
