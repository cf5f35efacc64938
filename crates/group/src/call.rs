//! One collective as data: what is asked for, and the signature that all ranks must agree on before data mixes.

use crate::Error;
use kiln_ir::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How contributions are combined.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
#[repr(u8)]
pub enum Reduce {
    Sum,
    /// The sum over the number of shards, rounded once more.
    Mean,
    Max,
    Min,
    Prod,
}

impl Reduce {
    /// Every one, in declaration order.
    pub const ALL: [Reduce; 5] = [Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min, Reduce::Prod];

    /// Whether it has a meaning for a dtype: bools are not summed, only floats have a mean, quantised blocks nothing.
    pub fn fits(self, dtype: DType) -> Result<(), Error> {
        let fits = match self {
            Reduce::Sum => dtype != DType::Bool,
            Reduce::Mean => dtype.is_float(),
            Reduce::Max | Reduce::Min | Reduce::Prod => true,
        };
        if fits && !dtype.is_quantised() { Ok(()) } else { Err(Error::Unsupported { reduce: self, dtype }) }
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduce::Sum => "sum",
            Reduce::Mean => "mean",
            Reduce::Max => "max",
            Reduce::Min => "min",
            Reduce::Prod => "prod",
        })
    }
}

/// What a collective does with the buffers of all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Op {
    /// Every rank gets the combination of all contributions.
    AllReduce(Reduce),
    /// Every rank gets its own [`piece`](crate::Layout::piece) of the combination; the rest of its buffer is undefined.
    ReduceScatter(Reduce),
    /// Every rank gives its own piece and gets all pieces.
    AllGather,
    /// Every rank gets the buffer of this one.
    Broadcast(u32),
    /// No data: nobody goes on before all have come.
    Barrier,
}

impl Op {
    pub(crate) fn reduce(self) -> Option<Reduce> {
        match self {
            Op::AllReduce(reduce) | Op::ReduceScatter(reduce) => Some(reduce),
            Op::AllGather | Op::Broadcast(_) | Op::Barrier => None,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::AllReduce(reduce) => write!(f, "all_reduce {reduce}"),
            Op::ReduceScatter(reduce) => write!(f, "reduce_scatter {reduce}"),
            Op::AllGather => f.write_str("all_gather"),
            Op::Broadcast(root) => write!(f, "broadcast from {root}"),
            Op::Barrier => f.write_str("barrier"),
        }
    }
}

/// What is asked for: an operation on elements of a dtype.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// What is done.
    pub op: Op,
    /// What the buffer holds.
    pub dtype: DType,
    /// Anything else that must agree: a hash of the shape, the number of a bucket. 0 if nothing.
    pub tag: u64,
}

impl Call {
    /// A call without a tag.
    pub fn new(op: Op, dtype: DType) -> Call {
        Call { op, dtype, tag: 0 }
    }

    /// The same with a tag.
    pub fn tagged(self, tag: u64) -> Call {
        Call { tag, ..self }
    }
}

/// What all ranks must agree on at one place of a group's sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Signature {
    /// The number of the collective in its group, from 1.
    pub sequence: u64,
    /// Which group.
    pub group: u64,
    /// What is done.
    pub op: Op,
    /// What the buffers hold.
    pub dtype: DType,
    /// How many elements, or quantised blocks.
    pub length: u64,
    /// What the caller added.
    pub tag: u64,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Signature { sequence, group, op, dtype, length, tag } = self;
        write!(f, "collective {sequence} of group {:08x}: {op}", *group as u32)?;
        if *op != Op::Barrier {
            write!(f, " of {length} {dtype}")?;
        }
        if *tag != 0 {
            write!(f, ", tag {tag:x}")?;
        }
        Ok(())
    }
}

impl Signature {
    /// As 40 bytes for shared memory and messages.
    pub(crate) fn pack(&self) -> [u64; 5] {
        let (op, detail) = match self.op {
            Op::AllReduce(reduce) => (0, reduce as u32),
            Op::ReduceScatter(reduce) => (1, reduce as u32),
            Op::AllGather => (2, 0),
            Op::Broadcast(root) => (3, root),
            Op::Barrier => (4, 0),
        };
        let code = op | (self.dtype as u64) << 8 | (detail as u64) << 32;
        [self.sequence, self.group, self.length, code, self.tag]
    }

    /// Nothing if the words are no signature.
    pub(crate) fn unpack([sequence, group, length, code, tag]: [u64; 5]) -> Option<Signature> {
        let detail = (code >> 32) as u32;
        let reduce = || Reduce::ALL.get(detail as usize).copied();
        let op = match code as u8 {
            0 => Op::AllReduce(reduce()?),
            1 => Op::ReduceScatter(reduce()?),
            2 => Op::AllGather,
            3 => Op::Broadcast(detail),
            4 => Op::Barrier,
            _ => return None,
        };
        let dtype = *DType::ALL.get((code >> 8) as u8 as usize)?;
        Some(Signature { sequence, group, op, dtype, length, tag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_pack_and_unpack() {
        for dtype in DType::ALL {
            for op in [
                Op::AllReduce(Reduce::Prod),
                Op::ReduceScatter(Reduce::Mean),
                Op::AllGather,
                Op::Broadcast(7),
                Op::Barrier,
            ] {
                let signature =
                    Signature { sequence: 9, group: u64::MAX, op, dtype, length: 1 << 40, tag: 5 };
                assert_eq!(Signature::unpack(signature.pack()), Some(signature));
            }
        }
        assert_eq!(Signature::unpack([0, 0, 0, 9, 0]), None);
        assert_eq!(Signature::unpack([0, 0, 0, 0xff00, 0]), None);
    }
}
