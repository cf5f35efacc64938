//! Collectives over memory that all ranks see: the heap of one process, or mappings of several.
//!
//! Each rank has a desk on the board: two posts, used in turn, where it lays a signature and either the contribution
//! itself (small) or the name of its buffer (large). A large reduction has two phases: each rank combines its own
//! segment of all buffers and writes the result into all of them, then waits until everyone has; of a contribution in
//! ranges only the last waits. Two posts are enough: whoever lays number n + 2 has seen everyone's n + 1, so that nobody
//! still reads its n.

use super::{SMALL, Traffic, Wait};
use crate::buffer::Buffer;
use crate::call::{Op, Reduce, Signature};
use crate::memory::Region;
use crate::reduce::Fold;
use crate::{Error, Layout, Loss, futex};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest spin before parking. Ranks that compute differ by a few tenths of a millisecond a step, and a core of a
/// virtual machine that sleeps is slow to wake: with 50 µs the weak scaling of an MLP and a GPT was 1 to 3 % lower.
const SPIN: Duration = Duration::from_millis(1);
/// The longest sleep without looking around.
const NAP: Duration = Duration::from_millis(100);
/// Bytes kept of the error that ended the group.
const VERDICT: usize = 2048 - 16;
/// Bytes kept of the reason of a poisoned contribution.
const REASON: usize = 192;

/// Shared by all ranks: the verdict, then a desk for each.
#[repr(C, align(64))]
struct Head {
    /// 0 none, 1 being written, 2 there.
    state: AtomicU32,
    length: AtomicU32,
    /// The last collective for which its writer has seen what everyone gave.
    after: AtomicU64,
    verdict: UnsafeCell<[u8; VERDICT]>,
}

#[repr(C, align(64))]
struct Desk {
    posts: [Post; 2],
    /// The last collective whose second phase this rank has finished.
    done: Line<AtomicU64>,
    /// The collective in which this rank stopped waiting for what others would lay.
    gave_up: Line<AtomicU64>,
    /// Changes when a parked owner should look again.
    bell: Line<AtomicU32>,
    parked: Line<AtomicU32>,
    /// One more than the number of collectives after which it left; 0 while it is here.
    left: Line<AtomicU64>,
}

/// Alone in its cache line.
#[repr(C, align(64))]
struct Line<T>(T);

#[repr(C, align(64))]
struct Post {
    /// The sequence number, written last.
    stamp: AtomicU64,
    signature: UnsafeCell<[u64; 5]>,
    /// Of a large contribution: the buffer. 0 if the contribution is here.
    buffer: UnsafeCell<u64>,
    /// One more than the length of the reason if it is poisoned, otherwise 0.
    poison: UnsafeCell<u64>,
    /// Parts of a small contribution, one after another.
    data: UnsafeCell<[u8; SMALL]>,
    reason: UnsafeCell<[u8; REASON]>,
}

/// Bytes of the board for that many ranks. All zero is a fresh one.
pub(crate) fn bytes(ranks: usize) -> usize {
    size_of::<Head>() + ranks * size_of::<Desk>()
}

/// How a rank finds the buffers of the others.
pub(crate) trait Reach: Send + Sync {
    fn buffer(&self, rank: usize, id: u64, until: Instant) -> Result<Arc<Region>, Error>;
    /// The peers that are there but do not run, if that can be told.
    fn stopped(&self, _ranks: &[usize]) -> Vec<usize> {
        Vec::new()
    }
}

/// One rank's view of the board.
pub(crate) struct Board {
    memory: Arc<Region>,
    rank: usize,
    layout: Layout,
    program: Vec<usize>,
    /// Parts of each rank.
    parts: Vec<usize>,
    posted: AtomicU64,
    /// The last collective for which this rank has seen what everyone gave.
    met: AtomicU64,
    /// Set with `verdict`, which this process knows even if the writer of the shared one died.
    ended: AtomicBool,
    verdict: Mutex<Option<Error>>,
    read: AtomicU64,
    written: AtomicU64,
    /// Nanoseconds waited for each rank.
    waited: Vec<AtomicU64>,
}

