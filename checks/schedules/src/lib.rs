//! The compute pool and the device's queue under a schedule explorer: the very files of `kiln-cpu` and `kiln-host`, built
//! on primitives that give the explorer a say at every step. The tests run them through thousands of schedules, and a wake-up that gets
//! lost is a deadlock that the explorer names. It takes every atomic for sequentially consistent: orderings are argued for
//! in the files, not tested here.

#[path = "../../../crates/cpu/src/pool.rs"]
pub mod pool;
#[path = "../../../crates/host/src/queue.rs"]
pub mod queue;
#[path = "../../../crates/host/src/stop.rs"]
#[allow(dead_code)]
mod stop;

mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use shuttle::thread;

    /// Nothing is computed here.
    pub(crate) fn standard<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    /// Time does not pass here: after a few turns of the others, spinning is over.
    pub(crate) fn spin_until(ready: impl Fn() -> bool) -> bool {
        for _ in 0..2 {
            if ready() {
                return true;
            }
            thread::yield_now();
        }
        ready()
    }
}
