//! One rule for each operation and operand: from the gradients of the results to the gradient of the operand.
//!
//! In: an [`Op`], the gradients of its results, its operands and results as values of some builder. Out: a value
//! of the operand's dtype and shape, or nothing. A rule emits only what its operand needs, because what backward
//! keeps alive is read off the rule itself, by [`saves`]. For half precision, composites and counts are computed in
//! f32. No walk and no accumulation: those belong to the caller.

mod index;
mod named;
mod product;
mod reduce;

use kiln_ir::*;
use smallvec::SmallVec;
use std::sync::LazyLock;

/// What a rule sees.
#[derive(Clone, Copy)]
pub struct Rule<'r, 'a> {
    /// Gradients of the results, missing where a result is unused.
    pub grads: &'r [Option<V<'a>>],
    /// Operands.
    pub ins: &'r [V<'a>],
    /// Results.
    pub outs: &'r [V<'a>],
}

/// Whether an operand can have a gradient at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    /// It has one, if its dtype is a float.
    Some,
    /// It is zero wherever it is defined.
    Zero,
    /// There is none, for this reason.
    None(&'static str),
}

/// Whether operand `i` of `op` can have a gradient at all.
pub fn flow(op: &Op, i: usize) -> Flow {
    const INDEX: Flow = Flow::None("indices have no derivative");
    match op {
        Op::Full { .. } | Op::Iota { .. } | Op::Random { .. } => Flow::None("it has no operands"),
        Op::Unary(op) => match op.grad() {
            Grad1::Is(_) => Flow::Some,
            Grad1::Zero => Flow::Zero,
            Grad1::No(reason) => Flow::None(reason),
        },
        Op::Binary(op) => match op.grad() {
            Grad2::Is(..) => Flow::Some,
            Grad2::Zero => Flow::Zero,
            Grad2::No(reason) => Flow::None(reason),
        },
        Op::Select if i == 0 => Flow::None("a condition has no derivative"),
        Op::Select => Flow::Some,
        Op::Cast(to) => match to.kind() {
            Kind::Float => Flow::Some,
            Kind::Signed | Kind::Unsigned => Flow::None("integers have no derivative"),
            Kind::Bool => Flow::None("the result is bool"),
            Kind::Quantised => Flow::None("quantised values have no derivative"),
        },
        Op::Move(_) => Flow::Some,
        Op::Reduce { kind, .. } => match kind {
            ReduceKind::Sum | ReduceKind::Mean | ReduceKind::Prod | ReduceKind::Max | ReduceKind::Min => {
                Flow::Some
            }
            ReduceKind::Any | ReduceKind::All => Flow::None("the result is bool"),
            ReduceKind::ArgMax | ReduceKind::ArgMin => INDEX,
        },
        Op::Scan { .. } | Op::Dot { .. } | Op::Conv { .. } | Op::Pool { .. } => Flow::Some,
        Op::Gather { .. } | Op::Scatter { .. } if i == 1 => INDEX,
        Op::Gather { .. } | Op::Scatter { .. } => Flow::Some,
        Op::Sort { .. } | Op::Named(_) => Flow::Some,
        Op::Guard { .. } => Flow::None("the result is bool"),
        Op::Commit => Flow::None("an update is not differentiated"),
        Op::Custom(call) if custom::find(&call.name).is_none() => {
            Flow::None("the operation is not registered")
        }
        Op::Custom(_) => Flow::Some,
    }
}

