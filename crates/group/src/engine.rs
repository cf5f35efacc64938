//! How ranks reach each other. A [`Group`](crate::Group) numbers, records and orders collectives; an engine carries
//! one out at a time. All engines combine in the tree of [`Layout`](crate::Layout), never with a library's own float
//! reduction, so they agree to the bit. Place for more: `nccl` comes with CUDA devices.

pub(crate) mod slots;
pub(crate) mod local;
#[cfg(target_os = "linux")]
pub(crate) mod mesh;
#[cfg(target_os = "linux")]
pub(crate) mod shm;
#[cfg(any(test, feature = "mpi"))]
pub(crate) mod mailbox;
#[cfg(any(test, feature = "mpi"))]
pub(crate) mod messages;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;

use crate::buffer::Buffer;
use crate::call::Signature;
use crate::memory::Region;
use crate::{Error, Layout};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes up to which a contribution travels with its signature.
pub(crate) const SMALL: usize = 16 << 10;

/// One side of a group's channel. Calls of `announce` and `run` come one at a time, in the group's order.
pub(crate) trait Engine: Send + Sync {
    /// Its name in reports.
    fn name(&self) -> &'static str;

    /// Whether it takes a link's time, more than a processor's.
    fn is_link(&self) -> bool {
        false
    }

    /// Memory for large contributions, at least `bytes` long, that peers can reach if the engine needs that.
    fn allocate(&self, bytes: usize) -> Result<Arc<Region>, Error>;

    /// Makes a small contribution visible without waiting. Every earlier call has been run.
    fn announce(&self, signature: &Signature, buffer: &Buffer);

    /// Carries the collective out and waits for it.
    fn run(&self, signature: &Signature, buffer: &mut Buffer, wait: Wait) -> Result<(), Error>;

    /// Ends the group on every rank with this error; the first one counts.
    fn abort(&self, error: &Error);

    /// A channel between some members of this one, which all of them ask for.
    fn subgroup(&self, place: Place, until: Instant) -> Result<Box<dyn Engine>, Error>;

    /// Tells the peers that this rank is done.
    fn leave(&self, after: u64);

    /// What has been moved so far.
    fn traffic(&self) -> Traffic;
}

/// Where a rank stands in a group.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Names the group among all of the job.
    pub group: u64,
    /// Its members, as ranks of the parent.
    pub members: Vec<usize>,
    /// The own place among them.
    pub rank: usize,
    pub layout: Layout,
}

/// How to wait.
#[derive(Clone, Copy)]
pub(crate) struct Wait {
    pub until: Instant,
    pub deadline: Duration,
    /// Whether to spin for a while before parking.
    pub spin: bool,
    /// Whether the call is followed by one on the rest of the contribution: nobody looks at the result before that has
    /// ended, so it need not be there on all ranks earlier.
    pub more: bool,
}

/// Payload moved to and from other ranks, and the time spent waiting for each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes read from other ranks, or received.
    pub read: u64,
    /// Bytes written to other ranks, or sent.
    pub written: u64,
    /// How long this rank has waited with each rank as the last to come.
    pub waited: Vec<Duration>,
}
