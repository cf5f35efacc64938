//! The seam between recording and executing: a [`Driver`] takes batches of the stream and gives values back.
//!
//! Above it, tensors record; below it, kernels, servers and decorators execute. The trait is small and names no
//! operation, so that a decorator ([`Record`], [`Profile`]) is a page of code. Also here: errors as they reach the user
//! ([`Error`]), answers that are not there yet ([`Pending`]), host bytes on their way in and out ([`Data`]) and where
//! in the user's program an operation came from ([`Origin`]).
// But for the promise of those who lend memory, `Host`.
#![deny(unsafe_code)]

mod batch;
mod decorate;
mod budget;
mod data;
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
pub use error::Error;
pub use info::{DeviceInfo, Locality, Memory, Usage};
pub use origin::{LineGuard, MethodGuard, Origin, Scope, ScopeGuard, method, scope};
pub use pending::{Help, Pending, Promise, pending};
pub use profile::{OpProfile, Profile};
pub use record::{Record, Replayed, replay};
pub use trace::{Span, Spans, Trace};

use kiln_ir::{Id, Meta, Op};
use std::any::Any;
use std::sync::Arc;

/// Keeps something alive for as long as it is held.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Finds memory for a value, if there is any: asked when the value is about to be computed, so that what is free again by
/// then can be used again.
pub type OutputMemory = Arc<dyn Fn() -> Option<Bytes> + Send + Sync>;

/// Something that executes the stream.
///
/// Calls take effect in the order in which they are made. A failed operation poisons the values it would have given,
/// and what depends on them; it never fails the device.
pub trait Driver: Send + Sync + 'static {
    /// What it is and can do.
    fn info(&self) -> DeviceInfo;

    /// Where it computes; a decorator says where the device below it does.
    fn locality(&self) -> Locality {
        Locality::Process
    }

    /// Takes the next part of the stream. Returns before it is executed; blocks only to bound what is queued.
    fn submit(&self, batch: Batch);

    /// Defines a value from host data.
    fn write(&self, id: Id, data: Data, place: Place);

    /// The content of a value as of now in the stream: the place is taken here, not when the answer is waited for.
    fn read(&self, id: Id) -> Pending<Data>;

    /// Like [`Driver::read`], for a caller who knows what the value is: another one is an error. Devices of this process
    /// do not err.
    fn read_as(&self, id: Id, _meta: Meta) -> Pending<Data> {
        self.read(id)
    }

    /// An answer once everything before this call has been executed.
    fn sync(&self) -> Pending<()>;

    /// Whether the device executes this operation itself. If not, the recording side lowers or refuses it.
    fn supports(&self, op: &Op, ins: &[Meta]) -> bool;

    /// Whether [`Driver::supports`] holds for everything, so that it need not be asked each time.
    fn supports_all(&self) -> bool {
        false
    }

    /// Bytes and values held now.
    fn memory(&self) -> Memory;

    /// Gives cached memory back to the system.
    fn cleanup(&self);

    /// The operations that have failed by themselves since this was last asked, each as [`Error::Failed`]: the first
    /// ones where there were many.
    fn failures(&self) -> Vec<Error> {
        Vec::new()
    }

    /// Sets the most bytes it may hold; `None` for no limit.
    fn limit(&self, bytes: Option<usize>);

    /// Makes host buffers ready for upload, so that writing them later does not block on a copy.
    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        data
    }

    /// Host memory of `len` bytes for the content of a value, which [`Driver::write`] then takes over without a copy.
    /// `None` where any memory will do.
    fn upload_buffer(&self, _len: usize, _place: Place) -> Option<Box<dyn UploadBuffer>> {
        None
    }

    /// Asks for value `id`, which a batch yet to be submitted defines, to be computed in that memory ([`Host::target`]),
    /// where nobody else reads or writes until a [`Driver::read`] of it is answered or [`Host::reached`] has told of it, and
    /// the device never after that. Where it was, the answer's bytes are that memory.
    fn place_output(&self, _id: Id, _memory: OutputMemory) {}

    /// Whether [`Driver::place_output`] is ever followed.
    fn places_outputs(&self) -> bool {
        false
    }

    /// Defines value `id`, of this meta, as what `from` is on `source`, without the bytes passing through the caller.
    /// `keep` holds `from` for as long as it may be asked for again. False, and nothing done, where there is no such
    /// way: then the caller reads and writes.
    fn fetch(
        &self,
        _id: Id,
        _meta: Meta,
        _place: Place,
        _source: &dyn Driver,
        _from: Id,
        _keep: Keep,
    ) -> bool {
        false
    }

    /// Whether it has nothing to do, of a device that computes beside the program: then what was recorded and waits
    /// should be submitted. Nothing of one that computes when somebody waits.
    fn is_idle(&self) -> Option<bool> {
        None
    }

    /// The device itself, or the one below a decorator: for another of its kind that has a short way to it, and for
    /// tools that know it. What it is says [`Driver::locality`], not whether there is something here.
    fn any(&self) -> Option<&dyn Any> {
        None
    }

    /// What happened since this was last asked that nobody waited for, in words: recoveries, ways that failed.
    fn events(&self) -> Vec<String> {
        Vec::new()
    }

    /// Notes from now on what runs and when, on the clock of whoever computes, or stops and forgets it.
    fn trace(&self, _on: bool) -> Result<(), Error> {
        Err(Error::Unsupported { op: "trace".into(), device: self.info().name })
    }

    /// Takes the oldest of what was noted, at most so many.
    fn spans(&self, _most: usize) -> Pending<Spans> {
        Pending::ready(Err(Error::Unsupported { op: "trace".into(), device: self.info().name }))
    }

    /// Ends what the device has open elsewhere. What is asked of it afterwards fails with [`Error::Closed`]. Local
    /// devices have nothing open.
    fn close(&self) {}

    /// Ends what is running as soon as it can be, and fails it, everything that waits and everything asked afterwards
    /// with [`Error::Stopped`]. Unlike [`Driver::close`] it does not wait, and it may be called from any thread while
    /// another one computes. A device is not used again afterwards.
    fn stop(&self) {
        self.close();
    }

    /// Why it will never compute again, if so: it was closed, or what it stands for is lost.
    fn ended(&self) -> Option<Error> {
        None
    }

    /// Brings whatever a decorator holds to its file. Devices hold nothing.
    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }
}
