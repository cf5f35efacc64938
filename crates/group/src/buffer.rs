//! What a collective works on: memory of the group, one part for each contribution of this rank.

use crate::memory::Region;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Memory of a group. It is moved into a collective and comes back with the result, so that nobody can touch it while
/// ranks exchange. Read and written as a slice it is its first part, where results are.
pub struct Buffer {
    pub(crate) region: Arc<Region>,
    /// Where it begins in each part: it may be a range of a contribution that is exchanged in several.
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) stride: usize,
    pub(crate) parts: usize,
    pub(crate) poison: Option<String>,
    pub(crate) pool: Weak<Pool>,
}

impl Buffer {
    /// How many parts it has.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// The contribution of one subtree of this rank.
    pub fn part(&self, part: usize) -> &[u8] {
        // SAFETY: inside the region, which only this value may touch outside a collective.
        unsafe { std::slice::from_raw_parts(self.at(part), self.bytes) }
    }

    /// The same, to be written.
    pub fn part_mut(&mut self, part: usize) -> &mut [u8] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at(part), self.bytes) }
    }

    /// Says that the contribution could not be computed. It still joins; the collective then fails on every rank with
    /// this rank and the reason, and the group lives on.
    pub fn poison(&mut self, reason: &str) {
        self.poison = Some(reason.to_string());
    }

    /// A range of one part that a device may compute in before the buffer is given to a collective. Whoever holds it
    /// afterwards must not touch it.
    pub fn range(&self, part: usize, range: std::ops::Range<usize>) -> Range {
        assert!(range.start <= range.end && range.end <= self.bytes);
        Range { at: self.at(part).wrapping_add(range.start), len: range.len(), region: self.region.clone() }
    }

    pub(crate) fn at(&self, part: usize) -> *mut u8 {
        assert!(part < self.parts, "part {part} of {}", self.parts);
        // SAFETY: parts lie one after another in the region.
        unsafe { self.region.start().add(part * self.stride + self.start) }
    }

    /// A range of it, to be exchanged by itself. It does not give the memory back to the pool.
    pub(crate) fn slice(&self, range: std::ops::Range<usize>) -> Buffer {
        assert!(range.start <= range.end && range.end <= self.bytes);
        let (start, bytes) = (self.start + range.start, range.len());
        Buffer { region: self.region.clone(), start, bytes, poison: None, pool: Weak::new(), ..*self }
    }
}

/// Part of a [`Buffer`]'s memory, which stays as long as this.
pub struct Range {
    at: *mut u8,
    len: usize,
    #[allow(dead_code)]
    region: Arc<Region>,
}

// SAFETY: an address; whoever goes through it keeps to what `Buffer::range` says.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Range {
    /// The first byte.
    pub fn start(&self) -> *mut u8 {
        self.at
    }

    /// All of it.
    ///
    /// # Safety
    /// Nobody writes it while this is borrowed: neither a device that computes there nor, once the buffer is given to a
    /// collective, those who exchange it.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: inside the region, which it holds and which was written from end to end once; and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.part(0)
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.part_mut(0)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} × {} bytes)", self.parts, self.bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            pool.put(self.region.clone());
        }
    }
}

/// Regions to be used again: a recurring step allocates nothing.
pub(crate) struct Pool(Mutex<Option<Vec<Arc<Region>>>>);

/// Regions kept.
const KEPT: usize = 64;

impl Default for Pool {
    fn default() -> Pool {
        Pool(Mutex::new(Some(Vec::new())))
    }
}

impl Pool {
    fn free(&self) -> MutexGuard<'_, Option<Vec<Arc<Region>>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The smallest that is large enough and not twice too large, of those that peers can reach or of the others; of
    /// equal ones the one that came back last, which caches know best.
    pub(crate) fn take(&self, bytes: usize, reachable: bool) -> Option<Arc<Region>> {
        let mut free = self.free();
        let free = free.as_mut()?;
        let fits =
            |r: &Region| (r.id != 0) == reachable && r.bytes() >= bytes && r.bytes() <= (2 * bytes).max(4096);
        let (at, _) =
            free.iter().enumerate().rev().filter(|(_, r)| fits(r)).min_by_key(|(_, r)| r.bytes())?;
        Some(free.remove(at))
    }

    fn put(&self, region: Arc<Region>) {
        if let Some(free) = &mut *self.free()
            && free.len() < KEPT
        {
            free.push(region);
        }
    }

    /// Nothing is used again: after a failure a peer may still be writing to any of them.
    pub(crate) fn close(&self) {
        *self.free() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_region_that_came_back_last_is_taken_first() {
        let pool = Pool::default();
        let region = |bytes, id| pool.put(Arc::new(Region::heap(bytes, id).unwrap()));
        region(4096, 1);
        region(4096, 2);
        region(8192, 3);
        let took = |bytes| pool.take(bytes, true).map(|region| region.id);
        assert_eq!([took(4096), took(4096), took(4096), took(4096)], [Some(2), Some(1), Some(3), None]);
    }
}
