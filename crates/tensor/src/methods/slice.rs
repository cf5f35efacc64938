//! Parts of a tensor: ranges, steps and single indices along its axes.

use crate::Tensor;
use kiln_device::method;
use kiln_ir::{AxisSet, Move, Op};
use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

/// # Parts
impl Tensor {
    /// The elements from `start` on, `length` of them, along an axis. A negative start counts from the end.
    #[doc(alias("slice"))]
    #[track_caller]
    pub fn narrow(&self, axis: isize, start: isize, length: usize) -> Tensor {
        let _method = method("narrow");
        let at = self.axis("narrow", axis);
        let extent = self.shape()[at];
        let from = if start < 0 { start + extent as isize } else { start };
        let fits = from >= 0 && (from as usize).checked_add(length).is_some_and(|end| end <= extent);
        assert!(
            fits,
            "narrow: {length} elements from {start} do not lie within axis {axis} of shape {:?}",
            self.shape()
        );
        slice(self, at, from as usize, from as usize + length, 1)
    }

    /// Every `step`-th element of `start..end` along an axis. Bounds count from the end if negative and are held to
    /// the axis, as in Python; an empty range gives an empty axis.
    #[track_caller]
    pub fn slice(&self, axis: isize, start: isize, end: isize, step: usize) -> Tensor {
        let _method = method("slice");
        let axis = self.axis("slice", axis);
        let (start, end) = bounds(self.shape()[axis], Some(start), Some(end));
        slice(self, axis, start, end, step)
    }

    /// A copy with every `step`-th element of `start..end` along an axis replaced by `value`, which broadcasts and
    /// takes this tensor's dtype.
    #[doc(alias("slice_scatter", "__setitem__"))]
    #[track_caller]
    pub fn slice_assign(&self, axis: isize, start: isize, end: isize, step: usize, value: &Tensor) -> Tensor {
        let _method = method("slice_assign");
        let axis = self.axis("slice_assign", axis);
        assert!(step > 0, "slice_assign: the step is 0");
        let (start, end) = bounds(self.shape()[axis], Some(start), Some(end));
        let mut shape = self.shape();
        shape[axis] = (end - start).div_ceil(step);
        let value = value.to_dtype(self.dtype().unpacked()).broadcast_to(shape);
        Tensor::one(Op::Move(Move::Assign { axis: axis as u8, start, end, step }), &[self, &value])
    }

    /// The elements at one index of an axis, without that axis. A negative index counts from the end.
    #[track_caller]
    pub fn select(&self, axis: isize, index: isize) -> Tensor {
        let _method = method("select");
        let at = self.axis("select", axis);
        let from = self.place("select", at, index);
        slice(self, at, from, from + 1, 1).reshape(self.shape().removed(at))
    }

    /// A part of the tensor: one [`TensorIndex`] for each leading axis, as a tuple. An integer drops its axis, a range
    /// keeps it, [`step_by`] adds a step. Tensors of integers are read together: they broadcast, and their common shape
    /// stands in the place of their axes if these are neighbours, else before all others; negative ones count from the end.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::arange(0, 24, 1, &Device::cpu()).reshape([2, 3, 4]);
    /// assert_eq!(x.index((-1, 1.., step_by(.., 2))).to_vec::<i64>().unwrap(), [16, 18, 20, 22]);
    /// assert_eq!(x.index(0).shape()[..], [3, 4]);
    /// let last = Tensor::from_slice(&[-1i64, 0], [2], &Device::cpu());
    /// assert_eq!(x.index((&last, 0, &last)).to_vec::<i64>().unwrap(), [15, 0]);
    /// ```
    #[doc(alias("slice", "__getitem__"))]
    #[track_caller]
    pub fn index(&self, indices: impl TensorIndices) -> Tensor {
        let _method = method("index");
        let (mut out, mut dropped, mut picks) = (self.clone(), AxisSet::default(), Vec::new());
        let indices = indices.list();
        assert!(indices.len() <= self.rank(), "index: {} indices of shape {:?}", indices.len(), self.shape());
        for (axis, part) in indices.into_iter().enumerate() {
            match part {
                TensorIndex::At(index) => {
                    let at = self.place("index", axis, index);
                    out = slice(&out, axis, at, at + 1, 1);
                    dropped = dropped.with(axis);
                }
                TensorIndex::Slice { start, end, step } => {
                    let (start, end) = bounds(self.shape()[axis], start, end);
                    out = slice(&out, axis, start, end, step);
                }
                TensorIndex::Tensor(index) => picks.push((axis - dropped.len(), index)),
            }
        }
        let shape = out.shape().reduced(dropped, false);
        let out = out.reshape(shape);
        if picks.is_empty() { out } else { super::advanced::read(&out, &picks) }
    }

    /// An index of an axis, counted from the start.
    #[track_caller]
    fn place(&self, op: &str, axis: usize, index: isize) -> usize {
        let extent = self.shape()[axis] as isize;
        let at = if index < 0 { index + extent } else { index };
        let fits = (0..extent).contains(&at);
        assert!(fits, "{op}: index {index} is out of range for axis {axis} of shape {:?}", self.shape());
        at as usize
    }
}

