//! The trait of those who execute, and its optional parts.
//!
//! A device implements the six methods of [`Driver`] that have no default, and the parts that it has. Who uses one calls
//! all methods on `dyn Driver`: what a device does without a part is written there, once. Who stands before a device
//! implements [`Decorator`](crate::Decorator) instead.

use crate::{Batch, Bytes, Data, DeviceInfo, Error, Memory, Pending, Place, Spans, UploadBuffer};
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

    /// Takes the next part of the stream. Returns before it is executed; blocks only to bound what is queued.
    fn submit(&self, batch: Batch);

    /// Defines a value from host data.
    fn write(&self, id: Id, data: Data, place: Place);

    /// The content of a value as of now in the stream: the place is taken here, not when the answer is waited for. What is
    /// read must have been submitted.
    fn read(&self, id: Id) -> Pending<Data>;

    /// Like [`Driver::read`], for a caller who knows what the value is: another one is an error. Devices of this process
    /// do not err.
    fn read_as(&self, id: Id, _meta: Meta) -> Pending<Data> {
        self.read(id)
    }

    /// An answer once everything before this call has been executed.
    fn sync(&self) -> Pending<()>;

    /// Bytes and values held now.
    fn memory(&self) -> Memory;

    /// Whether the device executes this operation itself. If not, the recording side lowers or refuses it. Not asked of a
    /// device that says [`DeviceInfo::supports_all`].
    fn supports(&self, _op: &Op, _ins: &[Meta]) -> bool {
        true
    }

    /// Its say in where values lie.
    fn placing(&self) -> Option<&dyn Placing> {
        None
    }

    /// Its short way to others of its kind.
    fn peer(&self) -> Option<&dyn Peer> {
        None
    }

    /// What it tells of its own accord.
    fn observe(&self) -> Option<&dyn Observe> {
        None
    }

    /// What holds of it as a whole: limits and its end.
    fn control(&self) -> Option<&dyn Control> {
        None
    }

    /// The device itself, or the one below a decorator: for another of its kind, and for tools that know it. What it is
    /// says [`Driver::info`], not whether there is something here.
    fn any(&self) -> Option<&dyn Any> {
        None
    }
}

/// A device with a say in where values lie.
pub trait Placing {
    /// Makes host buffers ready for upload, so that writing them later does not block on a copy.
    fn stage(&self, data: Vec<Data>) -> Vec<Data>;

    /// Host memory of `len` bytes for the content of a value, which [`Driver::write`] then takes over without a copy.
    /// `None` where any memory will do.
    fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>>;

    /// Asks for value `id`, which a batch yet to be submitted defines, to be computed in that memory
    /// ([`Host::target`](crate::Host::target)), where nobody else reads or writes until a [`Driver::read`] of it is answered
    /// or [`Host::reached`](crate::Host::reached) has told of it, and the device never after that. Where it was, the
    /// answer's bytes are that memory. Followed by devices that say [`DeviceInfo::places_outputs`].
    fn place_output(&self, id: Id, memory: OutputMemory);
}

/// A device with a short way to others, see [`DeviceInfo::peers`].
pub trait Peer {
    /// Defines a value as what another one is elsewhere, without the bytes passing through the caller. False, and nothing
    /// done, where there is no such way: then the caller reads and writes.
    fn fetch(&self, fetch: Fetch<'_>) -> bool;
}

/// A value that a device is to get from another device.
pub struct Fetch<'a> {
    /// The value that it becomes.
    pub id: Id,
    /// What it is.
    pub meta: Meta,
    /// Where it lives.
    pub place: Place,
    /// The device that has it.
    pub source: &'a dyn Driver,
    /// Its name there.
    pub from: Id,
    /// Holds it there for as long as it may be asked for again.
    pub keep: Keep,
}

/// A device that tells of what happens in it.
pub trait Observe {
    /// The operations that have failed by themselves since this was last asked, each as [`Error::Failed`]: the first
    /// ones where there were many.
    fn failures(&self) -> Vec<Error>;

    /// What happened since this was last asked that nobody waited for, in words: recoveries, ways that failed.
    fn events(&self) -> Vec<String>;

