//! Buckets combined by moves between devices: each worker leaves its contribution, and the last one records the exchange
//! for all. Servers move the bytes among themselves; of the devices nobody waits here.
//!
//! Workers may have a thread each, or share one that drives them in order. A step that fails on one of them fails on all,
//! with the reason, and none of its values stay behind.

use super::plan::Plan;
use crate::{Error, Partial, all_reduce};
use kiln_tensor::{NonFinite, Step, Tensor};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// What workers have left for each other.
pub(super) struct Moves {
    workers: usize,
    shards: usize,
    deadline: Duration,
    state: Mutex<State>,
    /// Something was left, or will not be.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    rounds: HashMap<u64, Round>,
    /// Why there are no more rounds.
    ended: Option<Error>,
    /// Workers that take no part any more.
    closed: BTreeSet<usize>,
}

/// A step of all workers.
struct Round {
    workers: Vec<Worker>,
    buckets: HashMap<usize, Bucket>,
    /// For each worker what a step along its results needs besides them, once all buckets are exchanged.
    words: Option<Vec<Option<Tensor>>>,
    failed: Option<Error>,
}

#[derive(Clone, Default)]
struct Worker {
    /// Where it began the round, if it has.
    thread: Option<ThreadId>,
    /// What its parameters come to, in a round where they are compared.
    hashes: Option<Vec<u64>>,
    /// Which parameters it has used.
    used: Option<Vec<bool>>,
    gone: bool,
}

enum Bucket {
    /// What came so far, by worker.
    Filling(Vec<Option<Contribution>>),
    /// All have come, and the last one records the exchange.
    Exchanging,
    /// The results, by worker.
    Done(Vec<Vec<Tensor>>),
}

/// What a worker adds to a bucket.
pub(super) type Contribution = Vec<Partial<Vec<Tensor>>>;

