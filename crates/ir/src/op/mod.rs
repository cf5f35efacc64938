//! The closed set of operations, as plain data.
//!
//! Outer variants are classes that passes match on; the small enums inside name the primitives. Scalars and reals are
//! kept as bits, so that `Eq` and `Hash` hold. What each takes and gives is in `infer.rs`, how each is written in
//! `form.rs`.

mod axes;
mod facts;
mod index;
mod moves;
mod named;
mod reduce;
mod windows;

pub use axes::AxisSet;
pub use index::{GatherKind, ScatterKind};
pub use moves::Move;
pub use named::{Named, attention_scores, attention_weights, lower};
pub use reduce::{ReduceKind, ScanKind};
pub use windows::{Conv, ConvKind, Pool, PoolKind};

use crate::{Binary, DType, Scalar, Shape, Unary};
use std::sync::Arc;

/// An operation with its attributes; its operands are in the [`crate::Node`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// A tensor filled with one value, of the value's dtype.
    Full {
        /// Extents.
        shape: Shape,
        /// The value everywhere.
        value: Scalar,
    },
    /// Each element is its own index along `axis`.
    Iota {
        /// Extents.
        shape: Shape,
        /// Element type.
        dtype: DType,
        /// The counted axis.
        axis: u8,
    },
    /// Pure randomness: element `i` is a function of (`key`, `offset`, `i`) alone.
    Random {
        /// Distribution.
        kind: RandomKind,
        /// Extents.
        shape: Shape,
        /// Element type.
        dtype: DType,
        /// Philox key of the stream.
        key: u64,
        /// Place in the stream.
        offset: u64,
    },
    /// Elementwise, one operand.
    Unary(Unary),
    /// Elementwise, two operands of one dtype that broadcast.
    Binary(Binary),
    /// Elementwise choice: (bool, a, b) that broadcast.
    Select,
    /// Conversion to another dtype; also packs and unpacks quantised values.
    Cast(DType),
    /// Rearrangement without arithmetic.
    Move(Move),
    /// Reduction over a set of axes.
    Reduce {
        /// What is computed.
        kind: ReduceKind,
        /// The axes that go.
        axes: AxisSet,
        /// Whether they stay with extent 1.
        keep: bool,
    },
    /// Running reduction along an axis, the element itself included.
    Scan {
        /// What is computed.
        kind: ScanKind,
        /// Along which axis.
        axis: u8,
        /// From the end to the start.
        reverse: bool,
    },
    /// Matrix product of (a `[.., M, K]`, b `[.., K, N]`), batch axes broadcast.
    Dot {
        /// b is `[.., N, K]`.
        transpose: bool,
    },
    /// Convolution over one to three spatial axes, and its two adjoints.
    Conv {
        /// Which of the three.
        kind: ConvKind,
        /// Geometry.
        conv: Conv,
    },
    /// Pooling over one to three spatial axes.
    Pool {
        /// What is computed.
        kind: PoolKind,
        /// Geometry.
        pool: Pool,
    },
    /// Reads along an axis by integer indices: (x, indices).
    Gather {
        /// How indices are laid out.
        kind: GatherKind,
        /// The indexed axis.
        axis: u8,
    },
    /// Writes along an axis by integer indices: (x, indices, source).
    Scatter {
        /// How indices are laid out and what happens at them.
        kind: ScatterKind,
        /// The indexed axis.
        axis: u8,
    },
    /// Stable sort along an axis; gives (values, i64 indices). NaN is above everything.
    Sort {
        /// Along which axis.
        axis: u8,
        /// Largest first.
        descending: bool,
        /// How many of the first results are given.
        take: usize,
    },
    /// (any number of operands): a bool, true if none of them has failed. It never fails itself and passes no failure on:
    /// this is how a step that lacks a gradient is refused as a whole. No derivative.
    Guard {
        /// All elements of its float operands must be finite too.
        finite: bool,
    },
    /// (ok, new, old) of one dtype and shape, `ok` a single bool: new if ok, else old. Unless ok is true it does not matter
    /// whether new, or ok itself, has failed. No derivative.
    Commit,
    /// A composite that a device may claim whole; otherwise it lowers itself.
    Named(Named),
    /// A user's operation, found by name in the registry.
    Custom(Arc<CustomCall>),
}

/// Distributions of [`Op::Random`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RandomKind {
    /// All values of an integer dtype, evenly.
    Bits,
    /// Floats in [0, 1).
    Uniform,
    /// The standard normal distribution.
    Normal,
}

