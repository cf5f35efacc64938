//! Ending work that is under way: a device's flag, which loops look at once per chunk.
//!
//! A device computes [`under`] its flag; the pool hands it on to whoever helps. Where [`check`] finds it set, the kernel
//! is left by unwinding with [`Stopped`], without a panic's message; the pool passes that on as it does a panic, and the
//! device makes an error of it. Looking costs a load from the thread's own storage and one of the flag.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static CURRENT: Cell<*const AtomicBool> = const { Cell::new(ptr::null()) };
}

/// What a kernel is left with.
pub struct Stopped;

/// The flag that a thread computes under, to be handed to another one.
#[derive(Clone, Copy)]
pub struct Flag(*const AtomicBool);

/// The flag of this thread.
pub fn current() -> Flag {
    Flag(CURRENT.get())
}

/// Runs `f` so that [`check`] looks at `flag`.
pub fn under<T>(flag: &AtomicBool, f: impl FnOnce() -> T) -> T {
    // SAFETY: the flag is borrowed until this returns.
    unsafe { under_flag(Flag(flag), f) }
}

/// Runs `f` under another thread's flag.
///
/// # Safety
/// The other thread stays within its [`under`] until this returns.
pub unsafe fn under_flag<T>(flag: Flag, f: impl FnOnce() -> T) -> T {
    struct Restore(*const AtomicBool);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _restore = Restore(CURRENT.replace(flag.0));
    f()
}

/// Whether this thread computes for a device.
pub fn is_under() -> bool {
    !CURRENT.get().is_null()
}

/// Leaves the kernel if the device was stopped.
#[inline]
pub fn check() {
    if is_set() {
        resume_unwind(Box::new(Stopped));
    }
}

/// Whether the device was stopped.
#[inline]
pub fn is_set() -> bool {
    let flag = CURRENT.get();
    // SAFETY: a flag that is current is borrowed by an `under` that has not returned.
    !flag.is_null() && unsafe { (*flag).load(Ordering::Relaxed) }
}
