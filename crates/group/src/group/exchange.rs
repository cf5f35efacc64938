//! What one waits for: a collective under way.

use super::Group;
use super::queue::Ticket;
use crate::Error;
use crate::buffer::Buffer;
use std::sync::Arc;

/// A collective that may not be finished. It goes on if this is dropped, but its result is lost.
#[must_use = "the result is there only after wait"]
pub struct Pending {
    pub(super) group: Group,
    /// The call of its last range, which is all of it where it is not cut.
    pub(super) ticket: Arc<Ticket>,
    /// The calls of the ranges before.
    pub(super) before: Vec<Arc<Ticket>>,
}

impl Pending {
    /// The buffer with the result. A failed collective does not give its buffer back.
    pub fn wait(self) -> Result<Buffer, Error> {
        let mut failed = None;
        for ticket in &self.before {
            failed = failed.or(self.group.0.finish(ticket).err());
        }
        let mut buffer = self.group.0.finish(&self.ticket)?;
        if let Some(error) = failed {
            return Err(error);
        }
        buffer.bytes += std::mem::take(&mut buffer.start);
        Ok(buffer)
    }

    /// Has `compute` make the own contribution, while nothing is carried out on any thread, then carries everything out
    /// up to this. How it ended is told by [`Pending::wait`].
    pub fn contribute(&self, compute: impl FnOnce()) {
        let _ = self.group.0.drive(&self.ticket, compute);
    }
}