/// A user operation's name and attributes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CustomCall {
    /// Name in the registry.
    pub name: String,
    /// Attributes, in the operation's own encoding.
    pub attrs: Vec<u8>,
}

/// A real attribute kept as its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Real(u64);

impl Real {
    /// The attribute with this value.
    pub fn new(value: f64) -> Real {
        Real(value.to_bits())
    }
    /// Its value.
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl std::fmt::Debug for Real {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.get())
    }
}

impl Op {
    /// Its name in text, files and messages. A custom operation's is its own.
    pub fn name(&self) -> &str {
        match self {
            Op::Full { .. } => "full",
            Op::Iota { .. } => "iota",
            Op::Random { kind, .. } => match kind {
                RandomKind::Bits => "random_bits",
                RandomKind::Uniform => "random_uniform",
                RandomKind::Normal => "random_normal",
            },
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Select => "select",
            Op::Cast(_) => "cast",
            Op::Move(op) => match op {
                Move::Reshape(_) => "reshape",
                Move::Permute(_) => "permute",
                Move::Expand(_) => "expand",
                Move::Slice { .. } => "slice",
                Move::Assign { .. } => "assign",
                Move::Flip(_) => "flip",
                Move::Cat { .. } => "cat",
            },
            Op::Reduce { kind, .. } => match kind {
                ReduceKind::Sum => "sum",
                ReduceKind::Mean => "mean",
                ReduceKind::Prod => "prod",
                ReduceKind::Max => "max",
                ReduceKind::Min => "min",
                ReduceKind::Any => "any",
                ReduceKind::All => "all",
                ReduceKind::ArgMax => "argmax",
                ReduceKind::ArgMin => "argmin",
            },
            Op::Scan { kind, .. } => match kind {
                ScanKind::Sum => "cumsum",
                ScanKind::Prod => "cumprod",
                ScanKind::Linear => "linear_scan",
            },
            Op::Dot { .. } => "dot",
            Op::Conv { kind, .. } => match kind {
                ConvKind::Forward => "conv",
                ConvKind::Input => "conv_input",
                ConvKind::Weight => "conv_weight",
            },
            Op::Pool { kind, .. } => match kind {
                PoolKind::Max => "max_pool",
                PoolKind::Sum => "sum_pool",
                PoolKind::SumInput => "sum_pool_input",
            },
            Op::Gather { kind, .. } => match kind {
                GatherKind::Each => "gather",
                GatherKind::Take => "take",
            },
            Op::Scatter { kind, .. } => match kind {
                ScatterKind::Each => "scatter",
                ScatterKind::EachAdd => "scatter_add",
                ScatterKind::TakeAdd => "take_add",
            },
            Op::Sort { .. } => "sort",
            Op::Guard { .. } => "guard",
            Op::Commit => "commit",
            Op::Named(op) => match op {
                Named::Softmax { .. } => "softmax",
                Named::LogSoftmax { .. } => "log_softmax",
                Named::LayerNorm { .. } => "layer_norm",
                Named::RmsNorm { .. } => "rms_norm",
                Named::Attention { .. } => "attention",
            },
            Op::Custom(call) => &call.name,
        }
    }

    /// A number for its kind, the same for operations that differ only in attributes; the elementwise ones each have
    /// their own.
    pub fn class(&self) -> u16 {
        match self {
            Op::Full { .. } => 0,
            Op::Iota { .. } => 1,
            Op::Random { .. } => 2,
            Op::Select => 3,
            Op::Cast(_) => 4,
            Op::Move(_) => 5,
            Op::Reduce { .. } => 6,
            Op::Scan { .. } => 7,
            Op::Dot { .. } => 8,
            Op::Conv { .. } => 9,
            Op::Pool { .. } => 10,
            Op::Gather { .. } => 11,
            Op::Scatter { .. } => 12,
            Op::Sort { .. } => 13,
            Op::Named(_) => 14,
            Op::Custom(_) => 15,
            Op::Guard { .. } => 16,
            Op::Commit => 17,
            Op::Unary(op) => 0x100 + *op as u16,
            Op::Binary(op) => 0x200 + *op as u16,
        }
    }

    /// How many values it gives.
    pub fn outputs(&self) -> usize {
        match self {
            Op::Sort { .. } | Op::Pool { kind: PoolKind::Max, .. } => 2,
            Op::Custom(call) => crate::custom::find(&call.name).map_or(1, |op| op.outputs()),
            _ => 1,
        }
    }
}
