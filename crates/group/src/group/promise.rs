//! Calls whose contribution comes later: their place in the group's order is taken now.

use super::{Group, Inner, Pending, Slot, Ticket, lock};
use crate::Error;
use crate::buffer::Buffer;
use crate::call::Call;
use crate::recorder::State;
use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

/// The duty to contribute to a call. Dropping it joins with a poisoned contribution, so that no rank waits in vain.
#[must_use = "dropping it poisons the collective on every rank"]
pub struct Promise {
    group: Group,
    ticket: Arc<Ticket>,
    bytes: usize,
    kept: bool,
}

impl Group {
    /// Takes the next place in the group's order for a call on that many bytes, whose contribution is given later.
    /// Calls behind it wait for it.
    #[track_caller]
    pub fn promise(&self, call: Call, bytes: usize) -> Result<(Promise, Pending), Error> {
        let (ticket, _) = self.0.enter(call, bytes, Slot::Promised, Location::caller())?;
        let promise = Promise { group: self.clone(), ticket: ticket.clone(), bytes, kept: false };
        Ok((promise, Pending { group: self.clone(), ticket }))
    }
}

impl Promise {
    /// A buffer for the contribution to a reduction: one part for each subtree this rank holds.
    pub fn buffer(&self) -> Result<Buffer, Error> {
        self.group.buffer(self.bytes)
    }

    /// Keeps the promise: the exchange may begin.
    pub fn give(mut self, buffer: Buffer) -> Result<(), Error> {
        let inner = &self.group.0;
        inner.fits(self.ticket.signature.op, &buffer)?;
        if buffer.bytes != self.bytes {
            return Err(Error::Length { bytes: buffer.bytes, dtype: self.ticket.signature.dtype });
        }
        self.kept = true;
        inner.keep(&self.ticket, buffer);
        Ok(())
    }

    /// Joins with a contribution that could not be computed; the call fails everywhere with this reason.
    pub fn fail(mut self, reason: &str) {
        self.poison(reason);
    }

    fn poison(&mut self, reason: &str) {
        self.kept = true;
        match self.group.buffer(self.bytes) {
            Ok(mut buffer) => {
                buffer.poison(reason);
                self.group.0.keep(&self.ticket, buffer);
            }
            Err(error) => self.group.0.fail(&error),
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.kept {
            self.poison("it was given up before its contribution was there");
        }
    }
}

impl Inner {
    fn keep(self: &Arc<Self>, ticket: &Arc<Ticket>, buffer: Buffer) {
        {
            let mut slot = lock(&ticket.slot);
            // Anything else: the group has ended meanwhile.
            if !matches!(*slot, Slot::Promised) {
                return;
            }
            *slot = Slot::Open(buffer);
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
        while matches!(*lock(&ticket.slot), Slot::Promised) {
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