/// The gradient of operand `i`, of its dtype and shape; `None` where it is zero or there is none.
pub fn gradient<'a>(op: &Op, rule: &Rule<'_, 'a>, i: usize) -> Option<V<'a>> {
    let x = rule.ins[i];
    if !x.dtype().is_float() {
        return None;
    }
    if let Op::Custom(call) = op {
        return custom::find(&call.name)?.grad(&call.attrs, rule.grads, rule.ins, rule.outs, i);
    }
    // Of the operations with two results, the second are indices: every rule starts from the first.
    let g = rule.grads.first().copied().flatten()?;
    match op {
        Op::Full { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Custom(_) => None,
        Op::Guard { .. } | Op::Commit => None,
        Op::Unary(op) => match op.grad() {
            Grad1::Is(d) => Some(d(g, x, rule.outs[0])),
            Grad1::Zero | Grad1::No(_) => None,
        },
        Op::Binary(op) => match op.grad() {
            Grad2::Is(da, db) => {
                let d = if i == 0 { da } else { db };
                Some(d(g, rule.ins[0], rule.ins[1], rule.outs[0]).sum_to(&x.shape()))
            }
            Grad2::Zero | Grad2::No(_) => None,
        },
        Op::Select => {
            let cond = rule.ins[0];
            let kept = if i == 1 { g.keep_where(cond) } else { g.drop_where(cond) };
            Some(kept.sum_to(&x.shape()))
        }
        Op::Cast(to) => to.is_float().then(|| g.cast(x.dtype())),
        Op::Move(op) => Some(moved(op, rule, g, i)),
        Op::Reduce { kind, axes, .. } => reduce::reduce(*kind, *axes, rule, g),
        Op::Scan { kind, axis, reverse } => Some(reduce::scan(*kind, *axis as usize, *reverse, rule, g, i)),
        Op::Dot { transpose } => Some(product::dot(*transpose, rule, g, i)),
        Op::Conv { kind, conv } => product::conv(*kind, conv, rule, g, i),
        Op::Pool { kind, pool } => product::pool(*kind, pool, rule, g),
        Op::Gather { kind, axis } => Some(index::gather(*kind, *axis, rule, g)),
        Op::Scatter { kind, axis } => Some(index::scatter(*kind, *axis, rule, g, i)),
        Op::Sort { axis, .. } => Some(index::add_at(x.zeros_like(), rule.outs[1], g, *axis)),
        Op::Named(op) => Some(named::named(op, rule, g, i)),
    }
}

/// Which operands and results the rule for operand `i` uses the values of: bit `k` for operand `k`, bit `32 + k` for
/// result `k`. Metas are free. A custom operation whose operands and results do not fit the bits keeps everything.
pub fn saves(op: &Op, ins: &[Meta], outs: &[Meta], i: usize) -> u64 {
    match op {
        Op::Unary(op) => UNARY[*op as usize],
        Op::Binary(op) => BINARY[*op as usize][i],
        // It may have more operands than a probe watches, and uses none.
        Op::Move(Move::Cat { .. }) => 0,
        Op::Custom(_) if ins.len() > 32 || outs.len() * 2 + ins.len() > 64 => u64::MAX,
        op => probe(op, ins, outs, i),
    }
}

// What the table's rules use does not depend on shapes, so it is found out once.
static UNARY: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let x = Meta::new(DType::F32, []);
    Unary::ALL.iter().map(|&op| probe(&Op::Unary(op), &[x], &[x], 0)).collect()
});
static BINARY: LazyLock<Vec<[u64; 2]>> = LazyLock::new(|| {
    let x = Meta::new(DType::F32, []);
    Binary::ALL.iter().map(|&op| [0, 1].map(|i| probe(&Op::Binary(op), &[x, x], &[x], i))).collect()
});

fn probe(op: &Op, ins: &[Meta], outs: &[Meta], i: usize) -> u64 {
    let (n, m) = (ins.len(), outs.len());
    let probe = Probe::new([outs, ins, outs].concat());
    let value = |k: usize| V::new(&probe, k as u32);
    let grads: SmallVec<[Option<V<'_>>; 2]> =
        (0..m).map(|k| outs[k].dtype.is_float().then(|| value(k))).collect();
    let operands: SmallVec<[V<'_>; 4]> = (m..m + n).map(value).collect();
    let results: SmallVec<[V<'_>; 2]> = (m + n..2 * m + n).map(value).collect();
    let answer = gradient(op, &Rule { grads: &grads, ins: &operands, outs: &results }, i);
    let mut used = probe.used();
    // A rule that hands a value on without an operation uses it too.
    if let Some(key) = answer.map(V::key).filter(|&key| (key as usize) < 2 * m + n) {
        used |= 1 << key;
    }
    let low = |bits: u64, n: usize| bits & ((1 << n) - 1);
    low(used >> m, n) | low(used >> (m + n), m) << 32
}

fn moved<'a>(op: &Move, rule: &Rule<'_, 'a>, g: V<'a>, i: usize) -> V<'a> {
    let x = rule.ins[i];
    match *op {
        Move::Reshape(_) => g.reshape(x.shape()),
        Move::Permute(order) => {
            let mut back = order;
            order.iter().enumerate().for_each(|(to, &from)| back[from as usize] = to as u8);
            g.apply(Op::Move(Move::Permute(back)))
        }
        Move::Expand(_) => g.sum_to(&x.shape()),
        Move::Slice { axis, start, end, step } => {
            x.zeros_like().apply2(Op::Move(Move::Assign { axis, start, end, step }), g)
        }
        Move::Assign { axis, start, end, step } => match i {
            0 => g.apply2(Op::Move(*op), rule.ins[1].zeros_like()),
            _ => g.slice(axis as usize, start, end, step),
        },
        Move::Flip(_) => g.apply(Op::Move(*op)),
        Move::Cat { axis } => {
            let axis = axis as usize;
            let extent = |v: &V<'a>| v.shape()[axis];
            let start = rule.ins[..i].iter().map(extent).sum();
            g.slice(axis, start, start + extent(&x), 1)
        }
    }
}

/// Half-precision values in f32, others as they are.
fn wide(v: V<'_>) -> V<'_> {
    match v.dtype() {
        DType::F16 | DType::BF16 => v.cast(DType::F32),
        _ => v,
    }
}
