//! Composites: closed formulas, computed in f32 for halves and rounded once at the end.

use super::{Rule, wide};
use kiln_ir::*;

pub(super) fn named<'a>(op: &Named, rule: &Rule<'_, 'a>, g: V<'a>, i: usize) -> V<'a> {
    let (x, g) = (rule.ins[i], wide(g));
    let out = match *op {
        Named::Softmax { axis } => {
            let y = wide(rule.outs[0]);
            (g - (g * y).sum(AxisSet::one(axis as usize), true)) * y
        }
        Named::LogSoftmax { axis } => g - wide(rule.outs[0]).exp() * g.sum(AxisSet::one(axis as usize), true),
        Named::LayerNorm { axes, eps } => norm(rule, g, i, axes, eps.get(), true),
        Named::RmsNorm { axes, eps } => norm(rule, g, i, axes, eps.get(), false),
        Named::Attention { causal, scale } => attention(rule, g, i, causal, scale.get()),
    };
    out.cast(x.dtype())
}

/// y = h * weight + bias with h = z / rms(z), where z is x, or x less its mean if `centred`.
fn norm<'a>(rule: &Rule<'_, 'a>, g: V<'a>, i: usize, axes: u8, eps: f64, centred: bool) -> V<'a> {
    let shape = rule.ins[i].shape();
    if i == 2 {
        return g.sum_to(&shape);
    }
    let x = wide(rule.ins[0]);
    let rank = x.shape().len();
    let axes = (rank - axes as usize..rank).fold(AxisSet::default(), AxisSet::with);
    let mean = |v: V<'a>| v.reduce(ReduceKind::Mean, axes, true);
    let z = if centred { x - mean(x) } else { x };
    let scale = (mean(z.square()) + eps).rsqrt();
    let h = z * scale;
    if i == 1 {
        return (g * h).sum_to(&shape);
    }
    let gh = rule.ins.get(1).map_or(g, |&weight| g * wide(weight));
    let along = h * mean(gh * h);
    let rest = if centred { gh - mean(gh) - along } else { gh - along };
    rest * scale
}

/// With scores s, weights p = softmax(s) and y = p v. Where a query must not look, and in rows that see nothing, p is 0
/// and with it the gradient of s.
fn attention<'a>(rule: &Rule<'_, 'a>, g: V<'a>, i: usize, causal: bool, scale: f64) -> V<'a> {
    let (q, k) = (wide(rule.ins[0]), wide(rule.ins[1]));
    let mask = rule.ins.get(3).map(|&mask| wide(mask));
    let p = attention_weights(attention_scores(q, k, mask, causal, scale));
    if i == 2 {
        return p.transpose().dot(g);
    }
    let gp = g.apply2(Op::Dot { transpose: true }, wide(rule.ins[2]));
    let last = AxisSet::one(p.shape().len() - 1);
    let gs = p * (gp - (gp * p).sum(last, true));
    match i {
        0 => gs.dot(k) * scale,
        1 => gs.transpose().dot(q) * scale,
        _ => gs.sum_to(&rule.ins[3].shape()),
    }
}