/// `start..end` by `step`, which lie within the axis.
#[track_caller]
pub(super) fn slice(x: &Tensor, axis: usize, start: usize, end: usize, step: usize) -> Tensor {
    if (start, end, step) == (0, x.shape()[axis], 1) {
        return x.clone();
    }
    Tensor::one(Op::Move(Move::Slice { axis: axis as u8, start, end, step }), &[x])
}

/// Python's bounds of a slice: negative ones count from the end, all are held to the axis.
fn bounds(extent: usize, start: Option<isize>, end: Option<isize>) -> (usize, usize) {
    let held = |bound: isize| match bound < 0 {
        true => extent.saturating_sub(bound.unsigned_abs()),
        false => (bound as usize).min(extent),
    };
    let (start, end) = (start.map_or(0, held), end.map_or(extent, held));
    (start, end.max(start))
}

/// What is taken of an axis.
#[derive(Clone)]
pub enum TensorIndex {
    /// One index; the axis is dropped. Negative ones count from the end.
    At(isize),
    /// Every `step`-th element of a range, with Python's meaning of negative and missing bounds.
    Slice {
        /// First index.
        start: Option<isize>,
        /// One past the last index.
        end: Option<isize>,
        /// Distance, at least 1.
        step: usize,
    },
    /// The indices that a tensor of integers holds.
    Tensor(Tensor),
}

impl From<&Tensor> for TensorIndex {
    fn from(index: &Tensor) -> TensorIndex {
        TensorIndex::Tensor(index.clone())
    }
}

impl TensorIndices for &Tensor {
    fn list(self) -> Vec<TensorIndex> {
        vec![self.into()]
    }
}

/// Every `step`-th element of a range.
///
/// # Panics
/// If the step is 0, or `range` is not a range.
#[track_caller]
pub fn step_by(range: impl Into<TensorIndex>, step: usize) -> TensorIndex {
    assert!(step > 0, "step_by: the step is 0");
    match range.into() {
        TensorIndex::Slice { start, end, step: inner } => {
            TensorIndex::Slice { start, end, step: inner * step }
        }
        TensorIndex::At(index) => panic!("step_by: {index} is not a range"),
        TensorIndex::Tensor(index) => panic!("step_by: a tensor of shape {:?} is not a range", index.shape()),
    }
}

/// One or several [`TensorIndex`]s: an integer, a range, [`step_by`], a tensor of integers, or a tuple of those.
pub trait TensorIndices {
    /// The indices, for the leading axes in order.
    fn list(self) -> Vec<TensorIndex>;
}

impl TensorIndices for &[TensorIndex] {
    fn list(self) -> Vec<TensorIndex> {
        self.to_vec()
    }
}

impl TensorIndices for TensorIndex {
    fn list(self) -> Vec<TensorIndex> {
        vec![self]
    }
}

impl From<RangeFull> for TensorIndex {
    fn from(_: RangeFull) -> TensorIndex {
        TensorIndex::Slice { start: None, end: None, step: 1 }
    }
}

impl TensorIndices for RangeFull {
    fn list(self) -> Vec<TensorIndex> {
        vec![self.into()]
    }
}

/// One past an included end; past -1 there is nothing but the end of the axis.
fn past(end: isize) -> Option<isize> {
    if end == -1 { None } else { Some(end + 1) }
}

macro_rules! indices {
    ($($t:ty)*) => {$(
        indices!(@one $t, |i| TensorIndex::At(i as isize));
        indices!(@one Range<$t>, |r| TensorIndex::Slice { start: Some(r.start as isize), end: Some(r.end as isize), step: 1 });
        indices!(@one RangeFrom<$t>, |r| TensorIndex::Slice { start: Some(r.start as isize), end: None, step: 1 });
        indices!(@one RangeTo<$t>, |r| TensorIndex::Slice { start: None, end: Some(r.end as isize), step: 1 });
        indices!(@one RangeInclusive<$t>, |r| TensorIndex::Slice { start: Some(*r.start() as isize), end: past(*r.end() as isize), step: 1 });
        indices!(@one RangeToInclusive<$t>, |r| TensorIndex::Slice { start: None, end: past(r.end as isize), step: 1 });
    )*};
    (@one $t:ty, |$x:ident| $index:expr) => {
        impl From<$t> for TensorIndex {
            fn from($x: $t) -> TensorIndex {
                $index
            }
        }
        impl TensorIndices for $t {
            fn list(self) -> Vec<TensorIndex> {
                vec![self.into()]
            }
        }
    };
}
indices!(isize i32 usize);

macro_rules! tuples {
    ($($($name:ident)*;)*) => {$(
        impl<$($name: Into<TensorIndex>),*> TensorIndices for ($($name,)*) {
            #[allow(non_snake_case)]
            fn list(self) -> Vec<TensorIndex> {
                let ($($name,)*) = self;
                vec![$($name.into()),*]
            }
        }
    )*};
}
tuples! {
    A; A B; A B C; A B C D; A B C D E; A B C D E F; A B C D E F G; A B C D E F G H;
}
