//! How a rank waits for the others, and wakes them.

use super::{Reach, SharedSlots};
use crate::call::Signature;
use crate::engine::Wait;
use crate::{Error, Loss, futex};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

/// The longest spin before parking. Ranks that compute differ by a few tenths of a millisecond a step, and a core of a
/// virtual machine that sleeps is slow to wake: with 50 µs the weak scaling of an MLP and a GPT was 1 to 3 % lower.
const SPIN: Duration = Duration::from_millis(1);
/// The longest sleep without looking around.
const NAP: Duration = Duration::from_millis(100);

impl SharedSlots {
    /// Waits until the condition holds for every peer, spinning first if that pays, then parked.
    pub(super) fn wait_all(
        &self,
        wait: Wait,
        signature: &Signature,
        reach: &dyn Reach,
        ready: impl Fn(usize) -> bool,
    ) -> Result<(), Error> {
        let mut missing = self.peers().find(|&r| !ready(r));
        if missing.is_none() {
            return Ok(());
        }
        let begun = Instant::now();
        let mut last = begun;
        let mut turns = 0u32;
        let rank_slots = self.rank_slots(self.rank);
        while let Some(rank) = missing {
            let next = |parked: bool| {
                // What ended the group counts only if what we wait for did not come before it.
                let over = self.over(rank);
                if parked || over.is_some() {
                    fence(SeqCst);
                }
                if ready(rank) { Ok(true) } else { over.map_or(Ok(false), Err) }
            };
            turns += 1;
            let spinning = wait.spin && (!turns.is_multiple_of(64) || begun.elapsed() < SPIN);
            if spinning {
                if ready(rank) || turns.is_multiple_of(64) && next(false)? {
                    missing = self.passed(rank, &mut last, &ready);
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            let wakeup = rank_slots.wakeup.0.load(SeqCst);
            rank_slots.parked.0.store(1, SeqCst);
            let there = next(true);
            if !matches!(there, Ok(false)) {
                rank_slots.parked.0.store(0, SeqCst);
                there?;
                missing = self.passed(rank, &mut last, &ready);
                continue;
            }
            let left = wait.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                rank_slots.parked.0.store(0, SeqCst);
                let missing: Vec<usize> = self.peers().filter(|&r| !ready(r)).collect();
                if missing.is_empty() {
                    return Ok(());
                }
                let stopped = reach.stopped(&missing);
                return Err(Error::Deadline {
                    rank: self.rank,
                    call: *signature,
                    after: wait.deadline,
                    missing,
                    stopped,
                });
            }
            futex::wait(&rank_slots.wakeup.0, wakeup, left.min(NAP));
            rank_slots.parked.0.store(0, SeqCst);
        }
        Ok(())
    }

    /// This rank came: books the time it took, and finds the next that is missing.
    fn passed(&self, rank: usize, last: &mut Instant, ready: &impl Fn(usize) -> bool) -> Option<usize> {
        let now = Instant::now();
        self.waited[rank].fetch_add((now - *last).as_nanos() as u64, Relaxed);
        *last = now;
        self.peers().find(|&r| !ready(r))
    }

    /// Why waiting for this rank is in vain, if it is.
    fn over(&self, rank: usize) -> Option<Error> {
        if let Some(error) = self.failure() {
            return Some(error);
        }
        match self.rank_slots(rank).left.0.load(Acquire) {
            0 => None,
            after => Some(Error::RankLost { rank, cause: Loss::Left { after: after - 1 } }),
        }
    }

    /// Wakes the peers that are parked.
    pub(super) fn ring(&self) {
        // Either the peer sees what was stored before, or we see that it is parked.
        fence(SeqCst);
        for rank in self.peers() {
            let rank_slots = self.rank_slots(rank);
            if rank_slots.parked.0.load(SeqCst) != 0 {
                rank_slots.wakeup.0.fetch_add(1, SeqCst);
                futex::wake(&rank_slots.wakeup.0);
            }
        }
    }

    pub(super) fn ring_all(&self) {
        for rank in 0..self.layout.ranks() {
            let rank_slots = self.rank_slots(rank);
            rank_slots.wakeup.0.fetch_add(1, SeqCst);
            futex::wake(&rank_slots.wakeup.0);
        }
    }
}
