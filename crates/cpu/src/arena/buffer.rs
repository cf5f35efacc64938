//! A piece of an arena's memory, or memory that somebody lends.

use super::block::Block;
use super::{Arena, Place};
use kiln_device::Bytes;
use std::fmt;
use std::sync::Arc;

/// A block of memory aligned to [`super::ALIGN`], given back to its arena on drop. Its content at first is unspecified but
/// initialised.
pub struct Buffer {
    pub(super) block: Block,
    pub(super) len: usize,
    pub(super) place: Place,
    /// `None` while it is cached.
    pub(super) arena: Option<Arc<Arena>>,
    /// Memory of somebody else, which is only read, except by who computes a value there first.
    pub(super) lent: Option<Bytes>,
}

impl Buffer {
    /// Length in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *const u8 {
        match &self.lent {
            Some(bytes) => bytes.as_ptr(),
            None => self.block.ptr.as_ptr(),
        }
    }

    /// All before byte `end` is final: told to whoever placed it there, see
    /// [`Host::reached`](kiln_device::Host::reached).
    pub fn reached(&self, end: usize) {
        if let Some(lent) = &self.lent {
            lent.reached(end);
        }
    }

    /// Whether it is somebody else's memory, which must not be written.
    pub fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// The first byte, to write through. From a shared reference, since kernels write buffers that a plan also
    /// holds: whoever writes makes sure that nobody else reads or writes those bytes meanwhile, and writes only
    /// initialised bytes.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        let target = self.lent.as_ref().and_then(Bytes::target);
        target.unwrap_or(self.as_ptr().cast_mut())
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the block has at least `len` bytes, all initialised (see the module head).
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(!self.is_lent(), "lent memory is only read");
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }

    /// How its memory is treated.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Whether it came from `arena`.
    pub fn is_of(&self, arena: &Arc<Arena>) -> bool {
        self.arena.as_ref().is_some_and(|own| Arc::ptr_eq(own, arena))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).field("place", &self.place).finish()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A cached buffer goes with its block.
        let Some(arena) = self.arena.take() else { return };
        let block = std::mem::replace(&mut self.block, Block::empty());
        let (place, arena) = (self.place, Some(arena));
        Arena::reclaim(Arc::new(Buffer { block, len: 0, place, arena, lent: None }));
    }
}
