//! What a caching allocator decides, for memory of any kind: which freed block is used again, what is counted, and what a
//! limit lets in. Freed blocks are kept in size classes, four to a power of two; who has the memory is the caller's affair.
//!
//! Deliberately absent: splitting and merging of freed blocks, locks, and the memory itself.

use kiln_device::{Error, Place};
use std::fmt;

/// Freed blocks by size class, and the counters of what is in use. `B` is however the allocator holds a block.
pub struct Blocks<B> {
    stats: ArenaStats,
    free: [Vec<B>; CLASSES],
}

/// Counters of an allocator. Bytes of reused buffers are those of their size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaStats {
    /// Bytes in live [`Place::Reuse`] buffers.
    pub live_bytes: usize,
    /// Number of live [`Place::Reuse`] buffers.
    pub live_buffers: usize,
    /// Bytes held for reuse.
    pub cached_bytes: usize,
    /// Bytes in live [`Place::Persistent`] buffers.
    pub persistent_bytes: usize,
    /// Number of live [`Place::Persistent`] buffers.
    pub persistent_buffers: usize,
    /// The most that `live_bytes + persistent_bytes` has been since the last [`Blocks::reset_peak`].
    pub peak_bytes: usize,
    /// Blocks that were new, from the system or cut from a mapping.
    pub system_allocs: u64,
    /// The most bytes that live, persistent and cached memory may take together.
    pub limit: Option<usize>,
}

/// A request that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    /// Bytes asked for.
    pub asked: usize,
    /// Bytes left under the limit with all caches dropped; 0 where it was the system that refused.
    pub free: usize,
    /// The limit that it does not fit: the arena's or the process's. None where it was the system that refused.
    pub limit: Option<usize>,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory: asked for {} bytes, {} free", self.asked, self.free)?;
        match self.limit {
            Some(limit) => write!(f, " of {limit}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Exhausted {}

impl From<Exhausted> for Error {
    fn from(e: Exhausted) -> Error {
        Error::OutOfMemory { asked: e.asked, free: e.free, limit: e.limit.unwrap_or(usize::MAX) }
    }
}

/// How a request is let in.
pub enum Grant<B> {
    /// By this block, which was kept.
    Cached(B),
    /// By a new one: nothing that is kept fits. These are to be freed before the system is asked.
    Fresh(Vec<B>),
}

impl<B> Blocks<B> {
    /// No blocks, under that limit.
    pub fn new(limit: Option<usize>) -> Blocks<B> {
        let stats = ArenaStats { limit, ..ArenaStats::default() };
        Blocks { stats, free: [const { Vec::new() }; CLASSES] }
    }

    /// The counters as of now.
    pub fn stats(&self) -> ArenaStats {
        self.stats
    }

    /// Counts a new block of `size` bytes in for a request of `asked`, and finds one that was kept. [`Blocks::retire`] takes
    /// it back, also where the memory turns out not to be there.
    pub fn admit(&mut self, asked: usize, size: usize, place: Place) -> Result<Grant<B>, Exhausted> {
        let used = self.stats.used();
        let limit = self.stats.limit.unwrap_or(usize::MAX);
        if size > limit.saturating_sub(used) {
            return Err(self.refuse(asked));
        }
        let cached = match place {
            Place::Reuse if size > 0 => self.free[class(size)].pop(),
            Place::Reuse | Place::Persistent => None,
        };
        let admitted = match cached {
            Some(shared) => {
                self.stats.cached_bytes -= size;
                Grant::Cached(shared)
            }
            None if self.stats.cached_bytes > limit - used - size => Grant::Fresh(self.trim()),
            None => Grant::Fresh(Vec::new()),
        };
        match place {
            Place::Reuse => {
                self.stats.live_bytes += size;
                self.stats.live_buffers += 1;
            }
            Place::Persistent => {
                self.stats.persistent_bytes += size;
                self.stats.persistent_buffers += 1;
            }
        }
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.used());
        Ok(admitted)
    }

    /// Counts bytes in that are held outside of blocks. Returns the blocks that have to be freed for them.
    pub fn hold(&mut self, bytes: usize) -> Result<Vec<B>, Exhausted> {
        let limit = self.stats.limit.unwrap_or(usize::MAX);
        let Some(left) = limit.saturating_sub(self.stats.used()).checked_sub(bytes) else {
            return Err(self.refuse(bytes));
        };
        self.stats.live_bytes += bytes;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.used());
        Ok(if self.stats.cached_bytes > left { self.trim() } else { Vec::new() })
    }

    /// Counts such bytes out.
    pub fn release(&mut self, bytes: usize) {
        self.stats.live_bytes -= bytes;
    }

    /// Counts one more that holds bytes outside of blocks.
    pub fn add_holder(&mut self) {
        self.stats.live_buffers += 1;
    }

    /// Counts one such less.
    pub fn remove_holder(&mut self) {
        self.stats.live_buffers -= 1;
    }

    /// Counts a block out.
    pub fn retire(&mut self, size: usize, place: Place) {
        match place {
            Place::Reuse => {
                self.stats.live_bytes -= size;
                self.stats.live_buffers -= 1;
            }
            Place::Persistent => {
                self.stats.persistent_bytes -= size;
                self.stats.persistent_buffers -= 1;
            }
        }
    }

    /// Keeps a block of `size` bytes for the next request of its class.
    pub fn cache(&mut self, size: usize, block: B) {
        self.stats.cached_bytes += size;
        self.free[class(size)].push(block);
    }

    /// Counts a block that is new.
    pub fn system_alloc(&mut self) {
        self.stats.system_allocs += 1;
    }

    /// Changes the limit. Returns the blocks that have to be freed if what is kept is now over it.
    pub fn set_limit(&mut self, limit: Option<usize>) -> Vec<B> {
        self.stats.limit = limit;
        let over = limit.is_some_and(|limit| self.stats.used() + self.stats.cached_bytes > limit);
        if over { self.trim() } else { Vec::new() }
    }

    /// Starts a new high-water mark from what is live now.
    pub fn reset_peak(&mut self) {
        self.stats.peak_bytes = self.stats.used();
    }

    /// All blocks that are kept, to be freed.
    pub fn trim(&mut self) -> Vec<B> {
        self.stats.cached_bytes = 0;
        self.free.iter_mut().flat_map(std::mem::take).collect()
    }

    /// Why a request does not fit.
    pub fn refuse(&self, asked: usize) -> Exhausted {
        let limit = self.stats.limit;
        let free = limit.unwrap_or(MAX_BYTES).saturating_sub(self.stats.used());
        Exhausted { asked, free, limit }
    }
}