impl Moves {
    pub fn new(workers: usize, shards: usize, deadline: Duration) -> Moves {
        Moves { workers, shards, deadline, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Something of a round changes, unless that is over.
    fn change(&self, number: u64, f: impl FnOnce(&mut Round)) {
        let mut state = self.lock();
        if state.ended.is_none() {
            f(state.round(number, self.workers));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A worker begins a round on this thread, perhaps with what its parameters come to: those of all must be the same.
    pub fn enter(
        &self,
        number: u64,
        worker: usize,
        hashes: Option<Vec<u64>>,
        plan: &Plan,
    ) -> Result<(), Error> {
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        let round = state.round(number, self.workers);
        let thread = Some(std::thread::current().id());
        round.workers[worker] = Worker { thread, hashes, ..Worker::default() };
        let Some((rank, entry)) = round.differs() else { return Ok(()) };
        let reason = format!("its {} is not that of rank 0 at step {number}", plan.entries[entry].path);
        let error: Error = kiln_group::Error::Aborted { rank, reason }.into();
        state.end(error.clone());
        drop(state);
        self.changed.notify_all();
        Err(error)
    }

    /// Leaves a worker's contribution to a bucket.
    pub fn leave(&self, number: u64, bucket: usize, worker: usize, own: Contribution, plan: &Plan) {
        let mut all = None;
        self.change(number, |round| {
            let filling = || Bucket::Filling(vec![None; self.workers]);
            let place = round.buckets.entry(bucket).or_insert_with(filling);
            if round.failed.is_some() {
                round.buckets.clear();
            } else if let Bucket::Filling(came) = place {
                came[worker] = Some(own);
                if came.iter().all(Option::is_some) {
                    all = Some(std::mem::take(came).into_iter().flatten().collect());
                    *place = Bucket::Exchanging;
                }
            }
        });
        let Some(all) = all else { return };
        // Devices without a way of their own are waited for here, so not under the lock.
        let exchanged = all_reduce(self.shards, all);
        let mut whole = None;
        self.change(number, |round| match exchanged {
            Err(error) => round.fail(error.into()),
            Ok(lists) => {
                round.buckets.insert(bucket, Bucket::Done(lists));
                whole = round.whole(plan);
            }
        });
        if let Some(sums) = whole {
            let words = words(sums);
            self.change(number, |round| round.words = Some(words));
        }
    }

    /// Notes which parameters a worker has used.
    pub fn used(&self, number: u64, worker: usize, used: Vec<bool>) {
        self.change(number, |round| round.workers[worker].used = Some(used));
    }

    /// A worker's contribution will not come: the others learn why, and the next round is another.
    pub fn fail(&self, number: u64, rank: usize, reason: &str) {
        let error = kiln_group::Error::Poisoned { rank, reason: reason.into() };
        self.change(number, |round| round.fail(error.into()));
    }

    /// There are no more rounds.
    pub fn end(&self, rank: usize, reason: &str) {
        self.lock().end(kiln_group::Error::Aborted { rank, reason: reason.into() }.into());
        self.changed.notify_all();
    }

    /// A worker has done with a round. With the last one it is over.
    pub fn gone(&self, number: u64, worker: usize) {
        let mut state = self.lock();
        let closed = state.closed.clone();
        let Some(round) = state.rounds.get_mut(&number) else { return };
        round.workers[worker].gone = true;
        if round.workers.iter().enumerate().all(|(i, w)| w.gone || closed.contains(&i)) {
            state.rounds.remove(&number);
        }
    }

    /// A worker takes no part any more.
    pub fn close(&self, worker: usize) {
        let mut state = self.lock();
        state.closed.insert(worker);
        if state.closed.len() == self.workers {
            state.rounds.clear();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Rounds of which something is left.
    pub fn open(&self) -> usize {
        self.lock().rounds.len()
    }

    /// A worker's result of a bucket, once all others have come.
    pub fn take(&self, number: u64, bucket: usize, worker: usize) -> Result<Vec<Tensor>, Error> {
        self.wait(number, worker, |round| match round.buckets.get(&bucket) {
            Some(Bucket::Done(lists)) => Ok(lists[worker].clone()),
            Some(Bucket::Filling(came)) => Err((0..came.len()).filter(|&i| came[i].is_none()).collect()),
            Some(Bucket::Exchanging) => Err(Vec::new()),
            None => Err((0..round.workers.len()).collect()),
        })
    }

    /// What a step along a worker's results needs besides them.
    pub fn word(&self, number: u64, worker: usize) -> Result<Option<Tensor>, Error> {
        self.wait(number, worker, |round| match &mut round.words {
            Some(words) => Ok(words[worker].take()),
            None => Err(Vec::new()),
        })
    }

    /// Which parameters any worker has used.
    pub fn mask(&self, number: u64, worker: usize) -> Result<Vec<bool>, Error> {
        self.wait(number, worker, |round| {
            let lists: Option<Vec<&Vec<bool>>> = round.workers.iter().map(|w| w.used.as_ref()).collect();
            let Some(lists) = lists else {
                return Err((0..round.workers.len()).filter(|&i| round.workers[i].used.is_none()).collect());
            };
            let entries = lists.first().map_or(0, |list| list.len());
            Ok((0..entries).map(|entry| lists.iter().any(|list| list.get(entry) == Some(&true))).collect())
        })
    }

    /// What `find` finds. Until then it names the workers it misses, and they are waited for.
    fn wait<T>(
        &self,
        number: u64,
        worker: usize,
        mut find: impl FnMut(&mut Round) -> Result<T, Vec<usize>>,
    ) -> Result<T, Error> {
        let (begun, own) = (Instant::now(), Some(std::thread::current().id()));
        let mut state = self.lock();
        loop {
            if let Some(error) = &state.ended {
                return Err(error.clone());
            }
            let round = state.round(number, self.workers);
            if let Some(error) = &round.failed {
                return Err(error.clone());
            }
            let mut missing = match find(round) {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            missing.retain(|&i| i != worker);
            if missing.iter().any(|&i| round.workers[i].thread == own) {
                // This thread would wait for itself.
                return Err(Error::Early);
            }
            if let Some(&rank) = missing.iter().find(|&i| state.closed.contains(i)) {
                let reason = "it was closed before this step".into();
                return Err(kiln_group::Error::Aborted { rank, reason }.into());
            }
            let left = self.deadline.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let error = Error::Late { rank: worker, after: self.deadline, missing };
                // Whoever is late would wait for this one.
                state.end(error.clone());
                self.changed.notify_all();
                return Err(error);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

impl State {
    fn round(&mut self, number: u64, workers: usize) -> &mut Round {
        self.rounds.entry(number).or_insert_with(|| Round {
            workers: vec![Worker::default(); workers],
            buckets: HashMap::new(),
            words: None,
            failed: None,
        })
    }

    fn end(&mut self, error: Error) {
        self.ended.get_or_insert(error);
        self.rounds.clear();
    }
}

impl Round {
    /// The first error counts. What has come goes.
    fn fail(&mut self, error: Error) {
        self.failed.get_or_insert(error);
        (self.buckets, self.words) = (HashMap::new(), None);
    }

    /// A worker whose parameters are not those of the first, and the first entry that is not.
    fn differs(&self) -> Option<(usize, usize)> {
        let first = self.workers.first()?.hashes.as_ref()?;
        self.workers.iter().enumerate().find_map(|(rank, worker)| {
            let own = worker.hashes.as_ref()?;
            Some((rank, own.iter().zip(first).position(|(own, first)| own != first)?))
        })
    }

    /// All results of each worker with their paths, once all buckets are exchanged.
    fn whole(&self, plan: &Plan) -> Option<Vec<Vec<(String, Tensor)>>> {
        let mut whole = vec![Vec::new(); self.workers.len()];
        for (b, bucket) in plan.buckets.iter().enumerate() {
            let Some(Bucket::Done(lists)) = self.buckets.get(&b) else { return None };
            for (own, list) in whole.iter_mut().zip(lists) {
                let named = bucket.members.iter().zip(list);
                own.extend(named.map(|(&(entry, _), sum)| (plan.entries[entry].path.clone(), sum.clone())));
            }
        }
        Some(whole)
    }
}

/// Whether all workers have all of their results, on the device of each: one of them may lose some on the way, and then
/// no model changes.
fn words(sums: Vec<Vec<(String, Tensor)>>) -> Vec<Option<Tensor>> {
    let homes: Vec<_> = sums.iter().map(|own| own.first().map(|(_, sum)| sum.device())).collect();
    let step = Step::new(sums.into_iter().flatten().collect(), &[], NonFinite::Continue);
    homes.into_iter().map(|home| step.word(&home?).cloned()).collect()
}
