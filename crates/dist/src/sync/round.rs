//! One step: the parameters of the coming backward, their gradients as they become final, and the wait.

use super::fill::{Lent, Piece, Placed, start};
use super::plan::{Entry, Plan};
use super::start::spread;
use super::state::States;
use super::{Combine, GradientSync, Inner, State, Unused, Way};
use crate::{Error, Partial};
use kiln_group::{Call, Op, Pending, Promise, Reduce};
use kiln_nn::{Module, Optimizer};
use kiln_tensor::{Bytes, DType, Data, Device, Gradients, LeafGradient, Meta, Tensor, no_grad};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a step came to, on every worker alike.
pub struct Reduced {
    /// The combined gradients, for the optimiser.
    pub gradients: Gradients,
    /// The combined loss of all shards, weighted as their gradients were.
    pub loss: Tensor,
    /// Parameters that no shard used, where [`Unused::Zeros`] allows it.
    pub unused: Vec<String>,
}

/// What [`Round::step`] came to, on every worker alike.
pub struct Stepped {
    /// As in [`Reduced`].
    pub loss: Tensor,
    /// As in [`Reduced`].
    pub unused: Vec<String>,
}

/// One step of one worker. Dropping it before the wait fails the step on every rank, and nothing else.
#[must_use = "without a wait the step fails on every rank"]
pub struct Round {
    sync: GradientSync,
    number: u64,
    next: usize,
    held: Range<usize>,
    /// With one worker and one shard there is nothing to combine.
    plain: Option<(Gradients, Option<Tensor>)>,
    work: Option<Work>,
}

/// What combining needs.
struct Work {
    plan: Arc<Plan>,
    device: Device,
    parameters: Vec<Tensor>,
    /// The model's buffers, which each shard finds as they were.
    states: States,
    /// Entries by leaf. A shared parameter is one entry.
    leaves: HashMap<u64, usize>,
    /// The gradients of the shard at hand so far, where it comes in several pieces.
    sums: Vec<Option<Tensor>>,
    /// What each entry's shards came to so far: a binary counter.
    stacks: Vec<Vec<Tensor>>,
    /// Which entries the shard at hand has given.
    given: Vec<bool>,
    /// Which parameters any shard has used.
    used: Vec<bool>,
    /// Entries in the order in which the last shard gave them.
    order: Vec<usize>,
    /// For each bucket, how many entries are missing.
    missing: Vec<usize>,
    promises: Vec<Option<Promise>>,
    /// Computing and exchanging take turns, because both need the same core.
    in_turn: bool,
    /// Then these buckets wait for the last one.
    placed: Vec<Placed>,
    pending: Vec<Pending>,
    /// Rank 0's order for all, where it is not settled yet.
    spread: Option<(Option<Promise>, Pending)>,
    /// Which parameters are used anywhere, where some may be unused.
    mask: Option<(Option<Promise>, Pending)>,
    hashes: Option<(Pending, Vec<u64>)>,
    /// What a step along the results needs besides them.
    words: Vec<Tensor>,
    /// As in [`super::Stats::early`].
    early: u64,
    /// The shard's backward is over.
    ends: bool,
    waited: Duration,
    failed: Option<Error>,
}

impl GradientSync {
    /// Begins a step with the parameters that the coming backward will differentiate. Frozen ones are left out.
    #[track_caller]
    pub fn begin(&self, model: &dyn Module) -> Result<Round, Error> {
        let inner = &self.0;
        let number = {
            let mut state = inner.lock();
            if state.closed {
                return Err(kiln_group::Error::Closed.into());
            }
            if state.open {
                return Err(Error::Open);
            }
            state.rounds += 1;
            state.stats.rounds += 1;
            state.open = true;
            state.rounds
        };
        let held = inner.layout.held(inner.rank);
        let mut round = Round { sync: self.clone(), number, next: held.start, held, plain: None, work: None };
        if inner.layout.shards() > 1 {
            round.work = Some(inner.begin(model, number)?);
        }
        Ok(round)
    }
}

