//! Memory for tensor buffers: freed blocks are kept in size classes and handed out again.
//!
//! `Arena::alloc` gives a `Buffer`; dropping the buffer gives its block back. First touch of fresh pages costs four
//! times as much as reuse, so blocks return to the system only on `cleanup`, under a limit, or with the arena.
//! Memory from the system starts zeroed and buffers are never shrunk below what was initialised, so every byte of
//! every buffer is initialised (with zeros or with a former tensor). Blocks smaller than a huge page are cut from
//! mappings that have some, one after another, and a mapping goes with its last block. Called by the CPU device.
//! All of it, and what kernels reserve for temporaries outside, is drawn from the process's budget. With `KILN_GUARD=1`
//! every buffer has a mapping of its own between pages that nobody may touch, so that a kernel that runs past it faults.
//! What is kept and what a limit lets in decides [`kiln_host::Blocks`], which knows no memory.

mod block;
mod buffer;
#[cfg(target_os = "linux")]
mod pages;
#[cfg(not(target_os = "linux"))]
mod pages {
    pub const LARGE: usize = usize::MAX;
    pub(super) use super::block::{system_free as unmap, system_zeroed as map};
    // There are no guard pages here.
    pub(super) use super::block::{system_free as unmap_guarded, system_zeroed as map_guarded};

    /// Nothing is cut here.
    pub unsafe fn discard(_: std::ptr::NonNull<u8>, _: usize) {}
}
mod reserved;
#[cfg(test)]
mod tests;

pub(crate) use block::GUARD;
pub use buffer::Buffer;
pub use kiln_device::Place;
pub use kiln_host::{ArenaStats, Exhausted};
pub use reserved::Reserved;

use block::{Block, Chunk};
use kiln_device::{Budget, Bytes, Error};
use kiln_host::{Blocks, Grant, MAX_BYTES, class_size};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Alignment in bytes of every buffer: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

/// A caching allocator with a limit and counters; shared by its buffers.
pub struct Arena {
    state: Mutex<State>,
    budget: Arc<Budget>,
}

/// All arenas: where the process's budget is used up, what others keep for reuse goes first.
static ARENAS: Mutex<Vec<Weak<Arena>>> = Mutex::new(Vec::new());

struct State {
    blocks: Blocks<Arc<Buffer>>,
    /// What the next small blocks are cut from.
    open: Chunk,
}

impl Arena {
    /// An empty arena, within the process's budget.
    pub fn new(limit: Option<usize>) -> Arc<Arena> {
        Arena::within(limit, Budget::process().clone())
    }

