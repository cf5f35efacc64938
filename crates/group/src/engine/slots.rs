//! Collectives over memory that all ranks see: the heap of one process, or mappings of several.
//!
//! Each rank has two slots in shared memory, used in turn, where it announces a signature and either the contribution
//! itself (small) or the name of its buffer (large). A large reduction has two phases: each rank combines its own
//! segment of all buffers and writes the result into all of them, then waits until everyone has; of a contribution in
//! ranges only the last waits. Two slots are enough: a rank that announces number n + 2 has seen everyone's n + 1, so
//! that nobody still reads its n.

mod layout;
mod transfer;
mod wait;

pub(crate) use layout::bytes;

use super::{Traffic, Wait};
use crate::buffer::Buffer;
use crate::call::{Op, Signature};
use crate::memory::Region;
use crate::{Error, Layout};
use layout::{FAILURE, Header, REASON, RankSlots, Slot};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How a rank finds the buffers of the others.
pub(crate) trait Reach: Send + Sync {
    fn buffer(&self, rank: usize, id: u64, until: Instant) -> Result<Arc<Region>, Error>;
    /// The peers that are there but do not run, if that can be told.
    fn stopped(&self, _ranks: &[usize]) -> Vec<usize> {
        Vec::new()
    }
}

/// One rank's view of the slots.
pub(crate) struct SharedSlots {
    memory: Arc<Region>,
    rank: usize,
    layout: Layout,
    program: Vec<usize>,
    /// Parts of each rank.
    parts: Vec<usize>,
    announced: AtomicU64,
    /// The last collective for which this rank has seen what everyone gave.
    met: AtomicU64,
    /// Set with `failure`, which this process knows even if the writer of the shared one died.
    ended: AtomicBool,
    failure: Mutex<Option<Error>>,
    read: AtomicU64,
    written: AtomicU64,
    /// Nanoseconds waited for each rank.
    waited: Vec<AtomicU64>,
}

