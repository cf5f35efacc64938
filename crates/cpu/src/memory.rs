//! Memory that kernels take outside of the arena: counted against the device's limit before it is taken, and taken in
//! ways that can fail.
//!
//! Sizes come from shapes, and shapes from anybody. A device computes [`counted`]; whatever asks for memory here is counted
//! there, and where there is none, the kernel is left by unwinding with the [`Error`] that its results then have.
//! Temporaries end with the [`Mark`] that was set before them. What is small is not counted: it is bounded by its size.

use crate::arena::{Arena, Buffer, Exhausted, GUARD, Place, Reserved};
use crate::stop;
use kiln_device::{Budget, Error};
use std::cell::{Cell, RefCell};
use std::panic::resume_unwind;
use std::sync::{Arc, LazyLock};
use std::thread::LocalKey;

/// Bytes up to which nothing is counted, so that small operations pay nothing.
const SMALL: usize = 64 << 10;
/// Elements between looks at whether the device was stopped.
pub(crate) const STRETCH: usize = 1 << 16;

struct Account {
    arena: Arc<Arena>,
    bytes: usize,
    reserved: Option<Reserved>,
}

thread_local! {
    static ACCOUNT: RefCell<Option<Account>> = const { RefCell::new(None) };
}

/// Runs `f`; what it takes is counted by `arena` until it returns.
pub(crate) fn counted<T>(arena: &Arc<Arena>, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<Account>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let ended = ACCOUNT.replace(self.0.take());
            drop(ended);
        }
    }
    let account = Account { arena: arena.clone(), bytes: 0, reserved: None };
    let _restore = Restore(ACCOUNT.replace(Some(account)));
    f()
}

impl Account {
    fn set(&mut self, bytes: usize) -> Result<(), Exhausted> {
        match &mut self.reserved {
            Some(reserved) => reserved.resize(bytes)?,
            None if bytes > SMALL => self.reserved = Some(self.arena.reserve(bytes)?),
            None => {}
        }
        self.bytes = bytes;
        Ok(())
    }
}

/// Leaves the kernel: there is no memory. Where no device computes, that is a panic.
pub(crate) fn leave(exhausted: Exhausted) -> ! {
    if stop::is_under() {
        resume_unwind(Box::new(Error::from(exhausted)));
    }
    panic!("{exhausted}")
}

/// Counts `bytes`, until the innermost mark ends.
pub(crate) fn charge(bytes: usize) {
    let counted = ACCOUNT.with_borrow_mut(|account| match account {
        Some(account) => match account.bytes.checked_add(bytes) {
            Some(sum) => account.set(sum).map_err(|e| Exhausted { asked: bytes, ..e }),
            None => Err(Exhausted { asked: bytes, free: 0, limit: None }),
        },
        None => Ok(()),
    });
    if let Err(exhausted) = counted {
        leave(exhausted);
    }
}

/// What is counted after it was set is given back when it is dropped, but for what is kept.
pub(crate) struct Mark(usize);

/// Sets a mark.
pub(crate) fn mark() -> Mark {
    Mark(ACCOUNT.with_borrow(|account| account.as_ref().map_or(0, |account| account.bytes)))
}

impl Mark {
    /// So many of the bytes counted since stay counted.
    pub fn keep(mut self, bytes: usize) {
        self.0 = self.0.saturating_add(bytes);
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let give_back = |account: &mut Account| {
            if self.0 < account.bytes {
                // Giving back does not fail.
                let _ = account.set(self.0);
            }
        };
        ACCOUNT.with_borrow_mut(|account| account.as_mut().map(give_back));
    }
}

/// An empty vector with room for `n` elements.
pub(crate) fn with_capacity<T>(n: usize) -> Vec<T> {
    let none = |asked| Exhausted { asked, free: 0, limit: None };
    let Some(bytes) = n.checked_mul(size_of::<T>()) else { leave(none(usize::MAX)) };
    charge(bytes);
    let mut out = Vec::new();
    if out.try_reserve_exact(n).is_err() {
        leave(none(bytes));
    }
    out
}