impl Inner {
    #[track_caller]
    fn begin(&self, model: &dyn Module, number: u64) -> Result<Work, Error> {
        let (mut entries, mut parameters, mut leaves) = (Vec::new(), Vec::new(), HashMap::new());
        model.visit("", &mut |path, parameter| {
            let Some(leaf) = parameter.leaf() else { return };
            leaves.entry(leaf).or_insert_with(|| {
                let meta = parameter.meta();
                let wire = self.config.compress.as_ref().map_or(meta.dtype, |c| c.wire(meta.dtype));
                entries.push(Entry { path: path.to_string(), meta, wire });
                parameters.push(parameter.clone());
                entries.len() - 1
            });
        });
        let device = parameters.first().map(|p: &Tensor| p.device()).unwrap_or_default();
        let states = States::new(model, parameters.len());
        entries.extend(states.entries());
        let elsewhere = parameters.iter().chain(states.values()).position(|p| p.device() != device);
        if let Some(i) = elsewhere {
            let found = parameters.iter().chain(states.values()).nth(i);
            let got = found.map_or(String::new(), |p| p.device().to_string());
            let path = entries[i].path.clone();
            let error = Error::Devices { rank: self.rank, path, want: device.to_string(), got };
            // The others take this step and would wait.
            match &self.way {
                Way::Alone => {}
                Way::Ranks(group) => group.abort(&error.to_string()),
                Way::Moves(moves) => moves.end(self.rank, &error.to_string()),
            }
            return Err(error);
        }
        entries.push(Entry { path: "loss".into(), meta: Meta::new(DType::F32, [1]), wire: DType::F32 });
        let plan = {
            let mut state = self.lock();
            state.device = Some(device.clone());
            state.plan(|| Plan::backwards(&self.config, entries.clone()), &entries)
        };
        let count = plan.entries.len();
        // Where one thread may drive several ranks, none waits for what another is yet to compute.
        let in_turn = !self.together
            && device.uses_host_cores()
            && matches!(&self.way, Way::Ranks(group) if !group.overlaps());
        let mut work = Work {
            device,
            leaves,
            sums: vec![None; count],
            stacks: vec![Vec::new(); count],
            given: vec![false; count],
            used: vec![false; count],
            order: Vec::with_capacity(count),
            missing: plan.buckets.iter().map(|b| b.members.len()).collect(),
            promises: Vec::new(),
            in_turn,
            placed: Vec::new(),
            pending: Vec::new(),
            spread: None,
            mask: None,
            words: Vec::new(),
            early: 0,
            ends: false,
            hashes: None,
            waited: Duration::ZERO,
            failed: None,
            plan,
            parameters,
            states,
        };
        let compares = self.config.check.is_some_and(|every| every > 0 && number.is_multiple_of(every));
        if let Way::Moves(moves) = &self.way {
            let hashes = compares.then(|| work.hashes()).transpose()?;
            moves.enter(number, self.rank, hashes, &work.plan)?;
        }
        if let Way::Ranks(group) = &self.way {
            if compares {
                let own = work.hashes()?;
                let bytes: Vec<u8> = own.iter().flat_map(|h| h.to_le_bytes()).collect();
                work.hashes = Some((spread(group, &bytes)?, own));
            }
            for bucket in &work.plan.buckets {
                let call = Call::new(Op::AllReduce(self.config.combine.reduce()), bucket.dtype);
                let (promise, pending) =
                    group.promise_cut(call.tagged(bucket.tag), bucket.bytes(), &bucket.cuts)?;
                work.promises.push(Some(promise));
                work.pending.push(pending);
            }
            if self.config.unused == Unused::Zeros {
                let call = Call::new(Op::AllReduce(Reduce::Max), DType::U8);
                let (promise, pending) = group.promise(call, count)?;
                work.mask = Some((Some(promise), pending));
            }
            if !work.plan.settled {
                let bytes = 1 + 4 * count;
                let (promise, pending) = group.promise(Call::new(Op::Broadcast(0), DType::U8), bytes)?;
                work.spread = Some((Some(promise), pending));
            }
        }
        Ok(work)
    }
}