impl SharedSlots {
    pub(crate) fn new(memory: Arc<Region>, rank: usize, layout: Layout) -> SharedSlots {
        assert!(memory.bytes() >= bytes(layout.ranks()));
        SharedSlots {
            memory,
            rank,
            layout,
            program: layout.program(),
            parts: (0..layout.ranks()).map(|r| layout.parts(r).len()).collect(),
            announced: AtomicU64::new(0),
            met: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            failure: Mutex::new(None),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            waited: (0..layout.ranks()).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the memory starts with it; it is valid zeroed and shared through atomics.
        unsafe { &*self.memory.start().cast::<Header>() }
    }

    fn rank_slots(&self, rank: usize) -> &RankSlots {
        assert!(rank < self.layout.ranks());
        // SAFETY: the slots of each rank follow the header.
        unsafe { &*self.memory.start().add(size_of::<Header>()).cast::<RankSlots>().add(rank) }
    }

    fn slot(&self, rank: usize, sequence: u64) -> &Slot {
        &self.rank_slots(rank).slots[(sequence % 2) as usize]
    }

    fn peers(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let me = self.rank;
        (0..self.layout.ranks()).filter(move |&r| r != me)
    }

    /// Writes this rank's contribution where the others look for it.
    pub(crate) fn announce(&self, signature: &Signature, buffer: &Buffer) {
        if self.announced.load(Relaxed) >= signature.sequence {
            return;
        }
        let slot = self.slot(self.rank, signature.sequence);
        // SAFETY: this rank's own slot, which nobody reads until it is stamped: see the module's head.
        unsafe {
            *slot.signature.get() = signature.pack();
            *slot.poison.get() = match &buffer.poison {
                None => 0,
                Some(reason) => {
                    let n = reason.len().min(REASON);
                    (&mut *slot.reason.get())[..n].copy_from_slice(&reason.as_bytes()[..n]);
                    n as u64 + 1
                }
            };
            *slot.buffer.get() = buffer.region.id;
            if buffer.region.id == 0 {
                let data = slot.data.get().cast::<u8>();
                for part in 0..buffer.parts {
                    std::ptr::copy_nonoverlapping(
                        buffer.at(part),
                        data.add(part * buffer.stride),
                        buffer.bytes,
                    );
                }
            }
        }
        slot.stamp.store(signature.sequence, Release);
        self.announced.store(signature.sequence, Relaxed);
        self.ring();
    }

    /// Carries out a collective. `segment` phases are counted as payload.
    pub(crate) fn run(
        &self,
        signature: &Signature,
        buffer: &mut Buffer,
        reach: &dyn Reach,
        wait: Wait,
    ) -> Result<(), Error> {
        self.announce(signature, buffer);
        let n = signature.sequence;
        let came = |rank: usize| self.slot(rank, n).stamp.load(Acquire) == n;
        // The others may have given up before this rank came. What all have met for goes on, and what all have announced
        // and still wait for: one that announced a reason and then died is told by its reason.
        let waits = |rank: usize| came(rank) && self.rank_slots(rank).gave_up.0.load(Acquire) != n;
        let met = match self.failure() {
            Some(error) if n > self.header().after.load(Relaxed) && !self.peers().all(waits) => Err(error),
            _ => self.wait_all(wait, signature, reach, came),
        };
        if met.is_err() {
            self.rank_slots(self.rank).gave_up.0.store(n, Release);
        }
        met?;
        let mut poison = None;
        for rank in 0..self.layout.ranks() {
            let slot = self.slot(rank, n);
            // SAFETY: stamped, so its owner has written it and leaves it alone until everyone is past it.
            let (words, poisoned) = unsafe { (*slot.signature.get(), *slot.poison.get()) };
            let theirs = Signature::unpack(words);
            if theirs != Some(*signature) {
                let theirs = theirs
                    .ok_or_else(|| Error::system("slots", format!("rank {rank} wrote no signature")))?;
                return Err(Error::Mismatch { rank: self.rank, mine: *signature, peer: rank, theirs });
            }
            if poisoned > 0 && poison.is_none() {
                // SAFETY: as above.
                let text = unsafe { &(&*slot.reason.get())[..(poisoned as usize - 1).min(REASON)] };
                poison = Some(Error::Poisoned { rank, reason: String::from_utf8_lossy(text).into_owned() });
            }
        }
        self.met.store(n, Relaxed);
        if let Some(error) = poison {
            return Err(error);
        }
        if signature.op == Op::Barrier || buffer.bytes == 0 || self.layout.ranks() == 1 {
            self.alone(signature, buffer);
        } else if buffer.region.id == 0 {
            self.small(signature, buffer);
        } else {
            self.large(signature, buffer, reach, wait)?;
            self.rank_slots(self.rank).done.0.store(n, Release);
            if !wait.more {
                self.ring();
                self.wait_all(wait, signature, reach, |rank| {
                    self.rank_slots(rank).done.0.load(Acquire) >= n
                })?;
            }
        }
        Ok(())
    }

    /// What ended the group, if anything.
    fn failure(&self) -> Option<Error> {
        if self.ended.load(Acquire) {
            return self.failure.lock().unwrap_or_else(|e| e.into_inner()).clone();
        }
        let head = self.header();
        if head.state.load(Acquire) == 2 {
            let length = (head.length.load(Relaxed) as usize).min(FAILURE);
            // SAFETY: state 2 means that it is written and stays.
            let text = unsafe { &(&*head.failure.get())[..length] };
            let reason = String::from_utf8_lossy(text).into_owned();
            return Some(serde_json::from_slice(text).unwrap_or(Error::Aborted { rank: self.rank, reason }));
        }
        None
    }

    /// Ends the group, here and for all.
    pub(crate) fn abort(&self, error: &Error) {
        // What another rank has found out first is the cause; this may be its effect.
        let known = self.failure();
        {
            let mut failure = self.failure.lock().unwrap_or_else(|e| e.into_inner());
            if failure.is_none() {
                *failure = Some(known.unwrap_or_else(|| error.clone()));
            }
        }
        self.ended.store(true, Release);
        let head = self.header();
        if head.state.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
            let mut text = serde_json::to_vec(error).unwrap_or_default();
            if text.is_empty() || text.len() > FAILURE {
                let mut reason = error.to_string();
                reason.truncate((0..=512).rev().find(|&n| reason.is_char_boundary(n)).unwrap_or(0));
                text = serde_json::to_vec(&Error::Aborted { rank: self.rank, reason }).unwrap_or_default();
            }
            let length = text.len().min(FAILURE);
            // SAFETY: state 1 belongs to the one who set it.
            unsafe { (&mut *head.failure.get())[..length].copy_from_slice(&text[..length]) };
            head.length.store(length as u32, Relaxed);
            head.after.store(self.met.load(Relaxed), Relaxed);
            head.state.store(2, SeqCst);
        }
        self.ring_all();
    }

    /// Whether a rank takes part in no further collective, by its own will.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.rank_slots(rank).left.0.load(Acquire) != 0
    }

    pub(crate) fn leave(&self, after: u64) {
        self.rank_slots(self.rank).left.0.store(after + 1, SeqCst);
        self.ring_all();
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            read: self.read.load(Relaxed),
            written: self.written.load(Relaxed),
            waited: self.waited.iter().map(|ns| Duration::from_nanos(ns.load(Relaxed))).collect(),
        }
    }
}
