//! A loop over neighbouring elements: the form that every fused program is brought to, and all that the code emitter
//! and the tile interpreter know of one.
//!
//! It names no shape and no number, only types and operations, so that one compiled pass serves every length and every
//! value of a constant.

use super::kernel::Call;
use kiln_ir::{DType, ReduceKind};
use smallvec::SmallVec;

/// What is done for each of `len` elements. Values are numbered: the inputs first, then the steps.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Pass {
    pub inputs: Vec<Input>,
    pub steps: Vec<Step>,
    pub outputs: Vec<Output>,
}

/// An operand in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Input {
    pub dtype: DType,
    /// One element at the address serves the whole loop; otherwise element `i` follows element `i - 1`.
    pub splat: bool,
}

/// An elementwise operation on earlier values.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Step {
    pub call: Call,
    pub args: SmallVec<[u32; 3]>,
}

/// What becomes of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Output {
    /// Written to memory, past the cache if `stream`; the address is then a multiple of 64 bytes.
    Store { value: u32, stream: bool },
    /// Reduced in the inner order: for each chunk of elements, the lanes of its accumulators, which the caller
    /// combines.
    Fold { value: u32, kind: ReduceKind },
}
