//! Values on their way between two servers, as their client sees them.

use super::faults::Faults;
use crate::protocol::message::Capability;
use kiln_device::{Data, Error, Keep, Pending, Place};
use kiln_ir::{Id, Meta};
use std::sync::Arc;

/// A value that a server fetches from another.
pub struct Move {
    /// The value to define.
    pub id: Id,
    /// Its dtype and shape.
    pub meta: Meta,
    /// Where it will live.
    pub place: Place,
    /// What it is exposed under.
    pub capability: Capability,
    /// Where it comes from.
    pub source: Arc<dyn MoveSource>,
    /// Holds the value at its source, so that it can be fetched again after the target is lost.
    pub keep: Keep,
}

/// How often a value is recalled whose server is lost each time.
pub const RECALLS: u32 = 64;

/// How many recalls are left after one that gave this error. A server that was lost and replaced costs one, whatever else
/// a quarter; if the value itself failed, there is nothing to try again.
pub fn recalls_left(error: &Error, tries: u32) -> u32 {
    match error {
        Error::Failed { .. } => 0,
        Error::Stopped => tries.saturating_sub(1),
        _ => tries.saturating_sub(RECALLS / 4),
    }
}

/// How servers reach each other.
#[derive(Clone, Default, Debug)]
pub struct Reach {
    /// The address that the source is known by.
    pub url: String,
    /// Which start of the server it is.
    pub incarnation: u64,
}

/// A value on another server, from its client's view. Nothing here waits.
pub trait MoveSource: Send + Sync {
    /// Where its server is.
    fn reach(&self) -> Reach;
    /// Lets a server fetch it.
    fn expose(&self, capability: Capability);
    /// Whose lines its failures are.
    fn faults(&self) -> Arc<Faults>;
    /// What was exposed, through the client.
    fn recall(&self, capability: Capability) -> Pending<Data>;
}

/// What a session needs from others, done outside of its lock.
pub enum Errand {
    /// The value is about to be fetched again.
    Expose(Arc<Move>),
    /// The direct way failed: the client passes the bytes of this transfer on.
    Pass(u64, Arc<Move>),
    /// Values of a snapshot are to be written to a file, and the outcome told.
    Store(Vec<(Id, Data)>),
}