impl Board {
    pub(crate) fn new(memory: Arc<Region>, rank: usize, layout: Layout) -> Board {
        assert!(memory.bytes() >= bytes(layout.ranks()));
        Board {
            memory,
            rank,
            layout,
            program: layout.program(),
            parts: (0..layout.ranks()).map(|r| layout.parts(r).len()).collect(),
            posted: AtomicU64::new(0),
            met: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            verdict: Mutex::new(None),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            waited: (0..layout.ranks()).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn head(&self) -> &Head {
        // SAFETY: the board starts with it; it is valid zeroed and shared through atomics.
        unsafe { &*self.memory.start().cast::<Head>() }
    }

    fn desk(&self, rank: usize) -> &Desk {
        assert!(rank < self.layout.ranks());
        // SAFETY: desks follow the head, one for each rank.
        unsafe { &*self.memory.start().add(size_of::<Head>()).cast::<Desk>().add(rank) }
    }

    fn post_of(&self, rank: usize, sequence: u64) -> &Post {
        &self.desk(rank).posts[(sequence % 2) as usize]
    }

    fn peers(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let me = self.rank;
        (0..self.layout.ranks()).filter(move |&r| r != me)
    }

    /// Lays this rank's contribution.
    pub(crate) fn post(&self, signature: &Signature, buffer: &Buffer) {
        if self.posted.load(Relaxed) >= signature.sequence {
            return;
        }
        let post = self.post_of(self.rank, signature.sequence);
        // SAFETY: this rank's own post, which nobody reads until it is stamped: see the module's head.
        unsafe {
            *post.signature.get() = signature.pack();
            *post.poison.get() = match &buffer.poison {
                None => 0,
                Some(reason) => {
                    let n = reason.len().min(REASON);
                    (&mut *post.reason.get())[..n].copy_from_slice(&reason.as_bytes()[..n]);
                    n as u64 + 1
                }
            };
            *post.buffer.get() = buffer.region.id;
            if buffer.region.id == 0 {
                let data = post.data.get().cast::<u8>();
                for part in 0..buffer.parts {
                    std::ptr::copy_nonoverlapping(
                        buffer.at(part),
                        data.add(part * buffer.stride),
                        buffer.bytes,
                    );
                }
            }
        }
        post.stamp.store(signature.sequence, Release);
        self.posted.store(signature.sequence, Relaxed);
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
        self.post(signature, buffer);
        let n = signature.sequence;
        let came = |rank: usize| self.post_of(rank, n).stamp.load(Acquire) == n;
        // The others may have given up before this rank came. What all have met for goes on, and what all have laid and
        // still wait for: one that laid a reason and then died is told by its reason.
        let waits = |rank: usize| came(rank) && self.desk(rank).gave_up.0.load(Acquire) != n;
        let met = match self.verdict() {
            Some(error) if n > self.head().after.load(Relaxed) && !self.peers().all(waits) => Err(error),
            _ => self.wait_all(wait, signature, reach, came),
        };
        if met.is_err() {
            self.desk(self.rank).gave_up.0.store(n, Release);
        }
        met?;
        let mut poison = None;
        for rank in 0..self.layout.ranks() {
            let post = self.post_of(rank, n);
            // SAFETY: stamped, so its owner has written it and leaves it alone until everyone is past it.
            let (words, poisoned) = unsafe { (*post.signature.get(), *post.poison.get()) };
            let theirs = Signature::unpack(words);
            if theirs != Some(*signature) {
                let theirs = theirs
                    .ok_or_else(|| Error::system("board", format!("rank {rank} wrote no signature")))?;
                return Err(Error::Mismatch { rank: self.rank, mine: *signature, peer: rank, theirs });
            }
            if poisoned > 0 && poison.is_none() {
                // SAFETY: as above.
                let text = unsafe { &(&*post.reason.get())[..(poisoned as usize - 1).min(REASON)] };
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
            self.desk(self.rank).done.0.store(n, Release);
            if !wait.more {
                self.ring();
                self.wait_all(wait, signature, reach, |rank| self.desk(rank).done.0.load(Acquire) >= n)?;
            }
        }
        Ok(())
    }

    /// A world of one has nothing to combine, but a mean of one part is still finished like any other.
    fn alone(&self, signature: &Signature, buffer: &mut Buffer) {
        if let Some(fold) = signature.op.reduce().and_then(|reduce| Fold::new(reduce, signature.dtype)) {
            let at = buffer.at(0);
            if self.layout.ranks() == 1 {
                // SAFETY: the buffer's own elements.
                unsafe { fold.tree(&[0], &[at], &[at], signature.length as usize, self.layout.shards()) };
            }
        }
    }

    /// All contributions are on the posts: every rank takes what it needs and combines for itself.
    fn small(&self, signature: &Signature, buffer: &mut Buffer) {
        let data = |rank: usize| self.post_of(rank, signature.sequence).data.get().cast::<u8>().cast_const();
        let (bytes, units) = (buffer.bytes, signature.length as usize);
        let unit = bytes / units;
        let target = buffer.at(0);
        let reduced = |reduce: Reduce, range: Range<usize>| {
            let fold = Fold::new(reduce, signature.dtype).expect("checked at the call");
            let mut leaves = Vec::with_capacity(self.program.len());
            for rank in 0..self.layout.ranks() {
                // SAFETY: parts lie one after another on the post and fit it: all ranks agree on the length.
                leaves.extend(
                    (0..self.parts[rank])
                        .map(|p| unsafe { data(rank).add(p * buffer.stride + range.start * unit) }),
                );
            }
            // SAFETY: leaves are posts that stay as they are; the target is this rank's own buffer.
            unsafe {
                fold.tree(
                    &self.program,
                    &leaves,
                    &[target.add(range.start * unit)],
                    range.len(),
                    self.layout.shards(),
                )
            };
            let foreign = self.program.len() - self.parts[self.rank];
            self.read.fetch_add((foreign * range.len() * unit) as u64, Relaxed);
        };
        let copy = |rank: usize, range: Range<usize>| {
            if rank != self.rank {
                // SAFETY: a post that stays as it is, into this rank's own buffer.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        data(rank).add(range.start * unit),
                        target.add(range.start * unit),
                        range.len() * unit,
                    )
                };
                self.read.fetch_add((range.len() * unit) as u64, Relaxed);
            }
        };
        match signature.op {
            Op::AllReduce(reduce) => reduced(reduce, 0..units),
            Op::ReduceScatter(reduce) => reduced(reduce, self.layout.piece(self.rank, units)),
            Op::AllGather => {
                (0..self.layout.ranks()).for_each(|rank| copy(rank, self.layout.piece(rank, units)))
            }
            Op::Broadcast(root) => copy(root as usize, 0..units),
            Op::Barrier => {}
        }
    }

    /// Contributions are in the ranks' buffers.
    fn large(
        &self,
        signature: &Signature,
        buffer: &mut Buffer,
        reach: &dyn Reach,
        wait: Wait,
    ) -> Result<(), Error> {
        let units = signature.length as usize;
        let unit = buffer.bytes / units;
        let mut regions = Vec::with_capacity(self.layout.ranks());
        for rank in 0..self.layout.ranks() {
            // SAFETY: stamped.
            let id = unsafe { *self.post_of(rank, signature.sequence).buffer.get() };
            let region =
                if rank == self.rank { buffer.region.clone() } else { reach.buffer(rank, id, wait.until)? };
            if region.bytes() < buffer.stride * (self.parts[rank] - 1) + buffer.start + buffer.bytes {
                return Err(Error::system("board", format!("the buffer of rank {rank} is too short")));
            }
            regions.push(region);
        }
        let reduced = |reduce: Reduce, range: Range<usize>, everywhere: bool| {
            let fold = Fold::new(reduce, signature.dtype).expect("checked at the call");
            let offset = buffer.start + range.start * unit;
            let mut leaves = Vec::with_capacity(self.program.len());
            for (rank, region) in regions.iter().enumerate() {
                for part in 0..self.parts[rank] {
                    // SAFETY: inside the region, as checked above.
                    leaves.push(unsafe { region.start().add(part * buffer.stride + offset) }.cast_const());
                }
            }
            // SAFETY: offset is inside every first part.
            let at = |rank: usize| unsafe { regions[rank].start().add(offset) };
            let mut targets = vec![at(self.rank)];
            if everywhere {
                targets.extend(self.peers().map(at));
            }
            // SAFETY: this rank alone reads and writes this range of all buffers until everyone is done.
            unsafe { fold.tree(&self.program, &leaves, &targets, range.len(), self.layout.shards()) };
            let bytes = range.len() * unit;
            self.read.fetch_add(((self.program.len() - self.parts[self.rank]) * bytes) as u64, Relaxed);
            self.written.fetch_add(((targets.len() - 1) * bytes) as u64, Relaxed);
        };
        let copy = |rank: usize, range: Range<usize>| {
            if rank != self.rank {
                let (offset, bytes) = (buffer.start + range.start * unit, range.len() * unit);
                // SAFETY: the peer leaves its range alone until everyone is done; the target is this rank's own.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        regions[rank].start().add(offset),
                        regions[self.rank].start().add(offset),
                        bytes,
                    )
                };
                self.read.fetch_add(bytes as u64, Relaxed);
            }
        };
        match signature.op {
            Op::AllReduce(reduce) => reduced(reduce, self.layout.segment(self.rank, units), true),
            Op::ReduceScatter(reduce) => reduced(reduce, self.layout.piece(self.rank, units), false),
            Op::AllGather => {
                (0..self.layout.ranks()).for_each(|rank| copy(rank, self.layout.piece(rank, units)))
            }
            Op::Broadcast(root) => copy(root as usize, 0..units),
            Op::Barrier => {}
        }
        Ok(())
    }

    /// Waits until the condition holds for every peer, spinning first if that pays, then parked.
    fn wait_all(
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
        let desk = self.desk(self.rank);
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
            let bell = desk.bell.0.load(SeqCst);
            desk.parked.0.store(1, SeqCst);
            let there = next(true);
            if !matches!(there, Ok(false)) {
                desk.parked.0.store(0, SeqCst);
                there?;
                missing = self.passed(rank, &mut last, &ready);
                continue;
            }
            let left = wait.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                desk.parked.0.store(0, SeqCst);
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
            futex::wait(&desk.bell.0, bell, left.min(NAP));
            desk.parked.0.store(0, SeqCst);
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
        if let Some(error) = self.verdict() {
            return Some(error);
        }
        match self.desk(rank).left.0.load(Acquire) {
            0 => None,
            after => Some(Error::RankLost { rank, cause: Loss::Left { after: after - 1 } }),
        }
    }

    /// What ended the group, if anything.
    fn verdict(&self) -> Option<Error> {
        if self.ended.load(Acquire) {
            return self.verdict.lock().unwrap_or_else(|e| e.into_inner()).clone();
        }
        let head = self.head();
        if head.state.load(Acquire) == 2 {
            let length = (head.length.load(Relaxed) as usize).min(VERDICT);
            // SAFETY: state 2 means that it is written and stays.
            let text = unsafe { &(&*head.verdict.get())[..length] };
            let reason = String::from_utf8_lossy(text).into_owned();
            return Some(serde_json::from_slice(text).unwrap_or(Error::Aborted { rank: self.rank, reason }));
        }
        None
    }

    /// Ends the group, here and for all.
    pub(crate) fn abort(&self, error: &Error) {
        // What another rank has found out first is the cause; this may be its effect.
        let known = self.verdict();
        {
            let mut verdict = self.verdict.lock().unwrap_or_else(|e| e.into_inner());
            if verdict.is_none() {
                *verdict = Some(known.unwrap_or_else(|| error.clone()));
            }
        }
        self.ended.store(true, Release);
        let head = self.head();
        if head.state.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
            let mut text = serde_json::to_vec(error).unwrap_or_default();
            if text.is_empty() || text.len() > VERDICT {
                let mut reason = error.to_string();
                reason.truncate((0..=512).rev().find(|&n| reason.is_char_boundary(n)).unwrap_or(0));
                text = serde_json::to_vec(&Error::Aborted { rank: self.rank, reason }).unwrap_or_default();
            }
            let length = text.len().min(VERDICT);
            // SAFETY: state 1 belongs to the one who set it.
            unsafe { (&mut *head.verdict.get())[..length].copy_from_slice(&text[..length]) };
            head.length.store(length as u32, Relaxed);
            head.after.store(self.met.load(Relaxed), Relaxed);
            head.state.store(2, SeqCst);
        }
        self.ring_all();
    }

    /// Whether a rank takes part in no further collective, by its own will.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.desk(rank).left.0.load(Acquire) != 0
    }

    pub(crate) fn leave(&self, after: u64) {
        self.desk(self.rank).left.0.store(after + 1, SeqCst);
        self.ring_all();
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            read: self.read.load(Relaxed),
            written: self.written.load(Relaxed),
            waited: self.waited.iter().map(|ns| Duration::from_nanos(ns.load(Relaxed))).collect(),
        }
    }

    /// Wakes the peers that are parked.
    fn ring(&self) {
        // Either the peer sees what was stored before, or we see that it is parked.
        fence(SeqCst);
        for rank in self.peers() {
            let desk = self.desk(rank);
            if desk.parked.0.load(SeqCst) != 0 {
                desk.bell.0.fetch_add(1, SeqCst);
                futex::wake(&desk.bell.0);
            }
        }
    }

    fn ring_all(&self) {
        for rank in 0..self.layout.ranks() {
            let desk = self.desk(rank);
            desk.bell.0.fetch_add(1, SeqCst);
            futex::wake(&desk.bell.0);
        }
    }
}
