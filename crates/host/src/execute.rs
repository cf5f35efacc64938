//! Executing: works, batches and nodes one after another, plans for windows, and what becomes of failures.

use crate::device::{Executor, Shared, Table, Task};
use crate::kernels::caught;
use crate::launches::{Failed, Launch, failed};
use crate::lowering;
use crate::stop;
use crate::{Arg, Kernels};
use kiln_device::{Batch, Bytes, Data, Error, Origin, OutputMemory, Place, Promise, pending};
use kiln_fuse::{Handles, WindowContext};
use kiln_ir::{DType, Id, Item, Meta, Node, Op, OpError, Scalar, Shape};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Operands of an operation up to which their memory is used again for the result.
const MOST_OWNED: usize = 1024;

/// Items of a batch up to which it is planned: recording gives far fewer, and the search is not made for more.
const MOST_PLANNED: usize = 1 << 14;

/// Failures that are kept until somebody asks for them; the first tell most.
const MOST_FAILURES: usize = 64;

/// A value, or why there is none.
pub(crate) type Slot<V> = Result<V, Arc<Error>>;

impl<K: Kernels> Shared<K> {
    pub(crate) fn executor(&self) -> MutexGuard<'_, Executor<K::Value>> {
        self.queue.executor()
    }

    pub(crate) fn execute(&self, executor: &mut Executor<K::Value>, work: Task) {
        stop::under(&self.stopped, || self.execute_under_flag(executor, work));
    }

    fn execute_under_flag(&self, executor: &mut Executor<K::Value>, work: Task) {
        self.hear(&mut executor.table);
        match work {
            Task::Batch(batch) => {
                self.batch(executor, &batch);
                batch.recycle();
            }
            Task::PlaceOutput(id, memory) => drop(executor.outputs.insert(id, memory)),
            Task::Write(id, data, place) => {
                let begun = self.trace.begin();
                let value = match id.is_reserved() {
                    true => Err(reserved("write")),
                    false => self.guarded("write", || self.kernels.upload(&data, place)),
                };
                self.trace.end(begun, "write", 0, data.bytes.len() as u64);
                self.launched(|| {
                    ("write".into(), None, [].into_iter().collect(), [id].into_iter().collect())
                });
                executor.table.insert(id, value.map_err(|e| self.fail(failed("write", id, None, e))));
            }
            Task::Read(id, promise) => {
                executor.outputs.remove(&id);
                let begun = self.trace.begin();
                let read = match executor.table.get(&id) {
                    _ if stop::is_set() => Err(Error::Stopped),
                    Some(Ok(value)) => Ok(value),
                    Some(Err(error)) => Err((**error).clone()),
                    None => Err(Error::UnknownValue(id)),
                };
                let bytes = read.as_ref().map_or(0, |&value| self.kernels.meta(value).bytes() as u64);
                match read {
                    Ok(value) => self.answer(value, id, promise),
                    Err(error) => promise.answer(Err(error)),
                }
                self.trace.end(begun, "read", 0, bytes);
            }
            Task::Sync(promise) if stop::is_set() => promise.answer(Err(Error::Stopped)),
            Task::Sync(promise) => self.finish(promise),
        }
        self.values.store(executor.table.len(), Ordering::Relaxed);
    }

    fn batch(&self, executor: &mut Executor<K::Value>, batch: &Batch) {
        let Executor { table, outputs, engine } = executor;
        let several = batch.items.len() > 1 || batch.items.iter().any(lowering::composite);
        if !engine.is_idle() && several && batch.items.len() <= MOST_PLANNED && !stop::is_set() {
            let outside = Outside { shared: self, table, batch };
            // A fault in planning costs speed, never results.
            let plan = catch_unwind(AssertUnwindSafe(|| engine.plan(&batch.items, &outside))).ok().flatten();
            if let Some(plan) = plan {
                return engine.replay(
                    plan,
                    &batch.items,
                    &mut Live { shared: self, table, outputs, batch, group: None, first: 0 },
                );
            }
        }
        for (at, item) in batch.items.iter().enumerate() {
            match item {
                Item::Free(id) => {
                    table.remove(id);
                    outputs.remove(id);
                }
                Item::Run(node) => {
                    let origin = batch.origins.get(at).copied();
                    if let Some(&id) = node.outs.iter().find(|id| id.is_reserved()) {
                        let error = failed(node.op.name(), id, origin, reserved(node.op.name()));
                        poison(table, node, self.fail(error));
                        continue;
                    }
                    let dying: SmallVec<[Id; 4]> = batch.items[at + 1..].iter().map_while(freed).collect();
                    self.node(table, node, &dying, origin, batch.place);
                }
            }
        }
    }

    /// Executes one node; `dying` are values that nothing uses afterwards.
    fn node(
        &self,
        table: &mut Table<K::Value>,
        node: &Node,
        dying: &[Id],
        origin: Option<Origin>,
        place: Place,
    ) {
        let known = node.ins.iter().all(|id| table.contains_key(id));
        match (&node.op, &node.ins[..], &node.outs[..]) {
            (Op::Guard { finite }, _, [out]) if known => {
                // It looks at what may still fail.
                self.catch_up(table);
                let word = self.guard(table, node, *finite, origin, place);
                return drop(table.insert(*out, word));
            }
            (Op::Commit, [ok, new, old], [out]) if known => {
                let ok = matches!(&table[ok], Ok(ok) if self.holds(ok));
                let from = if ok { new } else { old };
                let chosen = table[from].clone();
                self.launched(|| {
                    (
                        node.op.name().into(),
                        origin,
                        [*from].into_iter().collect(),
                        [*out].into_iter().collect(),
                    )
                });
                return drop(table.insert(*out, chosen));
            }
            _ => {}
        }
        let mut ins: SmallVec<[Arg<K::Value>; 4]> = SmallVec::with_capacity(node.ins.len());
        // A poisoned operand is looked for first, so that nothing is taken out of the table in vain.
        for id in &node.ins {
            match table.get(id) {
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    let error = error.clone();
                    return poison(table, node, error);
                }
                None => {
                    let error = failed(node.op.name(), first(node), origin, Error::UnknownValue(*id));
                    return poison(table, node, self.fail(error));
                }
            }
        }
        for id in &node.ins {
            // Of very many operands none is worth looking for the others.
            let once =
                node.ins.len() <= MOST_OWNED && node.ins.iter().filter(|other| *other == id).count() == 1;
            if once && dying.contains(id) {
                ins.extend(table.remove(id).and_then(Result::ok).map(Arg::Owned));
            } else if let Some(Ok(value)) = table.get(id) {
                ins.push(Arg::Shared(value.clone()));
            }
        }
        let begun = self.trace.begin();
        let read: u64 = begun.map_or(0, |_| ins.iter().map(|x| self.kernels.meta(x).bytes() as u64).sum());
        let result = self.guarded(node.op.name(), || self.kernels.eval(&node.op, &mut ins, place));
        if begun.is_some() {
            let written = |outs: &SmallVec<[K::Value; 2]>| {
                outs.iter().map(|x| self.kernels.meta(x).bytes() as u64).sum::<u64>()
            };
            self.trace.end(begun, node.op.name(), 1, read + result.as_ref().map_or(0, written));
        }
        self.launched(|| {
            (node.op.name().into(), origin, node.ins.iter().copied().collect(), node.outs.clone())
        });
        match result {
            Ok(outs) => table.extend(node.outs.iter().copied().zip(outs.into_iter().map(Ok))),
            Err(error) => {
                let error = failed(node.op.name(), first(node), origin, error);
                poison(table, node, self.fail(error))
            }
        }
    }

    /// Whether a step may be applied: a bool that is never poisoned by what it looks at. A refusal is a failure to be told.
    fn guard(
        &self,
        table: &Table<K::Value>,
        node: &Node,
        finite: bool,
        origin: Option<Origin>,
        place: Place,
    ) -> Slot<K::Value> {
        let failed = |cause: Error| self.fail(failed(node.op.name(), first(node), origin, cause));
        let refused = |at: usize, cause| Error::StepRefused { at, path: String::new(), origin: None, cause };
        let eval = |op: &Op, ins: &mut [Arg<K::Value>]| {
            let outs = self.guarded("guard", || self.kernels.eval(op, ins, place))?;
            outs.into_iter().next().ok_or(Error::UnknownValue(first(node)))
        };
        let word = |ok: bool| {
            let value = Scalar::from_bits(DType::Bool, ok as u64);
            eval(&Op::Full { shape: Shape::default(), value }, &mut []).map_err(failed)
        };
        for (at, id) in node.ins.iter().enumerate() {
            if let Err(cause) = &table[id] {
                failed(refused(at, Some(cause.clone())));
                return word(false);
            }
        }
        let values = node.ins.iter().filter_map(|id| table[id].as_ref().ok());
        for (at, value) in values.enumerate().filter(|_| finite) {
            let fine = eval(&node.op, &mut [Arg::Shared(value.clone())]).map_err(failed)?;
            if !self.holds(&fine) {
                failed(refused(at, None));
                return Ok(fine);
            }
        }
        word(true)
    }

    /// Whether a single bool is true.
    fn holds(&self, word: &K::Value) -> bool {
        self.kernels.download(word).is_ok_and(|data| data.bytes.first() == Some(&1))
    }

    /// Hands a value's bytes to whoever asked.
    fn answer(&self, value: &K::Value, id: Id, promise: Promise<Data>) {
        if self.kernels.launched() == 0 {
            return hand_over(promise, |promise| self.kernels.download_to(value, promise));
        }
        let failed = Failed::default();
        let (given, read) = pending(None);
        hand_over(given, |given| self.kernels.download_to(value, given));
        self.launch("read".into(), None, [id].into_iter().collect(), SmallVec::new(), failed.clone());
        let this = self.this.clone();
        read.on_answer(move |answer| {
            if let Some(this) = this.upgrade() {
                this.settle();
            }
            // The bytes of what failed meanwhile are nobody's.
            promise.answer(failed.get().map_or(answer, |error| Err((**error).clone())));
        });
    }

    /// Answers when the device has done everything before, and its faults are known.
    fn finish(&self, promise: Promise<()>) {
        if self.kernels.launched() == 0 {
            return hand_over(promise, |promise| self.kernels.finish(promise));
        }
        let (done, finished) = pending(None);
        let this = self.this.clone();
        finished.on_answer(move |answer| {
            if let Some(this) = this.upgrade() {
                this.settle();
            }
            promise.answer(answer);
        });
        hand_over(done, |done| self.kernels.finish(done));
    }

    /// Waits until the device has done what was launched, and has the table know what failed.
    fn catch_up(&self, table: &mut Table<K::Value>) {
        if self.kernels.launched() > 0 {
            let (done, finished) = pending(None);
            hand_over(done, |done| self.kernels.finish(done));
            // Stopped or not: what failed is told by its values.
            let _ = finished.wait();
            self.hear(table);
        }
    }

    /// Has the table know what has failed on the device by now.
    fn hear(&self, table: &mut Table<K::Value>) {
        if self.kernels.launched() == 0 {
            return;
        }
        self.settle();
        for (id, error) in self.launches().take_poison() {
            if let Some(slot @ Ok(_)) = table.get_mut(&id) {
                *slot = Err(error);
            }
        }
    }

    /// Takes in what the device tells of its launches.
    pub(crate) fn settle(&self) {
        if self.kernels.launched() > 0 {
            // Asked under the lock, or news could be taken in behind later ones.
            let mut launches = self.launches();
            let news = launches.settle(self.kernels.faults());
            drop(launches);
            news.into_iter().for_each(|error| drop(self.fail(error)));
        }
    }

    /// Whether everything that was launched is done.
    pub(crate) fn is_done(&self) -> bool {
        self.settle();
        self.launches().is_empty()
    }

    /// Notes what an asynchronous device has just been given: its name, origin, operands and results.
    fn launched(&self, what: impl FnOnce() -> Launched) {
        if self.kernels.launched() > 0 {
            let (op, origin, ins, outs) = what();
            self.launch(op, origin, ins, outs, Failed::default());
        }
    }

    fn launch(
        &self,
        op: String,
        origin: Option<Origin>,
        ins: SmallVec<[Id; 4]>,
        outs: SmallVec<[Id; 2]>,
        failed: Failed,
    ) {
        let until = self.kernels.launched();
        self.launches().push(Launch { until, op, origin, ins, outs, failed });
    }

    fn launches(&self) -> MutexGuard<'_, crate::launches::Launches> {
        self.launches.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Notes a failure for [`kiln_device::Observe::failures`].
    fn fail(&self, error: Arc<Error>) -> Arc<Error> {
        let mut failures = self.failures.lock().unwrap_or_else(|e| e.into_inner());
        if failures.len() < MOST_FAILURES {
            failures.push((*error).clone());
        }
        error
    }

    /// Runs a kernel; a panic in it is an error like any other.
    fn guarded<T>(&self, op: &str, f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        if stop::is_set() {
            return Err(Error::Stopped);
        }
        caught(op, f)
    }
}

