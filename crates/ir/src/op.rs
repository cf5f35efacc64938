//! The closed set of operations, as plain data.
//!
//! Outer variants are classes that passes match on; the small enums inside name the primitives. Scalars and reals are
//! kept as bits, so that `Eq` and `Hash` hold. What each takes and gives is in `infer.rs`, how each is written in
//! `form.rs`.

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

/// Rearrangements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Move {
    /// The same elements in row-major order under another shape.
    Reshape(Shape),
    /// Axis `i` of the result is axis `p[i]` of the operand.
    Permute(crate::Dims<u8>),
    /// Broadcasting to a larger shape.
    Expand(Shape),
    /// Every `step`-th element of `start..end` along an axis.
    Slice {
        /// The cut axis.
        axis: u8,
        /// First index.
        start: usize,
        /// One past the last index, at most the extent.
        end: usize,
        /// Distance, at least 1.
        step: usize,
    },
    /// (x, v): x with `start..end` by `step` along an axis replaced by v.
    Assign {
        /// The cut axis.
        axis: u8,
        /// First index.
        start: usize,
        /// One past the last index, at most the extent.
        end: usize,
        /// Distance, at least 1.
        step: usize,
    },
    /// Reversed along a set of axes.
    Flip(AxisSet),
    /// All operands one after another along an axis.
    Cat {
        /// The joined axis.
        axis: u8,
    },
}

/// Reductions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum ReduceKind {
    Sum,
    Mean,
    Prod,
    Max,
    Min,
    Any,
    All,
    /// i64 index of the first largest element along one axis; NaN counts as largest.
    ArgMax,
    /// i64 index of the first smallest element along one axis; NaN counts as smallest.
    ArgMin,
}

/// Running reductions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ScanKind {
    /// Running sum.
    Sum,
    /// Running product.
    Prod,
    /// (a, b): `s[i] = a[i] * s[i - 1] + b[i]`, starting from `s = 0`.
    Linear,
}

/// A convolution y = conv(x, w) and its adjoints. x is `[N, C, ..]`, w `[O, C / groups, ..]`, y `[N, O, ..]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ConvKind {
    /// (x, w) to y.
    Forward,
    /// (y, w) to x, whose spatial extents are `Conv::extent`: the transposed convolution.
    Input,
    /// (x, y) to w, whose spatial extents are `Conv::extent`.
    Weight,
}

/// Geometry of a convolution; places beyond the number of spatial axes hold the defaults.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub struct Conv {
    pub stride: [u32; 3],
    pub low: [u32; 3],
    pub high: [u32; 3],
    pub dilation: [u32; 3],
    /// Spatial extents of the result of an adjoint; 0 for the forward kind.
    pub extent: [u32; 3],
    pub groups: u32,
}

/// Pooling over windows. x is `[N, C, ..]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PoolKind {
    /// x to (largest of each window, its i64 index in the flattened spatial plane).
    Max,
    /// x to the sum of each window; padding counts as 0.
    Sum,
    /// The adjoint of `Sum`, whose spatial extents are `Pool::extent`.
    SumInput,
}

/// Geometry of pooling; places beyond the number of spatial axes hold the defaults.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub struct Pool {
    pub kernel: [u32; 3],
    pub stride: [u32; 3],
    pub low: [u32; 3],
    pub high: [u32; 3],
    pub dilation: [u32; 3],
    /// Spatial extents of the result of the adjoint; 0 otherwise.
    pub extent: [u32; 3],
}

/// Indexed reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GatherKind {
    /// One index for each result: `y[i][j] = x[index[i][j]][j]` along axis 0.
    Each,
    /// Whole slices: the axis is replaced by the axes of the indices.
    Take,
}

/// Indexed writes into a copy of x.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ScatterKind {
    /// One index for each source element; the last write wins.
    Each,
    /// One index for each source element; writes add up, in index order.
    EachAdd,
    /// Whole slices, as [`GatherKind::Take`] reads them; writes add up, in index order.
    TakeAdd,
}

