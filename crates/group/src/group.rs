//! Groups: who takes part, in which order collectives happen, and who drives them.
//!
//! A call gets the next number of its group and is queued. A small one at the head of the queue is announced to
//! the peers at once. Everything else is driven in order by whoever waits, or by the group's worker thread, so that
//! ranks exchange while the caller computes. Groups do not wait for each other. A call may take its number before its
//! contribution is there ([`Group::promise`]).

mod config;
mod drive;
mod exchange;
mod promise;
mod queue;

pub use config::Config;
pub use exchange::Pending;
pub use promise::Promise;

use crate::buffer::{Buffer, Pool};
use crate::call::{Call, Op, Reduce};
#[cfg(target_os = "linux")]
use crate::engine::shm;
use crate::engine::{Engine, Place, Traffic, local};
#[cfg(target_os = "linux")]
use crate::join::{self, Hello};
use crate::recorder::{Dump, Recorder};
use crate::rendezvous::{Identity, Rendezvous};
use crate::{Error, Layout, Tag};
use config::cores;
use drive::Wake;
use kiln_ir::DType;
use queue::Queue;
use std::collections::{HashMap, HashSet};
use std::panic::Location;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

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
    /// Notified, with the queue locked, when a promise is kept or all is over.
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
            Err(Error::Environment { variable: kiln_env::ENGINE.name().into(), reason })
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
                variable: kiln_env::ENGINE.name().into(),
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
                let variable = kiln_env::ENGINE.name().into();
                Err(Error::Environment {
                    variable,
                    reason: "this program was built without the feature `mpi`".into(),
                })
            }
            Some(other) => Err(Error::Environment {
                variable: kiln_env::ENGINE.name().into(),
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