impl Inner {
    /// Notes what a step took, and the order of entries that it found.
    fn collected(&self, work: &Work, order: Result<Option<Order>, Error>) -> Result<(), Error> {
        let mut state = self.lock();
        state.stats.waited += work.waited;
        state.stats.buckets += work.plan.buckets.len() as u64;
        state.stats.early += work.early;
        if let Some(Order { entries, overlaps }) = order? {
            let plan = Plan::settled(&self.config, work.plan.entries.clone(), &entries, overlaps);
            state.plan = Some(Arc::new(plan));
        }
        Ok(())
    }
}

impl State {
    /// The plan for these entries: the last one if it still fits.
    fn plan(&mut self, new: impl FnOnce() -> Plan, entries: &[Entry]) -> Arc<Plan> {
        match &self.plan {
            Some(plan) if plan.entries == entries => plan.clone(),
            _ => self.plan.insert(Arc::new(new())).clone(),
        }
    }
}

impl Round {
    /// The shards that this worker computes, in order.
    pub fn shards(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Differentiates the next shard's loss. Gradients leave as they become final in the last shard's.
    ///
    /// # Panics
    /// As [`Tensor::backward`] does.
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<(), Error> {
        self.backward_weighted(loss, 1.0)
    }

    /// `weight` is how much what the shard did to buffers counts.
    #[track_caller]
    fn backward_weighted(&mut self, loss: &Tensor, weight: f64) -> Result<(), Error> {
        self.shard()?;
        let Some(work) = &mut self.work else {
            self.next += 1;
            self.keep(loss);
            return Ok(());
        };
        let turn = Turn { inner: &self.sync.0, number: self.number, shard: self.next, held: &self.held };
        work.loss(&turn, loss, true);
        loss.differentiate()
            .on_ready(|leaf| {
                work.came(&turn, leaf, true);
                None
            })
            .run();
        work.end(&turn, Some(weight))?;
        self.next += 1;
        Ok(())
    }

    /// Like [`Round::backward`] for the mean loss over `samples` of the step's `all`, which is weighted by its share.
    #[track_caller]
    pub fn backward_of(&mut self, loss: &Tensor, samples: usize, all: usize) -> Result<(), Error> {
        if self.work.is_none() && samples == all {
            return self.backward(loss);
        }
        self.backward_weighted(&(loss * (samples as f64 / all.max(1) as f64)), samples as f64)
    }

    /// Differentiates a piece of the next shard's loss without ending the shard: nothing leaves yet. A
    /// [`Round::backward`] ends it.
    #[track_caller]
    pub fn accumulate(&mut self, loss: &Tensor) -> Result<(), Error> {
        self.shard()?;
        let Some(work) = &mut self.work else {
            self.keep(loss);
            return Ok(());
        };
        let turn = Turn { inner: &self.sync.0, number: self.number, shard: self.next, held: &self.held };
        work.loss(&turn, loss, false);
        loss.differentiate()
            .on_ready(|leaf| {
                work.came(&turn, leaf, false);
                None
            })
            .run();
        Ok(())
    }

    /// Adds a gradient that autodiff did not make to the next shard's, such as one that was computed by hand. It is taken
    /// as it is: whoever weighs the losses of shards weighs it too. A [`Round::backward`] or [`Round::finish`] ends the shard.
    pub fn give(&mut self, parameter: &Tensor, gradient: &Tensor) -> Result<(), Error> {
        self.shard()?;
        let rank = self.sync.0.rank;
        let Some(work) = &mut self.work else {
            let mut given = Gradients::default();
            given.set(parameter, gradient.detach());
            if given.is_empty() {
                return Err(Error::Foreign { rank });
            }
            self.put(given, None);
            return Ok(());
        };
        let entry = parameter.leaf().and_then(|leaf| work.leaves.get(&leaf)).copied();
        let entry = entry.ok_or(Error::Foreign { rank })?;
        let Entry { path, meta, .. } = &work.plan.entries[entry];
        if gradient.meta() != *meta || gradient.device() != work.device {
            return Err(Error::Gradient { rank, path: path.clone(), want: *meta, got: gradient.meta() });
        }
        let turn = Turn { inner: &self.sync.0, number: self.number, shard: self.next, held: &self.held };
        work.used[entry] = true;
        work.add(&turn, entry, gradient.detach(), false);
        Ok(())
    }

    /// Ends the next shard with what was accumulated and given; `loss` is what it is counted as.
    pub fn finish(&mut self, loss: &Tensor) -> Result<(), Error> {
        self.shard()?;
        match &mut self.work {
            Some(work) => {
                let turn =
                    Turn { inner: &self.sync.0, number: self.number, shard: self.next, held: &self.held };
                work.loss(&turn, loss, true);
                work.end(&turn, Some(1.0))?;
            }
            None => self.put(Gradients::default(), Some(loss.detach())),
        }
        self.next += 1;
        Ok(())
    }

    /// The next shard has no samples: it counts as zeros.
    pub fn skip(&mut self) -> Result<(), Error> {
        self.shard()?;
        if let Some(work) = &mut self.work {
            let turn = Turn { inner: &self.sync.0, number: self.number, shard: self.next, held: &self.held };
            work.end(&turn, None)?;
        }
        self.next += 1;
        Ok(())
    }

    /// Differentiates where there is nothing to combine with.
    #[track_caller]
    fn keep(&mut self, loss: &Tensor) {
        let gradients = loss.backward();
        self.put(gradients, Some(loss.detach()));
    }

    fn put(&mut self, gradients: Gradients, loss: Option<Tensor>) {
        let (sum, before) = self.plain.get_or_insert_default();
        sum.add(gradients);
        *before = match (before.take(), loss) {
            (Some(before), Some(loss)) => Some(before + loss),
            (before, loss) => before.or(loss),
        };
    }

    fn shard(&self) -> Result<(), Error> {
        let rank = self.sync.0.rank;
        if self.next < self.held.end { Ok(()) } else { Err(Error::Shard { rank, held: self.held.len() }) }
    }

    /// Waits for the exchange, by the group's deadline, and gives what the optimiser needs.
    pub fn wait(mut self) -> Result<Reduced, Error> {
        let inner = self.sync.0.clone();
        self.is_over()?;
        if let Some((gradients, Some(loss))) = self.plain.take() {
            return Ok(Reduced { gradients, loss, unused: Vec::new() });
        }
        // One shard that was skipped.
        let Some(mut work) = self.work.take() else {
            let loss = Tensor::zeros([], &Device::default());
            return Ok(Reduced { gradients: Gradients::default(), loss, unused: Vec::new() });
        };
        no_grad(|| {
            let mut sums = vec![None; work.plan.entries.len()];
            let collected = work
                .collect(&inner, self.number, |came| came.for_each(|(entry, sum)| sums[entry] = Some(sum)));
            inner.collected(&work, collected)?;
            work.reduced(&inner, sums.into_iter().flatten().collect())
        })
    }

    /// Waits for the exchange and has `optimizer` make a step: [`Round::wait`] and [`Optimizer::step`]. If a worker's
    /// contribution could not be computed, no worker's model changes.
    #[track_caller]
    pub fn step(self, model: &mut dyn Module, optimizer: &mut dyn Optimizer) -> Result<Stepped, Error> {
        let Reduced { gradients, loss, unused } = self.wait()?;
        kiln_nn::step(optimizer, model, &gradients);
        Ok(Stepped { loss, unused })
    }

    fn is_over(&self) -> Result<(), Error> {
        let left = self.held.end - self.next;
        if left == 0 { Ok(()) } else { Err(Error::Unfinished { rank: self.sync.0.rank, left }) }
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        let inner = &self.sync.0;
        inner.lock().open = false;
        self.work.iter().for_each(|work| work.states.put_back());
        // The others take this step; a rank that does not is no longer like them.
        let reason = "a step was dropped after its backward, before its wait";
        match (&inner.way, &self.work, self.next == self.held.end) {
            (Way::Ranks(group), Some(_), true) => group.abort(reason),
            (Way::Moves(moves), Some(_), true) => moves.end(inner.rank, reason),
            (Way::Moves(moves), Some(_), false) => {
                moves.fail(self.number, inner.rank, "a step was dropped before its backward was over")
            }
            (Way::Alone | Way::Ranks(_) | Way::Moves(_), _, _) => {}
        }
        if let Way::Moves(moves) = &inner.way {
            moves.gone(self.number, inner.rank);
        }
    }
}

/// Where in a step a gradient comes.
struct Turn<'a> {
    inner: &'a Inner,
    number: u64,
    shard: usize,
    held: &'a Range<usize>,
}

