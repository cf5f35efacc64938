//! The closed set of operations, as plain data.
//!
//! Outer variants are classes that passes match on; the small enums inside name the primitives. Scalars and reals are
//! kept as bits, so that `Eq` and `Hash` hold. `list.rs` has a line for each that is not elementwise; what each takes and
//! gives is in `infer.rs`.

mod axes;
mod facts;
mod index;
mod list;
mod moves;
mod named;
mod reduce;
mod set;
mod windows;

pub use axes::AxisSet;
pub(crate) use list::STRUCTURED;
pub use list::{Class, ConvKind, GatherKind, PoolKind, RandomKind, ReduceKind, ScanKind, ScatterKind};
pub use moves::Move;
pub use named::{Named, attention_scores, attention_weights, lower};
pub use set::OpSet;
pub use windows::{Conv, Pool};

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
            Op::Custom(call) => &call.name,
            op => op.form_name(),
        }
    }

    /// A number for its class; the elementwise ones each have their own.
    pub fn code(&self) -> u16 {
        match self {
            Op::Unary(op) => 0x100 + *op as u16,
            Op::Binary(op) => 0x200 + *op as u16,
            op => op.class() as u16,
        }
    }
}
