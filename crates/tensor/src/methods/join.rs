//! Several tensors into one, one into several, and one many times over.

use super::Axes;
use super::slice::slice;
use crate::{Shape, Tensor};
use kiln_device::method;
use kiln_ir::{Move, Op, promote};
use std::borrow::Borrow;

/// # Joined, split and repeated
impl Tensor {
    /// Tensors one after another along an axis, in the dtype they meet in. Empty tensors of rank 1 fit everything.
    ///
    /// # Panics
    /// If there are none.
    #[doc(alias("concat", "concatenate"))]
    #[track_caller]
    pub fn cat<T: Borrow<Tensor>>(parts: &[T], axis: isize) -> Tensor {
        let _method = method("cat");
        let Some(dtype) = parts.iter().map(|t| t.borrow().dtype().unpacked()).reduce(promote) else {
            panic!("cat: no tensors")
        };
        let fits_all = |t: &Tensor| t.shape()[..] == [0];
        let like = parts.iter().map(T::borrow).find(|t| !fits_all(t)).unwrap_or(parts[0].borrow());
        let axis = like.axis("cat", axis);
        let mut fitting = Vec::with_capacity(parts.len());
        for part in parts.iter().map(T::borrow) {
            if like.rank() == 1 || !fits_all(part) {
                fitting.push(part.to_dtype(dtype));
            }
        }
        match &fitting[..] {
            [part] => part.clone(),
            parts => Tensor::one(Op::Move(Move::Cat { axis: axis as u8 }), &parts.iter().collect::<Vec<_>>()),
        }
    }

    /// Tensors of one shape along a new axis.
    ///
    /// # Panics
    /// If there are none, or their shapes differ.
    #[track_caller]
    pub fn stack<T: Borrow<Tensor>>(parts: &[T], axis: isize) -> Tensor {
        let _method = method("stack");
        let Some(first) = parts.first().map(|t| t.borrow().shape()) else { panic!("stack: no tensors") };
        if let Some(other) = parts.iter().map(|t| t.borrow().shape()).find(|shape| *shape != first) {
            panic!("stack: shapes {first:?} and {other:?} do not fit together");
        }
        let axis = crate::tensor::resolve_axis("stack", axis, first.len() + 1, &first) as isize;
        let mut rows = Vec::with_capacity(parts.len());
        for part in parts {
            rows.push(part.borrow().unsqueeze(axis));
        }
        Tensor::cat(&rows, axis)
    }

    /// Pieces of `size` along an axis; the last may be shorter.
    #[track_caller]
    pub fn split(&self, size: usize, axis: isize) -> Vec<Tensor> {
        let _method = method("split");
        let at = self.axis("split", axis);
        let extent = self.shape()[at];
        assert!(
            size > 0 || extent == 0,
            "split: pieces of 0 never fill axis {axis} of shape {:?}",
            self.shape()
        );
        let count = extent.div_ceil(size.max(1)).max(1);
        let mut pieces = Vec::with_capacity(count);
        for i in 0..count {
            pieces.push(slice(self, at, i * size, ((i + 1) * size).min(extent), 1));
        }
        pieces
    }

    /// Pieces of these sizes along an axis.
    #[doc(alias("split", "split_with_sizes"))]
    #[track_caller]
    pub fn split_sizes(&self, sizes: &[usize], axis: isize) -> Vec<Tensor> {
        let _method = method("split_sizes");
        let at = self.axis("split", axis);
        let fits = sizes.iter().sum::<usize>() == self.shape()[at];
        assert!(fits, "split: sizes {sizes:?} do not fill axis {axis} of shape {:?}", self.shape());
        let mut pieces = Vec::with_capacity(sizes.len());
        let mut start = 0;
        for size in sizes {
            pieces.push(slice(self, at, start, start + size, 1));
            start += size;
        }
        pieces
    }

    /// At most `count` pieces of one size along an axis; the last may be shorter.
    #[track_caller]
    pub fn chunk(&self, count: usize, axis: isize) -> Vec<Tensor> {
        let _method = method("chunk");
        assert!(count > 0, "chunk: into 0 pieces");
        let extent = self.shape()[self.axis("chunk", axis)];
        self.split(extent.div_ceil(count).max(1), axis)
    }

    /// The tensor many times over along each axis; more numbers than axes add leading axes.
    #[doc(alias("tile"))]
    #[track_caller]
    pub fn repeat(&self, times: impl Into<Shape>) -> Tensor {
        let _method = method("repeat");
        let times = times.into();
        let lead = times.len().checked_sub(self.rank());
        let Some(lead) = lead else {
            panic!("repeat: {times:?} has fewer numbers than shape {:?} has axes", self.shape())
        };
        let shape = Shape::collect(std::iter::repeat_n(1, lead).chain(self.shape().iter().copied()));
        let (mut out, mut now) = (self.reshape(shape), shape);
        for (axis, &n) in times.iter().enumerate().filter(|&(_, &n)| n != 1) {
            // [before, d, after] is stretched as [before, n, d * after]: the rank does not grow with the axes.
            let before: usize = now[..axis].iter().product();
            let rest: usize = now[axis..].iter().product();
            now[axis] *= n;
            out = out.reshape([before, 1, rest]).broadcast_to([before, n, rest]).reshape(now);
        }
        out
    }

    /// Moved by `shifts` along `axes`, each; what leaves at an end comes in at the other. Without axes the tensor is
    /// rolled as if it were flat.
    #[track_caller]
    pub fn roll(&self, shifts: &[isize], axes: &[isize]) -> Tensor {
        let _method = method("roll");
        if axes.is_empty() {
            assert!(shifts.len() == 1, "roll: {} shifts without axes", shifts.len());
            return self.reshape([self.numel()]).roll(shifts, &[0]).reshape(self.shape());
        }
        assert!(shifts.len() == axes.len(), "roll: {} shifts along {} axes", shifts.len(), axes.len());
        let mut out = self.clone();
        for (axis, &shift) in Axes::new(axes).list("roll", self).into_iter().zip(shifts) {
            let extent = self.shape().get(axis).copied().unwrap_or(1);
            if extent < 2 {
                continue;
            }
            let first = extent - shift.rem_euclid(extent as isize) as usize;
            if first < extent {
                let (head, tail) = (slice(&out, axis, 0, first, 1), slice(&out, axis, first, extent, 1));
                out = Tensor::cat(&[tail, head], axis as isize);
            }
        }
        out
    }
}
