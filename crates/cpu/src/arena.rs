//! Memory for tensor buffers: freed blocks are kept in size classes and handed out again.
//!
//! `Arena::alloc` gives a `Buffer`; dropping the buffer gives its block back. First touch of fresh pages costs four
//! times as much as reuse, so blocks return to the system only on `cleanup`, under a limit, or with the arena.
//! Memory from the system starts zeroed and buffers are never shrunk below what was initialised, so every byte of
//! every buffer is initialised (with zeros or with a former tensor). Blocks smaller than a huge page are cut from
//! mappings that have some, one after another, and a mapping goes with its last block. Called by the CPU device.
//! All of it, and what kernels reserve for temporaries outside, is drawn from the process's budget. With `KILN_GUARD=1`
//! every buffer has a mapping of its own between pages that nobody may touch, so that a kernel that runs past it faults.
//! Deliberately absent: splitting and merging of freed blocks, per-thread caches.

use kiln_device::{Budget, Bytes, Error, Share};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// Alignment in bytes of every buffer: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

/// A caching allocator with a limit and counters; shared by its buffers.
pub struct Arena {
    state: Mutex<State>,
    budget: Arc<Budget>,
}

/// All arenas: where the process's budget is used up, what others keep for reuse goes first.
static ARENAS: Mutex<Vec<Weak<Arena>>> = Mutex::new(Vec::new());

/// How a buffer's memory is treated when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Rounded up to a size class and kept for the next request of that class.
    Reuse,
    /// Of exact size and given back to the system; for weights and other long-lived values.
    Persistent,
}

/// Counters of an [`Arena`]. Bytes of reused buffers are those of their size class.
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
    /// The most that `live_bytes + persistent_bytes` has been since the last [`Arena::reset_peak`].
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

/// Bytes that are held outside of buffers, counted by an arena as if they were one.
pub struct Reserved {
    arena: Arc<Arena>,
    share: Share,
}

impl Reserved {
    /// How many.
    pub fn bytes(&self) -> usize {
        self.share.bytes()
    }

    /// Takes more or gives some back, so that it holds `bytes`. After an error it is as before.
    pub fn resize(&mut self, bytes: usize) -> Result<(), Exhausted> {
        let held = self.bytes();
        let Some(more) = bytes.checked_sub(held) else {
            self.arena.state().stats.live_bytes -= held - bytes;
            // Giving back does not fail.
            let _ = self.share.resize(bytes);
            return Ok(());
        };
        let trimmed = self.arena.state().hold(more)?;
        drop(trimmed);
        if let Err(e) = self.arena.drawn(more, || self.share.resize(bytes)) {
            self.arena.state().stats.live_bytes -= more;
            return Err(e);
        }
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut state = self.arena.state();
        state.stats.live_bytes -= self.share.bytes();
        state.stats.live_buffers -= 1;
    }
}

/// A block of memory aligned to [`ALIGN`], given back to its arena on drop. Its content at first is unspecified but
/// initialised.
pub struct Buffer {
    block: Block,
    len: usize,
    place: Place,
    /// Nothing while it is cached.
    arena: Option<Arc<Arena>>,
    /// Memory of somebody else, which is only read, but by who computes a value there first.
    lent: Option<Bytes>,
}

impl Arena {
    /// An empty arena, within the process's budget.
    pub fn new(limit: Option<usize>) -> Arc<Arena> {
        Arena::within(limit, Budget::process().clone())
    }

