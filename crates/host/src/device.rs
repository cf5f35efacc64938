//! A device that computes on the host: a queue of submissions, a table of values, poison, and somebody to run it.
//!
//! [`HostDevice`] does everything but arithmetic, which comes from [`Kernels`]. Work is executed in order by whoever
//! holds the executor's lock: a thread that waits for an answer runs the queue itself, a background thread runs it
//! where nobody waits. A failed operation, or one that panics, poisons its results and nothing else.

use crate::floats::standard;
use crate::lowering;
use crate::queue::Queue;
use crate::stop::{self, Stopped};
use kiln_device::{
    Batch, Bytes, Control, Data, DeviceInfo, Driver, Error, Help, Memory, Observe, Origin, OutputMemory,
    Pending, Place, Placing, Promise, Spans, Trace, UploadBuffer, Urgency, pending,
};
use kiln_fuse::{Engine, Fuser, Handles, Limits, Observer, Stats, WindowContext};
use kiln_ir::{DType, Id, Item, Meta, Node, Op, OpError, Scalar, Shape};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Instant;

/// The arithmetic of a host device.
pub trait Kernels: Send + Sync + 'static {
    /// How it holds a value.
    type Value: Clone + Send + Sync;

    /// What it is and can do.
    fn info(&self) -> DeviceInfo;
    /// A value from host data.
    fn upload(&self, data: &Data, place: Place) -> Result<Self::Value, Error>;
    /// A value's dtype and shape.
    fn meta(&self, value: &Self::Value) -> Meta;
    /// A value as host data.
    fn download(&self, value: &Self::Value) -> Result<Data, Error>;
    /// The results of an operation. An operand that is `Owned` has no other user and may be overwritten.
    fn eval(
        &self,
        op: &Op,
        ins: &mut [Arg<Self::Value>],
        place: Place,
    ) -> Result<SmallVec<[Self::Value; 2]>, Error>;
    /// Bytes held; `values` is filled in by the device.
    fn memory(&self) -> Memory;
    /// Gives cached memory back.
    fn cleanup(&self) {}
    /// Sets the most bytes to hold.
    fn limit(&self, _bytes: Option<usize>) {}
    /// Makes host buffers ready for [`Kernels::upload`].
    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        data
    }
    /// Memory that [`Kernels::upload`] takes over.
    fn upload_buffer(&self, _len: usize, _place: Place) -> Option<Box<dyn UploadBuffer>> {
        None
    }
    /// What can run several nodes as one.
    fn fusers(&self) -> Vec<Box<dyn Fuser<Self::Value>>> {
        Vec::new()
    }
}

/// An operand.
pub enum Arg<V> {
    /// Used by others too.
    Shared(V),
    /// At its last use.
    Owned(V),
}

impl<V> std::ops::Deref for Arg<V> {
    type Target = V;
    fn deref(&self) -> &V {
        match self {
            Arg::Shared(value) | Arg::Owned(value) => value,
        }
    }
}

/// Operations that may wait in the queue before the recording thread has to help.
const MOST_QUEUED: usize = 1 << 14;

/// Operands of an operation up to which their memory is used again for the result.
const MOST_OWNED: usize = 1024;

/// Items of a batch up to which it is planned: recording gives far fewer, and the search is not made for more.
const MOST_PLANNED: usize = 1 << 14;

/// Failures that are kept until somebody asks for them; the first tell most.
const MOST_FAILURES: usize = 64;

/// A device over [`Kernels`].
pub struct HostDevice<K: Kernels> {
    shared: Arc<Shared<K>>,
}

struct Shared<K: Kernels> {
    kernels: K,
    queue: Queue<Task, Executor<K::Value>>,
    values: AtomicUsize,
    stopped: AtomicBool,
    /// Values are computed in memory that is chosen for them.
    places_outputs: bool,
    /// What failed since it was last asked for.
    failures: Mutex<Vec<Error>>,
    /// Starts the background thread at its first use.
    background: OnceLock<()>,
    /// It has fusers.
    fuses: AtomicBool,
    /// What has run, while somebody wants to know.
    trace: Trace,
    this: Weak<Shared<K>>,
}

enum Task {
    Batch(Batch),
    PlaceOutput(Id, OutputMemory),
    Write(Id, Data, Place),
    Read(Id, Promise<Data>),
    Sync(Promise<()>),
}

/// What executing needs: the values, and plans for windows.
struct Executor<V> {
    table: Table<V>,
    /// Where values are to be computed that nobody has read yet.
    outputs: FxHashMap<Id, OutputMemory>,
    engine: Engine<V>,
}

type Table<V> = FxHashMap<Id, Slot<V>>;

/// A value, or why there is none.
type Slot<V> = Result<V, Arc<Error>>;

