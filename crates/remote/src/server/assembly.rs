//! Values that arrive in pieces.

use crate::protocol::ProtocolError;
use kiln_device::{Bytes, Data, Error, Place, UploadBuffer};
use kiln_ir::Meta;

/// A value under way: an upload, or a fetch from another server.
pub struct Assembly {
    /// Its dtype and shape.
    pub meta: Meta,
    /// Bytes that have come.
    pub filled: usize,
    /// Bytes that it takes of the quota.
    pub counted: usize,
    /// Where they are.
    pub memory: Memory,
    /// Its direct way failed: the client sends the pieces itself.
    pub lost: bool,
    /// Where it is to be.
    pub place: Place,
    /// It comes from another server, which has been asked for it.
    pub begun: bool,
    /// The device was asked for memory in its turn.
    pub asked: bool,
    /// Bytes of the window that its client gets back when the stream has come to it.
    pub owed: usize,
    /// Bytes that were gathered before the stream has come to it.
    pub ahead: usize,
}

/// Where a value under way is gathered.
pub enum Memory {
    /// In memory that the device takes over.
    Device(Box<dyn UploadBuffer>),
    /// In memory that grows with what arrives.
    Grown(Vec<u8>),
    /// It is all there, in another session's memory.
    Whole(Box<Data>),
    /// There will be none, and its pieces are dropped.
    None(Box<Error>),
}

impl Assembly {
    /// Whether nothing is waited for any more.
    pub fn is_complete(&self) -> bool {
        match &self.memory {
            Memory::Device(_) | Memory::Grown(_) => self.filled == self.meta.bytes(),
            Memory::Whole(_) | Memory::None(_) => true,
        }
    }

    /// Appends bytes.
    pub fn add(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        let (from, to) = (self.filled, self.filled + bytes.len());
        if to > self.meta.bytes() {
            return Err(ProtocolError::Misuse("a transfer has more bytes than its shape"));
        }
        match &mut self.memory {
            Memory::Device(buffer) => buffer.bytes()[from..to].copy_from_slice(bytes),
            Memory::Grown(held) => match held.try_reserve(bytes.len()) {
                Ok(()) => held.extend_from_slice(bytes),
                Err(_) => {
                    let asked = self.meta.bytes();
                    let error = Error::OutOfMemory { asked, free: 0, limit: usize::MAX };
                    self.memory = Memory::None(Box::new(error));
                }
            },
            Memory::Whole(_) | Memory::None(_) => return Ok(()),
        }
        self.filled = to;
        Ok(())
    }

    /// The whole value, or why there is none.
    pub fn done(self) -> Result<Bytes, Error> {
        match self.memory {
            Memory::Device(buffer) => Ok(buffer.done()),
            Memory::Grown(held) => Ok(Bytes::new(held)),
            Memory::Whole(data) => Ok(data.bytes),
            Memory::None(error) => Err(*error),
        }
    }
}
