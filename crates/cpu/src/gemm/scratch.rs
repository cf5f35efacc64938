//! Memory for packed strips and sums, kept by each thread from call to call.

use crate::arena::{Buffer, GUARD};
use crate::memory;
use std::cell::Cell;
use std::thread::LocalKey;

thread_local! {
    pub(super) static SHARED: Cell<Option<Buffer>> = const { Cell::new(None) };
    pub(super) static OWN: Cell<Option<Buffer>> = const { Cell::new(None) };
    pub(super) static SUMMED: Cell<Option<Buffer>> = const { Cell::new(None) };
}

/// Memory for `n` numbers, kept by the thread for the next call. Taken out while in use, so that a nested use would
/// get memory of its own. T is a plain number.
pub(super) fn with_scratch<T: Copy>(
    key: &'static LocalKey<Cell<Option<Buffer>>>,
    n: usize,
    f: impl FnOnce(*mut T),
) {
    let bytes = n * size_of::<T>();
    // At least a huge page: packed strips are read in sequence, and page by page in small ones.
    let size = if *GUARD { bytes } else { bytes.next_multiple_of(2 << 20) };
    memory::with_scratch(key, size, usize::MAX, |memory| f(memory.cast()));
}

/// A scratch pointer that chunks share, each for its own strips.
#[derive(Clone, Copy)]
pub(super) struct Shared<T>(pub(super) *mut T);
// SAFETY: chunks write disjoint strips, and read them only after all are written.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(super) fn get(self) -> *mut T {
        self.0
    }
}
