//! The structured operations: what is not elementwise and not custom, one line each.
//!
//! A line has the name, the variant with its fields bound, the dtypes it takes, the kind of each field in written order,
//! how many operands it takes and how many results it gives. Class, name, text and wire form, signature, dtypes and arity
//! are made from it, and a variant without a line does not compile. Not here: what it gives (`infer.rs` and beside it), means
//! (`cpu/src/reference`) and how it is differentiated (`grad`). To add one, see CONTRIBUTING.md.

use super::*;
use crate::form::{FieldSink, FieldSource, FormError, Get, Put};
use crate::infer::Takes;
use std::ops::RangeInclusive;

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
    /// The logarithm of the running sum of exponentials.
    LogSumExp,
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

macro_rules! structured {
    ($($class:ident {
        $($name:literal [$($op:tt)*] $takes:ident ($($field:ident: $kind:ident),*) $operands:expr => $results:literal;)*
    })*) => {
        /// The classes of operations: the variants of [`Op`].
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[allow(missing_docs)]
        pub enum Class { $($class,)* Unary, Binary, Custom }

        impl Class {
            /// All of them.
            pub const ALL: &'static [Class] =
                &[$(Class::$class,)* Class::Unary, Class::Binary, Class::Custom];

            /// The names of its structured operations.
            pub const fn names(self) -> &'static [&'static str] {
                match self {
                    $(Class::$class => &[$($name,)*],)*
                    Class::Unary | Class::Binary | Class::Custom => &[],
                }
            }
        }

        /// The names, in the order in which the wire's own table has them.
        pub(crate) const STRUCTURED: &[&str] = &[$($($name,)*)*];

        #[allow(unused_variables)]
        impl Op {
            /// Its class.
            pub fn class(&self) -> Class {
                match self {
                    $($($($op)* => Class::$class,)*)*
                    Op::Unary(_) => Class::Unary,
                    Op::Binary(_) => Class::Binary,
                    Op::Custom(_) => Class::Custom,
                }
            }

            /// Its name in written form: like [`Op::name`], but `custom` for every custom operation.
            pub fn form_name(&self) -> &'static str {
                match self {
                    $($($($op)* => $name,)*)*
                    Op::Unary(op) => op.name(),
                    Op::Binary(op) => op.name(),
                    Op::Custom(_) => "custom",
                }
            }

            /// The place of a structured operation among all of them.
            pub(super) fn structured_number(&self) -> usize {
                match self {
                    $($($($op)* => const { super::set::structured_place($name) },)*)*
                    Op::Unary(_) | Op::Binary(_) | Op::Custom(_) => unreachable!("they are not structured"),
                }
            }

            /// How many operands it takes.
            pub fn operands(&self) -> RangeInclusive<usize> {
                match self {
                    $($($($op)* => $operands,)*)*
                    Op::Unary(_) => 1..=1,
                    Op::Binary(_) => 2..=2,
                    Op::Custom(_) => 0..=ANY,
                }
            }

            /// Which dtypes its first operand may have, or its result where it takes none.
            pub(crate) fn takes(&self) -> Takes {
                match self {
                    $($($($op)* => Takes::$takes,)*)*
                    Op::Unary(_) | Op::Binary(_) | Op::Custom(_) => Takes::Any,
                }
            }

            /// How many values it gives.
            pub fn outputs(&self) -> usize {
                match self {
                    $($($($op)* => $results,)*)*
                    Op::Unary(_) | Op::Binary(_) => 1,
                    Op::Custom(call) => crate::custom::find(&call.name).map_or(1, |op| op.outputs()),
                }
            }

            /// Gives its fields to `sink`.
            pub fn fields(&self, sink: &mut (impl FieldSink + ?Sized)) {
                match self {
                    $($($($op)* => { $(sink.$kind(stringify!($field), *$field);)* })*)*
                    Op::Unary(_) | Op::Binary(_) => {}
                    Op::Custom(call) => {
                        sink.text("name", call.name.clone());
                        sink.bytes("attrs", call.attrs.clone());
                    }
                }
            }

            /// The structured operation named `name` with the fields that `s` gives, if there is one.
            pub(crate) fn structured(name: &str, s: &mut dyn FieldSource) -> Result<Option<Op>, FormError> {
                Ok(Some(match name {
                    $($($name => { $(let $field = s.$kind(stringify!($field))?;)* $($op)* })*)*
                    _ => return Ok(None),
                }))
            }
        }
    };
}

