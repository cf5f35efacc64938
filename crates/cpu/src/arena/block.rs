//! Memory owned from the system: small blocks from its allocator or cut from a mapping, large ones on huge pages.

use super::{ALIGN, pages};
use kiln_device::Share;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};

/// Memory owned from the system, all of it initialised.
pub(super) struct Block {
    pub ptr: NonNull<u8>,
    pub size: usize,
    /// What it was cut from, which it keeps.
    pub home: Option<Arc<Block>>,
    /// What it takes of the budget. A mapping takes nothing itself: what is cut from it does.
    pub share: Option<Share>,
}

// SAFETY: a block is plain memory that it alone owns.
unsafe impl Send for Block {}
// SAFETY: a shared block gives out only its address.
unsafe impl Sync for Block {}

impl Block {
    pub fn empty() -> Block {
        let ptr = NonNull::without_provenance(std::num::NonZero::new(ALIGN).expect("not 0"));
        Block { ptr, size: 0, home: None, share: None }
    }
    pub fn new(size: usize) -> Option<Block> {
        if size == 0 {
            return Some(Block::empty());
        }
        let ptr = match size {
            _ if *GUARD => pages::map_guarded(size),
            pages::LARGE.. => pages::map(size),
            _ => system_zeroed(size),
        };
        Some(Block { ptr: ptr?, size, home: None, share: None })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.size == 0 {
            return;
        }
        if self.home.is_some() {
            // The mapping may live on for a long time, its pages need not.
            // SAFETY: the block is a part of a mapping that it keeps, and nothing refers to it any more.
            return unsafe { pages::discard(self.ptr, self.size) };
        }
        if *GUARD {
            // SAFETY: `new` mapped it so, and nothing refers to it any more.
            return unsafe { pages::unmap_guarded(self.ptr, self.size) };
        }
        if self.size >= pages::LARGE {
            // SAFETY: `new` mapped it with this size, and nothing refers to it any more.
            unsafe { pages::unmap(self.ptr, self.size) };
        } else {
            // SAFETY: `new` allocated it with this layout, and nothing refers to it any more.
            unsafe { system_free(self.ptr, self.size) };
        }
    }
}

/// The mapping that the next small blocks are cut from, and how much of it is used.
#[derive(Default)]
pub(super) struct Chunk(Option<(Arc<Block>, usize)>);

/// Blocks from here on that are smaller than a huge page are cut from mappings of `CHUNK` bytes.
const CUT: usize = 64 << 10;
const CHUNK: usize = 8 << 20;

impl Chunk {
    /// Whether blocks of that size are cut.
    pub fn serves(size: usize) -> bool {
        (CUT..pages::LARGE.min(CHUNK)).contains(&size)
    }

    /// A new block of a part of a mapping.
    pub fn cut(&mut self, size: usize) -> Option<Block> {
        debug_assert!(size.is_multiple_of(ALIGN));
        let (chunk, used) = match self.0.take() {
            Some((chunk, used)) if size <= CHUNK - used => (chunk, used),
            Some(_) | None => (Arc::new(Block::new(CHUNK)?), 0),
        };
        // SAFETY: the chunk has `size` bytes from there on.
        let ptr = unsafe { chunk.ptr.add(used) };
        self.0 = Some((chunk.clone(), used + size));
        Some(Block { ptr, size, home: Some(chunk), share: None })
    }
}

/// `KILN_GUARD=1`: every block ends at a page that nobody may touch. Slow; for debugging and fuzzing.
pub(crate) static GUARD: LazyLock<bool> = LazyLock::new(|| kiln_env::GUARD.is_on());

pub(super) fn system_zeroed(size: usize) -> Option<NonNull<u8>> {
    let layout = Layout::from_size_align(size, ALIGN).ok()?;
    // SAFETY: callers ask for at least one byte.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

/// # Safety
/// `ptr` came from `system_zeroed(size)`.
pub(super) unsafe fn system_free(ptr: NonNull<u8>, size: usize) {
    // SAFETY: the layout was valid when it was allocated with it.
    unsafe { dealloc(ptr.as_ptr(), Layout::from_size_align_unchecked(size, ALIGN)) }
}
