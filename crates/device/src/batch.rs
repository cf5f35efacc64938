//! One submission: a stretch of the stream.

use crate::Origin;
use kiln_ir::Item;
use std::sync::Mutex;

/// A stretch of the stream, with where each item came from.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The items, in order.
    pub items: Vec<Item>,
    /// The origin of each item; decorators and wires may leave it empty.
    pub origins: Vec<Origin>,
    /// Where the values it defines live.
    pub place: Place,
    /// When it should run.
    pub urgency: Urgency,
}

/// Emptied batches, whose memory the next ones use.
static SPARE: Mutex<Vec<Batch>> = Mutex::new(Vec::new());
/// How many emptied batches are kept.
const KEPT: usize = 8;

impl Batch {
    /// An empty batch, with the memory of one that was given back if there is one.
    pub fn recycled() -> Batch {
        SPARE.lock().unwrap_or_else(|e| e.into_inner()).pop().unwrap_or_default()
    }

    /// Gives the batch's memory back for others to use.
    pub fn recycle(mut self) {
        self.items.clear();
        self.origins.clear();
        let mut spare = SPARE.lock().unwrap_or_else(|e| e.into_inner());
        if spare.len() < KEPT {
            spare.push(self);
        }
    }
}

/// Where a value's memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Place {
    /// The arena, which recycles buffers.
    #[default]
    Reuse,
    /// Memory of its own, for what lives long, such as weights.
    Persistent,
}

/// When a submission should run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Urgency {
    /// In the background, starting now.
    #[default]
    Background,
    /// Someone is about to wait and will run it.
    Awaited,
    /// Before the call returns.
    Now,
}
