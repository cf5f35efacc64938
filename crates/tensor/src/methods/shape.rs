//! The same elements under another shape.

use super::{Axes, Dimensions};
use crate::{Shape, Tensor};
use kiln_device::method;
use kiln_ir::{AxisSet, Dims, MAX_RANK, Move, Op};

/// # Shapes and axes
impl Tensor {
    /// The same elements in row-major order under another shape. One extent may be -1: what is left over.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::arange(0, 12, 1, &Device::cpu());
    /// assert_eq!(x.reshape([3, -1]).shape()[..], [3, 4]);
    /// ```
    #[doc(alias("view"))]
    #[track_caller]
    pub fn reshape(&self, shape: impl Into<Dimensions>) -> Tensor {
        let shape = shape.into().fill("reshape", self);
        if shape == self.shape() {
            return self.clone();
        }
        Tensor::one(Op::Move(Move::Reshape(shape)), &[self])
    }

    /// The axes in another order: axis `i` of the result is axis `order[i]` of this tensor.
    #[doc(alias("transpose"))]
    #[track_caller]
    pub fn permute(&self, order: impl Into<Axes>) -> Tensor {
        let order = order.into().list("permute", self);
        assert!(
            order.len() == self.rank(),
            "permute: {order:?} does not order the axes of shape {:?}",
            self.shape()
        );
        if order.iter().enumerate().all(|(i, &axis)| i == axis) {
            return self.clone();
        }
        Tensor::one(Op::Move(Move::Permute(Dims::collect(order.iter().map(|&axis| axis as u8)))), &[self])
    }

    /// Two axes exchanged.
    #[track_caller]
    pub fn transpose(&self, a: isize, b: isize) -> Tensor {
        let _method = method("transpose");
        let (a, b) = (self.any_axis("transpose", a), self.any_axis("transpose", b));
        if a == b {
            return self.clone();
        }
        let mut order = Dims::collect(0..self.rank() as u8);
        order.swap(a, b);
        Tensor::one(Op::Move(Move::Permute(order)), &[self])
    }

    /// The last two axes exchanged; a tensor of a lower rank than 2 as it is.
    #[track_caller]
    pub fn t(&self) -> Tensor {
        let _method = method("t");
        if self.rank() < 2 { self.clone() } else { self.transpose(-1, -2) }
    }

    /// Axes of extent 1 stretched and new leading axes added. An extent of -1 stays as it is.
    #[doc(alias("broadcast"))]
    #[track_caller]
    pub fn expand(&self, shape: impl Into<Dimensions>) -> Tensor {
        let _method = method("expand");
        let dimensions = shape.into();
        let old = self.shape();
        let lead = dimensions.items().len().checked_sub(old.len());
        let shape = dimensions.shape("expand", |i| match dimensions.items()[i] {
            -1 => old.get(i.checked_sub(lead?)?).copied(),
            _ => None,
        });
        self.broadcast_to(shape)
    }

    /// Axes of extent 1 stretched and new leading axes added, to `shape`.
    #[track_caller]
    pub fn broadcast_to(&self, shape: impl Into<Shape>) -> Tensor {
        let _method = method("broadcast_to");
        let shape = shape.into();
        if shape == self.shape() {
            return self.clone();
        }
        Tensor::one(Op::Move(Move::Expand(shape)), &[self])
    }

    /// Without an axis, if its extent is 1; otherwise as it is.
    #[track_caller]
    pub fn squeeze(&self, axis: isize) -> Tensor {
        let _method = method("squeeze");
        let axis = self.any_axis("squeeze", axis);
        match self.shape().get(axis) {
            Some(1) => self.reshape(self.shape().removed(axis)),
            _ => self.clone(),
        }
    }

    /// Without any axis of extent 1.
    #[doc(alias("squeeze"))]
    #[track_caller]
    pub fn squeeze_all(&self) -> Tensor {
        let _method = method("squeeze_all");
        self.reshape(Shape::collect(self.shape().iter().copied().filter(|&d| d != 1)))
    }

    /// With a new axis of extent 1 at a place, which counts from behind the last axis if negative.
    #[doc(alias("expand_dims"))]
    #[track_caller]
    pub fn unsqueeze(&self, axis: isize) -> Tensor {
        let _method = method("unsqueeze");
        let rank = self.rank();
        let at = crate::tensor::resolve_axis("unsqueeze", axis, rank + 1, &self.shape());
        match self.shape().inserted(at, 1) {
            Some(shape) => self.reshape(shape),
            None => panic!("unsqueeze: rank {} is above the highest supported, {MAX_RANK}", rank + 1),
        }
    }

    /// The axes from `start` to `end`, both included, as one. Rank 0 becomes rank 1.
    #[doc(alias("ravel"))]
    #[track_caller]
    pub fn flatten(&self, start: isize, end: isize) -> Tensor {
        let _method = method("flatten");
        let (start, end) = (self.any_axis("flatten", start), self.any_axis("flatten", end));
        assert!(start <= end, "flatten: axis {start} is behind axis {end} of shape {:?}", self.shape());
        if self.rank() == 0 {
            return self.lifted();
        }
        let shape = self.shape();
        let middle = shape[start..=end].iter().product();
        self.reshape(Shape::collect(
            shape[..start].iter().copied().chain([middle]).chain(shape[end + 1..].iter().copied()),
        ))
    }

    /// Reversed along axes.
    #[track_caller]
    pub fn flip(&self, axes: impl Into<Axes>) -> Tensor {
        let axes = axes.into().list("flip", self);
        let mut set = AxisSet::default();
        for &axis in &axes {
            assert!(!set.has(axis), "flip: axis {axis} is named twice");
            set = set.with(axis);
        }
        if self.rank() == 0 || set.is_empty() {
            return self.clone();
        }
        Tensor::one(Op::Move(Move::Flip(set)), &[self])
    }
}
