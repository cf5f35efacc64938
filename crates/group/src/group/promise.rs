//! Calls whose contribution comes later, as a whole or range by range: their place in the group's order is taken now.

use super::queue::{Progress, Ticket};
use super::{Group, Inner, Pending, lock};
use crate::Error;
use crate::buffer::{Buffer, Range};
use crate::call::{Call, Op};
use crate::recorder::State;
use std::collections::VecDeque;
use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

/// The duty to contribute to a call. Dropping it joins with a poisoned contribution, so that no rank waits in vain.
#[must_use = "dropping it poisons the collective on every rank"]
pub struct Promise {
    group: Group,
    bytes: usize,
    /// Taken when it is first needed.
    buffer: Option<Buffer>,
    /// The calls that are yet to be given, each with the end of its range of the contribution.
    open: VecDeque<(Arc<Ticket>, usize)>,
    /// Bytes of each part that are given.
    given: usize,
}

impl Group {
    /// Takes the next place in the group's order for a call on that many bytes, whose contribution is given later.
    /// Calls behind it wait for it.
    #[track_caller]
    pub fn promise(&self, call: Call, bytes: usize) -> Result<(Promise, Pending), Error> {
        self.promise_cut(call, bytes, &[])
    }

    /// Like [`Group::promise`], but an all-reduce is exchanged in ranges, cut at these bytes, each of which can leave before
    /// the ones behind it are computed ([`Promise::reach`]). To the group each range is a call of its own; all ranks cut
    /// alike.
    #[track_caller]
    pub fn promise_cut(&self, call: Call, bytes: usize, cuts: &[usize]) -> Result<(Promise, Pending), Error> {
        let line = Location::caller();
        let cuts = if let Op::AllReduce(_) = call.op { cuts } else { &[] };
        let misplaced = |(i, &cut): (usize, &usize)| {
            cut > *cuts.get(i + 1).unwrap_or(&bytes) || !cut.is_multiple_of(call.dtype.size())
        };
        if let Some(wrong) = cuts.iter().enumerate().position(misplaced) {
            return Err(Error::Length { bytes: cuts[wrong], dtype: call.dtype });
        }
        let mut promise =
            Promise { group: self.clone(), bytes, buffer: None, open: VecDeque::new(), given: 0 };
        let mut start = 0;
        for &end in cuts.iter().chain([&bytes]) {
            // Ranges of equal length are told apart by where they begin.
            let call = call.tagged(call.tag.wrapping_add(start as u64));
            let (ticket, _) = self.0.enter(call, end - start, Progress::Promised, end < bytes, line)?;
            promise.open.push_back((ticket, end));
            start = end;
        }
        let mut before: Vec<_> = promise.open.iter().map(|(ticket, _)| ticket.clone()).collect();
        let ticket = before.pop().expect("one at least");
        Ok((promise, Pending { group: self.clone(), ticket, before }))
    }
}

impl Promise {
    /// How many parts the contribution to a reduction has: one for each subtree this rank holds.
    pub fn parts(&self) -> usize {
        self.group.0.parts.0
    }

    fn buffer(&mut self) -> Result<&mut Buffer, Error> {
        match &mut self.buffer {
            Some(buffer) => Ok(buffer),
            none => Ok(none.insert(self.group.buffer(self.bytes)?)),
        }
    }

    /// Where a range of one part lies, for a device to compute it there before it is given. Nothing if some of it is
    /// given already.
    pub fn range(&mut self, part: usize, range: std::ops::Range<usize>) -> Result<Option<Range>, Error> {
        let given = self.given;
        let buffer = self.buffer()?;
        Ok((range.start >= given).then(|| buffer.range(part, range)))
    }

