//! What the queue synchronises with: the standard library. `checks/schedules` builds the same file on the primitives of a
//! schedule explorer.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
