//! One submission: a stretch of the stream.

use crate::Origin;
use kiln_ir::Item;

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