/// Composites with a meaning of their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Named {
    /// exp(x) over its sum along an axis.
    Softmax {
        /// Along which axis.
        axis: u8,
    },
    /// log(softmax(x)).
    LogSoftmax {
        /// Along which axis.
        axis: u8,
    },
    /// (x, weight, bias): normalised over the last `axes` axes to mean 0 and variance 1, scaled and shifted.
    LayerNorm {
        /// How many last axes.
        axes: u8,
        /// Added to the variance.
        eps: Real,
    },
    /// (x, weight): divided by the root mean square of the last `axes` axes, scaled.
    RmsNorm {
        /// How many last axes.
        axes: u8,
        /// Added to the mean square.
        eps: Real,
    },
    /// (query, key, value[, mask]): softmax(q kᵀ scale + mask) v over `[.., length, width]`; mask is added.
    Attention {
        /// A query sees keys up to its own place only.
        causal: bool,
        /// Factor of the scores.
        scale: Real,
    },
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

/// A set of axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AxisSet(pub(crate) u8);

impl AxisSet {
    /// The first `rank` axes.
    pub fn all(rank: usize) -> AxisSet {
        AxisSet(if rank >= 8 { 0xff } else { (1 << rank) - 1 })
    }
    /// The set with just this axis, which is below [`crate::MAX_RANK`].
    pub fn one(axis: usize) -> AxisSet {
        AxisSet(1 << axis)
    }
    /// The set with `axis` in it too.
    pub fn with(self, axis: usize) -> AxisSet {
        AxisSet(self.0 | (1 << axis))
    }
    /// Whether `axis` is in it.
    pub fn has(self, axis: usize) -> bool {
        axis < 8 && self.0 >> axis & 1 == 1
    }
    /// Its axes, ascending.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = usize> {
        (0..8).filter(move |&i| self.has(i))
    }
    /// How many axes.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }
    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// One past the highest axis.
    pub fn bound(self) -> usize {
        8 - self.0.leading_zeros() as usize
    }
}

impl std::fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
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

    /// Whether a number, a random key or the place of a slice is all that may differ between it and operations that
    /// are [`Op::is_alike`]; other operations are only like themselves.
    pub fn is_open(&self) -> bool {
        matches!(
            self,
            Op::Full { .. } | Op::Random { .. } | Op::Move(Move::Slice { .. } | Move::Assign { .. })
        )
    }

    /// Whether it differs from `other` at most in what a plan reads anew at every run: the value of a number, a random
    /// key, or where a slice of the same length starts. Extents must be the same.
    pub fn is_alike(&self, other: &Op) -> bool {
        match (self, other) {
            (Op::Binary(a), Op::Binary(b)) => a == b,
            (Op::Unary(a), Op::Unary(b)) => a == b,
            (Op::Full { shape: a, value: x }, Op::Full { shape: b, value: y }) => {
                a == b && x.dtype() == y.dtype()
            }
            (
                Op::Random { kind, shape, dtype, key: _, offset: _ },
                Op::Random { kind: kind2, shape: shape2, dtype: dtype2, key: _, offset: _ },
            ) => kind == kind2 && shape == shape2 && dtype == dtype2,
            (
                Op::Move(Move::Slice { axis, start, end, step }),
                Op::Move(Move::Slice { axis: axis2, start: start2, end: end2, step: step2 }),
            )
            | (
                Op::Move(Move::Assign { axis, start, end, step }),
                Op::Move(Move::Assign { axis: axis2, start: start2, end: end2, step: step2 }),
            ) => {
                let length = |start: &usize, end: &usize| end.checked_sub(*start);
                axis == axis2 && step == step2 && length(start, end) == length(start2, end2)
            }
            _ => self == other,
        }
    }

    /// Whether it can fail on the values of its operands, not only on their shapes.
    pub fn is_fallible(&self) -> bool {
        match self {
            Op::Gather { .. } | Op::Scatter { .. } | Op::Custom(_) => true,
            Op::Binary(op) => op.divides(),
            Op::Full { .. }
            | Op::Iota { .. }
            | Op::Random { .. }
            | Op::Unary(_)
            | Op::Select
            | Op::Cast(_)
            | Op::Move(_)
            | Op::Reduce { .. }
            | Op::Scan { .. }
            | Op::Dot { .. }
            | Op::Conv { .. }
            | Op::Pool { .. }
            | Op::Sort { .. }
            | Op::Guard { .. }
            | Op::Commit
            | Op::Named(_) => false,
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