impl<K: Kernels + Default> HostDevice<K> {
    /// A device with kernels of its own.
    pub fn start() -> HostDevice<K> {
        HostDevice::new(K::default())
    }
}

impl<K: Kernels> HostDevice<K> {
    /// A device that computes with `kernels`.
    pub fn new(kernels: K) -> HostDevice<K> {
        let fusers = if fusing() { kernels.fusers() } else { Vec::new() };
        let fuses = AtomicBool::new(!fusers.is_empty());
        let engine = Engine::new(fusers, Limits::default());
        let places_outputs = kernels.info().places_outputs;
        let shared = Arc::new_cyclic(|this| Shared {
            kernels,
            queue: Queue::new(Executor {
                table: FxHashMap::default(),
                outputs: FxHashMap::default(),
                engine,
            }),
            values: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            places_outputs,
            failures: Mutex::default(),
            background: OnceLock::new(),
            fuses,
            trace: Trace::default(),
            this: this.clone(),
        });
        let device = HostDevice { shared };
        if let Some(dir) = kiln_env::CACHE.get() {
            device.cache(dir);
        }
        device
    }

    /// What fusion has done.
    pub fn fusion(&self) -> Stats {
        self.shared.executor().engine.stats()
    }

    /// Adds a fuser of the user's own. Where it scores better than the device's, its groups are made.
    pub fn add_fuser(&self, fuser: Box<dyn Fuser<K::Value>>) {
        self.shared.executor().engine.add(fuser);
        self.shared.fuses.store(true, Ordering::Relaxed);
    }

    /// Keeps plans in a folder from now on, as `KILN_CACHE` does.
    pub fn cache(&self, dir: impl Into<std::path::PathBuf>) {
        let info = self.shared.kernels.info();
        self.shared.executor().engine.cache(dir, &format!("{} {}", info.name, info.numerics));
    }

    /// Tells `observer` from now on what fusion does.
    pub fn observe(&self, observer: Box<dyn Observer>) {
        self.shared.executor().engine.observe(observer);
    }

    fn ask<T>(&self, work: impl FnOnce(Promise<T>) -> Task) -> Pending<T> {
        let (promise, pending) = pending(Some(self.shared.clone() as Arc<dyn Help>));
        self.shared.queue.push(work(promise), 0);
        pending
    }
}

impl<K: Kernels> Drop for HostDevice<K> {
    fn drop(&mut self) {
        self.shared.queue.stop();
    }
}

impl<K: Kernels> Driver for HostDevice<K> {
    fn info(&self) -> DeviceInfo {
        let info = DeviceInfo { supports_all: true, ..self.shared.kernels.info() };
        match self.shared.fuses.load(Ordering::Relaxed) {
            true => DeviceInfo { name: format!("fusion<{}>", info.name), ..info },
            false => info,
        }
    }

    fn submit(&self, batch: Batch) {
        let urgency = batch.urgency;
        let items = batch.items.len();
        let full = self.shared.queue.push(Task::Batch(batch), items) > MOST_QUEUED;
        match urgency {
            _ if full => self.shared.run(),
            Urgency::Now => self.shared.run(),
            Urgency::Background => self.shared.start(),
            Urgency::Awaited => {}
        }
    }

    fn write(&self, id: Id, data: Data, place: Place) {
        self.shared.queue.push(Task::Write(id, data, place), 0);
    }

    fn read(&self, id: Id) -> Pending<Data> {
        self.ask(|promise| Task::Read(id, promise))
    }

    fn sync(&self) -> Pending<()> {
        self.ask(Task::Sync)
    }

    fn memory(&self) -> Memory {
        Memory { values: self.shared.values.load(Ordering::Relaxed), ..self.shared.kernels.memory() }
    }

    fn placing(&self) -> Option<&dyn Placing> {
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

impl<K: Kernels> Placing for HostDevice<K> {
    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        self.shared.kernels.stage(data)
    }

    fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>> {
        self.shared.kernels.upload_buffer(len, place)
    }

    fn place_output(&self, id: Id, memory: OutputMemory) {
        if self.shared.places_outputs {
            self.shared.queue.push(Task::PlaceOutput(id, memory), 0);
        }
    }
}

impl<K: Kernels> Observe for HostDevice<K> {
    fn failures(&self) -> Vec<Error> {
        std::mem::take(&mut *self.shared.failures.lock().unwrap_or_else(|e| e.into_inner()))
    }

    fn events(&self) -> Vec<String> {
        Vec::new()
    }

    fn trace(&self, on: bool) -> Result<(), Error> {
        self.shared.trace.set(on);
        Ok(())
    }

