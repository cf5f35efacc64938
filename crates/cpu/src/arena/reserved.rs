//! Bytes that are held outside of buffers: temporaries of kernels.

use super::{Arena, Exhausted};
use kiln_device::Share;
use std::sync::Arc;

/// Bytes that are held outside of buffers, counted by an arena as if they were one.
pub struct Reserved {
    pub(super) arena: Arc<Arena>,
    pub(super) share: Share,
}

impl Reserved {
    /// How many.
    pub fn bytes(&self) -> usize {
        self.share.bytes()
    }

    /// Takes more or gives some back, so that it holds `bytes`. After an error it is as before.
    pub fn resize(&mut self, bytes: usize) -> Result<(), Exhausted> {
        let held = self.bytes();
        let Some(more) = bytes.checked_sub(held) else {
            self.arena.state().release(held - bytes);
            // Giving back does not fail.
            let _ = self.share.resize(bytes);
            return Ok(());
        };
        let trimmed = self.arena.state().hold(more)?;
        drop(trimmed);
        if let Err(e) = self.arena.drawn(more, || self.share.resize(bytes)) {
            self.arena.state().release(more);
            return Err(e);
        }
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut state = self.arena.state();
        state.release(self.share.bytes());
        state.blocks.remove_holder();
    }
}
