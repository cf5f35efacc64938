//! A device over [`Kernels`]: a queue of submissions, a table of values, poison, and somebody to run it.
//!
//! [`HostDevice`] does everything but arithmetic, which comes from [`Kernels`]. Work is executed in order by whoever
//! holds the executor's lock (`execute.rs`): a thread that waits for an answer runs the queue itself, a background thread
//! runs it where nobody waits. A failed operation, or one that panics, poisons its results and nothing else.

use crate::Kernels;
use crate::execute::Slot;
use crate::floats::standard;
use crate::launches::Launches;
use crate::queue::Queue;
use kiln_device::{
    Batch, Control, Data, DeviceInfo, Driver, Error, Help, Memory, Observe, OutputMemory, Pending, Place,
    Placing, Promise, Spans, Trace, UploadBuffer, Urgency, pending,
};
use kiln_fuse::{Engine, Fuser, Limits, Observer, Stats};
use kiln_ir::{Id, Meta, Op};
use rustc_hash::FxHashMap;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Operations that may wait in the queue before the recording thread has to help.
const MOST_QUEUED: usize = 1 << 14;

/// A device over [`Kernels`].
pub struct HostDevice<K: Kernels> {
    shared: Arc<Shared<K>>,
}

pub(crate) struct Shared<K: Kernels> {
    pub kernels: K,
    pub queue: Queue<Task, Executor<K::Value>>,
    pub values: AtomicUsize,
    pub stopped: AtomicBool,
    /// Values are computed in memory that is chosen for them.
    places_outputs: bool,
    /// What failed since it was last asked for.
    pub failures: Mutex<Vec<Error>>,
    /// What an asynchronous device has been given.
    pub launches: Mutex<Launches>,
    /// Starts the background thread at its first use.
    background: OnceLock<()>,
    /// It has fusers.
    fuses: AtomicBool,
    /// What has run, while somebody wants to know.
    pub trace: Trace,
    pub this: Weak<Shared<K>>,
}

pub(crate) enum Task {
    Batch(Batch),
    PlaceOutput(Id, OutputMemory),
    Write(Id, Data, Place),
    Read(Id, Promise<Data>),
    Sync(Promise<()>),
}

/// What executing needs: the values, and plans for windows.
pub(crate) struct Executor<V> {
    pub table: Table<V>,
    /// Where values are to be computed that nobody has read yet.
    pub outputs: FxHashMap<Id, OutputMemory>,
    pub engine: Engine<V>,
}

pub(crate) type Table<V> = FxHashMap<Id, Slot<V>>;

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
            launches: Mutex::default(),
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
        let info = self.shared.kernels.info();
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

    fn supports(&self, op: &Op, ins: &[Meta]) -> bool {
        self.shared.kernels.supports(op, ins)
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
        self.shared.settle();
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
        self.shared.queue.is_empty() && self.shared.is_done()
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
        self.shared.kernels.stop();
    }

    fn ended(&self) -> Option<Error> {
        None
    }
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

/// `KILN_FUSE=0` runs every node by itself.
fn fusing() -> bool {
    kiln_env::FUSE.get().unwrap_or(true)
}