    fn spans(&self, most: usize) -> Pending<Spans> {
        Pending::ready(Ok(self.shared.trace.take(most)))
    }

    fn is_idle(&self) -> bool {
        false
    }
}

impl<K: Kernels> Control for HostDevice<K> {
    fn limit(&self, bytes: Option<usize>) {
        self.shared.kernels.limit(bytes);
    }

    fn cleanup(&self) {
        self.shared.kernels.cleanup();
    }

    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn close(&self) {}

    fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
    }

    fn ended(&self) -> Option<Error> {
        None
    }
}

impl<K: Kernels> Shared<K> {
    fn executor(&self) -> MutexGuard<'_, Executor<K::Value>> {
        self.queue.executor()
    }

    fn execute(&self, executor: &mut Executor<K::Value>, work: Task) {
        stop::under(&self.stopped, || self.execute_under_flag(executor, work));
    }

    fn execute_under_flag(&self, executor: &mut Executor<K::Value>, work: Task) {
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
                executor.table.insert(id, value.map_err(|e| self.fail(failed("write", id, None, e))));
            }
            Task::Read(id, promise) => {
                executor.outputs.remove(&id);
                let begun = self.trace.begin();
                let answer = match executor.table.get(&id) {
                    _ if stop::is_set() => Err(Error::Stopped),
                    Some(Ok(value)) => self.guarded("read", || self.kernels.download(value)),
                    Some(Err(error)) => Err((**error).clone()),
                    None => Err(Error::UnknownValue(id)),
                };
                self.trace.end(begun, "read", 0, answer.as_ref().map_or(0, |data| data.bytes.len() as u64));
                promise.answer(answer)
            }
            Task::Sync(promise) => promise.answer(if stop::is_set() { Err(Error::Stopped) } else { Ok(()) }),
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
                    &mut Live { shared: self, table, outputs, batch, group: None },
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
                let word = self.guard(table, node, *finite, origin, place);
                return drop(table.insert(*out, word));
            }
            (Op::Commit, [ok, new, old], [out]) if known => {
                let ok = matches!(&table[ok], Ok(ok) if self.holds(ok));
                let chosen = table[if ok { new } else { old }].clone();
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

    /// Notes a failure for [`Driver::failures`].
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
        catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(panicked(op, &*panic)))
    }
}

/// What a kernel was left with as an error. One that unwinds with an [`Error`] is taken at its word.
pub fn panicked(op: &str, panic: &(dyn Any + Send)) -> Error {
    if panic.is::<Stopped>() {
        return Error::Stopped;
    }
    if let Some(error) = panic.downcast_ref::<Error>() {
        return error.clone();
    }
    let message = panic.downcast_ref::<String>().cloned();
    let message = message.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
    Error::Panicked { op: op.to_string(), message: message.unwrap_or_default() }
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
        lowering::lowered(self.batch, |id| self.meta(id)).map(|batch| batch.items)
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

    fn begins(&mut self, nodes: &[&Node]) {
        // Operands that the group makes itself are not there yet.
        self.group =
            self.shared.trace.begin().map(|begun| (begun, self.bytes(nodes.iter().flat_map(|n| &n.ins))));
    }

    fn ends(&mut self, name: &str, nodes: &[&Node]) {
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
        self.shared.kernels.download(self.get(id).ok_or(Error::UnknownValue(id))?)
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

/// `KILN_FUSE=0` runs every node by itself.
fn fusing() -> bool {
    kiln_env::FUSE.get().unwrap_or(true)
}

fn poison<V>(table: &mut Table<V>, node: &Node, error: Arc<Error>) {
    table.extend(node.outs.iter().map(|&id| (id, Err(error.clone()))));
}

/// Values that fusion defines take these names; nobody else may.
fn reserved(op: &str) -> Error {
    let reason = "names from 2^62 on belong to the device";
    Error::Op(OpError::Attribute { op: op.to_string(), reason })
}

fn failed(op: &str, value: Id, origin: Option<Origin>, cause: Error) -> Arc<Error> {
    Arc::new(Error::Failed { op: op.to_string(), value, origin, cause: Arc::new(cause) })
}

impl<K: Kernels> Help for Shared<K> {
    fn run(&self) {
        standard(|| self.queue.run(&mut |executor, work| self.execute(executor, work)));
    }

    fn start(&self) {
        self.background.get_or_init(|| {
            if let Some(shared) = self.this.upgrade() {
                let thread = std::thread::Builder::new().name("kiln-device".into());
                let serve = move || {
                    standard(|| shared.queue.serve(&mut |executor, work| shared.execute(executor, work)))
                };
                // Without a background thread, whoever waits still runs the queue.
                let _ = thread.spawn(serve);
            }
        });
        self.queue.kick();
    }
}
