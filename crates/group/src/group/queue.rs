//! The queue of a group: each call gets its number there, and waits there for its turn.

use super::{Inner, lock};
use crate::Error;
use crate::buffer::Buffer;
use crate::call::{Call, Op, Signature};
use crate::engine::SMALL;
use crate::memory::{self, Region};
use std::collections::VecDeque;
use std::panic::Location;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

#[derive(Default)]
pub(super) struct Queue {
    /// The number of the last call.
    pub last: u64,
    /// Calls that are not finished, oldest first.
    pub open: VecDeque<Arc<Ticket>>,
    /// Why the group takes no more calls.
    pub over: Option<Error>,
}

/// A call on its way.
pub(super) struct Ticket {
    pub signature: Signature,
    pub number: u64,
    pub progress: Mutex<Progress>,
    /// It is a range of a contribution of which more follows.
    pub more: bool,
    /// Since when its contribution has been there, where a link is tried out.
    pub since: OnceLock<Instant>,
}

pub(super) enum Progress {
    /// The contribution is yet to come.
    Promised,
    Open(Buffer),
    Running,
    Ended(Result<Buffer, Error>),
    Taken,
}

impl Inner {
    pub(super) fn buffer(&self, bytes: usize, parts: usize) -> Result<Buffer, Error> {
        let most = self.parts.0.max(self.parts.1).max(parts);
        let stride = bytes.checked_next_multiple_of(64).filter(|stride| stride.checked_mul(most).is_some());
        let stride = stride.ok_or_else(|| memory::none(bytes))?;
        // All ranks must agree on what is small, whatever their parts.
        let large = stride * self.parts.1 > SMALL;
        let whole = stride * self.parts.0.max(parts);
        let region = match self.pool.take(whole, large) {
            Some(region) => region,
            None if large => self.engine.allocate(whole)?,
            None => Arc::new(Region::heap(whole, 0)?),
        };
        Ok(Buffer { region, start: 0, bytes, stride, parts, poison: None, pool: Arc::downgrade(&self.pool) })
    }

    pub(super) fn issue(
        self: &Arc<Self>,
        call: Call,
        buffer: Buffer,
        line: &'static Location<'static>,
        wake: bool,
    ) -> Result<Arc<Ticket>, Error> {
        self.fits(call.op, &buffer)?;
        let (ticket, head) = self.enter(call, buffer.bytes, Progress::Open(buffer), false, line)?;
        if wake {
            self.ready(&ticket, head);
        }
        Ok(ticket)
    }

    /// Whether the buffer can be this rank's contribution.
    pub(super) fn fits(&self, op: Op, buffer: &Buffer) -> Result<(), Error> {
        if !std::ptr::eq(buffer.pool.as_ptr(), Arc::as_ptr(&self.pool)) {
            return Err(Error::Foreign);
        }
        if op.reduce().is_some() && buffer.parts != self.parts.0 {
            return Err(Error::Parts { want: self.parts.0, got: buffer.parts });
        }
        Ok(())
    }

    /// Gives a call its number. Tells whether it is the oldest open one.
    pub(super) fn enter(
        &self,
        call: Call,
        bytes: usize,
        progress: Progress,
        more: bool,
        line: &'static Location<'static>,
    ) -> Result<(Arc<Ticket>, bool), Error> {
        let Call { op, dtype, tag } = call;
        if let Some(reduce) = op.reduce() {
            reduce.fits(dtype)?;
        }
        if let Op::Broadcast(root) = op
            && root as usize >= self.layout.ranks()
        {
            return Err(Error::Member { rank: root as usize, ranks: self.layout.ranks() });
        }
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(Error::Length { bytes, dtype });
        }
        let mut queue = lock(&self.queue);
        if let Some(error) = &queue.over {
            return Err(error.clone());
        }
        queue.last += 1;
        let length = (bytes / dtype.size()) as u64;
        let signature = Signature { sequence: queue.last, group: self.id, op, dtype, length, tag };
        let number = self.recorder.issued(signature, &self.name, line);
        let promised = matches!(progress, Progress::Promised);
        let progress = Mutex::new(progress);
        let ticket = Arc::new(Ticket { signature, number, progress, more, since: OnceLock::new() });
        if !promised {
            self.is_there(&ticket);
        }
        queue.open.push_back(ticket.clone());
        let head = queue.open.len() == 1;
        Ok((ticket, head))
    }

    /// A call's contribution is there as of now.
    pub(super) fn is_there(&self, ticket: &Ticket) {
        if self.config.rate.is_some() {
            let _ = ticket.since.set(Instant::now());
        }
    }

    /// Whether the oldest open call could be run.
    pub(super) fn waits(&self) -> bool {
        let queue = lock(&self.queue);
        queue.open.front().is_some_and(|front| matches!(*lock(&front.progress), Progress::Open(_)))
    }
}
