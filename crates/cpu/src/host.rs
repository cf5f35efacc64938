//! A device that computes on the host: a queue of submissions, a table of values, poison, and somebody to run it.
//!
//! [`HostDevice`] does everything but arithmetic, which comes from [`Kernels`]. Work is executed in order by whoever
//! holds the executor's lock: a thread that waits for an answer runs the queue itself, a background thread runs it
//! where nobody waits. A failed operation, or one that panics, poisons its results and nothing else.

use kiln_device::{
    Batch, Data, Device, DeviceInfo, Error, Help, Memory, Origin, Pending, Place, Promise, Urgency, pending,
};
use kiln_ir::{Id, Item, Meta, Node, Op};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

/// The arithmetic of a host device.
pub trait Kernels: Send + Sync + 'static {
    /// How it holds a value.
    type Value: Clone + Send + Sync;

    /// What it is and can do.
    fn info(&self) -> DeviceInfo;
    /// A value from host data.
    fn upload(&self, data: &Data, place: Place) -> Result<Self::Value, Error>;
    /// A value as host data.
    fn download(&self, value: &Self::Value) -> Result<Data, Error>;
    /// The results of an operation. An operand that is `Owned` has no other user and may be overwritten.
    fn eval(&self, op: &Op, ins: &mut [Arg<Self::Value>], place: Place) -> Result<SmallVec<[Self::Value; 2]>, Error>;
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

/// A device over [`Kernels`].
pub struct HostDevice<K: Kernels> {
    shared: Arc<Shared<K>>,
}

struct Shared<K: Kernels> {
    kernels: K,
    queue: Mutex<Queue>,
    /// Wakes the background thread.
    wake: Condvar,
    executor: Mutex<FxHashMap<Id, Slot<K::Value>>>,
    values: AtomicUsize,
    /// Starts the background thread at its first use.
    background: OnceLock<()>,
    this: Weak<Shared<K>>,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    items: usize,
    /// The background thread should run.
    kicked: bool,
    stopped: bool,
}

enum Work {
    Batch(Batch),
    Write(Id, Data, Place),
    Read(Id, Promise<Data>),
    Sync(Promise<()>),
}

/// A value, or why there is none.
type Slot<V> = Result<V, Arc<Error>>;

impl<K: Kernels> HostDevice<K> {
    /// A device that computes with `kernels`.
    pub fn new(kernels: K) -> HostDevice<K> {
        let shared = Arc::new_cyclic(|this| Shared {
            kernels,
            queue: Mutex::default(),
            wake: Condvar::new(),
            executor: Mutex::default(),
            values: AtomicUsize::new(0),
            background: OnceLock::new(),
            this: this.clone(),
        });
        HostDevice { shared }
    }

    fn ask<T>(&self, work: impl FnOnce(Promise<T>) -> Work) -> Pending<T> {
        let (promise, pending) = pending(Some(self.shared.clone() as Arc<dyn Help>));
        self.shared.lock().work.push_back(work(promise));
        pending
    }
}

impl<K: Kernels> Drop for HostDevice<K> {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.wake.notify_all();
    }
}

impl<K: Kernels> Device for HostDevice<K> {
    fn info(&self) -> DeviceInfo {
        self.shared.kernels.info()
    }

    fn submit(&self, batch: Batch) {
        let urgency = batch.urgency;
        let full = {
            let mut queue = self.shared.lock();
            queue.items += batch.items.len();
            queue.work.push_back(Work::Batch(batch));
            queue.items > MOST_QUEUED
        };
        match urgency {
            _ if full => self.shared.run(),
            Urgency::Now => self.shared.run(),
            Urgency::Background => self.shared.start(),
            Urgency::Awaited => {}
        }
    }

    fn write(&self, id: Id, data: Data, place: Place) {
        self.shared.lock().work.push_back(Work::Write(id, data, place));
    }

    fn read(&self, id: Id) -> Pending<Data> {
        self.ask(|promise| Work::Read(id, promise))
    }

    fn sync(&self) -> Pending<()> {
        self.ask(Work::Sync)
    }

    fn supports(&self, _: &Op, _: &[Meta]) -> bool {
        true
    }

    fn memory(&self) -> Memory {
        Memory { values: self.shared.values.load(Ordering::Relaxed), ..self.shared.kernels.memory() }
    }

    fn cleanup(&self) {
        self.shared.kernels.cleanup();
    }

    fn limit(&self, bytes: Option<usize>) {
        self.shared.kernels.limit(bytes);
    }

    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        self.shared.kernels.stage(data)
    }
}

