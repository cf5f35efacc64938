//! Dtype and shape of every rule's result are the operand's.

use crate::cases::{all, case};
use kiln_grad::*;
use kiln_ir::*;

/// Runs the rule for operand `i` on a probe, and gives the meta of its answer.
pub fn answer(op: &Op, ins: &[Meta], i: usize) -> Option<Meta> {
    let outs = infer(op, ins).unwrap_or_else(|e| panic!("{op}: {e}"));
    let probe = Probe::new([&outs[..], ins, &outs[..]].concat());
    let (m, n) = (outs.len(), ins.len());
    let values: Vec<V<'_>> = (0..2 * m + n).map(|k| V::new(&probe, k as u32)).collect();
    let grads: Vec<_> = (0..m).map(|k| outs[k].dtype.is_float().then_some(values[k])).collect();
    gradient(op, &Rule { grads: &grads, ins: &values[m..m + n], outs: &values[m + n..] }, i).map(V::meta)
}

#[test]
fn of_every_rule_are_the_operands() {
    for line in &all() {
        for float in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let (op, ins) = case(line, float);
            for (i, want) in ins.iter().enumerate() {
                let expected = flow(&op, i) == Flow::Some && want.dtype.is_float();
                match answer(&op, &ins, i) {
                    Some(got) => assert!(expected && got == *want, "{line} ({float}): operand {i} got {got}"),
                    None => assert!(
                        !expected || want.shape.numel() == 0,
                        "{line} ({float}): operand {i} got nothing"
                    ),
                }
            }
        }
    }
}

#[test]
fn integers_and_quantised_operands_have_none() {
    let case = |line| case(line, DType::F32);
    let (op, ins) = case("dot transpose=true : f32[2,32] q8[4,32]");
    assert_eq!((answer(&op, &ins, 0), answer(&op, &ins, 1)), (Some(ins[0]), None));
    let (op, ins) = case("dot transpose=false : f32[2,4] q4[4,32]");
    assert_eq!((answer(&op, &ins, 0), answer(&op, &ins, 1)), (Some(ins[0]), None));
    for line in [
        "mul : i32[2] i32[2]",
        "cast dtype=i32 : f32[2]",
        "cast dtype=f32 : i32[2]",
        "cast dtype=q8 : f32[32]",
        "cast dtype=f16 : q8[32]",
    ] {
        let (op, ins) = case(line);
        assert_eq!(answer(&op, &ins, 0), None, "{line}");
    }
    let (op, ins) = case("cast dtype=f16 : f32[2]");
    assert_eq!(answer(&op, &ins, 0), Some(ins[0]));
}

#[test]
fn unused_results_give_nothing() {
    let x = Meta::new(DType::F32, [3]);
    let op = Op::Sort { axis: 0, descending: false, take: 3 };
    let probe = Probe::new(vec![x, x, Meta::new(DType::I64, [3])]);
    let v = |k| V::new(&probe, k);
    assert!(gradient(&op, &Rule { grads: &[None, None], ins: &[v(0)], outs: &[v(1), v(2)] }, 0).is_none());
}

#[test]
fn every_operand_without_gradient_has_a_reason() {
    for line in &all() {
        let (op, ins) = case(line, DType::F32);
        for i in 0..ins.len() {
            if let Flow::None(reason) = flow(&op, i) {
                assert!(!reason.is_empty(), "{line}");
            }
        }
    }
    assert_eq!(flow(&Op::Unary(Unary::Floor), 0), Flow::Zero);
    assert_eq!(flow(&Op::Select, 0), Flow::None("a condition has no derivative"));
    assert_eq!(
        flow(&Op::Gather { kind: GatherKind::Take, axis: 0 }, 1),
        Flow::None("indices have no derivative")
    );
}