impl Turn<'_> {
    fn is_last(&self) -> bool {
        self.shard + 1 == self.held.end
    }
}

/// What rank 0 found in its first backward, for all.
struct Order {
    /// Entries as their gradients became final.
    entries: Vec<usize>,
    /// Whether it computes and exchanges at the same time.
    overlaps: bool,
}

/// What a bucket's entries came to.
type Came<'a> = &'a mut dyn Iterator<Item = (usize, Tensor)>;

impl Work {
    /// The loss travels behind the gradients.
    fn loss(&mut self, turn: &Turn<'_>, loss: &Tensor, ends: bool) {
        let entry = self.plan.loss();
        let loss = loss.detach().to_dtype(DType::F32).reshape([1]);
        self.add(turn, entry, loss, ends);
    }

    /// A gradient is final.
    fn came(&mut self, turn: &Turn<'_>, leaf: LeafGradient, ends: bool) {
        let Some(&entry) = self.leaves.get(&leaf.leaf()) else { return };
        self.used[entry] = true;
        self.add(turn, entry, leaf.gradient, ends);
    }

    fn add(&mut self, turn: &Turn<'_>, entry: usize, value: Tensor, ends: bool) {
        let sum = match self.sums[entry].take() {
            Some(sum) => sum + value,
            None => value,
        };
        if ends {
            self.give(turn, entry, sum);
        } else {
            self.sums[entry] = Some(sum);
        }
    }