    /// An empty arena that draws from this budget.
    pub fn within(limit: Option<usize>, budget: Arc<Budget>) -> Arc<Arena> {
        let stats = ArenaStats { limit, ..ArenaStats::default() };
        let state = State { stats, free: [const { Vec::new() }; CLASSES], open: None };
        let arena = Arc::new(Arena { state: Mutex::new(state), budget });
        let mut all = ARENAS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|arena| arena.strong_count() > 0);
        all.push(Arc::downgrade(&arena));
        arena
    }

    /// Counts bytes that are about to be held outside of buffers: temporaries of kernels.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Reserved, Exhausted> {
        let share = self.budget.take(0).unwrap_or_else(|_| unreachable!("nothing is always there"));
        self.state().stats.live_buffers += 1;
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
        let Some(size) = size else { return Err(self.state().refuse(bytes)) };
        let admitted = self.state().admit(bytes, size, place)?;
        let mut shared = match admitted {
            Admitted::Cached(shared) => shared,
            Admitted::Fresh(trimmed) => {
                drop(trimmed);
                match self.fresh(size, place) {
                    Ok(block) => Arc::new(Buffer { block, len: bytes, place, arena: None, lent: None }),
                    Err(e) => {
                        self.state().retire(size, place);
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
        state.retire(size, place);
        match place {
            Place::Reuse if size > 0 && !*GUARD => state.cache(shared),
            // Unmapping can take long, so not under the lock.
            Place::Reuse | Place::Persistent => drop((state, shared)),
        }
    }

    /// Host memory as a buffer that is only read, without a copy; nothing if it is not aligned as buffers are.
    pub fn lend(self: &Arc<Self>, bytes: Bytes) -> Option<Arc<Buffer>> {
        if bytes.is_empty() || !bytes.as_ptr().addr().is_multiple_of(ALIGN) {
            return None;
        }
        self.state().stats.live_buffers += 1;
        let (block, len, arena) = (Block::empty(), bytes.len(), Some(self.clone()));
        Some(Arc::new(Buffer { block, len, place: Place::Reuse, arena, lent: Some(bytes) }))
    }

    /// Changes the limit, dropping caches if they are now over it. Live buffers stay.
    pub fn set_limit(&self, limit: Option<usize>) {
        let mut state = self.state();
        state.stats.limit = limit;
        let over = limit.is_some_and(|limit| state.stats.used() + state.stats.cached_bytes > limit);
        let trimmed = if over { state.trim() } else { Vec::new() };
        drop(state);
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
        self.state().stats
    }

    /// Starts a new high-water mark from what is live now.
    pub fn reset_peak(&self) {
        let mut state = self.state();
        state.stats.peak_bytes = state.stats.used();
    }

    /// Asks the budget and the system, and once more after dropping the caches.
    fn fresh(&self, size: usize, place: Place) -> Result<Block, Exhausted> {
        let share = self.drawn(size, || self.budget.take(size))?;
        let ask = || {
            let mut state = self.state();
            state.stats.system_allocs += u64::from(size > 0);
            if place == Place::Reuse && !*GUARD && (CUT..pages::LARGE.min(CHUNK)).contains(&size) {
                return state.cut(size);
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

struct State {
    stats: ArenaStats,
    free: [Vec<Arc<Buffer>>; CLASSES],
    /// The mapping that the next small blocks are cut from, and how much of it is used.
    open: Option<(Arc<Block>, usize)>,
}

enum Admitted {
    Cached(Arc<Buffer>),
    /// Nothing cached fits; these are to be freed before asking the system.
    Fresh(Vec<Arc<Buffer>>),
}

impl State {
    /// Counts a new buffer in, and finds it a cached block.
    fn admit(&mut self, asked: usize, size: usize, place: Place) -> Result<Admitted, Exhausted> {
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
                Admitted::Cached(shared)
            }
            None if self.stats.cached_bytes > limit - used - size => Admitted::Fresh(self.trim()),
            None => Admitted::Fresh(Vec::new()),
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

    /// Counts bytes in that are held outside of buffers. Gives what has to be dropped for them.
    fn hold(&mut self, bytes: usize) -> Result<Vec<Arc<Buffer>>, Exhausted> {
        let limit = self.stats.limit.unwrap_or(usize::MAX);
        let Some(left) = limit.saturating_sub(self.stats.used()).checked_sub(bytes) else {
            return Err(self.refuse(bytes));
        };
        self.stats.live_bytes += bytes;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.used());
        Ok(if self.stats.cached_bytes > left { self.trim() } else { Vec::new() })
    }

    /// Counts a buffer out.
    fn retire(&mut self, size: usize, place: Place) {
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

    fn cache(&mut self, shared: Arc<Buffer>) {
        let size = shared.block.size;
        self.stats.cached_bytes += size;
        self.free[class(size)].push(shared);
    }

    /// A new block of a part of a mapping.
    fn cut(&mut self, size: usize) -> Option<Block> {
        debug_assert!(size.is_multiple_of(ALIGN));
        let (chunk, used) = match self.open.take() {
            Some((chunk, used)) if size <= CHUNK - used => (chunk, used),
            Some(_) | None => (Arc::new(Block::new(CHUNK)?), 0),
        };
        // SAFETY: the chunk has `size` bytes from there on.
        let ptr = unsafe { chunk.ptr.add(used) };
        self.open = Some((chunk.clone(), used + size));
        Some(Block { ptr, size, home: Some(chunk), share: None })
    }

    fn trim(&mut self) -> Vec<Arc<Buffer>> {
        self.open = None;
        self.stats.cached_bytes = 0;
        self.free.iter_mut().flat_map(std::mem::take).collect()
    }

    fn refuse(&self, asked: usize) -> Exhausted {
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

/// Blocks from here on that are smaller than a huge page are cut from mappings of `CHUNK` bytes.
const CUT: usize = 64 << 10;
const CHUNK: usize = 8 << 20;
const SMALLEST: usize = 64;
/// Requests from here on are refused: rounding them up must not pass `isize::MAX`.
const MAX_BYTES: usize = isize::MAX as usize / 2;
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
fn class_size(bytes: usize) -> Option<usize> {
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

/// Memory owned from the system, all of it initialised.
struct Block {
    ptr: NonNull<u8>,
    size: usize,
    /// What it was cut from, which it keeps.
    home: Option<Arc<Block>>,
    /// What it takes of the budget. A mapping takes nothing itself: what is cut from it does.
    share: Option<Share>,
}

// SAFETY: a block is plain memory that it alone owns.
unsafe impl Send for Block {}
// SAFETY: a shared block gives out only its address.
unsafe impl Sync for Block {}

impl Block {
    fn empty() -> Block {
        let ptr = NonNull::without_provenance(std::num::NonZero::new(ALIGN).expect("not 0"));
        Block { ptr, size: 0, home: None, share: None }
    }

    fn new(size: usize) -> Option<Block> {
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

/// `KILN_GUARD=1`: see the module head. Slow; for debugging and fuzzing.
pub(crate) static GUARD: LazyLock<bool> =
    LazyLock::new(|| std::env::var("KILN_GUARD").is_ok_and(|v| v == "1"));

fn system_zeroed(size: usize) -> Option<NonNull<u8>> {
    let layout = Layout::from_size_align(size, ALIGN).ok()?;
    // SAFETY: callers ask for at least one byte.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

/// # Safety
/// `ptr` came from `system_zeroed(size)`.
unsafe fn system_free(ptr: NonNull<u8>, size: usize) {
    // SAFETY: the layout was valid when it was allocated with it.
    unsafe { dealloc(ptr.as_ptr(), Layout::from_size_align_unchecked(size, ALIGN)) }
}

/// Large blocks on huge pages, which the system gives out zeroed.
#[cfg(target_os = "linux")]
mod pages {
    use std::io::Write;
    use std::ptr::{NonNull, null_mut};

    /// The size of a huge page; smaller blocks cannot have one.
    pub const LARGE: usize = 2 << 20;
    const PAGE: usize = 4096;

    pub fn map(size: usize) -> Option<NonNull<u8>> {
        let size = size.next_multiple_of(PAGE);
        // One huge page more than needed, so that a huge-page boundary can be cut out of it: older kernels align
        // mappings to small pages only, and then the first and last 2 MiB stay small.
        let whole = size.checked_add(LARGE)?;
        // SAFETY: a new private mapping touches no existing memory.
        let start = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(null_mut(), whole, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        let before = start.align_offset(LARGE);
        let ptr = start.wrapping_byte_add(before);
        // SAFETY: the three ranges lie in the mapping just made, and nobody has its address yet. The advice may be
        // refused (no huge pages on this host), which changes only speed.
        unsafe {
            if before > 0 {
                libc::munmap(start, before);
            }
            if before < LARGE {
                libc::munmap(ptr.wrapping_byte_add(size), LARGE - before);
            }
            libc::madvise(ptr, size, libc::MADV_HUGEPAGE);
        }
        NonNull::new(ptr.cast())
    }

    /// # Safety
    /// `ptr` came from `map(size)`.
    pub unsafe fn unmap(ptr: NonNull<u8>, size: usize) {
        // SAFETY: the whole mapping, as `map` left it.
        unsafe { libc::munmap(ptr.as_ptr().cast(), size.next_multiple_of(PAGE)) };
    }

    /// Gives the whole pages of a part of a mapping back. The system may refuse, which costs only memory.
    ///
    /// # Safety
    /// The part is of a mapping of this module, and nobody uses it any more.
    pub unsafe fn discard(ptr: NonNull<u8>, size: usize) {
        let before = ptr.as_ptr().align_offset(PAGE);
        let len = size.saturating_sub(before) / PAGE * PAGE;
        if len > 0 {
            // SAFETY: the caller's promise.
            unsafe { libc::madvise(ptr.as_ptr().wrapping_add(before).cast(), len, libc::MADV_DONTNEED) };
        }
    }

    /// What is around a guarded block up to the pages that nobody may touch.
    const PATTERN: u8 = 0xa5;

    /// Where the pages of a guarded block are, seen from its first byte: how far before it, and how long.
    fn around(size: usize) -> Option<(usize, usize)> {
        let used = size.checked_next_multiple_of(super::ALIGN)?;
        let pages = used.checked_next_multiple_of(PAGE)?;
        Some((pages - used, pages))
    }

    /// A block that ends where a page begins that nobody may touch, but for what its alignment takes, and that has such a
    /// page before it too.
    pub fn map_guarded(size: usize) -> Option<NonNull<u8>> {
        let (before, pages) = around(size)?;
        let whole = pages.checked_add(2 * PAGE)?;
        // SAFETY: a new private mapping touches no existing memory; what is opened lies in it, and so does what is
        // filled.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let start = libc::mmap(null_mut(), whole, libc::PROT_NONE, flags, -1, 0);
            if start == libc::MAP_FAILED {
                return None;
            }
            let first = start.cast::<u8>().wrapping_add(PAGE);
            if libc::mprotect(first.cast(), pages, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                libc::munmap(start, whole);
                return None;
            }
            first.write_bytes(PATTERN, before);
            first.add(before + size).write_bytes(PATTERN, pages - before - size);
            NonNull::new(first.add(before))
        }
    }

    /// Ends the process if somebody wrote beside the block.
    ///
    /// # Safety
    /// `ptr` came from `map_guarded(size)`.
    pub unsafe fn unmap_guarded(ptr: NonNull<u8>, size: usize) {
        let Some((before, pages)) = around(size) else { return };
        // SAFETY: the pages as `map_guarded` left them.
        unsafe {
            let first = ptr.as_ptr().sub(before);
            let all = std::slice::from_raw_parts(first, pages);
            let (front, back) = (&all[..before], &all[before + size..]);
            if front.iter().chain(back).any(|&byte| byte != PATTERN) {
                let message = format_args!("KILN_GUARD: somebody wrote beside a buffer of {size} bytes\n");
                let _ = std::io::stderr().write_fmt(message);
                std::process::abort();
            }
            libc::munmap(first.sub(PAGE).cast(), pages + 2 * PAGE);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod pages {
    pub const LARGE: usize = usize::MAX;
    pub(super) use super::{system_free as unmap, system_zeroed as map};
    // There are no guard pages here.
    pub(super) use super::{system_free as unmap_guarded, system_zeroed as map_guarded};

    /// Nothing is cut here.
    pub unsafe fn discard(_: super::NonNull<u8>, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    #[cfg(target_os = "linux")]
    fn small_blocks_share_a_mapping_that_goes_with_the_last() {
        let arena = Arena::new(None);
        let alloc = |bytes, place| arena.alloc(bytes, place).unwrap();
        let size = class_size(300 << 10).unwrap();
        let mut blocks: Vec<Buffer> = (0..40).map(|_| alloc(300 << 10, Place::Reuse)).collect();
        let place = |b: &Buffer| b.as_ptr().addr();
        let follow = blocks.windows(2).filter(|pair| place(&pair[0]) + size == place(&pair[1])).count();
        assert!(follow > 35, "{follow} of 40 follow the one before");
        for (i, block) in blocks.iter_mut().enumerate() {
            assert!(block.as_slice().iter().all(|&b| b == 0) && place(block).is_multiple_of(ALIGN));
            block.as_mut_slice().fill(i as u8 + 1);
        }
        let home = |block: &Buffer| Arc::downgrade(block.block.home.as_ref().unwrap());
        let (first, last) = (home(&blocks[0]), home(&blocks[39]));
        let kept = blocks.split_off(39);
        drop(blocks);
        arena.cleanup();
        assert!(first.upgrade().is_none() && last.upgrade().is_some());
        assert!(kept[0].as_slice().iter().all(|&b| b == 40));
        drop(kept);
        arena.cleanup();
        assert!(last.upgrade().is_none());
        assert!(alloc(300 << 10, Place::Persistent).block.home.is_none());
        assert!(alloc(3 << 20, Place::Reuse).block.home.is_none());
        assert!(alloc(4 << 10, Place::Reuse).block.home.is_none());
    }

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
    fn freed_block_comes_back() {
        let arena = Arena::new(None);
        for bytes in [1, 100, 1000, MIB, 3 * MIB] {
            let before = arena.stats().system_allocs;
            let first = arena.alloc(bytes, Place::Reuse).unwrap();
            let address = first.as_ptr() as usize;
            assert_eq!(address % ALIGN, 0);
            drop(first);
            let second = arena.alloc(bytes, Place::Reuse).unwrap();
            assert_eq!(second.as_ptr() as usize, address);
            assert_eq!(arena.stats().system_allocs, before + 1);
        }
    }

    #[test]
    fn fresh_memory_is_zero_and_all_of_it_writable() {
        for place in [Place::Reuse, Place::Persistent] {
            for bytes in [0, 1, 63, 100, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3] {
                let mut buffer = Arena::new(None).alloc(bytes, place).unwrap();
                assert_eq!(buffer.len(), bytes);
                assert!(buffer.as_slice().iter().all(|&b| b == 0));
                buffer.as_mut_slice().fill(7);
                assert!(buffer.as_slice().iter().all(|&b| b == 7));
            }
        }
    }

    #[test]
    fn limit_drops_caches_first_then_refuses() {
        let arena = Arena::new(Some(4 * MIB));
        drop(arena.alloc(2 * MIB, Place::Reuse).unwrap());
        assert_eq!(arena.stats().cached_bytes, 2 * MIB);
        let big = arena.alloc(3 * MIB, Place::Reuse).unwrap();
        assert_eq!(arena.stats().cached_bytes, 0);
        let error = arena.alloc(MIB + 1, Place::Reuse).unwrap_err();
        assert_eq!(error, Exhausted { asked: MIB + 1, free: MIB, limit: Some(4 * MIB) });
        let rest = arena.alloc(MIB, Place::Persistent).unwrap();
        assert!(arena.alloc(1, Place::Reuse).is_err());
        assert!(arena.alloc(0, Place::Reuse).is_ok());
        drop((big, rest));
        arena.set_limit(Some(MIB));
        assert_eq!(arena.stats().cached_bytes, 0);
        assert!(arena.alloc(2 * MIB, Place::Reuse).is_err());
        arena.set_limit(None);
        assert!(arena.alloc(2 * MIB, Place::Reuse).is_ok());
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let arena = Arena::new(None);
        for bytes in [isize::MAX as usize, usize::MAX, MAX_BYTES, MAX_BYTES - 1, 1 << 60] {
            for place in [Place::Reuse, Place::Persistent] {
                assert_eq!(arena.alloc(bytes, place).unwrap_err().asked, bytes);
            }
        }
        let stats = arena.stats();
        assert_eq!((stats.live_bytes, stats.live_buffers), (0, 0));
        assert_eq!((stats.persistent_bytes, stats.persistent_buffers), (0, 0));
    }

    #[test]
    fn persistent_is_counted_apart_and_not_cached() {
        let arena = Arena::new(None);
        let weights = arena.alloc(1001, Place::Persistent).unwrap();
        let value = arena.alloc(1001, Place::Reuse).unwrap();
        let stats = arena.stats();
        assert_eq!((stats.persistent_bytes, stats.persistent_buffers), (1001, 1));
        assert_eq!((stats.live_bytes, stats.live_buffers), (1024, 1));
        drop((weights, value));
        let stats = arena.stats();
        assert_eq!((stats.persistent_bytes, stats.live_bytes, stats.cached_bytes), (0, 0, 1024));
        assert_eq!(stats.peak_bytes, 2025);
        arena.reset_peak();
        assert_eq!(arena.stats().peak_bytes, 0);
        arena.cleanup();
        assert_eq!(arena.stats().cached_bytes, 0);
    }

    #[test]
    fn threads_leave_nothing_live() {
        let arena = Arena::new(Some(64 * MIB));
        std::thread::scope(|s| {
            for seed in 0..4usize {
                let arena = &arena;
                s.spawn(move || {
                    let mut held = Vec::new();
                    for i in 0..2000usize {
                        let bytes = (i * 7919 + seed * 104_729) % 40_000;
                        let place = if i % 5 == 0 { Place::Persistent } else { Place::Reuse };
                        let mut buffer = arena.alloc(bytes, place).unwrap();
                        buffer.as_mut_slice().fill(seed as u8);
                        held.push(buffer);
                        if i % 3 == 0 {
                            let out = held.swap_remove(i % held.len());
                            assert!(out.as_slice().iter().all(|&b| b == seed as u8));
                        }
                        if held.len() > 50 {
                            held.clear();
                        }
                    }
                });
            }
        });
        let stats = arena.stats();
        assert_eq!((stats.live_bytes, stats.live_buffers, stats.persistent_bytes), (0, 0, 0));
        assert!(stats.cached_bytes > 0 && stats.peak_bytes > 0);
    }
}
