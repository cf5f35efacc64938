//! Values as expressions: how derivatives and lowerings are written.
//!
//! A [`V`] is a value in some builder. Arithmetic on it emits nodes there: into the recorder when a backward runs, into
//! a list when a composite is lowered, or into a [`Probe`], which only notes what a rule touches.

use crate::op::*;
use crate::{Binary, DType, Meta, Op, Scalar, Shape, Unary, infer};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};

/// Where expressions go.
pub trait Build {
    /// Appends an operation on earlier values and gives its results. An operation that does not fit is a bug in the
    /// rule that wrote it, and panics.
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]>;
    /// Dtype and shape of a value.
    fn meta(&self, value: u32) -> Meta;
}

/// A value in a builder.
#[derive(Clone, Copy)]
pub struct V<'a> {
    build: &'a dyn Build,
    key: u32,
}

impl<'a> V<'a> {
    /// The value `key` of `build`.
    pub fn new(build: &'a dyn Build, key: u32) -> V<'a> {
        V { build, key }
    }

    /// Its place in the builder.
    pub fn key(self) -> u32 {
        self.key
    }

    /// Its dtype and shape.
    pub fn meta(self) -> Meta {
        self.build.meta(self.key)
    }

    /// Its extents.
    pub fn shape(self) -> Shape {
        self.meta().shape
    }

    /// Its dtype.
    pub fn dtype(self) -> DType {
        self.meta().dtype
    }

    /// The results of an operation on these values, at least one.
    pub fn emit(op: Op, ins: &[V<'a>]) -> SmallVec<[V<'a>; 2]> {
        let build = ins[0].build;
        let keys: SmallVec<[u32; 4]> = ins.iter().map(|v| v.key).collect();
        build.emit(op, &keys).into_iter().map(|key| V { build, key }).collect()
    }

    /// The first result of an operation on this value.
    pub fn apply(self, op: Op) -> V<'a> {
        V::emit(op, &[self])[0]
    }

    /// The first result of an operation on this value and another.
    pub fn apply2(self, op: Op, other: V<'a>) -> V<'a> {
        V::emit(op, &[self, other])[0]
    }

    /// A tensor of one value, in this value's builder.
    pub fn full(self, shape: impl Into<Shape>, value: Scalar) -> V<'a> {
        let op = Op::Full { shape: shape.into(), value };
        V { build: self.build, key: self.build.emit(op, &[])[0] }
    }

    /// A number of this value's dtype.
    pub fn number(self, value: f64) -> V<'a> {
        self.full([], Scalar::from_f64(self.dtype(), value))
    }

    /// Zeros of this value's shape.
    pub fn zeros_like(self) -> V<'a> {
        let meta = self.meta();
        self.full(meta.shape, Scalar::from_f64(meta.dtype, 0.0))
    }

    /// Its index along an axis, at each element of `shape`.
    pub fn iota(self, shape: impl Into<Shape>, dtype: DType, axis: usize) -> V<'a> {
        let op = Op::Iota { shape: shape.into(), dtype, axis: axis as u8 };
        V { build: self.build, key: self.build.emit(op, &[])[0] }
    }

    /// Where this bool value holds `a`, else `b`.
    pub fn choose(self, a: V<'a>, b: V<'a>) -> V<'a> {
        V::emit(Op::Select, &[self, a, b])[0]
    }

    /// This value where `cond` holds, else 0.
    pub fn keep_where(self, cond: V<'a>) -> V<'a> {
        cond.choose(self, self.number(0.0))
    }

    /// 0 where `cond` holds, else this value.
    pub fn drop_where(self, cond: V<'a>) -> V<'a> {
        cond.choose(self.number(0.0), self)
    }

    /// The gradient of the operand that does not lose against the other; half of it where they tie.
    pub fn unless_tied(self, a: V<'a>, b: V<'a>, loses: V<'a>) -> V<'a> {
        a.eq_v(b).choose(self * 0.5, self.drop_where(loses))
    }

    /// Both bool values hold.
    pub fn and(self, other: V<'a>) -> V<'a> {
        self.apply2(Op::Binary(Binary::And), other)
    }

    /// Whether it equals a number.
    pub fn eq(self, value: f64) -> V<'a> {
        self.eq_v(self.number(value))
    }

    /// Whether it is above a number.
    pub fn gt(self, value: f64) -> V<'a> {
        self.gt_v(self.number(value))
    }

    /// Whether it is below a number.
    pub fn lt(self, value: f64) -> V<'a> {
        self.lt_v(self.number(value))
    }

    /// Whether it is at least a number.
    pub fn ge(self, value: f64) -> V<'a> {
        self.ge_v(self.number(value))
    }

    /// Elementwise power.
    pub fn pow(self, exponent: V<'a>) -> V<'a> {
        self.apply2(Op::Binary(Binary::Pow), exponent)
    }

    /// Elementwise quotient rounded down.
    pub fn floor_divide(self, other: V<'a>) -> V<'a> {
        self.apply2(Op::Binary(Binary::FloorDivide), other)
    }

    /// Conversion; nothing is emitted if the dtype is right already.
    pub fn cast(self, dtype: DType) -> V<'a> {
        if self.dtype() == dtype { self } else { self.apply(Op::Cast(dtype)) }
    }

    /// A reduction.
    pub fn reduce(self, kind: ReduceKind, axes: AxisSet, keep: bool) -> V<'a> {
        self.apply(Op::Reduce { kind, axes, keep })
    }

    /// The sum over axes.
    pub fn sum(self, axes: AxisSet, keep: bool) -> V<'a> {
        self.reduce(ReduceKind::Sum, axes, keep)
    }

    /// The same elements under another shape; nothing is emitted if the shape is right already.
    pub fn reshape(self, shape: impl Into<Shape>) -> V<'a> {
        let shape = shape.into();
        if self.shape() == shape { self } else { self.apply(Op::Move(Move::Reshape(shape))) }
    }

    /// Broadcasting; nothing is emitted if the shape is right already.
    pub fn expand(self, shape: impl Into<Shape>) -> V<'a> {
        let shape = shape.into();
        if self.shape() == shape { self } else { self.apply(Op::Move(Move::Expand(shape))) }
    }

    /// The axes in another order.
    pub fn permute(self, order: impl IntoIterator<Item = usize>) -> V<'a> {
        self.apply(Op::Move(Move::Permute(crate::Dims::collect(order.into_iter().map(|i| i as u8)))))
    }

    /// The last two axes exchanged.
    pub fn transpose(self) -> V<'a> {
        let rank = self.shape().len();
        self.permute((0..rank - 2).chain([rank - 1, rank - 2]))
    }

    /// The elements `start..end` by `step` along an axis.
    pub fn slice(self, axis: usize, start: usize, end: usize, step: usize) -> V<'a> {
        self.apply(Op::Move(Move::Slice { axis: axis as u8, start, end, step }))
    }

    /// Matrix product.
    pub fn dot(self, other: V<'a>) -> V<'a> {
        self.apply2(Op::Dot { transpose: false }, other)
    }

    /// The sum over every axis along which `shape` was broadcast to this value's shape: the adjoint of broadcasting.
    pub fn sum_to(self, shape: &Shape) -> V<'a> {
        let from = self.shape();
        if from == *shape {
            return self;
        }
        let lead = from.len() - shape.len();
        let mut axes = AxisSet::all(lead);
        for (i, &d) in shape.iter().enumerate() {
            if d == 1 && from[lead + i] != 1 {
                axes = axes.with(lead + i);
            }
        }
        let sum = if axes.is_empty() { self } else { self.sum(axes, true) };
        sum.reshape(*shape)
    }
}

