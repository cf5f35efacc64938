//! Indexed reads and writes: each is the other's adjoint.

use super::Rule;
use kiln_ir::*;

pub(super) fn gather<'a>(kind: GatherKind, axis: u8, rule: &Rule<'_, 'a>, g: V<'a>) -> V<'a> {
    let (zeros, indices) = (rule.ins[0].zeros_like(), rule.ins[1]);
    match kind {
        GatherKind::Each => add_at(zeros, indices, g, axis),
        GatherKind::Take => {
            V::emit(Op::Scatter { kind: ScatterKind::TakeAdd, axis }, &[zeros, indices, g])[0]
        }
    }
}

/// Where several writes of the plain kind meet, each source gets the gradient of the place; which one was kept is not
/// known here.
pub(super) fn scatter<'a>(kind: ScatterKind, axis: u8, rule: &Rule<'_, 'a>, g: V<'a>, i: usize) -> V<'a> {
    let (indices, source) = (rule.ins[1], rule.ins[2]);
    match (kind, i) {
        (ScatterKind::Each, 0) => V::emit(Op::Scatter { kind, axis }, &[g, indices, source.zeros_like()])[0],
        (ScatterKind::EachAdd | ScatterKind::TakeAdd, 0) => g,
        (ScatterKind::Each | ScatterKind::EachAdd, _) => {
            g.apply2(Op::Gather { kind: GatherKind::Each, axis }, indices)
        }
        (ScatterKind::TakeAdd, _) => g.apply2(Op::Gather { kind: GatherKind::Take, axis }, indices),
    }
}

/// `zeros` with each element of `g` added at its index.
pub(super) fn add_at<'a>(zeros: V<'a>, indices: V<'a>, g: V<'a>, axis: u8) -> V<'a> {
    V::emit(Op::Scatter { kind: ScatterKind::EachAdd, axis }, &[zeros, indices, g])[0]
}
