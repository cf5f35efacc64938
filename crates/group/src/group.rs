//! Groups: who takes part, in which order collectives happen, and who drives them.
//!
//! A call gets the next number of its group and is queued. A small one at the head of the queue is laid out for the
//! peers at once. Everything else is driven in order by whoever waits, or by the group's worker thread, so that
//! ranks exchange while the caller computes. Groups do not wait for each other. A call may take its number before its
//! contribution is there ([`Group::promise`]).

mod promise;
pub use promise::Promise;

use crate::buffer::{Buffer, Pool};
use crate::call::{Call, Op, Reduce, Signature};
#[cfg(target_os = "linux")]
use crate::engine::shm;
use crate::engine::{Engine, Place, SMALL, Traffic, Wait, local};
#[cfg(target_os = "linux")]
use crate::join::{self, Hello};
use crate::memory::{self, Region};
use crate::recorder::{Dump, Recorder, State};
use crate::rendezvous::{Identity, Rendezvous};
use crate::{Error, Layout, Tag};
use kiln_ir::DType;
use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::Location;
use std::path::PathBuf;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicUsize, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

/// The settings of a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long a collective waits for the other ranks.
    pub deadline: Duration,
    /// Logical shards of the job; the number of ranks if not set.
    pub shards: Option<usize>,
    /// Threads that each rank computes with. Waiting spins only if all ranks' threads have a core of their own.
    pub threads: usize,
    /// Where the flight record goes when a group fails.
    pub flight: Option<PathBuf>,
    /// Bytes a second that collectives may move at most: tries out a slower link than there is.
    pub rate: Option<u64>,
}

impl Default for Config {
    /// 60 s or what `KILN_DEADLINE` says, as many shards as ranks, one thread, the folder that `KILN_FLIGHT` names.
    fn default() -> Config {
        let seconds = std::env::var("KILN_DEADLINE").ok().and_then(|s| s.trim().parse::<f64>().ok());
        let deadline = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).filter(|d| !d.is_zero());
        Config {
            deadline: deadline.unwrap_or(Duration::from_secs(60)),
            shards: None,
            threads: 1,
            flight: std::env::var_os("KILN_FLIGHT").map(PathBuf::from),
            rate: None,
        }
    }
}

/// Some ranks that exchange data. A value: clone it, pass it on, have many. The last clone to go leaves the group.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    id: u64,
    name: Arc<str>,
    rank: usize,
    layout: Layout,
    /// Parts of this rank, and the most that any rank has.
    parts: (usize, usize),
    config: Config,
    engine: Box<dyn Engine>,
    recorder: Arc<Recorder>,
    pool: Arc<Pool>,
    queue: Mutex<Queue>,
    /// Rung, with the queue locked, when a promise is kept or all is over.
    kept: Condvar,
    /// Held by whoever drives the head of the queue.
    driver: Mutex<()>,
    /// Threads that drive, or wait until they can.
    drivers: AtomicUsize,
    worker: Mutex<Option<Arc<Wake>>>,
    /// When the link of a [`Config::rate`] has carried what it has to carry.
    carried: Mutex<Option<Instant>>,
    /// How many subgroups of each name were made.
    made: Mutex<HashMap<(String, Vec<usize>), u64>>,
    /// Names that somebody has claimed.
    claimed: Arc<Mutex<HashSet<String>>>,
    cores: usize,
}

#[derive(Default)]
struct Queue {
    /// The number of the last call.
    last: u64,
    /// Calls that are not finished, oldest first.
    open: VecDeque<Arc<Ticket>>,
    /// Why the group takes no more calls.
    over: Option<Error>,
}

/// A call on its way.
struct Ticket {
    signature: Signature,
    number: u64,
    slot: Mutex<Slot>,
    /// It is a range of a contribution of which more follows.
    more: bool,
    /// Since when its contribution has been there, where a link is tried out.
    since: OnceLock<Instant>,
}

enum Slot {
    /// The contribution is yet to come.
    Promised,
    Open(Buffer),
    Running,
    Ended(Result<Buffer, Error>),
    Taken,
}