    /// What a shard came to for one entry.
    fn give(&mut self, turn: &Turn<'_>, entry: usize, value: Tensor) {
        self.given[entry] = true;
        let value = match &turn.inner.config.compress {
            Some(hook) if entry < self.parameters.len() => hook.encode(&value),
            _ => value,
        };
        let stack = &mut self.stacks[entry];
        stack.push(value);
        for _ in 0..turn.inner.layout.merges(turn.inner.rank, turn.shard) {
            if let (Some(right), Some(left)) = (stack.pop(), stack.pop()) {
                stack.push(left + right);
            }
        }
        if turn.is_last() {
            self.order.push(entry);
            let bucket = self.plan.home[entry];
            self.missing[bucket] -= 1;
            if self.missing[bucket] == 0
                && let Err(error) = self.leave(turn, bucket)
            {
                self.failed.get_or_insert(error);
            }
        }
    }

    /// A full bucket leaves.
    fn leave(&mut self, turn: &Turn<'_>, bucket: usize) -> Result<(), Error> {
        let plan = self.plan.clone();
        let members = &plan.buckets[bucket].members;
        // Of what ends a shard, zeros and all, nothing is yet to come.
        self.early += (!self.ends && self.missing.iter().any(|&left| left > 0)) as u64;
        match &turn.inner.way {
            Way::Alone => {}
            Way::Ranks(_) => {
                let Some(promise) = self.promises[bucket].take() else { return Ok(()) };
                let size = plan.buckets[bucket].dtype.size();
                let mut pieces: Vec<Piece> = Vec::new();
                for &(entry, start) in members {
                    for (part, value) in std::mem::take(&mut self.stacks[entry]).into_iter().enumerate() {
                        pieces.push((value, part, start * size));
                    }
                }
                self.placed.push(Placed::new(promise, pieces, &turn.inner.copied));
                if !self.in_turn || self.missing.iter().all(|&left| left == 0) {
                    start(self.placed.drain(..), !self.in_turn);
                }
            }
            Way::Moves(moves) => {
                let mut partials: Vec<Partial<Vec<Tensor>>> = (turn.inner.layout.parts(turn.inner.rank))
                    .into_iter()
                    .map(|part| Partial { first: part.start, shards: part.len(), value: Vec::new() })
                    .collect();
                for &(entry, _) in members {
                    let stack = std::mem::take(&mut self.stacks[entry]);
                    stack.into_iter().zip(&mut partials).for_each(|(value, part)| part.value.push(value));
                }
                moves.leave(turn.number, bucket, turn.inner.rank, partials, &plan);
            }
        }
        Ok(())
    }