/// No highest number of operands.
const ANY: usize = usize::MAX;

#[rustfmt::skip]
structured! {
    Full {
        "full"           [Op::Full { shape, value }]                                                    Any   (shape: shape, value: scalar) 0..=0 => 1;
    }
    Iota {
        "iota"           [Op::Iota { shape, dtype, axis }]                                              Num   (shape: shape, dtype: dtype, axis: axis) 0..=0 => 1;
    }
    Random {
        "random_bits"    [Op::Random { kind: RandomKind::Bits, shape, dtype, key, offset }]             Int   (shape: shape, dtype: dtype, key: word, offset: word) 0..=0 => 1;
        "random_uniform" [Op::Random { kind: RandomKind::Uniform, shape, dtype, key, offset }]          Float (shape: shape, dtype: dtype, key: word, offset: word) 0..=0 => 1;
        "random_normal"  [Op::Random { kind: RandomKind::Normal, shape, dtype, key, offset }]           Float (shape: shape, dtype: dtype, key: word, offset: word) 0..=0 => 1;
    }
    Select {
        "select"         [Op::Select]                                                                   Bool  () 3..=3 => 1;
    }
    Cast {
        "cast"           [Op::Cast(dtype)]                                                              Any   (dtype: dtype) 1..=1 => 1;
    }
    Move {
        "reshape"        [Op::Move(Move::Reshape(shape))]                                               Plain (shape: shape) 1..=1 => 1;
        "permute"        [Op::Move(Move::Permute(order))]                                               Plain (order: order) 1..=1 => 1;
        "expand"         [Op::Move(Move::Expand(shape))]                                                Plain (shape: shape) 1..=1 => 1;
        "slice"          [Op::Move(Move::Slice { axis, start, end, step })]                             Plain (axis: axis, start: bound, end: bound, step: bound) 1..=1 => 1;
        "assign"         [Op::Move(Move::Assign { axis, start, end, step })]                            Plain (axis: axis, start: bound, end: bound, step: bound) 2..=2 => 1;
        "flip"           [Op::Move(Move::Flip(axes))]                                                   Plain (axes: axes) 1..=1 => 1;
        "cat"            [Op::Move(Move::Cat { axis })]                                                 Plain (axis: axis) 1..=ANY => 1;
    }
    Reduce {
        "sum"            [Op::Reduce { kind: ReduceKind::Sum, axes, keep }]                             Num   (axes: axes, keep: flag) 1..=1 => 1;
        "mean"           [Op::Reduce { kind: ReduceKind::Mean, axes, keep }]                            Float (axes: axes, keep: flag) 1..=1 => 1;
        "prod"           [Op::Reduce { kind: ReduceKind::Prod, axes, keep }]                            Num   (axes: axes, keep: flag) 1..=1 => 1;
        "max"            [Op::Reduce { kind: ReduceKind::Max, axes, keep }]                             Plain (axes: axes, keep: flag) 1..=1 => 1;
        "min"            [Op::Reduce { kind: ReduceKind::Min, axes, keep }]                             Plain (axes: axes, keep: flag) 1..=1 => 1;
        "any"            [Op::Reduce { kind: ReduceKind::Any, axes, keep }]                             Bool  (axes: axes, keep: flag) 1..=1 => 1;
        "all"            [Op::Reduce { kind: ReduceKind::All, axes, keep }]                             Bool  (axes: axes, keep: flag) 1..=1 => 1;
        "argmax"         [Op::Reduce { kind: ReduceKind::ArgMax, axes, keep }]                          Plain (axes: axes, keep: flag) 1..=1 => 1;
        "argmin"         [Op::Reduce { kind: ReduceKind::ArgMin, axes, keep }]                          Plain (axes: axes, keep: flag) 1..=1 => 1;
    }
    Scan {
        "cumsum"         [Op::Scan { kind: ScanKind::Sum, axis, reverse }]                              Num   (axis: axis, reverse: flag) 1..=1 => 1;
        "cumprod"        [Op::Scan { kind: ScanKind::Prod, axis, reverse }]                             Num   (axis: axis, reverse: flag) 1..=1 => 1;
        "logcumsumexp"   [Op::Scan { kind: ScanKind::LogSumExp, axis, reverse }]                        Float (axis: axis, reverse: flag) 1..=1 => 1;
        "linear_scan"    [Op::Scan { kind: ScanKind::Linear, axis, reverse }]                           Num   (axis: axis, reverse: flag) 2..=2 => 1;
    }
    Dot {
        "dot"            [Op::Dot { transpose }]                                                        Num   (transpose: flag) 2..=2 => 1;
    }
    Conv {
        "conv"           [Op::Conv { kind: ConvKind::Forward, conv: Conv { stride, low, high, dilation, extent, groups } }] Num   (stride: triple, low: triple, high: triple, dilation: triple, extent: triple, groups: count) 2..=2 => 1;
        "conv_input"     [Op::Conv { kind: ConvKind::Input, conv: Conv { stride, low, high, dilation, extent, groups } }]   Num   (stride: triple, low: triple, high: triple, dilation: triple, extent: triple, groups: count) 2..=2 => 1;
        "conv_weight"    [Op::Conv { kind: ConvKind::Weight, conv: Conv { stride, low, high, dilation, extent, groups } }]  Num   (stride: triple, low: triple, high: triple, dilation: triple, extent: triple, groups: count) 2..=2 => 1;
    }
    Pool {
        "max_pool"       [Op::Pool { kind: PoolKind::Max, pool: Pool { kernel, stride, low, high, dilation, extent } }]      Num   (kernel: triple, stride: triple, low: triple, high: triple, dilation: triple, extent: triple) 1..=1 => 2;
        "sum_pool"       [Op::Pool { kind: PoolKind::Sum, pool: Pool { kernel, stride, low, high, dilation, extent } }]      Num   (kernel: triple, stride: triple, low: triple, high: triple, dilation: triple, extent: triple) 1..=1 => 1;
        "sum_pool_input" [Op::Pool { kind: PoolKind::SumInput, pool: Pool { kernel, stride, low, high, dilation, extent } }] Num   (kernel: triple, stride: triple, low: triple, high: triple, dilation: triple, extent: triple) 1..=1 => 1;
    }
    Gather {
        "gather"         [Op::Gather { kind: GatherKind::Each, axis }]                                  Plain (axis: axis) 2..=2 => 1;
        "take"           [Op::Gather { kind: GatherKind::Take, axis }]                                  Plain (axis: axis) 2..=2 => 1;
    }
    Scatter {
        "scatter"        [Op::Scatter { kind: ScatterKind::Each, axis }]                                Plain (axis: axis) 3..=3 => 1;
        "scatter_add"    [Op::Scatter { kind: ScatterKind::EachAdd, axis }]                             Num   (axis: axis) 3..=3 => 1;
        "take_add"       [Op::Scatter { kind: ScatterKind::TakeAdd, axis }]                             Num   (axis: axis) 3..=3 => 1;
    }
    Sort {
        "sort"           [Op::Sort { axis, descending, take }]                                          Plain (axis: axis, descending: flag, take: bound) 1..=1 => 2;
    }
    Guard {
        "guard"          [Op::Guard { finite }]                                                         Plain (finite: flag) 1..=ANY => 1;
    }
    Commit {
        "commit"         [Op::Commit]                                                                   Bool  () 3..=3 => 1;
    }
    Named {
        "softmax"        [Op::Named(Named::Softmax { axis })]                                           Float (axis: axis) 1..=1 => 1;
        "log_softmax"    [Op::Named(Named::LogSoftmax { axis })]                                        Float (axis: axis) 1..=1 => 1;
        "layer_norm"     [Op::Named(Named::LayerNorm { axes, eps })]                                    Float (axes: axis, eps: real) 1..=3 => 1;
        "rms_norm"       [Op::Named(Named::RmsNorm { axes, eps })]                                      Float (axes: axis, eps: real) 1..=2 => 1;
        "attention"      [Op::Named(Named::Attention { causal, scale })]                                Float (causal: flag, scale: real) 3..=4 => 1;
    }
}