/// What driving once came to.
enum Turn {
    /// A call has ended.
    Ran,
    /// The oldest call waits for its own contribution.
    Promised(Arc<Ticket>),
    /// Nothing is open.
    Idle,
}

#[derive(Default)]
struct Wake {
    state: Mutex<Errand>,
    bell: Condvar,
}

#[derive(Default, PartialEq)]
enum Errand {
    #[default]
    Rest,
    Drive,
    End,
}

impl Group {
    /// One group of `ranks` threads of this process: a value for each.
    pub fn local(ranks: usize, config: Config) -> Result<Vec<Group>, Error> {
        let layout = Layout::new(config.shards.unwrap_or(ranks), ranks)?;
        let group = |(rank, engine)| Group::new("local", 0, rank, layout, config.clone(), engine);
        Ok(local::engines(layout)?.into_iter().enumerate().map(group).collect())
    }

    /// The group of all ranks of a job, each a process: comes back when all have come and agree on what they are. On one
    /// machine they share memory; ranks on several need the feature `mpi`.
    pub fn join(at: &Rendezvous, identity: Identity, config: Config) -> Result<Group, Error> {
        let layout = Layout::new(config.shards.unwrap_or(at.world), at.world)?;
        if at.world == 1 {
            return Ok(Group::local(1, config)?.remove(0));
        }
        #[cfg(target_os = "linux")]
        return Group::join_world(at, identity, config, layout);
        #[cfg(not(target_os = "linux"))]
        {
            let _ = (identity, layout);
            let reason = "ranks are processes only on Linux; here they are threads: Group::local".into();
            Err(Error::Environment { variable: "KILN_ENGINE".into(), reason })
        }
    }

    #[cfg(target_os = "linux")]
    fn join_world(
        at: &Rendezvous,
        identity: Identity,
        config: Config,
        layout: Layout,
    ) -> Result<Group, Error> {
        let (shards, identity) = (layout.shards(), identity.short());
        let hello = Hello { rank: at.rank, world: at.world, shards, identity };
        match at.engine.as_deref() {
            None | Some("shm") if at.local_world == at.world => {
                let until = Instant::now() + config.deadline;
                let id = join::number(&at.job);
                let mesh = join::meet(at, hello, config.deadline)?;
                let engine = shm::engine(mesh, id, (0..at.world).collect(), at.rank, layout, until)?;
                Ok(Group::new("world", id, at.rank, layout, config, engine))
            }
            Some("shm") => Err(Error::Environment {
                variable: "KILN_ENGINE".into(),
                reason: format!(
                    "shm needs all {} ranks on one machine, {} are here",
                    at.world, at.local_world
                ),
            }),
            #[cfg(feature = "mpi")]
            None | Some("mpi") => {
                let id = join::number(&at.job);
                let engine = crate::engine::mpi::engine(hello, layout, id, config.deadline)?;
                Ok(Group::new("world", id, at.rank, layout, config, engine))
            }
            #[cfg(not(feature = "mpi"))]
            None | Some("mpi") => {
                let variable = "KILN_ENGINE".into();
                Err(Error::Environment {
                    variable,
                    reason: "this program was built without the feature `mpi`".into(),
                })
            }
            Some(other) => Err(Error::Environment {
                variable: "KILN_ENGINE".into(),
                reason: format!("`{other}` is no engine: shm or mpi"),
            }),
        }
    }

    pub(crate) fn new(
        name: &str,
        id: u64,
        rank: usize,
        layout: Layout,
        config: Config,
        engine: Box<dyn Engine>,
    ) -> Group {
        let recorder = Arc::new(Recorder::new(rank, layout.ranks(), config.flight.clone()));
        Group::with(name.into(), id, rank, layout, config, engine, recorder)
    }

    fn with(
        name: Arc<str>,
        id: u64,
        rank: usize,
        layout: Layout,
        config: Config,
        engine: Box<dyn Engine>,
        recorder: Arc<Recorder>,
    ) -> Group {
        let most = (0..layout.ranks()).map(|r| layout.parts(r).len()).max().unwrap_or(1);
        Group(Arc::new(Inner {
            id,
            name,
            rank,
            layout,
            parts: (layout.parts(rank).len(), most),
            config,
            engine,
            recorder,
            pool: Arc::default(),
            queue: Mutex::default(),
            kept: Condvar::new(),
            driver: Mutex::default(),
            drivers: AtomicUsize::new(0),
            worker: Mutex::default(),
            carried: Mutex::default(),
            made: Mutex::default(),
            claimed: Arc::default(),
            cores: cores(),
        }))
    }

