//! Where no code is emitted, every pass is interpreted.

use crate::fused::pass::Pass;
use std::sync::Arc;

/// A compiled pass, of which there is none.
pub(crate) enum Code {}

/// Nothing.
pub(crate) fn compile(_: &Pass) -> Option<Arc<Code>> {
    None
}

impl Code {
    /// # Safety
    /// There is nothing to run.
    pub unsafe fn run(&self, _: &[*mut u8], _: usize) {
        match *self {}
    }
}
