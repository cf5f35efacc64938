//! What the pool synchronises with: the standard library. `checks/schedules` builds the same file on the primitives of a
//! schedule explorer.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;

pub(crate) use kiln_host::standard;

use std::time::{Duration, Instant};

/// The longest anyone spins before giving the core back.
const SPIN: Duration = Duration::from_micros(50);

/// Spins for at most `SPIN`; true as soon as `ready` is.
pub(crate) fn spin_until(ready: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Reading the clock costs about as much as a pause instruction.
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}