    /// Notes from now on what runs and when, on the clock of whoever computes, or stops and forgets it.
    fn trace(&self, on: bool) -> Result<(), Error>;

    /// Takes the oldest of what was noted, at most so many.
    fn spans(&self, most: usize) -> Pending<Spans>;

    /// Whether it has nothing to do: then what was recorded and waits should be submitted. Asked of devices that say
    /// [`DeviceInfo::asynchronous`].
    fn is_idle(&self) -> bool;
}

/// A device that can be limited, emptied and ended.
pub trait Control {
    /// Sets the most bytes it may hold; `None` for no limit.
    fn limit(&self, bytes: Option<usize>);

    /// Gives cached memory back to the system.
    fn cleanup(&self);

    /// Brings whatever a decorator holds to its file. Devices hold nothing.
    fn flush(&self) -> Result<(), Error>;

    /// Ends what the device has open elsewhere. What is asked of it afterwards fails with [`Error::Closed`]. Local
    /// devices have nothing open.
    fn close(&self);

    /// Ends what is running as soon as it can be, and fails it, everything that waits and everything asked afterwards
    /// with [`Error::Stopped`]. Unlike [`Control::close`] it does not wait, and it may be called from any thread while
    /// another one computes. A device is not used again afterwards.
    fn stop(&self);

    /// Why it will never compute again, if so: it was closed, or what it stands for is lost.
    fn ended(&self) -> Option<Error>;
}

/// Every method of the parts, with what a device does that lacks the part.
impl dyn Driver + '_ {
    /// See [`Placing::stage`].
    pub fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        match self.placing() {
            Some(part) => part.stage(data),
            None => data,
        }
    }

    /// See [`Placing::upload_buffer`].
    pub fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>> {
        self.placing()?.upload_buffer(len, place)
    }

    /// See [`Placing::place_output`].
    pub fn place_output(&self, id: Id, memory: OutputMemory) {
        if let Some(part) = self.placing() {
            part.place_output(id, memory);
        }
    }

    /// See [`Peer::fetch`].
    pub fn fetch(&self, fetch: Fetch<'_>) -> bool {
        self.peer().is_some_and(|part| part.fetch(fetch))
    }

    /// See [`Observe::failures`].
    pub fn failures(&self) -> Vec<Error> {
        self.observe().map_or_else(Vec::new, |part| part.failures())
    }

    /// See [`Observe::events`].
    pub fn events(&self) -> Vec<String> {
        self.observe().map_or_else(Vec::new, |part| part.events())
    }

    /// See [`Observe::trace`].
    pub fn trace(&self, on: bool) -> Result<(), Error> {
        match self.observe() {
            Some(part) => part.trace(on),
            None => Err(self.lacks("trace")),
        }
    }

    /// See [`Observe::spans`].
    pub fn spans(&self, most: usize) -> Pending<Spans> {
        match self.observe() {
            Some(part) => part.spans(most),
            None => Pending::ready(Err(self.lacks("trace"))),
        }
    }

    /// See [`Observe::is_idle`].
    pub fn is_idle(&self) -> bool {
        self.observe().is_some_and(|part| part.is_idle())
    }

    /// See [`Control::limit`].
    pub fn limit(&self, bytes: Option<usize>) {
        if let Some(part) = self.control() {
            part.limit(bytes);
        }
    }

    /// See [`Control::cleanup`].
    pub fn cleanup(&self) {
        if let Some(part) = self.control() {
            part.cleanup();
        }
    }

    /// See [`Control::flush`].
    pub fn flush(&self) -> Result<(), Error> {
        self.control().map_or(Ok(()), |part| part.flush())
    }

    /// See [`Control::close`].
    pub fn close(&self) {
        if let Some(part) = self.control() {
            part.close();
        }
    }

    /// See [`Control::stop`].
    pub fn stop(&self) {
        if let Some(part) = self.control() {
            part.stop();
        }
    }

    /// See [`Control::ended`].
    pub fn ended(&self) -> Option<Error> {
        self.control()?.ended()
    }

    fn lacks(&self, what: &str) -> Error {
        Error::Unsupported { op: what.into(), device: self.info().name }
    }
}
