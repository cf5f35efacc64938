//! The end of the process: servers are told, so that nothing of a finished program waits there for the end of its lease.
//!
//! Devices live as long as the process, and nothing drops them then. So the sessions are closed by a function that the
//! C library calls when `main` has returned or `exit` was called. It allocates, locks and waits for next to nothing: the
//! thread that exits may hold any lock.

use super::remote::Shared;
use std::sync::{Arc, Mutex, Once, Weak};
use std::time::{Duration, Instant};

/// How long the end of the process may be held up, all servers together.
const LONGEST: Duration = Duration::from_millis(300);

static OPEN: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Closes this session when the process ends.
pub(super) fn remember(shared: &Arc<Shared>) {
    static HOOK: Once = Once::new();
    HOOK.call_once(hook);
    let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
    open.retain(|other| other.strong_count() > 0);
    open.push(Arc::downgrade(shared));
}

#[allow(unsafe_code)]
fn hook() {
    // SAFETY: the function has the right type, needs nothing that was dropped before, and does not unwind: it only reads
    // and writes atomics, tries locks, and sleeps. If the C library has no room for it, leases end as they always do.
    let _ = unsafe { libc::atexit(goodbye) };
    PROCESS.get_or_init(std::process::id);
}

/// The process that has the IO thread; a fork of it has none.
static PROCESS: std::sync::OnceLock<u32> = std::sync::OnceLock::new();

extern "C" fn goodbye() {
    if PROCESS.get() != Some(&std::process::id()) {
        return;
    }
    // Whoever opens a device right now holds it, maybe this very thread.
    let Ok(open) = OPEN.try_lock() else { return };
    let told: Vec<Arc<Shared>> = open.iter().filter_map(Weak::upgrade).filter(|s| s.is_connected()).collect();
    drop(open);
    told.iter().for_each(|shared| shared.close());
    let start = Instant::now();
    while told.iter().any(|shared| !shared.is_over()) && start.elapsed() < LONGEST {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Nothing may be dropped here that could take a lock.
    std::mem::forget(told);
}