    /// A shard's backward is over: what it did not give are zeros, or an error. `weight` is that of what it did to buffers;
    /// `None` if it was skipped.
    fn end(&mut self, turn: &Turn<'_>, weight: Option<f64>) -> Result<(), Error> {
        let mut unused = Vec::new();
        self.ends = true;
        for (entry, change) in self.states.taken(weight, &self.device) {
            self.give(turn, entry, change);
        }
        for entry in 0..self.plan.entries.len() {
            if self.given[entry] {
                continue;
            }
            if let Some(sum) = self.sums[entry].take() {
                self.give(turn, entry, sum);
            } else if weight.is_none() || turn.inner.config.unused == Unused::Zeros {
                let Meta { dtype, shape } = self.plan.entries[entry].meta;
                self.give(turn, entry, Tensor::full(shape, 0.0, dtype, &self.device));
            } else {
                unused.push(self.plan.entries[entry].path.clone());
            }
        }
        self.given.fill(false);
        self.ends = false;
        if !unused.is_empty() {
            let error = Error::Unused { rank: turn.inner.rank, paths: unused };
            // The other ranks learn it in place of this one's contribution.
            self.promises.drain(..).flatten().for_each(|promise| promise.fail(&error.to_string()));
            start(self.placed.drain(..), true);
            if let Way::Moves(moves) = &turn.inner.way {
                moves.fail(turn.number, turn.inner.rank, &error.to_string());
            }
            return Err(error);
        }
        if turn.is_last() {
            let used = || self.used.iter().map(|&used| used as u8).collect();
            let entries = self.order.iter().flat_map(|&e| (e as u32).to_le_bytes());
            let order = || [!self.in_turn as u8].into_iter().chain(entries).collect();
            if let (Way::Moves(moves), Unused::Zeros) = (&turn.inner.way, turn.inner.config.unused) {
                moves.used(turn.number, turn.inner.rank, self.used.clone());
            }
            keep(&mut self.mask, used)?;
            keep(&mut self.spread, order)?;
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// What the parameters come to, to be compared with rank 0's.
    fn hashes(&self) -> Result<Vec<u64>, Error> {
        let reads: Vec<_> = self.parameters.iter().map(|p| p.content()).collect();
        reads.into_iter().map(|read| Ok(hash(&read.wait()?.bytes))).collect()
    }

    /// Waits for everything that is under way, and has each bucket as it comes; gives the order of entries that rank 0
    /// found, where it is new.
    fn collect(
        &mut self,
        inner: &Inner,
        number: u64,
        mut each: impl FnMut(Came<'_>),
    ) -> Result<Option<Order>, Error> {
        if let (Some((pending, own)), Way::Ranks(group)) = (self.hashes.take(), &inner.way) {
            let first = pending.wait()?;
            let differs = own.iter().zip(first.chunks(8)).position(|(own, first)| own.to_le_bytes() != first);
            if let Some(entry) = differs {
                let path = &self.plan.entries[entry].path;
                let reason = format!("its {path} is not that of rank 0 at step {number}");
                group.abort(&reason);
                return Err(kiln_group::Error::Aborted { rank: inner.rank, reason }.into());
            }
        }
        let plan = self.plan.clone();
        let mut failed = None;
        if let (Some(last), true) = (self.pending.last(), self.in_turn) {
            let mut begun = Instant::now();
            last.contribute(|| {
                // What fails is told in place of a contribution.
                drop(self.device.sync());
                begun = Instant::now();
            });
            self.waited += begun.elapsed();
        }
        let mut pending = std::mem::take(&mut self.pending).into_iter();
        for (b, bucket) in plan.buckets.iter().enumerate() {
            let members = bucket.members.iter();
            match &inner.way {
                Way::Alone => each(
                    &mut members
                        .filter_map(|&(entry, _)| Some((entry, finish(inner, self.stacks[entry].pop()?)))),
                ),
                Way::Ranks(_) => {
                    let begun = Instant::now();
                    let pending = pending.next().ok_or(Error::Early)?;
                    let came = pending.wait();
                    self.waited += begun.elapsed();
                    match came {
                        Ok(buffer) => {
                            let meta = Meta::new(bucket.dtype, [bucket.length]);
                            let whole =
                                Tensor::from_data(Data::new(meta, Bytes::new(Lent(buffer))), &self.device);
                            each(&mut members.map(|&(entry, start)| {
                                let shape = plan.entries[entry].meta.shape;
                                let flat = whole.narrow(0, start as isize, shape.numel());
                                let shape: Vec<isize> = shape.iter().map(|&d| d as isize).collect();
                                (entry, flat.reshape(&shape[..]))
                            }));
                        }
                        // The others are waited for all the same: the group may live on.
                        Err(error) => drop(failed.get_or_insert(error)),
                    }
                }
                Way::Moves(moves) => {
                    let begun = Instant::now();
                    let list = moves.take(number, b, inner.rank);
                    self.waited += begun.elapsed();
                    let list = list?;
                    each(&mut members.zip(list).map(|(&(entry, _), sum)| (entry, finish(inner, sum))));
                }
            }
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
        if let Way::Moves(moves) = &inner.way {
            self.words.extend(moves.word(number, inner.rank)?);
            if inner.config.unused == Unused::Zeros {
                self.used = moves.mask(number, inner.rank)?;
            }
        }
        let order = match self.spread.take() {
            Some((_, pending)) => {
                let number = |b: &[u8]| b.iter().rev().fold(0, |n, &b| n << 8 | b as usize);
                let bytes = pending.wait()?;
                let (overlaps, entries) = bytes.split_first().ok_or(Error::Early)?;
                Some(Order { entries: entries.chunks(4).map(number).collect(), overlaps: *overlaps != 0 })
            }
            None => None,
        };
        if let Some((_, pending)) = self.mask.take() {
            self.used = pending.wait()?.iter().map(|&used| used != 0).collect();
        }
        Ok(order)
    }

    fn reduced(&self, inner: &Inner, mut sums: Vec<Tensor>) -> Result<Reduced, Error> {
        let loss = sums.pop().map(|loss| loss.reshape(())).ok_or(Error::Early)?;
        self.states.moved(&sums.split_off(self.parameters.len().min(sums.len())));
        let mut reduced = Reduced { gradients: Gradients::default(), loss, unused: Vec::new() };
        self.words.iter().for_each(|word| reduced.gradients.require(word.clone()));
        for (entry, sum) in sums.into_iter().enumerate() {
            let Entry { path, meta, .. } = &self.plan.entries[entry];
            if inner.config.unused == Unused::Zeros && !self.used[entry] {
                reduced.unused.push(path.clone());
                continue;
            }
            reduced.gradients.set(&self.parameters[entry], decode(inner, sum, meta.dtype));
        }
        Ok(reduced)
    }
}

/// What a reduction between ranks does at the end.
fn finish(inner: &Inner, sum: Tensor) -> Tensor {
    match inner.config.combine {
        Combine::Sum => sum,
        Combine::Mean => sum / inner.layout.shards() as f64,
    }
}

/// A combination as a gradient of that dtype.
fn decode(inner: &Inner, sum: Tensor, dtype: DType) -> Tensor {
    match &inner.config.compress {
        Some(hook) => hook.decode(&sum, dtype),
        None => sum,
    }
}

/// Keeps a promise with these bytes for all of a rank's parts.
fn keep(
    waiting: &mut Option<(Option<Promise>, Pending)>,
    bytes: impl FnOnce() -> Vec<u8>,
) -> Result<(), Error> {
    let Some(mut promise) = waiting.as_mut().and_then(|(promise, _)| promise.take()) else { return Ok(()) };
    let bytes = bytes();
    (0..promise.parts()).try_for_each(|part| promise.put(part, 0, &bytes).map(drop))?;
    Ok(promise.give()?)
}

/// Told apart are bytes that differ, not more: ranks mean well.
fn hash(bytes: &[u8]) -> u64 {
    let mut sum = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let word = chunk.iter().rev().fold(0u64, |n, &b| n << 8 | b as u64);
        sum = (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    sum
}
