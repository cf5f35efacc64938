//! The device at the other end: a session kept alive by a task on the IO thread.

use super::core::{Config, Core, Login, News, Stats};
use super::drive::drive;
use super::exit;
use super::faults::Faults;
use super::known::Known;
use super::moves::{Errand, Move, MoveSource, RECALLS, Reach, recalls_left};
use super::spill;
use crate::address::Address;
use crate::protocol::message::{Capability, Query, decode_memory, decode_spans};
use kiln_device::{
    Batch, Control, Data, DeviceInfo, Driver, Error, Fetch, Locality, Memory, Observe, Peer, Pending, Place,
    Promise, Spans, pending,
};
use kiln_ir::{Id, Meta, Op};
use std::any::Any;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, Weak};
use std::time::Duration;
use tokio::sync::Notify;

/// Bytes that may wait to be sent before the recording thread has to wait too.
const MOST_QUEUED: u64 = 32 << 20;
/// Tasks that may wait to be executed.
const MOST_UNEXECUTED: u64 = 4096;
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

/// A server that may have the session, and what it is told.
pub(super) struct Server {
    pub address: Address,
    pub login: Login,
}

/// What the device and the task that keeps it connected share.
pub(super) struct Shared {
    core: Mutex<Core>,
    pub servers: Vec<Server>,
    pub patience: Patience,
    /// There is something to send.
    pub wake: Notify,
    /// Less waits to be sent or executed, or there is news.
    pub changed: Condvar,
    closed: AtomicBool,
    /// The server has the client's ear now.
    connected: AtomicBool,
    /// Which server has, or had, the session.
    home: AtomicUsize,
    /// Nothing keeps the session connected any more.
    ended: AtomicBool,
    /// How other servers reach this one. Its lock is the last: nothing else is locked under it.
    pub reach: Mutex<Reach>,
    faults: Arc<Faults>,
    /// What the server knows.
    known: Arc<Known>,
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
        if addresses.is_empty() {
            return Err(Error::Address { address: String::new(), reason: "it names no server".into() });
        }
        // All are looked at now: what stands in for a lost server must not turn out to be wrong only then.
        let server = |address: Address| {
            let (device, token) = (address.device.clone(), address.token()?);
            let (recover, compress) = (!address.options.no_recovery, address.options.compress);
            Ok(Server { address, login: Login { device, token, recover, compress } })
        };
        let servers = addresses.into_iter().map(server).collect::<Result<Vec<_>, Error>>()?;
        let lineage = kiln_env::LINEAGE.read()?.unwrap_or(4 << 30);
        let config = Config {
            peer: peer(&servers),
            program: program(),
            most_lineage: lineage,
            most_snapshot: kiln_env::SNAPSHOT.read()?.unwrap_or(lineage / 4),
            most_stored: kiln_env::LINEAGE_FILES.read()?.unwrap_or(64 << 30),
            replay_micros: 1_000_000,
            replay_bytes: (256 << 20).min(lineage / 4),
            any_numerics: kiln_env::ANY_NUMERICS.read()?.unwrap_or(false),
        };
        let core = Core::new(config);
        let shared = Arc::new_cyclic(|this| Shared {
            faults: core.faults(),
            known: core.known(),
            core: Mutex::new(core),
            servers,
            patience,
            wake: Notify::new(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            connected: AtomicBool::new(false),
            home: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            reach: Mutex::default(),
            this: this.clone(),
        });
        exit::remember(&shared);
        let driven = shared.clone();
        io().spawn(async move {
            drive(driven.clone()).await;
            driven.ended.store(true, Ordering::Release);
            driven.changed.notify_all();
        });
        let mut core = shared.lock();
        loop {
            if let Some(error) = core.failure() {
                return Err(error.clone());
            }
            if core.info().is_some() {
                break;
            }
            core = shared.changed.wait(core).unwrap_or_else(|e| e.into_inner());
        }
        drop(core);
        Ok(Remote { shared })
    }

    /// What the session has seen: bytes, replies, recoveries.
    pub fn stats(&self) -> Stats {
        self.shared.lock().stats()
    }

