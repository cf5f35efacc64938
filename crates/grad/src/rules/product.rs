//! Bilinear operations and windows: matrix products, convolutions, pooling.

use super::{Rule, index};
use kiln_ir::*;

pub(super) fn dot<'a>(transpose: bool, rule: &Rule<'_, 'a>, g: V<'a>, i: usize) -> V<'a> {
    let (a, b) = (rule.ins[0], rule.ins[1]);
    if i == 0 {
        return g.apply2(Op::Dot { transpose: !transpose }, b.cast(a.dtype())).sum_to(&a.shape());
    }
    let shape = b.shape();
    // A b that all batches share gets one product over all rows, not one for each batch and their sum.
    let shared = shape[..shape.len() - 2].iter().all(|&d| d == 1);
    let (a, g) = if shared { (rows(a), rows(g)) } else { (a, g) };
    let gb = if transpose { g.transpose().dot(a) } else { a.transpose().dot(g) };
    if shared { gb.reshape(shape) } else { gb.sum_to(&shape) }
}

/// All axes but the last as one.
fn rows(v: V<'_>) -> V<'_> {
    let shape = v.shape();
    let last = shape.len() - 1;
    v.reshape([shape[..last].iter().product(), shape[last]])
}

/// The three kinds are the three partial derivatives of one trilinear form, so each one's rules are the other two.
pub(super) fn conv<'a>(
    kind: ConvKind,
    conv: &Conv,
    rule: &Rule<'_, 'a>,
    g: V<'a>,
    i: usize,
) -> Option<V<'a>> {
    let (p, q) = (rule.ins[0], rule.ins[1]);
    let like = rule.ins[i];
    let (kind, a, b) = match (kind, i) {
        (ConvKind::Forward, 0) => (ConvKind::Input, g, q),
        (ConvKind::Forward, _) => (ConvKind::Weight, p, g),
        (ConvKind::Input, 0) => (ConvKind::Forward, g, q),
        (ConvKind::Input, _) => (ConvKind::Weight, g, p),
        (ConvKind::Weight, 0) => (ConvKind::Input, q, g),
        (ConvKind::Weight, _) => (ConvKind::Forward, p, g),
    };
    let run = |extent| a.apply2(Op::Conv { kind, conv: Conv { extent, ..*conv } }, b);
    match kind {
        ConvKind::Forward => crop(like, || run([0; 3])),
        ConvKind::Input | ConvKind::Weight => Some(run(extent(like))),
    }
}

pub(super) fn pool<'a>(kind: PoolKind, pool: &Pool, rule: &Rule<'_, 'a>, g: V<'a>) -> Option<V<'a>> {
    let x = rule.ins[0];
    let run = |kind, extent| g.apply(Op::Pool { kind, pool: Pool { extent, ..*pool } });
    match kind {
        PoolKind::Max => {
            let plane = |v: V<'a>| {
                let shape = v.shape();
                v.reshape([shape[0] * shape[1], shape[2..].iter().product()])
            };
            let shape = x.shape();
            let zero = Scalar::from_f64(x.dtype(), 0.0);
            let zeros = x.full([shape[0] * shape[1], shape[2..].iter().product()], zero);
            Some(index::add_at(zeros, plane(rule.outs[1]), plane(g), 1).reshape(shape))
        }
        PoolKind::Sum => Some(run(PoolKind::SumInput, extent(x))),
        PoolKind::SumInput => crop(x, || run(PoolKind::Sum, [0; 3])),
    }
}

/// The spatial extents of `v`, as attributes hold them.
fn extent(v: V<'_>) -> [u32; 3] {
    let mut extent = [0; 3];
    for (e, &d) in extent.iter_mut().zip(&v.shape()[2..]) {
        *e = u32::try_from(d).unwrap_or(u32::MAX);
    }
    extent
}

/// The result of `full` cropped to the spatial extents of `like`: an adjoint may be given fewer windows than would fit, and
/// where it is given none, nothing need fit at all.
fn crop<'a>(like: V<'a>, full: impl FnOnce() -> V<'a>) -> Option<V<'a>> {
    let shape = like.shape();
    if shape[2..].contains(&0) {
        return None;
    }
    let mut out = full();
    for axis in 2..shape.len() {
        if out.shape()[axis] != shape[axis] {
            out = out.slice(axis, 0, shape[axis], 1);
        }
    }
    Some(out)
}
