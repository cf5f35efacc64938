//! The engine between threads of one process: the slots and the buffers are on its heap.

use super::slots::{self, Reach, SharedSlots};
use super::{Engine, Place, Traffic, Wait};
use crate::buffer::Buffer;
use crate::call::Signature;
use crate::memory::Region;
use crate::{Error, Layout};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

/// What the ranks of one job share.
#[derive(Default)]
struct Shared {
    /// Slots of groups that some members have not asked for yet, and how many.
    slots: Mutex<HashMap<u64, (Arc<Region>, usize)>>,
    /// All large buffers by id.
    buffers: Mutex<HashMap<u64, Weak<Region>>>,
    ids: AtomicU64,
}

struct Local {
    slots: SharedSlots,
    shared: Arc<Shared>,
}

/// One engine for each of the ranks.
pub(crate) fn engines(layout: Layout) -> Result<Vec<Box<dyn Engine>>, Error> {
    let shared = Arc::new(Shared::default());
    let memory = Arc::new(Region::heap(slots::bytes(layout.ranks()), 0)?);
    let engine = |rank| -> Box<dyn Engine> {
        Box::new(Local { slots: SharedSlots::new(memory.clone(), rank, layout), shared: shared.clone() })
    };
    Ok((0..layout.ranks()).map(engine).collect())
}

impl Engine for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        let id = self.shared.ids.fetch_add(1, Relaxed) + 1;
        let region = Arc::new(Region::heap(bytes, id)?);
        let mut buffers = lock(&self.shared.buffers);
        buffers.retain(|_, region| region.strong_count() > 0);
        buffers.insert(id, Arc::downgrade(&region));
        Ok(region)
    }

    fn announce(&self, signature: &Signature, buffer: &Buffer) {
        self.slots.announce(signature, buffer);
    }

    fn run(&self, signature: &Signature, buffer: &mut Buffer, wait: Wait) -> Result<(), Error> {
        self.slots.run(signature, buffer, &*self.shared, wait)
    }

    fn abort(&self, error: &Error) {
        self.slots.abort(error);
    }

    fn subgroup(&self, place: Place, _: Instant) -> Result<Box<dyn Engine>, Error> {
        let mut slots = lock(&self.shared.slots);
        let ranks = place.layout.ranks();
        let (memory, missing) = match slots.entry(place.group) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(none) => none.insert((Arc::new(Region::heap(slots::bytes(ranks), 0)?), ranks)),
        };
        *missing -= 1;
        let (memory, missing) = (memory.clone(), *missing);
        if missing == 0 {
            slots.remove(&place.group);
        }
        Ok(Box::new(Local {
            slots: SharedSlots::new(memory, place.rank, place.layout),
            shared: self.shared.clone(),
        }))
    }

    fn leave(&self, after: u64) {
        self.slots.leave(after);
    }

    fn traffic(&self) -> Traffic {
        self.slots.traffic()
    }
}

impl Reach for Shared {
    fn buffer(&self, rank: usize, id: u64, _: Instant) -> Result<Arc<Region>, Error> {
        let region = lock(&self.buffers).get(&id).and_then(Weak::upgrade);
        region.ok_or_else(|| Error::system("buffer", format!("rank {rank} has dropped its buffer")))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
