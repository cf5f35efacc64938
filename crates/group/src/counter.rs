//! The contributions of a rank's own shards, combined as far as the tree allows.

use crate::buffer::Buffer;
use crate::call::Reduce;
use crate::reduce::Fold;
use crate::{Error, Group};
use kiln_ir::DType;

/// Takes the values of a rank's shards in order and combines them in the tree of the job: a binary counter, which
/// holds a logarithm of them. What remains are the parts of a buffer.
pub struct Counter {
    group: Group,
    fold: Fold,
    bytes: usize,
    /// Values not yet combined.
    stack: Vec<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    shard: usize,
}

impl Counter {
    /// For values of that many bytes.
    pub fn new(group: &Group, reduce: Reduce, dtype: DType, bytes: usize) -> Result<Counter, Error> {
        let fold = Fold::new(reduce, dtype).ok_or(Error::Unsupported { reduce, dtype })?;
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(Error::Length { bytes, dtype });
        }
        let shard = group.layout().held(group.rank()).start;
        Ok(Counter { group: group.clone(), fold, bytes, stack: Vec::new(), spare: Vec::new(), shard })
    }

    /// The value of the next shard.
    ///
    /// # Panics
    /// If it has another length, or if the rank holds no further shard.
    pub fn push(&mut self, value: &[u8]) {
        let (layout, rank) = (self.group.layout(), self.group.rank());
        assert_eq!(value.len(), self.bytes, "bytes of a shard's value");
        assert!(layout.held(rank).contains(&self.shard), "rank {rank} holds no shard {}", self.shard);
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(value);
        self.stack.push(buffer);
        for _ in 0..layout.merges(rank, self.shard) {
            let right = self.stack.pop().expect("two values");
            self.fold.pair(self.stack.last_mut().expect("two values"), &right);
            self.spare.push(right);
        }
        self.shard += 1;
    }

    /// What the rank contributes, ready for a reduction.
    ///
    /// # Panics
    /// If a shard is missing.
    pub fn finish(self) -> Result<Buffer, Error> {
        let mut buffer = self.group.buffer(self.bytes)?;
        assert_eq!(self.stack.len(), buffer.parts(), "every shard has been pushed");
        for (part, value) in self.stack.iter().enumerate() {
            buffer.part_mut(part).copy_from_slice(value);
        }
        Ok(buffer)
    }
}
