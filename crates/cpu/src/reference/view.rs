//! Strided readings of a row-major array: how rearrangements, broadcasting and reductions find their elements.

use crate::{memory, stop};
use kiln_ir::{AxisSet, Dims, MAX_RANK, Shape};
use std::borrow::Cow;

/// Where each element of a shape lies in an array.
#[derive(Clone, Copy, Debug)]
pub struct View {
    start: isize,
    /// Extents.
    pub shape: Shape,
    /// Distance in elements along each axis.
    pub strides: Dims<isize>,
}

impl View {
    /// A whole array.
    pub fn whole(shape: &Shape) -> View {
        View { start: 0, shape: *shape, strides: shape.contiguous_strides() }
    }

    /// Axis `i` becomes axis `order[i]`; axes may be left out if they are read at index 0 only.
    pub fn permuted(self, order: impl IntoIterator<Item = usize> + Clone) -> View {
        View {
            start: self.start,
            shape: Dims::collect(order.clone().into_iter().map(|i| self.shape[i])),
            strides: Dims::collect(order.into_iter().map(|i| self.strides[i])),
        }
    }

    /// Broadcast to a larger shape.
    pub fn expanded(self, shape: &Shape) -> View {
        let lead = shape.len() - self.shape.len();
        let stride = |i: usize| match i.checked_sub(lead) {
            Some(own) if self.shape[own] == shape[i] => self.strides[own],
            _ => 0,
        };
        View { start: self.start, shape: *shape, strides: Dims::collect((0..shape.len()).map(stride)) }
    }

    /// Every `step`-th index of `start..end` along an axis.
    pub fn cut(mut self, axis: usize, start: usize, end: usize, step: usize) -> View {
        self.start += start as isize * self.strides[axis];
        self.shape[axis] = (end - start).div_ceil(step);
        // A step beyond the axis leaves one element, whose stride is never used.
        self.strides[axis] = self.strides[axis].wrapping_mul(step as isize);
        self
    }

    /// Reversed along axes.
    pub fn flipped(mut self, axes: AxisSet) -> View {
        for axis in axes.iter() {
            self.start += self.strides[axis] * (self.shape[axis] as isize - 1).max(0);
            self.strides[axis] = -self.strides[axis];
        }
        self
    }

    /// Calls `f` with the offset of each element, in row-major order.
    pub fn each(&self, mut f: impl FnMut(usize)) {
        if self.shape.contains(&0) {
            return;
        }
        let outer = self.shape.len().saturating_sub(1);
        let (length, step) = match self.shape.last() {
            Some(&length) => (length, self.strides[outer]),
            None => (1, 0),
        };
        let mut index = [0usize; MAX_RANK];
        let mut at = self.start;
        loop {
            stop::check();
            for i in 0..length as isize {
                f((at + i * step) as usize);
            }
            let mut axis = outer;
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                index[axis] += 1;
                at = at.wrapping_add(self.strides[axis]);
                if index[axis] < self.shape[axis] {
                    break;
                }
                at = at.wrapping_sub(self.strides[axis].wrapping_mul(self.shape[axis] as isize));
                index[axis] = 0;
            }
        }
    }

    /// The offset of each element, in row-major order.
    pub fn offsets(&self) -> Vec<usize> {
        let mut out = memory::with_capacity(self.shape.numel());
        self.each(|at| out.push(at));
        out
    }

    /// The elements of `x` that the view reads, in row-major order; `x` itself where that is all of it in its order.
    pub fn read<'a, T: Copy>(&self, x: &'a [T]) -> Cow<'a, [T]> {
        let n = self.shape.numel();
        let plain = (0..self.shape.len())
            .all(|i| self.shape[i] == 1 || self.strides[i] == self.shape.contiguous_strides()[i]);
        if n == x.len() && self.start == 0 && plain {
            return Cow::Borrowed(x);
        }
        let mut out = memory::with_capacity(n);
        self.each(|at| out.push(x[at]));
        Cow::Owned(out)
    }
}

/// How a shape falls apart around an axis: the number of outer indices, the axis's extent, the number of inner indices.
pub fn around(shape: &Shape, axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}
