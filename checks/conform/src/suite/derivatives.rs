//! What the rules of derivatives emit, on the device. That the rules are right is for `kiln-grad`'s tests to say, which
//! compare them with differences.

use super::Suite;
use super::cases::Case;
use super::trace::Trace;
use super::values::{Fill, value};
use kiln_grad::{Rule, gradient};
use kiln_ir::{DType, Meta, V};

/// Runs the rule of every operand.
pub fn check(suite: &mut Suite<'_>, case: &Case) {
    // One float and one half are enough; the rules' own operations have their cases in every dtype.
    let float = |d: DType| matches!(d, DType::F32 | DType::BF16);
    let small = case.ins.iter().all(|x| x.shape.numel() <= 2048);
    if !case.strided || !small || !case.ins.iter().any(|x| float(x.data.dtype())) {
        return;
    }
    let trace = Trace::default();
    let ins: Vec<V<'_>> = case.ins.iter().map(|x| trace.leaf(x.clone())).collect();
    let outs = V::emit(case.op.clone(), &ins);
    let gradient_of = |meta: Meta| meta.dtype.is_float().then(|| trace.leaf(value(meta, Fill::Tame, 21)));
    let grads: Vec<Option<V<'_>>> = outs.iter().map(|v| gradient_of(v.meta())).collect();
    let rule = Rule { grads: &grads, ins: &ins, outs: &outs };
    let keys: Vec<u32> = (0..ins.len()).filter_map(|i| gradient(&case.op, &rule, i)).map(V::key).collect();
    if !keys.is_empty() {
        suite.totals.cases += 1;
        let metas: Vec<Meta> = ins.iter().map(|v| v.meta()).collect();
        suite.trace(&format!("derivative of {} : {metas:?}", case.op), &trace, &keys);
    }
}
