//! A value on a device, alive as long as something holds it.

use crate::Device;
use crate::lane::{self, Lane};
use kiln_ir::{Id, Meta};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One value of the stream. The last holder's drop puts its `Free` into the stream.
pub(crate) struct Value {
    pub id: Id,
    pub meta: Meta,
    /// The lane it was recorded in.
    pub lane: Arc<Lane>,
    /// The place in that lane of its last use or definition there: once that is submitted, so is every use but those
    /// by lanes that still hold the value.
    pub last: AtomicU64,
    /// The place of its definition.
    pub defined: u64,
}

impl Value {
    pub fn device(&self) -> &Device {
        &self.lane.device
    }

    /// Whether its definition still waits in its lane.
    pub fn is_pending(&self) -> bool {
        self.defined >= self.lane.submitted()
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        lane::free(self.id, &self.lane, self.last.load(Ordering::Relaxed));
    }
}

/// A name that no other value of this process has. Each thread draws from blocks of its own.
pub(crate) fn fresh() -> Id {
    const BLOCK: u64 = 1 << 16;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static OWN: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    }
    let draw = || {
        let from = NEXT.fetch_add(BLOCK, Ordering::Relaxed);
        (from, from + BLOCK)
    };
    let id = OWN.try_with(|own| {
        let (mut next, mut end) = own.get();
        if next == end {
            (next, end) = draw();
        }
        own.set((next + 1, end));
        next
    });
    Id(id.unwrap_or_else(|_| draw().0))
}