macro_rules! unary_methods {
    ($($variant:ident $name:ident $doc:literal $columns:tt)*) => {
        #[allow(clippy::should_implement_trait)]
        impl<'a> V<'a> {
            $(#[doc = $doc] pub fn $name(self) -> V<'a> { self.apply(Op::Unary(Unary::$variant)) })*
        }
    };
}
unary_table!(unary_methods);

macro_rules! comparisons {
    ($($name:ident $variant:ident $doc:literal)*) => {
        impl<'a> V<'a> {
            $(#[doc = $doc] pub fn $name(self, other: V<'a>) -> V<'a> { self.apply2(Op::Binary(Binary::$variant), other) })*
        }
    };
}
comparisons! {
    eq_v Eq "Whether it equals another value."
    lt_v Lt "Whether it is below another value."
    le_v Le "Whether it is at most another value."
    gt_v Gt "Whether it is above another value."
    ge_v Ge "Whether it is at least another value."
}

macro_rules! operators {
    ($($trait:ident $method:ident $variant:ident)*) => {$(
        impl<'a> std::ops::$trait for V<'a> {
            type Output = V<'a>;
            fn $method(self, other: V<'a>) -> V<'a> { self.apply2(Op::Binary(Binary::$variant), other) }
        }
        impl<'a> std::ops::$trait<f64> for V<'a> {
            type Output = V<'a>;
            fn $method(self, other: f64) -> V<'a> { std::ops::$trait::$method(self, self.number(other)) }
        }
        impl<'a> std::ops::$trait<V<'a>> for f64 {
            type Output = V<'a>;
            fn $method(self, other: V<'a>) -> V<'a> { std::ops::$trait::$method(other.number(self), other) }
        }
    )*};
}
operators!(Add add Add Sub sub Sub Mul mul Mul Div div Div);

impl<'a> std::ops::Neg for V<'a> {
    type Output = V<'a>;
    fn neg(self) -> V<'a> {
        self.apply(Op::Unary(Unary::Neg))
    }
}

/// A builder that computes nothing: it knows metas and notes which of the first `given` values were used as operands.
pub struct Probe {
    metas: RefCell<Vec<Meta>>,
    given: usize,
    used: Cell<u64>,
}

impl Probe {
    /// A probe whose first values have these metas; at most 64 of them are watched.
    pub fn new(given: Vec<Meta>) -> Probe {
        Probe { given: given.len(), metas: RefCell::new(given), used: Cell::new(0) }
    }

    /// Which of the given values were used, as bits.
    pub fn used(&self) -> u64 {
        self.used.get()
    }
}

impl Build for Probe {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        for &key in ins {
            if (key as usize) < self.given.min(64) {
                self.used.set(self.used.get() | 1 << key);
            }
        }
        let mut metas = self.metas.borrow_mut();
        let operands: SmallVec<[Meta; 4]> = ins.iter().map(|&key| metas[key as usize]).collect();
        let outs = infer(&op, &operands)
            .unwrap_or_else(|e| panic!("a rule wrote an operation that does not fit: {e}"));
        outs.into_iter()
            .map(|meta| {
                metas.push(meta);
                metas.len() as u32 - 1
            })
            .collect()
    }

    fn meta(&self, value: u32) -> Meta {
        self.metas.borrow()[value as usize]
    }
}
