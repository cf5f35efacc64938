//! Convolutions and pooling, and what they give.

use super::{ConvKind, PoolKind};
use crate::infer::Infer;
use crate::{DType, Meta, OpError};
use smallvec::{SmallVec, smallvec};

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

impl Infer<'_> {
    pub(crate) fn conv(&self, kind: ConvKind, conv: &Conv) -> Result<Meta, OpError> {
        let [p, q] = self.two()?;
        if p.dtype != q.dtype {
            return Err(OpError::DTypeMismatch { op: self.name(), lhs: p.dtype, rhs: q.dtype });
        }
        let rank = p.shape.len();
        if !(3..=5).contains(&rank) || q.shape.len() != rank {
            return self.mismatch(&p.shape, &q.shape);
        }
        let groups = conv.groups as usize;
        if groups == 0 || conv.stride[..rank - 2].contains(&0) || conv.dilation[..rank - 2].contains(&0) {
            return Err(OpError::Attribute {
                op: self.name(),
                reason: "stride, dilation and groups are at least 1",
            });
        }
        let mut out = p;
        let axis =
            |i: usize| (conv.stride[i], conv.low[i], conv.high[i], conv.dilation[i], conv.extent[i] as usize);
        match kind {
            ConvKind::Forward => {
                let fits =
                    p.shape[1] % groups == 0 && q.shape[0] % groups == 0 && p.shape[1] / groups == q.shape[1];
                if !fits {
                    return self.mismatch(&p.shape, &q.shape);
                }
                out.shape[1] = q.shape[0];
                for i in 0..rank - 2 {
                    let (stride, low, high, dilation, _) = axis(i);
                    match windows(p.shape[i + 2], q.shape[i + 2], stride, low, high, dilation) {
                        Some(n) => out.shape[i + 2] = n,
                        None => return self.mismatch(&p.shape, &q.shape),
                    }
                }
            }
            ConvKind::Input => {
                let channels = q.shape[1].checked_mul(groups);
                let fits = p.shape[1] == q.shape[0] && q.shape[0] % groups == 0;
                let Some(channels) = channels.filter(|_| fits) else {
                    return self.mismatch(&p.shape, &q.shape);
                };
                out.shape[1] = channels;
                for i in 0..rank - 2 {
                    let (stride, low, high, dilation, extent) = axis(i);
                    if !reaches(extent, q.shape[i + 2], p.shape[i + 2], stride, low, high, dilation) {
                        return self.mismatch(&p.shape, &q.shape);
                    }
                    out.shape[i + 2] = extent;
                }
            }
            ConvKind::Weight => {
                let fits = p.shape[0] == q.shape[0] && p.shape[1] % groups == 0 && q.shape[1] % groups == 0;
                if !fits {
                    return self.mismatch(&p.shape, &q.shape);
                }
                out.shape[0] = q.shape[1];
                out.shape[1] = p.shape[1] / groups;
                for i in 0..rank - 2 {
                    let (stride, low, high, dilation, extent) = axis(i);
                    if !reaches(p.shape[i + 2], extent, q.shape[i + 2], stride, low, high, dilation) {
                        return self.mismatch(&p.shape, &q.shape);
                    }
                    out.shape[i + 2] = extent;
                }
            }
        }
        Ok(out)
    }

    pub(crate) fn pool(&self, kind: PoolKind, pool: &Pool) -> Result<SmallVec<[Meta; 2]>, OpError> {
        let x = self.one()?;
        let rank = x.shape.len();
        if !(3..=5).contains(&rank) {
            return self.shape(&x.shape, "pooling takes [N, C, ..] with one to three spatial axes");
        }
        let zero = |t: &[u32; 3]| t[..rank - 2].contains(&0);
        if zero(&pool.kernel) || zero(&pool.stride) || zero(&pool.dilation) {
            return Err(OpError::Attribute {
                op: self.name(),
                reason: "kernel, stride and dilation are at least 1",
            });
        }
        let mut out = x;
        for i in 0..rank - 2 {
            let (stride, low, high, dilation) = (pool.stride[i], pool.low[i], pool.high[i], pool.dilation[i]);
            let kernel = pool.kernel[i] as usize;
            let length = x.shape[i + 2];
            out.shape[i + 2] = match kind {
                PoolKind::Max | PoolKind::Sum => match windows(length, kernel, stride, low, high, dilation) {
                    Some(n) => n,
                    None => return self.shape(&x.shape, "the window does not fit"),
                },
                PoolKind::SumInput => {
                    if !reaches(pool.extent[i] as usize, kernel, length, stride, low, high, dilation) {
                        return self.shape(&x.shape, "the windows do not fit the extent");
                    }
                    pool.extent[i] as usize
                }
            };
        }
        match kind {
            PoolKind::Max => {
                // Every window must hold at least one real element, or its maximum would have no index.
                let lone = (0..rank - 2).any(|i| {
                    let n = out.shape[i + 2] as u64;
                    let last = n.saturating_sub(1).saturating_mul(pool.stride[i] as u64);
                    let length = x.shape[i + 2] as u64;
                    let reach = (pool.kernel[i] as u64 - 1).saturating_mul(pool.dilation[i] as u64);
                    let low = pool.low[i] as u64;
                    // Taps further apart than the axis is long may step over it, if they start in the low padding.
                    let strides_over = low > 0 && length < pool.dilation[i] as u64;
                    n > 0 && (low > reach || last >= length.saturating_add(low) || strides_over)
                });
                if lone {
                    return self.shape(&x.shape, "a window lies wholly in the padding");
                }
                Ok(smallvec![out, Meta { dtype: DType::I64, shape: out.shape }])
            }
            PoolKind::Sum | PoolKind::SumInput => Ok(smallvec![out]),
        }
    }
}

/// How many windows of `kernel` fit a padded axis, or `None` if none does.
fn windows(length: usize, kernel: usize, stride: u32, low: u32, high: u32, dilation: u32) -> Option<usize> {
    let padded = length.checked_add(low as usize)?.checked_add(high as usize)?;
    let span = kernel.checked_sub(1)?.checked_mul(dilation as usize)?.checked_add(1)?;
    Some(padded.checked_sub(span)? / stride as usize + 1)
}

/// Whether `count` windows of `kernel` stay within a padded axis of `length`.
fn reaches(
    length: usize,
    kernel: usize,
    count: usize,
    stride: u32,
    low: u32,
    high: u32,
    dilation: u32,
) -> bool {
    if count == 0 {
        return true;
    }
    windows(length, kernel, stride, low, high, dilation).is_some_and(|n| count <= n)
}