    /// A group of some ranks of this one, which must all ask for it with the same name, members and shards; its ranks
    /// are their places in the list. The same name gives a new group each time.
    pub fn subgroup(&self, name: &str, members: &[usize], shards: Option<usize>) -> Result<Group, Error> {
        let inner = &self.0;
        let ranks = inner.layout.ranks();
        if let Some(&rank) = members.iter().find(|&&r| r >= ranks) {
            return Err(Error::Member { rank, ranks });
        }
        let own = members.iter().position(|&r| r == inner.rank);
        let rank = own.ok_or(Error::Member { rank: inner.rank, ranks: members.len() })?;
        let layout = Layout::new(shards.unwrap_or(members.len()), members.len())?;
        let count = {
            let mut made = lock(&inner.made);
            let count = made.entry((name.to_string(), members.to_vec())).or_default();
            *count += 1;
            *count
        };
        let tag = Tag::default().add_number(inner.id).add(name).add_number(members.len() as u64);
        let tag = members.iter().fold(tag, |tag, &member| tag.add_number(member as u64));
        let id = tag.add_number(count).add_number(layout.shards() as u64).finish().max(1);
        let place = Place { group: id, members: members.to_vec(), rank, layout };
        let engine = inner.engine.subgroup(place, Instant::now() + inner.config.deadline)?;
        let config = Config { shards, ..inner.config.clone() };
        Ok(Group::with(name.into(), id, rank, layout, config, engine, inner.recorder.clone()))
    }