/// What planning may ask.
struct Outside<'a, K: Kernels> {
    shared: &'a Shared<K>,
    table: &'a Table<K::Value>,
    batch: &'a Batch,
}

impl<K: Kernels> WindowContext for Outside<'_, K> {
    fn meta(&self, id: Id) -> Option<Meta> {
        self.table.get(&id).and_then(|slot| slot.as_ref().ok()).map(|value| self.shared.kernels.meta(value))
    }

    fn lower(&self, _: &[Item]) -> Option<Vec<Item>> {
        let claims = |op: &Op, ins: &[Meta]| self.shared.kernels.claims(op, ins);
        lowering::lowered(self.batch, |id| self.meta(id), claims).map(|batch| batch.items)
    }
}

/// The table while a plan runs.
struct Live<'a, K: Kernels> {
    shared: &'a Shared<K>,
    table: &'a mut Table<K::Value>,
    outputs: &'a mut FxHashMap<Id, OutputMemory>,
    batch: &'a Batch,
    /// When the group that runs began, and the bytes of its operands; while a trace is wanted.
    group: Option<(Instant, u64)>,
    /// The place of its first node.
    first: usize,
}

impl<K: Kernels> Live<'_, K> {
    /// Bytes of those of these values that are there.
    fn bytes<'n>(&self, ids: impl Iterator<Item = &'n Id>) -> u64 {
        let mut ids: SmallVec<[Id; 64]> = ids.copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids.iter().filter_map(|id| self.get(*id)).map(|x| self.shared.kernels.meta(x).bytes() as u64).sum()
    }
}