    /// Puts bytes in their place in one part, unless they lie there. What is given stays as it is. Tells how many were
    /// copied.
    pub fn put(&mut self, part: usize, start: usize, bytes: &[u8]) -> Result<usize, Error> {
        let given = self.given;
        let place = self.buffer()?.range(part, start..start + bytes.len());
        if std::ptr::eq(place.start(), bytes.as_ptr()) {
            return Ok(0);
        }
        let rest = &bytes[given.saturating_sub(start).min(bytes.len())..];
        let skipped = bytes.len() - rest.len();
        // SAFETY: inside the range, of which nobody else uses what is not given.
        unsafe { std::ptr::copy(rest.as_ptr(), place.start().add(skipped), rest.len()) };
        Ok(rest.len())
    }

    /// All parts are there up to this byte: the exchange of the ranges before it may begin, but for the last, which
    /// [`Promise::give`] gives. Tells whether whoever exchanges may want this core for a moment: Linux would let the
    /// thread at hand go on for a millisecond, unless it yields.
    pub fn reach(&mut self, end: usize) -> Result<bool, Error> {
        let before = self.given;
        while self.open.len() > 1 && self.open.front().is_some_and(|&(_, range)| range <= end) {
            self.next(None)?;
        }
        Ok(self.given > before && self.group.overlaps())
    }

    /// Keeps the promise: the exchange may begin.
    pub fn give(mut self) -> Result<(), Error> {
        self.all(None)?;
        if self.group.overlaps() {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Joins with a contribution that could not be computed; the call fails everywhere with this reason.
    pub fn fail(mut self, reason: &str) {
        self.poison(reason);
    }

    fn poison(&mut self, reason: &str) {
        // Where the group has ended nobody waits.
        if lock(&self.group.0.queue).over.is_some() {
            self.open.clear();
        }
        if let Err(error) = self.all(Some(reason)) {
            self.group.0.fail(&error);
        }
    }

    fn all(&mut self, poison: Option<&str>) -> Result<(), Error> {
        while !self.open.is_empty() {
            self.next(poison)?;
        }
        Ok(())
    }

    /// Gives the next range. The last one gives the memory back: when that has been exchanged, all have.
    fn next(&mut self, poison: Option<&str>) -> Result<(), Error> {
        let (given, last) = (self.given, self.open.len() == 1);
        let Some(&(_, end)) = self.open.front() else { return Ok(()) };
        let all = self.buffer()?;
        let mut range = all.slice(given..end);
        if last {
            range.pool = std::mem::take(&mut all.pool);
        }
        range.poison = poison.map(str::to_string);
        self.given = end;
        if let Some((ticket, _)) = self.open.pop_front() {
            self.group.0.keep(&ticket, range);
        }
        Ok(())
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.open.is_empty() {
            self.poison("it was given up before its contribution was there");
        }
    }
}

impl Inner {
    fn keep(self: &Arc<Self>, ticket: &Arc<Ticket>, buffer: Buffer) {
        {
            let mut progress = lock(&ticket.progress);
            // Anything else: the group has ended meanwhile.
            if !matches!(*progress, Progress::Promised) {
                return;
            }
            self.is_there(ticket);
            *progress = Progress::Open(buffer);
        }
        // Calls behind it may be ready, and need somebody who drives.
        let only = {
            let queue = lock(&self.queue);
            queue.open.len() == 1 && queue.open.front().is_some_and(|front| Arc::ptr_eq(front, ticket))
        };
        self.ready(ticket, only);
        // Last: who is woken may drive it to its end at once.
        let _queue = lock(&self.queue);
        self.kept.notify_all();
    }

    /// Waits until a call's own contribution is there. If it does not come in time the group ends: the others wait too.
    pub(super) fn await_promise(&self, ticket: &Arc<Ticket>) {
        let deadline = self.config.deadline;
        let until = Instant::now() + deadline;
        let mut queue = lock(&self.queue);
        while matches!(*lock(&ticket.progress), Progress::Promised) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(queue);
                self.recorder.moved(ticket.number, State::Failed);
                self.fail(&Error::Deadline {
                    rank: self.rank,
                    call: ticket.signature,
                    after: deadline,
                    missing: vec![self.rank],
                    stopped: Vec::new(),
                });
                return;
            }
            queue = self.kept.wait_timeout(queue, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}