    /// Begins a snapshot of all live values now, instead of when enough has happened since the last one. It is taken in
    /// the background; the statistics count it when it is complete.
    pub fn snapshot(&self) {
        self.shared.lock().snapshot();
        self.shared.settle();
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

/// The servers as errors name them.
fn peer(servers: &[Server]) -> String {
    servers.iter().map(|server| server.address.to_string()).collect::<Vec<_>>().join(",")
}

fn program() -> String {
    let name = std::env::args().next().unwrap_or_default();
    let name = std::path::Path::new(&name).file_name().map(|n| n.to_string_lossy().into_owned());
    format!("{}[{}]", name.unwrap_or_default(), std::process::id())
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Driver for Remote {
    fn info(&self) -> DeviceInfo {
        let core = self.shared.lock();
        let info = core.info().cloned().unwrap_or_else(|| unreachable!("a session was opened"));
        DeviceInfo {
            name: format!("remote<{}>", info.name),
            locality: Locality::Server(core.peer().to_string()),
            asynchronous: true,
            supports_all: false,
            places_outputs: false,
            peers: Some("kiln servers"),
            ..info
        }
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
        self.ask(|core, promise| core.read(id, None, promise))
    }

    fn read_as(&self, id: Id, meta: Meta) -> Pending<Data> {
        self.ask(|core, promise| core.read(id, Some(meta), promise))
    }

    fn sync(&self) -> Pending<()> {
        self.ask(|core, promise| core.sync(promise))
    }

    fn memory(&self) -> Memory {
        self.query(Query::Memory).unwrap_or_default()
    }

    fn supports(&self, op: &Op, _: &[Meta]) -> bool {
        self.shared.known.has(op)
    }

    fn peer(&self) -> Option<&dyn Peer> {
        Some(self)
    }

    fn observe(&self) -> Option<&dyn Observe> {
        Some(self)
    }

    fn control(&self) -> Option<&dyn Control> {
        Some(self)
    }

    fn any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl Peer for Remote {
    fn fetch(&self, fetch: Fetch<'_>) -> bool {
        let Fetch { id, meta, place, source, from, keep } = fetch;
        let Some(source) = source.any().and_then(|device| device.downcast_ref::<Remote>()) else {
            return false;
        };
        let mut capability = [0; 32];
        if getrandom::fill(&mut capability).is_err() {
            return false;
        }
        let source = Arc::new(RemoteValue { shared: source.shared.clone(), id: from });
        source.expose(capability);
        let moved = Move { id, meta, place, capability, source, keep };
        self.shared.lock().fetch(Arc::new(moved));
        self.shared.settle();
        self.shared.hold();
        true
    }
}

impl Observe for Remote {
    fn failures(&self) -> Vec<Error> {
        self.shared.lock().failures()
    }

    fn events(&self) -> Vec<String> {
        self.shared.lock().events()
    }

    fn trace(&self, on: bool) -> Result<(), Error> {
        self.ask(|core, promise| core.trace(on, promise)).wait().map(drop)
    }

    fn spans(&self, _: usize) -> Pending<Spans> {
        self.ask(Core::spans)
            .answered(|content| decode_spans(&content?).map_err(|e| Error::Peer { message: e.to_string() }))
    }

    fn is_idle(&self) -> bool {
        let core = self.shared.lock();
        core.unexecuted() == 0 && core.queued_bytes() == 0
    }
}

impl Control for Remote {
    fn limit(&self, bytes: Option<usize>) {
        let _ = self.query(Query::Limit(bytes.map(|b| b as u64)));
    }

    fn cleanup(&self) {
        super::pool::cleanup();
        let _ = self.query(Query::Cleanup);
    }

    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn close(&self) {
        self.shared.close();
        let open = |_: &mut Core| !self.shared.is_over();
        let core = self.shared.lock();
        drop(self.shared.changed.wait_timeout_while(core, CLOSE, open).unwrap_or_else(|e| e.into_inner()));
        self.shared.fail(Error::Closed { device: self.shared.peer() });
    }

    fn stop(&self) {
        self.close();
    }

    fn ended(&self) -> Option<Error> {
        let closed = || self.shared.is_closed().then(|| Error::Closed { device: self.shared.peer() });
        self.shared.lock().failure().cloned().or_else(closed)
    }
}

/// A value on a server.
struct RemoteValue {
    shared: Arc<Shared>,
    id: Id,
}

impl MoveSource for RemoteValue {
    fn reach(&self) -> Reach {
        self.shared.reach.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    fn faults(&self) -> Arc<Faults> {
        self.shared.faults.clone()
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

/// Passes the bytes of a transfer on through the client. The value is exposed once more, because its server may be
/// another by now, and nobody there knows of it.
fn pass(target: Arc<Shared>, transfer: u64, moved: Arc<Move>, tries: u32) {
    let source = moved.source.clone();
    source.expose(moved.capability);
    source.recall(moved.capability).on_answer(move |answer| match answer {
        Err(error) if recalls_left(&error, tries) > 0 => {
            pass(target, transfer, moved, recalls_left(&error, tries));
        }
        answer => {
            target.lock().supply(transfer, answer);
            target.settle();
        }
    });
}

/// Writes values to a file on a thread of its own: disks take their time.
fn keep(shared: Arc<Shared>, values: Vec<(Id, Data)>) {
    let told = shared.clone();
    let write = move || {
        let outcome = spill::store(&values);
        shared.lock().stored(outcome);
        shared.settle();
    };
    if let Err(e) = std::thread::Builder::new().name("kiln-spill".into()).spawn(write) {
        told.lock().stored(Err(e));
    }
}

/// Tells people: through the program's logger, and where there is none the important things on standard error.
fn log(news: &News) {
    if log::max_level() > log::LevelFilter::Off {
        log::warn!(target: "kiln::remote", "{}", news.text);
    } else if news.loud {
        // Nobody may read it any more.
        let _ = writeln!(std::io::stderr(), "kiln: {}", news.text);
    }
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Hands answers over and gets the IO thread going.
    pub fn settle(&self) {
        let (answers, errands, settled, news) = {
            let mut core = self.lock();
            (core.answers(), core.errands(), core.settled(), core.news())
        };
        self.wake.notify_one();
        news.iter().for_each(log);
        drop(settled);
        answers.into_iter().for_each(|answer| answer.give());
        for errand in errands {
            match (errand, self.this.upgrade()) {
                (Errand::Expose(moved), _) => moved.source.expose(moved.capability),
                (Errand::Pass(transfer, moved), Some(this)) => pass(this, transfer, moved, RECALLS),
                (Errand::Store(values), Some(this)) => keep(this, values),
                (Errand::Pass(..) | Errand::Store(_), None) => {}
            }
        }
    }

    /// Waits while too much is under way.
    fn hold(&self) {
        let busy = |core: &mut Core| core.queued_bytes() > MOST_QUEUED || core.unexecuted() > MOST_UNEXECUTED;
        drop(self.changed.wait_while(self.lock(), busy).unwrap_or_else(|e| e.into_inner()));
    }

    pub fn fail(&self, error: Error) {
        self.lock().fail(error);
        self.settle();
        self.changed.notify_all();
    }

    /// Ends the session as soon as the server can be told.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends when the device is closed.
    pub async fn closing(&self) {
        while !self.is_closed() {
            self.wake.notified().await;
        }
    }

    /// Whether the server has been told that the session is over, as far as it can be.
    pub fn is_over(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// A server has taken the connection.
    pub fn welcomed(&self, server: usize) {
        self.home.store(server, Ordering::Release);
        self.connected.store(true, Ordering::Release);
    }

    /// There is no connection. Whether there was one.
    pub fn disconnected(&self) -> bool {
        self.connected.swap(false, Ordering::AcqRel)
    }

    /// Whether a goodbye would reach the server.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// The server that has, or had, the session.
    pub fn home(&self) -> String {
        self.servers[self.home.load(Ordering::Acquire)].address.to_string()
    }

    /// All servers, as errors name them.
    pub fn peer(&self) -> String {
        peer(&self.servers)
    }
}