impl ArenaStats {
    fn used(&self) -> usize {
        self.live_bytes + self.persistent_bytes
    }
}

const SMALLEST: usize = 64;
/// Requests from here on are refused: rounding them up must not pass `isize::MAX`.
pub const MAX_BYTES: usize = isize::MAX as usize / 2;
const CLASSES: usize = 4 * (usize::BITS - SMALLEST.ilog2()) as usize;

/// Four classes to a power of two: at most a quarter more than asked for.
fn class(bytes: usize) -> usize {
    if bytes <= SMALLEST {
        return 0;
    }
    let top = (bytes - 1).ilog2();
    let quarter = ((bytes - 1) >> (top - 2)) & 3;
    4 * (top - SMALLEST.ilog2()) as usize + quarter + 1
}

/// The size of the class that holds `bytes`, if that is a size at all. No bytes take no memory.
pub fn class_size(bytes: usize) -> Option<usize> {
    match class(bytes) {
        _ if bytes == 0 => Some(0),
        _ if bytes >= MAX_BYTES => None,
        0 => Some(SMALLEST),
        class => {
            let base = SMALLEST << ((class - 1) / 4);
            Some(base + base / 4 * ((class - 1) % 4 + 1))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn classes_waste_at_most_a_quarter() {
        let mut sizes: Vec<usize> = (1..5000).collect();
        sizes.extend((12..50).flat_map(|p| [(1 << p) - 1, 1 << p, (1 << p) + 1, 3 << p, 5 << p]));
        for bytes in sizes {
            let size = class_size(bytes).unwrap();
            assert!(size >= bytes && (bytes < SMALLEST || size <= bytes + bytes / 4), "{bytes} in {size}");
            assert_eq!(class(size), class(bytes));
            assert_eq!(class_size(size), Some(size));
            assert!(class(size) < CLASSES);
        }
        assert!(class(MAX_BYTES) < CLASSES);
    }

    #[test]
    fn what_is_freed_is_used_again_and_goes_when_the_limit_needs_it() {
        let mut blocks: Blocks<&str> = Blocks::new(Some(3 * MIB));
        assert!(matches!(blocks.admit(MIB, MIB, Place::Reuse), Ok(Grant::Fresh(none)) if none.is_empty()));
        blocks.retire(MIB, Place::Reuse);
        blocks.cache(MIB, "first");
        assert!(matches!(blocks.admit(MIB - 1, MIB, Place::Reuse), Ok(Grant::Cached("first"))));
        blocks.retire(MIB, Place::Reuse);
        blocks.cache(MIB, "first");
        // Persistent memory is never one that was kept; the limit makes what is kept go first.
        assert!(
            matches!(blocks.admit(3 * MIB, 3 * MIB, Place::Persistent), Ok(Grant::Fresh(all)) if all == ["first"])
        );
        let refused = blocks.admit(5, 64, Place::Reuse).err();
        assert_eq!(refused, Some(Exhausted { asked: 5, free: 0, limit: Some(3 * MIB) }));
        assert_eq!(blocks.hold(1).err(), Some(Exhausted { asked: 1, free: 0, limit: Some(3 * MIB) }));
        blocks.retire(3 * MIB, Place::Persistent);
        assert_eq!(blocks.hold(2 * MIB).unwrap().len(), 0);
        blocks.release(2 * MIB);
        let stats = blocks.stats();
        assert_eq!((stats.live_bytes, stats.persistent_bytes, stats.peak_bytes), (0, 0, 3 * MIB));
    }
}
