//! Pieces of work in parts, one per thread, that anyone may finish.

use crate::pool;
use crate::stop;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most parts there can be.
pub(super) const MOST: usize = 64;

/// Cuts `0..count` into `parts` even parts and calls `f` on some threads, until all pieces are claimed from its argument.
/// A thread begins with a part of its own, so that what it left in its cache is used again, and then helps with the
/// others, but for the last `leave` pieces of each: nobody waits long for a thread that does not get to run.
pub(super) fn parted(parts: usize, count: usize, leave: usize, f: impl Fn(Claims<'_>) + Sync) {
    let taken = [const { AtomicUsize::new(0) }; MOST];
    let run = |own: usize| f(Claims { taken: &taken[..parts], count, leave, own, helped: 0 });
    if parts <= 1 { run(0) } else { pool::parallel(parts, &run) }
}

/// The pieces that one thread gets.
pub(super) struct Claims<'a> {
    taken: &'a [AtomicUsize],
    count: usize,
    leave: usize,
    own: usize,
    helped: usize,
}

impl Claims<'_> {
    /// Counts one more piece of a part; returns how many were taken before.
    fn claim(&self, part: usize) -> usize {
        let taken = &self.taken[part];
        if self.taken.len() > 1 {
            return taken.fetch_add(1, Ordering::Relaxed);
        }
        // Nobody else counts, and a locked addition would wait for all stores before it.
        let before = taken.load(Ordering::Relaxed);
        taken.store(before + 1, Ordering::Relaxed);
        before
    }
}

impl Iterator for Claims<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        stop::check();
        let parts = self.taken.len();
        while self.helped < parts {
            let part = (self.own + self.helped) % parts;
            let (first, end) = (part * self.count / parts, (part + 1) * self.count / parts);
            // Relaxed: a piece reads nothing that another wrote; the pool orders what follows.
            if self.helped == 0 || first + self.taken[part].load(Ordering::Relaxed) + self.leave < end {
                let i = first + self.claim(part);
                if i < end {
                    return Some(i);
                }
            }
            self.helped += 1;
        }
        None
    }
}
