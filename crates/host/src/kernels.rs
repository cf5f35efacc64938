//! What a device supplies to the shell: arithmetic on values of its own kind.
//!
//! Kernels that compute before they return need no more than the methods without a default. A device with a stream of its
//! own, where work is launched now and done later, says so by [`Kernels::launched`] and the four methods behind it.

use crate::stop::Stopped;
use kiln_device::{Data, DeviceInfo, Error, Memory, Place, Promise, UploadBuffer};
use kiln_fuse::Fuser;
use kiln_ir::{Meta, Op};
use smallvec::SmallVec;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The arithmetic of a device. Calls that compute come one at a time, in the order of the stream.
pub trait Kernels: Send + Sync + 'static {
    /// How it holds a value.
    type Value: Clone + Send + Sync;

    /// What it is and can do.
    fn info(&self) -> DeviceInfo;
    /// A value from host data.
    fn upload(&self, data: &Data, place: Place) -> Result<Self::Value, Error>;
    /// A value's dtype and shape.
    fn meta(&self, value: &Self::Value) -> Meta;
    /// A value as host data, waited for.
    fn download(&self, value: &Self::Value) -> Result<Data, Error>;
    /// The results of an operation. An operand that is `Owned` has no other user and may be overwritten.
    fn eval(
        &self,
        op: &Op,
        ins: &mut [Arg<Self::Value>],
        place: Place,
    ) -> Result<SmallVec<[Self::Value; 2]>, Error>;
    /// Bytes held; `values` is filled in by the device.
    fn memory(&self) -> Memory;

    /// Gives cached memory back.
    fn cleanup(&self) {}
    /// Sets the most bytes to hold.
    fn limit(&self, _bytes: Option<usize>) {}
    /// Makes host buffers ready for [`Kernels::upload`].
    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        data
    }
    /// Memory that [`Kernels::upload`] takes over.
    fn upload_buffer(&self, _len: usize, _place: Place) -> Option<Box<dyn UploadBuffer>> {
        None
    }
    /// What can run several nodes as one.
    fn fusers(&self) -> Vec<Box<dyn Fuser<Self::Value>>> {
        Vec::new()
    }

    /// Whether [`Kernels::eval`] takes this operation; what it does not take is recorded as primitives. Not asked where
    /// [`DeviceInfo::supports_all`] is said.
    fn supports(&self, _op: &Op, _ins: &[Meta]) -> bool {
        true
    }
    /// Whether this composite ([`Op::Named`]) is computed whole in a window too, by a kernel such as flash attention. Any
    /// other is written there as the primitives it stands for, which can fuse with what is around them.
    fn claims(&self, _op: &Op, _ins: &[Meta]) -> bool {
        false
    }

    /// How many kernels have been launched on the device's stream, those that are done included: the place of the last one.
    /// It stays 0 where computing is over when a call returns.
    fn launched(&self) -> u64 {
        0
    }
    /// How far the stream has come, and which launches have failed since this was last asked. The shell makes poison of
    /// them: of their results, and of all that was computed from those meanwhile. Asked often, and on any thread.
    fn faults(&self) -> Faults {
        Faults::default()
    }
    /// Answers when everything launched so far is done, failed or not. It returns at once; whoever answers holds no lock
    /// that another of these methods takes.
    fn finish(&self, done: Promise<()>) {
        done.answer(Ok(()));
    }
    /// Like [`Kernels::download`], but returns before the bytes have travelled, and answers as [`Kernels::finish`] does.
    fn download_to(&self, value: &Self::Value, to: Promise<Data>) {
        to.answer(caught("read", || self.download(value)));
    }
    /// The device is stopped and not used again: the stream need not be finished, and what was promised is answered with
    /// [`Error::Stopped`]. On any thread.
    fn stop(&self) {}
}

/// How far an asynchronous device has come.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Launches up to this one, counted as [`Kernels::launched`] does, are done; those of them that failed have been told.
    pub done: u64,
    /// The launches that failed by themselves, each once, and why.
    pub failed: Vec<(u64, Error)>,
}

/// An operand.
pub enum Arg<V> {
    /// Used by others too.
    Shared(V),
    /// At its last use.
    Owned(V),
}

impl<V> std::ops::Deref for Arg<V> {
    type Target = V;
    fn deref(&self) -> &V {
        match self {
            Arg::Shared(value) | Arg::Owned(value) => value,
        }
    }
}

/// Runs a kernel; a panic in it is an error like any other.
pub(crate) fn caught<T>(op: &str, f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(panicked(op, &*panic)))
}

/// What a kernel was left with as an error. One that unwinds with an [`Error`] is taken at its word.
pub fn panicked(op: &str, panic: &(dyn Any + Send)) -> Error {
    if panic.is::<Stopped>() {
        return Error::Stopped;
    }
    if let Some(error) = panic.downcast_ref::<Error>() {
        return error.clone();
    }
    let message = panic.downcast_ref::<String>().cloned();
    let message = message.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
    Error::Panicked { op: op.to_string(), message: message.unwrap_or_default() }
}