impl<K: Kernels> Shared<K> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn execute(&self, table: &mut FxHashMap<Id, Slot<K::Value>>, work: Work) {
        match work {
            Work::Batch(batch) => self.batch(table, &batch),
            Work::Write(id, data, place) => {
                let value = self.guarded("write", || self.kernels.upload(&data, place));
                table.insert(id, value.map_err(|e| failed("write", None, e)));
            }
            Work::Read(id, promise) => promise.answer(match table.get(&id) {
                Some(Ok(value)) => self.guarded("read", || self.kernels.download(value)),
                Some(Err(error)) => Err((**error).clone()),
                None => Err(Error::UnknownValue(id)),
            }),
            Work::Sync(promise) => promise.answer(Ok(())),
        }
        self.values.store(table.len(), Ordering::Relaxed);
    }

    fn batch(&self, table: &mut FxHashMap<Id, Slot<K::Value>>, batch: &Batch) {
        for (at, item) in batch.items.iter().enumerate() {
            match item {
                Item::Free(id) => {
                    table.remove(id);
                }
                Item::Run(node) => {
                    let origin = batch.origins.get(at).copied();
                    self.node(table, node, &batch.items[at + 1..], origin, batch.place);
                }
            }
        }
    }

    /// Executes one node; `rest` is what follows it in the stream.
    fn node(&self, table: &mut FxHashMap<Id, Slot<K::Value>>, node: &Node, rest: &[Item], origin: Option<Origin>, place: Place) {
        let mut ins: SmallVec<[Arg<K::Value>; 4]> = SmallVec::with_capacity(node.ins.len());
        for (i, id) in node.ins.iter().enumerate() {
            let dies = || rest.iter().map_while(|item| match item {
                Item::Free(id) => Some(id),
                Item::Run(_) => None,
            }).any(|free| free == id);
            let again = || node.ins.iter().enumerate().any(|(j, other)| j != i && other == id);
            match table.get(id) {
                Some(Err(error)) => {
                    let error = error.clone();
                    return poison(table, node, error);
                }
                None => return poison(table, node, failed(node.op.name(), origin, Error::UnknownValue(*id))),
                Some(Ok(_)) if !again() && dies() => {
                    if let Some(Ok(value)) = table.remove(id) {
                        ins.push(Arg::Owned(value));
                    }
                }
                Some(Ok(value)) => ins.push(Arg::Shared(value.clone())),
            }
        }
        match self.guarded(node.op.name(), || self.kernels.eval(&node.op, &mut ins, place)) {
            Ok(outs) => table.extend(node.outs.iter().copied().zip(outs.into_iter().map(Ok))),
            Err(error) => poison(table, node, failed(node.op.name(), origin, error)),
        }
    }

    /// Runs a kernel; a panic in it is an error like any other.
    fn guarded<T>(&self, op: &str, f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
            let message = panic.downcast_ref::<String>().cloned();
            let message = message.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
            Err(Error::Panicked { op: op.to_string(), message: message.unwrap_or_default() })
        })
    }
}

fn poison<V>(table: &mut FxHashMap<Id, Slot<V>>, node: &Node, error: Arc<Error>) {
    table.extend(node.outs.iter().map(|&id| (id, Err(error.clone()))));
}

fn failed(op: &str, origin: Option<Origin>, cause: Error) -> Arc<Error> {
    Arc::new(Error::Failed { op: op.to_string(), origin, cause: Arc::new(cause) })
}

impl<K: Kernels> Help for Shared<K> {
    fn run(&self) {
        loop {
            let mut table = self.executor.lock().unwrap_or_else(|e| e.into_inner());
            loop {
                let work = {
                    let mut queue = self.lock();
                    let work = queue.work.pop_front();
                    if let Some(Work::Batch(batch)) = &work {
                        queue.items -= batch.items.len();
                    }
                    work
                };
                match work {
                    Some(work) => self.execute(&mut table, work),
                    None => break,
                }
            }
            drop(table);
            // Work that came between the last look and the release of the lock has no other runner.
            if self.lock().work.is_empty() {
                return;
            }
        }
    }

    fn start(&self) {
        self.background.get_or_init(|| {
            if let Some(shared) = self.this.upgrade() {
                let thread = std::thread::Builder::new().name("kiln-device".into());
                // Without a background thread, whoever waits still runs the queue.
                let _ = thread.spawn(move || shared.background());
            }
        });
        let mut queue = self.lock();
        if !queue.kicked {
            queue.kicked = true;
            self.wake.notify_one();
        }
    }
}

impl<K: Kernels> Shared<K> {
    fn background(&self) {
        loop {
            let mut queue = self.lock();
            while !queue.kicked && !queue.stopped {
                queue = self.wake.wait(queue).unwrap_or_else(|e| e.into_inner());
            }
            if queue.stopped {
                return;
            }
            queue.kicked = false;
            drop(queue);
            Help::run(self);
        }
    }
}
