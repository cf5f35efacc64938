//! Reductions and scans.

use super::{Rule, wide};
use kiln_ir::*;

pub(super) fn reduce<'a>(kind: ReduceKind, axes: AxisSet, rule: &Rule<'_, 'a>, g: V<'a>) -> Option<V<'a>> {
    let x = rule.ins[0];
    let shape = x.shape();
    match kind {
        ReduceKind::Sum => Some(spread(g, axes, &shape)),
        ReduceKind::Mean => {
            let n: usize = axes.iter().map(|i| shape[i]).product();
            let share = if n == 1 { g } else { (wide(g) / n.max(1) as f64).cast(g.dtype()) };
            Some(spread(share, axes, &shape))
        }
        ReduceKind::Prod => product(x, axes, g),
        ReduceKind::Max | ReduceKind::Min => {
            // Ties share evenly, over all reduced axes together.
            let mask = x.eq_v(spread(rule.outs[0], axes, &shape));
            let g = wide(g);
            let ties = mask.cast(g.dtype()).sum(axes, true);
            let share = g.reshape(ties.shape()) / ties;
            Some(share.cast(x.dtype()).keep_where(mask))
        }
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => None,
    }
}

/// A reduced value at each place of the operand it was reduced from.
fn spread<'a>(v: V<'a>, axes: AxisSet, shape: &Shape) -> V<'a> {
    v.reshape(shape.reduced(axes, true)).expand(*shape)
}

/// The product of all others, by running products from both sides: no division, so zeros are no special case.
fn product<'a>(x: V<'a>, axes: AxisSet, g: V<'a>) -> Option<V<'a>> {
    let shape = x.shape();
    let n: usize = axes.iter().map(|i| shape[i]).product();
    if axes.is_empty() || n == 0 {
        return (n != 0).then(|| g.reshape(shape));
    }
    let rank = shape.len();
    if let (1, Some(axis)) = (axes.len(), axes.iter().next()) {
        return Some(spread(g, axes, &shape) * others(x, axis));
    }
    // Several axes become one last axis.
    let order = Dims::<usize>::collect((0..rank).filter(|&i| !axes.has(i)).chain(axes.iter()));
    let moved = x.permute(order.iter().copied());
    let kept = rank - axes.len();
    let flat = Shape::collect(moved.shape()[..kept].iter().copied().chain([n]));
    let line = g.reshape(Shape::collect(flat[..kept].iter().copied().chain([1])));
    let out = (line * others(moved.reshape(flat), kept)).reshape(moved.shape());
    let mut back = order;
    order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
    Some(out.permute(back.iter().copied()))
}

/// At each place, the product of all other elements along an axis.
fn others(x: V<'_>, axis: usize) -> V<'_> {
    let running = |reverse| x.apply(Op::Scan { kind: ScanKind::Prod, axis: axis as u8, reverse });
    neighbour(running(false), axis, false, 1.0) * neighbour(running(true), axis, true, 1.0)
}

pub(super) fn scan<'a>(
    kind: ScanKind,
    axis: usize,
    reverse: bool,
    rule: &Rule<'_, 'a>,
    g: V<'a>,
    i: usize,
) -> V<'a> {
    let a = rule.ins[0];
    // What reaches a place from itself and all later ones: s[k] = g[k] + a[k + 1] * s[k + 1].
    let collected = || {
        let op = Op::Scan { kind: ScanKind::Linear, axis: axis as u8, reverse: !reverse };
        neighbour(a, axis, !reverse, 0.0).apply2(op, g)
    };
    let before = |edge| neighbour(rule.outs[0], axis, reverse, edge);
    match (kind, i) {
        (ScanKind::Sum, _) => g.apply(Op::Scan { kind, axis: axis as u8, reverse: !reverse }),
        (ScanKind::Prod, _) => collected() * before(1.0),
        (ScanKind::LogSumExp, _) => {
            // The same from exponentials of differences, none of which is above 1: y does not fall along the axis.
            let (a, y) = (wide(a), wide(rule.outs[0]));
            let carried = (y - neighbour(y, axis, !reverse, f64::INFINITY)).exp();
            let op = Op::Scan { kind: ScanKind::Linear, axis: axis as u8, reverse: !reverse };
            (carried.apply2(op, wide(g)) * (a - y).exp()).cast(g.dtype())
        }
        (ScanKind::Linear, 0) => collected() * before(0.0),
        (ScanKind::Linear, _) => collected(),
    }
}

/// At each place the value one place before it along an axis (or `after` it), and `edge` where there is none.
fn neighbour(x: V<'_>, axis: usize, after: bool, edge: f64) -> V<'_> {
    let mut shape = x.shape();
    let n = shape[axis];
    if n == 0 {
        return x;
    }
    shape[axis] = 1;
    let edge = x.full(shape, Scalar::from_f64(x.dtype(), edge));
    let parts = match (n, after) {
        (1, _) => return edge,
        (_, false) => [edge, x.slice(axis, 0, n - 1, 1)],
        (_, true) => [x.slice(axis, 1, n, 1), edge],
    };
    V::emit(Op::Move(Move::Cat { axis: axis as u8 }), &parts)[0]
}