    /// The own place, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.0.layout.ranks()
    }

    /// Who holds which shards.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// `local`, `shm` or `mpi`.
    pub fn engine(&self) -> &'static str {
        self.0.engine.name()
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// A zeroed or reused buffer for reductions: one part of that many bytes for each subtree this rank holds.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, Error> {
        self.0.buffer(bytes, self.0.parts.0)
    }

    /// A buffer of a single part with this content: for gathering and broadcast, and for reductions where this rank
    /// contributes one part.
    pub fn buffer_of(&self, content: &[u8]) -> Result<Buffer, Error> {
        let mut buffer = self.0.buffer(content.len(), 1)?;
        buffer.copy_from_slice(content);
        Ok(buffer)
    }

    /// Starts a collective. The buffer is back with the result when the answer is waited for.
    #[track_caller]
    pub fn start(&self, call: Call, buffer: Buffer) -> Result<Pending, Error> {
        let ticket = self.0.issue(call, buffer, Location::caller(), true)?;
        Ok(Pending { group: self.clone(), ticket, before: Vec::new() })
    }

    /// Carries out a collective and waits for it: the least delay where nothing is to be computed meanwhile.
    #[track_caller]
    pub fn run(&self, call: Call, buffer: Buffer) -> Result<Buffer, Error> {
        let ticket = self.0.issue(call, buffer, Location::caller(), false)?;
        self.0.finish(&ticket)
    }

    /// Every rank gets the combination of all contributions.
    #[track_caller]
    pub fn all_reduce(&self, reduce: Reduce, dtype: DType, buffer: Buffer) -> Result<Pending, Error> {
        self.start(Call::new(Op::AllReduce(reduce), dtype), buffer)
    }

    /// Every rank gets its [`piece`](Layout::piece) of the combination, in place; the rest is undefined.
    #[track_caller]
    pub fn reduce_scatter(&self, reduce: Reduce, dtype: DType, buffer: Buffer) -> Result<Pending, Error> {
        self.start(Call::new(Op::ReduceScatter(reduce), dtype), buffer)
    }

    /// Every rank gives its piece, in place, and gets all.
    #[track_caller]
    pub fn all_gather(&self, dtype: DType, buffer: Buffer) -> Result<Pending, Error> {
        self.start(Call::new(Op::AllGather, dtype), buffer)
    }

    /// Every rank gets the first part of the buffer of `root`.
    #[track_caller]
    pub fn broadcast(&self, root: usize, dtype: DType, buffer: Buffer) -> Result<Pending, Error> {
        self.start(Call::new(Op::Broadcast(root as u32), dtype), buffer)
    }

    /// Comes back when every rank has come.
    #[track_caller]
    pub fn barrier(&self) -> Result<(), Error> {
        let empty = self.0.buffer(0, 1)?;
        let ticket = self.0.issue(Call::new(Op::Barrier, DType::U8), empty, Location::caller(), false)?;
        self.0.finish(&ticket).map(drop)
    }

    /// Finishes or fails what is pending, then takes no more calls. Closing again does nothing.
    pub fn close(&self) -> Result<(), Error> {
        let inner = &self.0;
        let last = {
            let queue = lock(&inner.queue);
            match &queue.over {
                Some(Error::Closed) => return Ok(()),
                Some(error) => return Err(error.clone()),
                None => {}
            }
            queue.open.back().cloned()
        };
        let ended = last.map_or(Ok(()), |ticket| inner.drive(&ticket, || ()));
        {
            let mut queue = lock(&inner.queue);
            if let Some(error) = &queue.over {
                return Err(error.clone());
            }
            queue.over = Some(Error::Closed);
        }
        inner.leave();
        ended
    }

    /// Ends the group on every rank: each waiting and each later call fails with the reason.
    pub fn abort(&self, reason: &str) {
        self.0.fail(&Error::Aborted { rank: self.0.rank, reason: reason.to_string() });
    }

    /// Takes a name that nobody else has in this group, until the claim is dropped.
    pub fn claim(&self, name: &str) -> Result<Claim, Error> {
        if !lock(&self.0.claimed).insert(name.to_string()) {
            return Err(Error::Claimed { name: name.to_string() });
        }
        Ok(Claim { name: name.to_string(), names: self.0.claimed.clone() })
    }

    /// Whether exchanging while the ranks compute saves time. Not where each computes with one thread and no core is free:
    /// the exchange is done by processors, unless a link takes the time.
    pub fn overlaps(&self) -> bool {
        let Inner { config, engine, .. } = &*self.0;
        config.threads > 1 || self.0.spare(2) || config.rate.is_some() || engine.is_link()
    }

    /// Payload moved and time waited for each rank so far.
    pub fn traffic(&self) -> Traffic {
        self.0.engine.traffic()
    }

    /// The last collectives of this rank in all its groups.
    pub fn flight(&self) -> Dump {
        self.0.recorder.dump(None)
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { name, rank, layout, engine, .. } = &*self.0;
        write!(
            f,
            "Group({name}, rank {rank} of {}, {} shards, {})",
            layout.ranks(),
            layout.shards(),
            engine.name()
        )
    }
}

/// A collective that may not be finished. It goes on if this is dropped, but its result is lost.
#[must_use = "the result is there only after wait"]
pub struct Pending {
    group: Group,
    /// The call of its last range, which is all of it where it is not cut.
    ticket: Arc<Ticket>,
    /// The calls of the ranges before.
    before: Vec<Arc<Ticket>>,
}

impl Pending {
    /// The buffer with the result. A failed collective does not give its buffer back.
    pub fn wait(self) -> Result<Buffer, Error> {
        let mut failed = None;
        for ticket in &self.before {
            failed = failed.or(self.group.0.finish(ticket).err());
        }
        let mut buffer = self.group.0.finish(&self.ticket)?;
        if let Some(error) = failed {
            return Err(error);
        }
        buffer.bytes += std::mem::take(&mut buffer.start);
        Ok(buffer)
    }

    /// Has `compute` make the own contribution, while nothing is carried out on any thread, then carries everything out
    /// up to this. How it ended is told by [`Pending::wait`].
    pub fn contribute(&self, compute: impl FnOnce()) {
        let _ = self.group.0.drive(&self.ticket, compute);
    }
}

/// A name taken by [`Group::claim`].
pub struct Claim {
    name: String,
    names: Arc<Mutex<HashSet<String>>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.names).remove(&self.name);
    }
}

