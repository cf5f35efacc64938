//! Pieces of work in parts, one a thread, that anyone may finish.

use crate::pool;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most parts there can be.
pub(super) const MOST: usize = 64;

/// Runs `f(0)`, …, `f(count - 1)` in `parts` even parts. A thread begins with a part of its own, so that what it left in
/// its cache is used again, and then helps with the others: nobody waits for a thread that does not get to run.
pub(super) fn parted(parts: usize, count: usize, f: impl Fn(usize) + Sync) {
    if parts <= 1 {
        return (0..count).for_each(f);
    }
    let taken = [const { AtomicUsize::new(0) }; MOST];
    pool::parallel(parts, &|own| {
        for step in 0..parts {
            let part = (own + step) % parts;
            let (first, end) = (part * count / parts, (part + 1) * count / parts);
            loop {
                // Relaxed: a piece reads nothing that another wrote; the pool orders what follows.
                let i = first + taken[part].fetch_add(1, Ordering::Relaxed);
                if i >= end {
                    break;
                }
                f(i);
            }
        }
    });
}