    /// An empty arena that draws from this budget.
    pub fn within(limit: Option<usize>, budget: Arc<Budget>) -> Arc<Arena> {
        let state = State { blocks: Blocks::new(limit), open: Chunk::default() };
        let arena = Arc::new(Arena { state: Mutex::new(state), budget });
        let mut all = ARENAS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|arena| arena.strong_count() > 0);
        all.push(Arc::downgrade(&arena));
        arena
    }

    /// Counts bytes that are about to be held outside of buffers: temporaries of kernels.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Reserved, Exhausted> {
        let share = self.budget.take(0).unwrap_or_else(|_| unreachable!("nothing is always there"));
        self.state().blocks.add_holder();
        let mut reserved = Reserved { arena: self.clone(), share };
        reserved.resize(bytes)?;
        Ok(reserved)
    }

    /// A buffer of `bytes` bytes, or the reason why not. Under a limit, caches are dropped before it is refused.
    pub fn alloc(self: &Arc<Self>, bytes: usize, place: Place) -> Result<Buffer, Exhausted> {
        let shared = self.share(bytes, place)?;
        Ok(Arc::into_inner(shared).expect("a new buffer has one owner"))
    }

    /// Like [`Arena::alloc`], with the count of its owners: both are used again where [`Arena::reclaim`] got them, so
    /// that this makes no heap call then.
    pub fn share(self: &Arc<Self>, bytes: usize, place: Place) -> Result<Arc<Buffer>, Exhausted> {
        let size = match place {
            Place::Reuse if !*GUARD => class_size(bytes),
            Place::Reuse => (bytes < MAX_BYTES).then_some(bytes),
            Place::Persistent => (bytes < MAX_BYTES).then_some(bytes),
        };
        let Some(size) = size else { return Err(self.state().blocks.refuse(bytes)) };
        let admitted = self.state().admit(bytes, size, place)?;
        let mut shared = match admitted {
            Grant::Cached(shared) => shared,
            Grant::Fresh(trimmed) => {
                drop(trimmed);
                match self.fresh(size, place) {
                    Ok(block) => Arc::new(Buffer { block, len: bytes, place, arena: None, lent: None }),
                    Err(e) => {
                        self.state().blocks.retire(size, place);
                        return Err(Exhausted { asked: bytes, ..e });
                    }
                }
            }
        };
        let buffer = Arc::get_mut(&mut shared).expect("a cached buffer has no owner");
        (buffer.len, buffer.place) = (bytes, place);
        buffer.arena = Some(self.clone());
        Ok(shared)
    }

    /// Gives a buffer back with the count of its owners, if this is the last of them.
    pub fn reclaim(mut shared: Arc<Buffer>) {
        let Some(buffer) = Arc::get_mut(&mut shared) else { return };
        let Some(arena) = buffer.arena.take() else { return };
        let (size, place) = (buffer.block.size, buffer.place);
        let mut state = arena.state();
        state.blocks.retire(size, place);
        match place {
            Place::Reuse if size > 0 && !*GUARD => state.blocks.cache(size, shared),
            // Unmapping can take long, so not under the lock.
            Place::Reuse | Place::Persistent => drop((state, shared)),
        }
    }

    /// Host memory as a buffer that is only read, without a copy; `None` if it is not aligned as buffers are.
    pub fn lend(self: &Arc<Self>, bytes: Bytes) -> Option<Arc<Buffer>> {
        if bytes.is_empty() || !bytes.as_ptr().addr().is_multiple_of(ALIGN) {
            return None;
        }
        self.state().blocks.add_holder();
        let (block, len, arena) = (Block::empty(), bytes.len(), Some(self.clone()));
        Some(Arc::new(Buffer { block, len, place: Place::Reuse, arena, lent: Some(bytes) }))
    }

    /// Changes the limit, dropping caches if they are now over it. Live buffers stay.
    pub fn set_limit(&self, limit: Option<usize>) {
        let trimmed = self.state().set_limit(limit);
        drop(trimmed);
    }

    /// Gives all cached memory back to the system, but what lies between blocks that are in use.
    pub fn cleanup(&self) {
        // The blocks are unmapped when the temporary is dropped, after the lock.
        let trimmed = self.state().trim();
        drop(trimmed);
    }

    /// The counters as of now.
    pub fn stats(&self) -> ArenaStats {
        self.state().blocks.stats()
    }

    /// Starts a new high-water mark from what is live now.
    pub fn reset_peak(&self) {
        self.state().blocks.reset_peak();
    }

    /// Asks the budget and the system, and once more after dropping the caches.
    fn fresh(&self, size: usize, place: Place) -> Result<Block, Exhausted> {
        let share = self.drawn(size, || self.budget.take(size))?;
        let ask = || {
            let mut state = self.state();
            if size > 0 {
                state.blocks.system_alloc();
            }
            if place == Place::Reuse && !*GUARD && Chunk::serves(size) {
                return state.open.cut(size);
            }
            drop(state);
            Block::new(size)
        };
        let mut block = ask()
            .or_else(|| {
                self.cleanup();
                ask()
            })
            .ok_or(Exhausted { asked: size, free: 0, limit: None })?;
        block.share = Some(share);
        Ok(block)
    }

    /// What `draw` gets from the budget, if need be after all arenas dropped their caches.
    fn drawn<T>(&self, asked: usize, mut draw: impl FnMut() -> Result<T, Error>) -> Result<T, Exhausted> {
        if let Ok(drawn) = draw() {
            return Ok(drawn);
        }
        let all: Vec<Weak<Arena>> = ARENAS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        all.iter().filter_map(Weak::upgrade).for_each(|arena| arena.cleanup());
        let (free, limit) = (self.budget.free(), Some(self.budget.limit()));
        draw().map_err(|_| Exhausted { asked, free, limit })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Arena").field(&self.stats()).finish()
    }
}

impl State {
    /// Counts a new buffer in, and finds it a cached block.
    fn admit(&mut self, asked: usize, size: usize, place: Place) -> Result<Grant<Arc<Buffer>>, Exhausted> {
        let admitted = self.blocks.admit(asked, size, place)?;
        if let Grant::Fresh(trimmed) = &admitted {
            self.let_go(trimmed);
        }
        Ok(admitted)
    }

    /// Counts bytes in that are held outside of buffers. Returns what has to be dropped for them.
    fn hold(&mut self, bytes: usize) -> Result<Vec<Arc<Buffer>>, Exhausted> {
        let trimmed = self.blocks.hold(bytes)?;
        self.let_go(&trimmed);
        Ok(trimmed)
    }

    fn release(&mut self, bytes: usize) {
        self.blocks.release(bytes);
    }

    fn set_limit(&mut self, limit: Option<usize>) -> Vec<Arc<Buffer>> {
        let trimmed = self.blocks.set_limit(limit);
        self.let_go(&trimmed);
        trimmed
    }

    fn trim(&mut self) -> Vec<Arc<Buffer>> {
        self.open = Chunk::default();
        self.blocks.trim()
    }

    /// Where memory is short the rest of the open mapping goes too.
    fn let_go(&mut self, trimmed: &[Arc<Buffer>]) {
        if !trimmed.is_empty() {
            self.open = Chunk::default();
        }
    }
}
