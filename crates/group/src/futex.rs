//! Sleeping until a word changes, across threads and processes.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while the word holds `seen`, at most this long. May wake without a reason.
#[cfg(target_os = "linux")]
pub(crate) fn wait(word: &AtomicU32, seen: u32, at_most: Duration) {
    let time = libc::timespec { tv_sec: at_most.as_secs() as _, tv_nsec: at_most.subsec_nanos() as _ };
    // SAFETY: the word and the time outlive the call; not private, because the word may be shared memory.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &time) };
}

/// Wakes everyone who sleeps on the word.
#[cfg(target_os = "linux")]
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: the word outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn wait(_: &AtomicU32, _: u32, at_most: Duration) {
    std::thread::sleep(at_most.min(Duration::from_micros(100)));
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn wake(_: &AtomicU32) {}