impl Inner {
    fn buffer(&self, bytes: usize, parts: usize) -> Result<Buffer, Error> {
        let most = self.parts.0.max(self.parts.1).max(parts);
        let stride = bytes.checked_next_multiple_of(64).filter(|stride| stride.checked_mul(most).is_some());
        let stride = stride.ok_or_else(|| memory::none(bytes))?;
        // All ranks must agree on what is small, whatever their parts.
        let large = stride * self.parts.1 > SMALL;
        let whole = stride * self.parts.0.max(parts);
        let region = match self.pool.take(whole, large) {
            Some(region) => region,
            None if large => self.engine.allocate(whole)?,
            None => Arc::new(Region::heap(whole, 0)?),
        };
        Ok(Buffer { region, start: 0, bytes, stride, parts, poison: None, pool: Arc::downgrade(&self.pool) })
    }

    fn issue(
        self: &Arc<Self>,
        call: Call,
        buffer: Buffer,
        line: &'static Location<'static>,
        wake: bool,
    ) -> Result<Arc<Ticket>, Error> {
        self.fits(call.op, &buffer)?;
        let (ticket, head) = self.enter(call, buffer.bytes, Slot::Open(buffer), false, line)?;
        if wake {
            self.ready(&ticket, head);
        }
        Ok(ticket)
    }

    /// Whether the buffer can be this rank's contribution.
    fn fits(&self, op: Op, buffer: &Buffer) -> Result<(), Error> {
        if !std::ptr::eq(buffer.pool.as_ptr(), Arc::as_ptr(&self.pool)) {
            return Err(Error::Foreign);
        }
        if op.reduce().is_some() && buffer.parts != self.parts.0 {
            return Err(Error::Parts { want: self.parts.0, got: buffer.parts });
        }
        Ok(())
    }