/// `n` times the same.
pub(crate) fn filled<T: Clone>(n: usize, value: T) -> Vec<T> {
    let mut out = with_capacity(n);
    while out.len() < n {
        stop::check();
        out.resize(n.min(out.len() + STRETCH), value.clone());
    }
    out
}

/// The first `n` of the elements, or as many as there are.
pub(crate) fn collect<T>(n: usize, elements: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut out = with_capacity(n);
    let mut elements = elements.into_iter();
    while out.len() < n {
        stop::check();
        let before = out.len();
        out.extend(elements.by_ref().take(STRETCH.min(n - before)));
        if out.len() == before {
            break;
        }
    }
    out
}

/// A copy.
pub(crate) fn copied<T: Copy>(x: &[T]) -> Vec<T> {
    let mut out = with_capacity(x.len());
    out.extend_from_slice(x);
    out
}

/// Scratch of threads is not drawn from a budget: what they keep is bounded, and what is more is reserved by who uses it.
static SCRATCH: LazyLock<Arc<Arena>> = LazyLock::new(|| Arena::within(None, Budget::new(usize::MAX)));

/// Calls `f` with memory of at least `bytes` bytes that the thread keeps for the next call if it is at most `most`. Taken
/// out while in use, so that a nested use gets memory of its own.
pub(crate) fn with_scratch(
    key: &'static LocalKey<Cell<Option<Buffer>>>,
    bytes: usize,
    most: usize,
    f: impl FnOnce(*mut u8),
) {
    let kept = key.take().filter(|memory| memory.len() >= bytes && !*GUARD);
    let memory = kept.unwrap_or_else(|| {
        SCRATCH.alloc(bytes, Place::Persistent).unwrap_or_else(|exhausted| leave(exhausted))
    });
    f(memory.as_mut_ptr());
    if memory.len() <= most {
        key.set(Some(memory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicBool;

    fn asked(f: impl FnOnce()) -> usize {
        let run = || stop::under(&AtomicBool::new(false), f);
        let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("there is no memory");
        match panic.downcast_ref() {
            Some(Error::OutOfMemory { asked, .. }) => *asked,
            other => panic!("another reason: {other:?}"),
        }
    }

    #[test]
    fn what_is_taken_is_counted_and_ends_with_its_mark() {
        let arena = Arena::new(Some(1 << 20));
        let live = || arena.stats().live_bytes;
        counted(&arena, || {
            let outer = mark();
            let kept: Vec<u64> = with_capacity(40_000);
            assert_eq!(live(), 320_000);
            let inner = mark();
            let _temporary = filled(500_000, 1u8);
            assert_eq!(live(), 820_000);
            assert_eq!(asked(|| drop(filled(300_000, 1u8))), 300_000);
            assert_eq!(live(), 820_000);
            drop(inner);
            assert_eq!(live(), 320_000);
            drop(kept);
            outer.keep(1000);
            assert_eq!(live(), 1000);
        });
        let stats = arena.stats();
        assert_eq!((stats.live_bytes, stats.live_buffers), (0, 0));
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused_without_a_limit() {
        let arena = Arena::within(None, kiln_device::Budget::new(usize::MAX));
        counted(&arena, || {
            assert_eq!(asked(|| drop(with_capacity::<u64>(1 << 61))), usize::MAX);
            assert_eq!(asked(|| drop(filled(1 << 60, 1u8))), 1 << 60);
            assert_eq!(asked(|| drop(collect(1 << 58, 0..10u8))), 1 << 58);
        });
        assert_eq!(arena.stats().live_bytes, 0);
    }

    #[test]
    fn small_things_are_not_counted() {
        let arena = Arena::new(Some(0));
        counted(&arena, || assert_eq!(collect(9, 0..5u8), [0, 1, 2, 3, 4]));
    }
}
