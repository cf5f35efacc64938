//! Host bytes with their meta, shared without copying.

use kiln_ir::Meta;
use std::any::Any;
use std::sync::Arc;

/// Memory on the host that can be shared.
///
/// # Safety
/// Devices go through addresses here for as long as they hold it. [`Host::bytes`] gives the same memory at every call, and
/// nobody writes it while it is shared, but for whoever was given [`Host::target`]: until a device has told
/// [`Host::reached`], or has let go, nobody else writes there, and nobody reads it through [`Host::bytes`].
#[allow(unsafe_code)]
pub unsafe trait Host: Any + Send + Sync {
    /// All of it.
    fn bytes(&self) -> &[u8];

    /// Whether a device may go on reading it instead of copying it: memory that is meant to be lent for long.
    fn is_lent(&self) -> bool {
        false
    }

    /// Where a device may compute a value, see [`Placing::place_output`](crate::Placing::place_output): the first byte, if all of it may
    /// be written while it is shared.
    fn target(&self) -> Option<*mut u8> {
        None
    }

    /// Told by a device that computes a value there: all before byte `end` is final, and the device leaves it alone from
    /// now on. Comes in any order, perhaps never.
    fn reached(&self, _end: usize) {}
}

#[allow(unsafe_code)]
// SAFETY: a vector that is only shared neither moves nor changes.
unsafe impl Host for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Host memory that is being filled, to be shared afterwards.
pub trait UploadBuffer: Send {
    /// All of it.
    fn bytes(&mut self) -> &mut [u8];
    /// It is filled.
    fn done(self: Box<Self>) -> Bytes;
}

/// A shared range of host memory.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Host>,
    start: usize,
    len: usize,
}

impl Bytes {
    /// All of `owner`.
    pub fn new(owner: impl Host) -> Bytes {
        let len = owner.bytes().len();
        Bytes { owner: Arc::new(owner), start: 0, len }
    }

    /// A range of shared memory, which must lie within it.
    pub fn shared(owner: Arc<dyn Host>, start: usize, len: usize) -> Bytes {
        assert!(start.checked_add(len).is_some_and(|end| end <= owner.bytes().len()));
        Bytes { owner, start, len }
    }

    /// Whether its owner lends it, see [`Host::is_lent`].
    pub fn is_lent(&self) -> bool {
        self.owner.is_lent()
    }

    /// The first byte, to write to, see [`Host::target`].
    pub fn target(&self) -> Option<*mut u8> {
        self.owner.target().map(|first| first.wrapping_add(self.start))
    }

    /// Tells its owner, see [`Host::reached`].
    pub fn reached(&self, end: usize) {
        if self.start == 0 {
            self.owner.reached(end);
        }
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range does not lie within it.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Bytes {
        assert!(range.start <= range.end && range.end <= self.len);
        Bytes { owner: self.owner.clone(), start: self.start + range.start, len: range.len() }
    }

    /// The owner, if it is of type `T` and this is all of it.
    pub fn whole<T: Host>(&self) -> Option<Arc<T>> {
        if self.start != 0 || self.len != self.owner.bytes().len() {
            return None;
        }
        let owner: Arc<dyn Any + Send + Sync> = self.owner.clone();
        owner.downcast().ok()
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.start..self.start + self.len]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

/// A value on the host: row-major elements, little-endian, bool as 0 or 1, quantised values as packed blocks.
#[derive(Clone, Debug)]
pub struct Data {
    /// Dtype and shape.
    pub meta: Meta,
    /// [`Meta::bytes`] bytes.
    pub bytes: Bytes,
}

impl Data {
    /// A value of these bytes.
    ///
    /// # Panics
    /// If the number of bytes does not fit the meta.
    pub fn new(meta: Meta, bytes: Bytes) -> Data {
        assert_eq!(bytes.len(), meta.bytes(), "{meta} takes another number of bytes");
        Data { meta, bytes }
    }
}
