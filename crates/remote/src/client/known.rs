//! Which operations the server knows: received when a session is opened, looked up for every operation that is recorded.

use kiln_ir::{Op, OpSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// The operations that the server of the session knows; none before there is a session.
#[derive(Default)]
pub struct Known([AtomicU64; OpSet::WORDS]);

impl Known {
    /// Another server has the session. Who asks meanwhile may see some of either set: what the server then does not know
    /// fails there, as what was recorded before does.
    pub fn set(&self, known: OpSet) {
        self.0.iter().zip(known.words()).for_each(|(word, new)| word.store(new, Ordering::Relaxed));
    }

    /// Whether the server knows this operation.
    pub fn has(&self, op: &Op) -> bool {
        let number = op.number();
        self.0[number / 64].load(Ordering::Relaxed) >> (number % 64) & 1 != 0
    }
}
