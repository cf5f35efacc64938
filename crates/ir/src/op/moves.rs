//! Rearrangements and what they give.

use super::AxisSet;
use crate::infer::Infer;
use crate::{Dims, Meta, OpError, Shape, broadcast};

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
        /// The sliced axis.
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
        /// The sliced axis.
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

impl Infer<'_> {
    pub(crate) fn moved(&self, op: &Move) -> Result<Meta, OpError> {
        let sliced = |x: &Meta, axis: u8, start: usize, end: usize, step: usize| -> Result<Meta, OpError> {
            let axis = self.axis(axis, &x.shape)?;
            let length = x.shape[axis];
            if step == 0 || start > end || end > length {
                return Err(OpError::Range { op: self.name(), start, end, step, length });
            }
            let mut out = *x;
            out.shape[axis] = (end - start).div_ceil(step);
            Ok(out)
        };
        match op {
            Move::Reshape(shape) => {
                let x = self.one()?;
                match (shape.checked_numel(), x.shape.checked_numel()) {
                    (None, _) => Err(OpError::TooLarge { shape: *shape }),
                    (_, None) => Err(OpError::TooLarge { shape: x.shape }),
                    (Some(n), Some(m)) if n == m => Ok(Meta { dtype: x.dtype, shape: *shape }),
                    (Some(_), Some(_)) => self.mismatch(&x.shape, shape),
                }
            }
            Move::Permute(order) => {
                let x = self.one()?;
                let mut seen = AxisSet::default();
                let fits = order.len() == x.shape.len()
                    && order.iter().all(|&p| {
                        let new = (p as usize) < x.shape.len() && !seen.has(p as usize);
                        seen = if new { seen.with(p as usize) } else { seen };
                        new
                    });
                if !fits {
                    return self.shape(&x.shape, "the order is not a permutation of its axes");
                }
                Ok(Meta { dtype: x.dtype, shape: Dims::collect(order.iter().map(|&p| x.shape[p as usize])) })
            }
            Move::Expand(shape) => {
                let x = self.one()?;
                if broadcast(&x.shape, shape) != Some(*shape) {
                    return self.mismatch(&x.shape, shape);
                }
                Ok(Meta { dtype: x.dtype, shape: *shape })
            }
            Move::Slice { axis, start, end, step } => {
                let x = self.one()?;
                sliced(&x, *axis, *start, *end, *step)
            }
            Move::Assign { axis, start, end, step } => {
                let [x, v] = self.two()?;
                self.same_plain(&x, &v)?;
                self.same_shape(&sliced(&x, *axis, *start, *end, *step)?.shape, &v.shape)?;
                Ok(x)
            }
            Move::Flip(axes) => {
                let x = self.one()?;
                self.axes(*axes, &x.shape)?;
                Ok(x)
            }
            Move::Cat { axis } => {
                let Some((first, rest)) = self.ins.split_first() else { return self.arity() };
                let axis = self.axis(*axis, &first.shape)?;
                let mut out = *first;
                for x in rest {
                    self.same_plain(first, x)?;
                    let length = out.shape[axis].checked_add(*x.shape.get(axis).unwrap_or(&0));
                    let mut like = x.shape;
                    if like.len() == out.shape.len() {
                        like[axis] = first.shape[axis];
                    }
                    if like != first.shape {
                        return self.mismatch(&first.shape, &x.shape);
                    }
                    match length {
                        Some(length) => out.shape[axis] = length,
                        None => return Err(OpError::TooLarge { shape: out.shape }),
                    }
                }
                Ok(out)
            }
        }
    }
}