    /// Gives a call its number. Tells whether it is the oldest open one.
    fn enter(
        &self,
        call: Call,
        bytes: usize,
        slot: Slot,
        more: bool,
        line: &'static Location<'static>,
    ) -> Result<(Arc<Ticket>, bool), Error> {
        let Call { op, dtype, tag } = call;
        if let Some(reduce) = op.reduce() {
            reduce.fits(dtype)?;
        }
        if let Op::Broadcast(root) = op
            && root as usize >= self.layout.ranks()
        {
            return Err(Error::Member { rank: root as usize, ranks: self.layout.ranks() });
        }
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(Error::Length { bytes, dtype });
        }
        let mut queue = lock(&self.queue);
        if let Some(error) = &queue.over {
            return Err(error.clone());
        }
        queue.last += 1;
        let length = (bytes / dtype.size()) as u64;
        let signature = Signature { sequence: queue.last, group: self.id, op, dtype, length, tag };
        let number = self.recorder.issued(signature, &self.name, line);
        let promised = matches!(slot, Slot::Promised);
        let slot = Mutex::new(slot);
        let ticket = Arc::new(Ticket { signature, number, slot, more, since: OnceLock::new() });
        if !promised {
            self.is_there(&ticket);
        }
        queue.open.push_back(ticket.clone());
        let head = queue.open.len() == 1;
        Ok((ticket, head))
    }

    /// A call's contribution is there as of now.
    fn is_there(&self, ticket: &Ticket) {
        if self.config.rate.is_some() {
            let _ = ticket.since.set(Instant::now());
        }
    }

    /// A call's contribution is there: somebody has to run it, unless it is small and next.
    fn ready(self: &Arc<Self>, ticket: &Ticket, head: bool) {
        // Either we see that somebody drives, or they see the contribution before they go.
        fence(SeqCst);
        if self.drivers.load(SeqCst) == 0 && !(head && self.laid(ticket)) {
            self.wake();
        }
    }

    /// Whether a small contribution at the head of the queue could be laid out at once.
    fn laid(&self, ticket: &Ticket) -> bool {
        let Ok(_driver) = self.driver.try_lock() else { return false };
        match &*lock(&ticket.slot) {
            Slot::Open(buffer) if buffer.region.id == 0 => {
                self.engine.post(&ticket.signature, buffer);
                true
            }
            Slot::Open(_) | Slot::Promised => false,
            Slot::Running | Slot::Ended(_) | Slot::Taken => true,
        }
    }

    /// Waits for a call and takes its result.
    fn finish(self: &Arc<Self>, ticket: &Ticket) -> Result<Buffer, Error> {
        self.drive(ticket, || ())?;
        match std::mem::replace(&mut *lock(&ticket.slot), Slot::Taken) {
            Slot::Ended(result) => result,
            Slot::Promised | Slot::Open(_) | Slot::Running | Slot::Taken => Err(Error::Closed),
        }
    }

    /// Runs calls in order until this one has ended, but `compute` before.
    fn drive(self: &Arc<Self>, ticket: &Ticket, compute: impl FnOnce()) -> Result<(), Error> {
        let ended = || matches!(*lock(&ticket.slot), Slot::Ended(_) | Slot::Taken);
        if ended() {
            return Ok(());
        }
        let driven = self.driving(|| {
            compute();
            while !ended() {
                match self.next(false) {
                    Turn::Ran => {}
                    Turn::Promised(ticket) => self.await_promise(&ticket),
                    Turn::Idle => return Err(lock(&self.queue).over.clone().unwrap_or(Error::Closed)),
                }
            }
            Ok(())
        });
        if self.waits() {
            self.wake();
        }
        driven
    }

    /// Runs calls in turn with other drivers. Meanwhile calls that become ready are left to the drivers, so the caller
    /// has to see to it afterwards that nothing [waits](Inner::waits).
    fn driving<T>(&self, run: impl FnOnce() -> T) -> T {
        self.drivers.fetch_add(1, SeqCst);
        let _gone = Gone(&self.drivers);
        let _driver = lock(&self.driver);
        run()
    }

    /// Whether so many threads of every rank have a core each.
    fn spare(&self, threads: usize) -> bool {
        self.layout.ranks() * threads <= self.cores
    }

    /// Whether the oldest open call could be run.
    fn waits(&self) -> bool {
        let queue = lock(&self.queue);
        queue.open.front().is_some_and(|front| matches!(*lock(&front.slot), Slot::Open(_)))
    }

    /// Runs the oldest open call, if its contribution is there, `beside` a thread that computes or not. The
    /// caller holds the driver.
    fn next(&self, beside: bool) -> Turn {
        let (ticket, promised) = {
            let queue = lock(&self.queue);
            let Some(ticket) = queue.open.front().cloned() else { return Turn::Idle };
            (ticket, queue.open.iter().any(|open| matches!(*lock(&open.slot), Slot::Promised)))
        };
        // What is promised is still being computed.
        let spin = self.spare(self.config.threads + usize::from(beside || promised));
        let mut buffer = {
            let mut slot = lock(&ticket.slot);
            match std::mem::replace(&mut *slot, Slot::Running) {
                Slot::Open(buffer) => buffer,
                Slot::Promised => {
                    *slot = Slot::Promised;
                    drop(slot);
                    return Turn::Promised(ticket);
                }
                // Failed by an abort meanwhile.
                before @ (Slot::Running | Slot::Ended(_) | Slot::Taken) => {
                    *slot = before;
                    drop(slot);
                    lock(&self.queue).open.pop_front();
                    return Turn::Ran;
                }
            }
        };
        self.recorder.moved(ticket.number, State::Started);
        let deadline = self.config.deadline;
        let wait = Wait { until: Instant::now() + deadline, deadline, spin, more: ticket.more };
        let begun = Instant::now();
        let result = self.engine.run(&ticket.signature, &mut buffer, wait);
        if let Some(rate) = self.config.rate {
            let takes = Duration::from_secs_f64(buffer.bytes as f64 / rate.max(1) as f64);
            self.carry(&ticket, begun, takes);
        }
        self.recorder.moved(ticket.number, if result.is_ok() { State::Done } else { State::Failed });
        buffer.poison = None;
        let error = match result {
            Ok(()) => {
                *lock(&ticket.slot) = Slot::Ended(Ok(buffer));
                None
            }
            Err(error) => {
                *lock(&ticket.slot) = Slot::Ended(Err(error.clone()));
                (!error.is_local()).then_some(error)
            }
        };
        {
            let mut queue = lock(&self.queue);
            if queue.open.front().is_some_and(|front| Arc::ptr_eq(front, &ticket)) {
                queue.open.pop_front();
            }
        }
        if let Some(error) = error {
            self.fail(&error);
        }
        Turn::Ran
    }

    /// Sleeps until a link has carried a call, begun at that time, that takes it so long. What is behind a range of the
    /// same contribution is given to the link meanwhile.
    fn carry(&self, ticket: &Ticket, begun: Instant, takes: Duration) {
        let until = {
            let mut carried = lock(&self.carried);
            let from = match (*carried, ticket.since.get()) {
                // It was there when the one before had been carried, though that sleep took a little longer.
                (Some(free), Some(&since)) if since <= free => free,
                _ => begun,
            };
            *carried.insert(from + takes)
        };
        if !ticket.more {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Ends the group with this error: for the peers, for what is queued, and for later calls.
    fn fail(&self, error: &Error) {
        let open = {
            let mut queue = lock(&self.queue);
            if queue.over.is_some() {
                return;
            }
            queue.over = Some(error.clone());
            std::mem::take(&mut queue.open)
        };
        self.pool.close();
        self.engine.abort(error);
        for ticket in open {
            let mut slot = lock(&ticket.slot);
            if matches!(*slot, Slot::Open(_) | Slot::Promised) {
                *slot = Slot::Ended(Err(error.clone()));
                self.recorder.moved(ticket.number, State::Failed);
            }
        }
        self.recorder.failed(error);
        let _queue = lock(&self.queue);
        self.kept.notify_all();
    }

    /// Sends the worker to drive what is open. It starts with the first errand.
    fn wake(self: &Arc<Self>) {
        let mut worker = lock(&self.worker);
        let wake = worker.get_or_insert_with(|| {
            let wake = Arc::new(Wake::default());
            let (inner, bell) = (Arc::downgrade(self), wake.clone());
            let name = format!("kiln-{}", self.name);
            let body = move || work(&inner, &bell);
            if let Err(error) = std::thread::Builder::new().name(name).spawn(body) {
                // Whoever waits drives; only the overlap is lost.
                eprintln!("no thread for group {}: {error}", self.name);
            }
            wake
        });
        *lock(&wake.state) = Errand::Drive;
        wake.bell.notify_one();
    }

    fn leave(&self) {
        let queue = lock(&self.queue);
        // A contribution that failed and has not been laid out is the reason why the others wait in vain.
        let failed = queue.open.iter().find_map(|ticket| match &*lock(&ticket.slot) {
            Slot::Open(buffer) => buffer.poison.clone(),
            Slot::Promised | Slot::Running | Slot::Ended(_) | Slot::Taken => None,
        });
        if let Some(reason) = failed {
            self.engine.abort(&Error::Poisoned { rank: self.rank, reason });
        }
        self.engine.leave(queue.last);
    }
}

/// Somebody who drives less, when dropped.
struct Gone<'a>(&'a AtomicUsize);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// The worker: drives the queue until it is empty, then rests. It keeps the group alive only while it drives.
fn work(inner: &Weak<Inner>, wake: &Wake) {
    loop {
        {
            let mut state = lock(&wake.state);
            while *state == Errand::Rest {
                state = wake.bell.wait(state).unwrap_or_else(|e| e.into_inner());
            }
            if *state == Errand::End {
                return;
            }
            *state = Errand::Rest;
        }
        let Some(inner) = inner.upgrade() else { return };
        while inner.waits() {
            inner.driving(|| while matches!(inner.next(true), Turn::Ran) {});
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(wake) = lock(&self.worker).take() {
            *lock(&wake.state) = Errand::End;
            wake.bell.notify_one();
        }
        self.leave();
        self.pool.close();
    }
}

/// The cores that all ranks of this machine have together: `KILN_CORES`, where a launcher has divided them, else those
/// that this process may use.
fn cores() -> usize {
    let told = std::env::var("KILN_CORES").ok().and_then(|v| v.trim().parse().ok());
    told.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
