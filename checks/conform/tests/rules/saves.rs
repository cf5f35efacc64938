//! What a recorder must keep for backward.

use crate::cases::{all, case};
use kiln_grad::*;
use kiln_ir::*;
use std::sync::Arc;

/// What the rule for operand `i` keeps, in words: `a`, `b`, .. for operands, `y`, `z` for results.
fn kept(line: &str, i: usize) -> String {
    let (op, ins) = case(line, DType::F32);
    let outs = infer(&op, &ins).unwrap();
    let bits = saves(&op, &ins, &outs, i);
    let operands = (0..ins.len()).filter(|k| bits >> k & 1 == 1).map(|k| (b'a' + k as u8) as char);
    let results = (0..outs.len()).filter(|k| bits >> (32 + k) & 1 == 1).map(|k| (b'y' + k as u8) as char);
    operands.chain(results).collect()
}

#[test]
fn are_only_what_the_rule_uses() {
    let expect = [
        ("exp : f32[2]", "y"),
        ("relu : f32[2]", "y"),
        ("sin : f32[2]", "a"),
        ("floor : f32[2]", ""),
        ("add : f32[2] f32[2]", "|"),
        ("mul : f32[2] f32[]", "b|a"),
        ("div : f32[2] f32[2]", "b|ab"),
        ("select : bool[2] f32[2] f32[2]", "|a|a"),
        ("cast dtype=f16 : f32[2]", ""),
        ("reshape shape=[4] : f32[2,2]", ""),
        ("permute order=[1,0] : f32[2,2]", ""),
        ("slice axis=0 start=0 end=1 step=1 : f32[2]", ""),
        ("assign axis=0 start=0 end=1 step=1 : f32[2] f32[1]", "|"),
        ("cat axis=0 : f32[2] f32[2]", "|"),
        ("sum axes=[0] keep=false : f32[2]", ""),
        ("mean axes=[0] keep=false : f32[2]", ""),
        ("max axes=[0] keep=false : f32[2]", "ay"),
        ("prod axes=[0] keep=false : f32[2]", "a"),
        ("cumsum axis=0 reverse=false : f32[2]", ""),
        ("cumprod axis=0 reverse=false : f32[2]", "ay"),
        ("linear_scan axis=0 reverse=false : f32[2] f32[2]", "ay|a"),
        ("dot transpose=false : f32[2,3] f32[3,4]", "b|a"),
        ("dot transpose=true : f32[2,2,3] f32[4,3]", "b|a"),
        ("take axis=0 : f32[3] i64[2]", "b|"),
        ("scatter_add axis=0 : f32[3] i64[2] f32[2]", "||b"),
        ("sort axis=0 descending=false take=2 : f32[3]", "z"),
        ("softmax axis=0 : f32[3]", "y"),
        ("log_softmax axis=0 : f32[3]", "y"),
        ("layer_norm axes=1 eps=1e-5 : f32[2,3] f32[3] f32[3]", "ab|a|"),
        ("attention causal=true scale=1.0 : f32[2,2] f32[2,2] f32[2,2]", "abc|abc|ab"),
        (
            "max_pool kernel=[2,1,1] stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[1,1,4]",
            "z",
        ),
        (
            "conv stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[1,1,4] f32[1,1,2]",
            "b|a",
        ),
    ];
    for (line, want) in expect {
        let (_, ins) = case(line, DType::F32);
        let got: Vec<String> = (0..ins.len()).map(|i| kept(line, i)).collect();
        assert_eq!(got.join("|"), want, "{line}");
    }
}

#[test]
fn are_nothing_where_there_is_no_gradient() {
    for line in &all() {
        let (op, ins) = case(line, DType::F32);
        for i in (0..ins.len()).filter(|&i| flow(&op, i) != Flow::Some) {
            assert_eq!(kept(line, i), "", "{line}");
        }
    }
}

#[test]
fn of_a_long_cat_are_nothing() {
    let x = Meta::new(DType::F32, [1]);
    let op = Op::Move(Move::Cat { axis: 0 });
    assert_eq!(saves(&op, &[x; 100], &[Meta::new(DType::F32, [100])], 99), 0);
}

/// `scale * x`, whose rule hands its first operand on untouched when asked for the second.
struct Odd;

impl custom::CustomOp for Odd {
    fn name(&self) -> &str {
        "test.odd"
    }
    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<smallvec::SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec::smallvec![ins[0]])
    }
    fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        Err("not run here".into())
    }
    fn grad<'a>(
        &self,
        _: &[u8],
        grads: &[Option<V<'a>>],
        ins: &[V<'a>],
        _: &[V<'a>],
        i: usize,
    ) -> Option<V<'a>> {
        if i == 0 { Some(grads[0]? * ins[1]) } else { Some(ins[0]) }
    }
}

#[test]
fn of_custom_operations_come_from_their_rule() {
    custom::register(Odd).unwrap();
    let op = Op::Custom(Arc::new(CustomCall { name: "test.odd".into(), attrs: Vec::new() }));
    let x = Meta::new(DType::F32, [2]);
    assert_eq!([0, 1].map(|i| saves(&op, &[x, x], &[x], i)), [2, 1]);
    assert_eq!(saves(&op, &[x; 40], &[x], 0), u64::MAX);
    assert_eq!(flow(&op, 0), Flow::Some);
    let unknown = Op::Custom(Arc::new(CustomCall { name: "test.unknown".into(), attrs: Vec::new() }));
    assert_eq!(flow(&unknown, 0), Flow::None("the operation is not registered"));
    assert_eq!(saves(&unknown, &[x], &[x], 0), 0);
}
