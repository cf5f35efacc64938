//! The seam between recording and executing: a [`Driver`] takes batches of the stream and gives values back.
//!
//! Above it, tensors record; below it, kernels, servers and decorators execute. A device says what it is
//! ([`DeviceInfo`]), implements the few methods of [`Driver`] and the optional parts that it has. It names no operation.
//! Who stands before a device implements [`Decorator`], which hands everything on, as [`Record`] and [`Profile`] do. Also
//! here: errors as they reach the user ([`Error`]), answers that are not there yet ([`Pending`]), host bytes on their way
//! in and out ([`Data`]) and where in the user's program an operation came from ([`Origin`]).
//!
//! The handle that a program holds is `kiln::Device`: an address, an id and one of these drivers.
// But for the promise of those who lend memory, `Host`.
#![deny(unsafe_code)]

mod batch;
mod decorate;
mod budget;
mod data;
mod driver;
mod error;
mod info;
mod origin;
mod pending;

mod profile;
mod record;
mod trace;

pub use batch::{Batch, Place, Urgency};
pub use budget::{Budget, Share};
pub use data::{Bytes, Data, Host, UploadBuffer};
pub use decorate::Decorator;
pub use driver::{Control, Driver, Fetch, Keep, Observe, OutputMemory, Peer, Placing};
pub use error::Error;
pub use info::{DeviceInfo, Locality, Memory, Processor, Usage};
pub use origin::{LineGuard, MethodGuard, Origin, Scope, ScopeGuard, method, scope};
pub use pending::{Help, Pending, Promise, pending};
pub use profile::{OpProfile, Profile};
pub use record::{Record, Replayed, replay};
pub use trace::{Span, Spans, Trace};
