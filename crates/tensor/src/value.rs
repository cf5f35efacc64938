//! A value on a device, alive as long as something holds it.

use crate::Device;
use crate::lane::{self, BEFORE, Lane};
use kiln_ir::{Id, Meta};
use std::sync::atomic::{AtomicU64, Ordering};

/// One value of the stream. The last holder's drop puts its `Free` into the stream.
pub(crate) struct Value {
    pub id: Id,
    pub meta: Meta,
    /// How many bytes it takes.
    pub bytes: usize,
    /// The lane it was recorded in.
    pub lane: &'static Lane,
    /// The place in that lane of its last use or definition there: once that is submitted, so is every use but those
    /// by lanes that still hold the value.
    pub last: AtomicU64,
    /// The place of its definition.
    pub defined: u64,
}

impl Value {
    /// A value that was defined without being recorded.
    pub fn before(id: Id, meta: Meta, lane: &'static Lane) -> Value {
        Value { id, meta, bytes: meta.bytes(), lane, last: AtomicU64::new(BEFORE), defined: BEFORE }
    }

    pub fn device(&self) -> &'static Device {
        &self.lane.device
    }

    /// Whether its definition still waits in its lane.
    pub fn is_pending(&self) -> bool {
        self.defined >= self.lane.submitted()
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        lane::free(self.id, self.lane, self.last.load(Ordering::Relaxed), self.bytes);
    }
}

/// Names that nobody else has: from the first up to the second.
pub(crate) fn draw() -> (u64, u64) {
    const BLOCK: u64 = 1 << 16;
    static NEXT: AtomicU64 = AtomicU64::new(Id::RECORDED.first.0);
    let from = NEXT.fetch_add(BLOCK, Ordering::Relaxed);
    (from, from + BLOCK)
}