impl<K: Kernels> Handles<K::Value> for Live<'_, K> {
    fn get(&self, id: Id) -> Option<&K::Value> {
        self.table.get(&id).and_then(|slot| slot.as_ref().ok())
    }

    fn put(&mut self, id: Id, value: K::Value) {
        self.table.insert(id, Ok(value));
    }

    fn run(&mut self, at: usize, node: &Node, dying: &[Id]) {
        self.shared.node(self.table, node, dying, self.batch.origins.get(at).copied(), self.batch.place);
    }

    fn fail(&mut self, place: usize, nodes: &[&Node], error: Error) {
        let Some(node) = nodes.first() else { return };
        let origin = self.batch.origins.get(place).copied();
        let error = self.shared.fail(failed(node.op.name(), first(node), origin, error));
        nodes.iter().for_each(|node| poison(self.table, node, error.clone()));
    }

    fn begins(&mut self, place: usize, nodes: &[&Node]) {
        self.first = place;
        // Operands that the group makes itself are not there yet.
        self.group =
            self.shared.trace.begin().map(|begun| (begun, self.bytes(nodes.iter().flat_map(|n| &n.ins))));
    }

    fn ends(&mut self, name: &str, nodes: &[&Node]) {
        self.shared.launched(|| {
            let ins = nodes.iter().flat_map(|node| node.ins.iter().copied()).collect();
            let outs = nodes.iter().flat_map(|node| node.outs.iter().copied()).collect();
            (name.into(), self.batch.origins.get(self.first).copied(), ins, outs)
        });
        if let Some((begun, read)) = self.group.take() {
            let ops: SmallVec<[&str; 64]> = nodes.iter().map(|node| node.op.name()).collect();
            let bytes = read + self.bytes(nodes.iter().flat_map(|n| &n.outs));
            let name = format!("{name}: {}", ops.join(" "));
            self.shared.trace.end(Some(begun), &name, nodes.len() as u32, bytes);
        }
    }

    fn free(&mut self, id: Id) {
        self.table.remove(&id);
        self.outputs.remove(&id);
    }

    fn place(&self) -> Place {
        self.batch.place
    }

    fn output_memory(&self, id: Id) -> Option<Bytes> {
        self.outputs.get(&id).and_then(|memory| memory())
    }

    fn read(&self, id: Id) -> Result<Data, Error> {
        let data = self.shared.kernels.download(self.get(id).ok_or(Error::UnknownValue(id))?)?;
        self.shared.settle();
        self.shared.launches().poison(id).map_or(Ok(data), |error| Err((*error).clone()))
    }

    fn write(&mut self, id: Id, data: Data) -> Result<(), Error> {
        let value = self.shared.kernels.upload(&data, self.batch.place)?;
        self.put(id, value);
        Ok(())
    }
}

/// The value that an operation's failure is told of; hostile ones may define none.
fn first(node: &Node) -> Id {
    node.outs.first().copied().unwrap_or(Id::NONE)
}

fn freed(item: &Item) -> Option<Id> {
    match item {
        Item::Free(id) => Some(*id),
        Item::Run(_) => None,
    }
}

fn poison<V>(table: &mut Table<V>, node: &Node, error: Arc<Error>) {
    table.extend(node.outs.iter().map(|&id| (id, Err(error.clone()))));
}

/// Values that fusion defines take these names; nobody else may.
fn reserved(op: &str) -> Error {
    let reason = "names from 2^62 on belong to the device";
    Error::Op(OpError::Attribute { op: op.to_string(), reason })
}

/// Has the kernels take a promise. One that panics has dropped it, which answers it.
fn hand_over<T>(promise: Promise<T>, take: impl FnOnce(Promise<T>)) {
    let _ = catch_unwind(AssertUnwindSafe(|| take(promise)));
}

/// What was launched: its name, origin, operands and results.
type Launched = (String, Option<Origin>, SmallVec<[Id; 4]>, SmallVec<[Id; 2]>);
