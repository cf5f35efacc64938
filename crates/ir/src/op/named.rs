//! Composites: what they give, and what they mean in primitives. A device that does not claim one runs the latter.

use super::{AxisSet, Op, Real, ReduceKind};
use crate::infer::Infer;
use crate::{DType, Meta, OpError, V, broadcast};
use smallvec::{SmallVec, smallvec};

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

impl Infer<'_> {
    pub(crate) fn named(&self, op: &Named) -> Result<Meta, OpError> {
        match op {
            Named::Softmax { axis } | Named::LogSoftmax { axis } => {
                let x = self.one()?;
                self.axis(*axis, &x.shape)?;
                Ok(x)
            }
            Named::LayerNorm { axes, .. } | Named::RmsNorm { axes, .. } => {
                let Some((x, rest)) = self.ins.split_first() else { return self.arity() };
                let n = *axes as usize;
                if n == 0 || n > x.shape.len() {
                    return Err(OpError::Axis { op: self.name(), axis: n as i64, shape: x.shape });
                }
                for w in rest {
                    if w.dtype != x.dtype {
                        return Err(OpError::DTypeMismatch { op: self.name(), lhs: x.dtype, rhs: w.dtype });
                    }
                    if w.shape[..] != x.shape[x.shape.len() - n..] {
                        return self.mismatch(&x.shape, &w.shape);
                    }
                }
                Ok(*x)
            }
            Named::Attention { .. } => {
                let (q, k, v) = match self.ins {
                    [q, k, v] | [q, k, v, _] => (q, k, v),
                    _ => return self.arity(),
                };
                self.same_plain(q, k)?;
                self.same_plain(q, v)?;
                let rank = q.shape.len();
                let fits = rank >= 2
                    && k.shape.len() == rank
                    && v.shape.len() == rank
                    && q.shape[..rank - 2] == k.shape[..rank - 2]
                    && q.shape[..rank - 2] == v.shape[..rank - 2]
                    && q.shape[rank - 1] == k.shape[rank - 1]
                    && k.shape[rank - 2] == v.shape[rank - 2];
                if !fits {
                    return self.mismatch(&q.shape, if q.shape == k.shape { &v.shape } else { &k.shape });
                }
                if let [_, _, _, mask] = self.ins {
                    self.same_plain(q, mask)?;
                    let mut scores = q.shape;
                    scores[rank - 1] = k.shape[rank - 2];
                    if broadcast(&mask.shape, &scores) != Some(scores) {
                        return self.mismatch(&scores, &mask.shape);
                    }
                }
                let mut out = *q;
                out.shape[rank - 1] = v.shape[rank - 1];
                Ok(out)
            }
        }
    }
}

/// The results of a composite on `ins` as primitives, or `None` if `op` has no lowering.
pub fn lower<'a>(op: &Op, ins: &[V<'a>]) -> Option<SmallVec<[V<'a>; 2]>> {
    match op {
        Op::Named(named) => Some(smallvec![composite(named, ins)]),
        Op::Custom(call) => crate::custom::find(&call.name)?.lower(&call.attrs, ins),
        _ => None,
    }
}

fn composite<'a>(op: &Named, ins: &[V<'a>]) -> V<'a> {
    // Half-precision operands are widened once, so that a composite rounds once.
    let dtype = ins[0].dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let ins: SmallVec<[V<'a>; 4]> = ins.iter().map(|v| v.cast(wide)).collect();
    let x = ins[0];
    let out = match *op {
        Named::Softmax { axis } => softmax(x, axis as usize),
        Named::LogSoftmax { axis } => {
            let axes = AxisSet::one(axis as usize);
            let shifted = x - row_max(x, axis as usize);
            shifted - shifted.exp().sum(axes, true).log()
        }
        Named::LayerNorm { axes, eps } => {
            let axes = last_axes(x, axes);
            let centred = x - x.reduce(ReduceKind::Mean, axes, true);
            let variance = centred.square().reduce(ReduceKind::Mean, axes, true);
            scaled(centred * (variance + eps.get()).rsqrt(), &ins[1..])
        }
        Named::RmsNorm { axes, eps } => {
            let mean_square = x.square().reduce(ReduceKind::Mean, last_axes(x, axes), true);
            scaled(x * (mean_square + eps.get()).rsqrt(), &ins[1..])
        }
        Named::Attention { causal, scale } => {
            let scores = attention_scores(x, ins[1], ins.get(3).copied(), causal, scale.get());
            attention_weights(scores).dot(ins[2])
        }
    };
    out.cast(dtype)
}

/// The scaled and masked scores of attention, before softmax.
pub fn attention_scores<'a>(q: V<'a>, k: V<'a>, mask: Option<V<'a>>, causal: bool, scale: f64) -> V<'a> {
    let mut scores = (q * scale).dot(k.transpose());
    if causal {
        let shape = scores.shape();
        let (m, n) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let future = scores.iota([m, n], DType::I64, 1).gt_v(scores.iota([m, n], DType::I64, 0));
        scores = future.choose(scores.number(f64::NEG_INFINITY), scores);
    }
    match mask {
        Some(mask) => scores + mask,
        None => scores,
    }
}

/// Softmax of attention scores along the last axis; a row that sees nothing is 0.
pub fn attention_weights(scores: V<'_>) -> V<'_> {
    let axis = scores.shape().len() - 1;
    let largest = row_max(scores, axis);
    let blind = largest.eq(f64::NEG_INFINITY);
    let e = (scores - largest.drop_where(blind)).exp();
    // Such a row is divided by 1, not by its sum of 0, so that no derivative meets 0 / 0.
    e / blind.choose(e.number(1.0), e.sum(AxisSet::one(axis), true))
}

fn softmax(x: V<'_>, axis: usize) -> V<'_> {
    let e = (x - row_max(x, axis)).exp();
    e / e.sum(AxisSet::one(axis), true)
}

/// The largest element along an axis; 0 where the axis is empty, so that empty rows stay empty.
fn row_max(x: V<'_>, axis: usize) -> V<'_> {
    if x.shape()[axis] == 0 { x.number(0.0) } else { x.reduce(ReduceKind::Max, AxisSet::one(axis), true) }
}

fn last_axes(x: V<'_>, n: u8) -> AxisSet {
    let rank = x.shape().len();
    (rank - n as usize..rank).fold(AxisSet::default(), AxisSet::with)
}

fn scaled<'a>(x: V<'a>, weights: &[V<'a>]) -> V<'a> {
    match *weights {
        [] => x,
        [weight] => x * weight,
        [weight, bias, ..] => x * weight + bias,
    }
}
