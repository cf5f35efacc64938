//! Operations with operands, as text: f32 stands for any float.

use kiln_ir::text::{parse_meta, parse_op};
use kiln_ir::*;

/// An operation with the metas of its operands, `float` in place of f32.
pub fn case(line: &str, float: DType) -> (Op, Vec<Meta>) {
    let (op, ins) = line.split_once(" : ").unwrap();
    let meta = |text: &str| parse_meta(text).unwrap();
    let swap = |dtype: DType| if dtype == DType::F32 { float } else { dtype };
    let op = parse_op(op).unwrap();
    let ins = ins.split_whitespace().map(|m| Meta { dtype: swap(meta(m).dtype), ..meta(m) }).collect();
    (op, ins)
}

/// Elementwise lines from the tables, in a few shapes.
pub fn elementwise() -> Vec<String> {
    let mut lines = Vec::new();
    for op in Unary::ALL {
        let dtype = if op.domain() == Domain::Bits { "bool" } else { "f32" };
        lines.extend(["[]", "[0,2]", "[3]"].map(|shape| format!("{} : {dtype}{shape}", op.name())));
    }
    for op in Binary::ALL {
        let d = if op.domain() == Domain::Bits { "bool" } else { "f32" };
        let pairs = [("[]", "[]"), ("[2,3]", "[2,3]"), ("[2,1]", "[3]"), ("[]", "[2]"), ("[1,2]", "[0,1,1]")];
        lines.extend(pairs.map(|(a, b)| format!("{} : {d}{a} {d}{b}", op.name())));
    }
    lines
}

#[rustfmt::skip]
pub const LINES: &[&str] = &[
    "select : bool[2,3] f32[3] f32[2,1]",
    "select : bool[] f32[] f32[4]",
    "select : bool[0] f32[1] f32[]",
    "cast dtype=f32 : f32[2]",
    "cast dtype=f32 : f32[]",
    "reshape shape=[6] : f32[2,3]",
    "reshape shape=[] : f32[1,1]",
    "reshape shape=[0,7] : f32[0,3]",
    "permute order=[2,0,1] : f32[2,3,4]",
    "permute order=[] : f32[]",
    "expand shape=[4,2,3] : f32[2,1]",
    "expand shape=[0,3] : f32[1,3]",
    "expand shape=[] : f32[]",
    "slice axis=1 start=1 end=5 step=2 : f32[2,5]",
    "slice axis=0 start=2 end=2 step=1 : f32[3]",
    "assign axis=1 start=1 end=5 step=3 : f32[2,6] f32[2,2]",
    "assign axis=0 start=0 end=0 step=1 : f32[3] f32[0]",
    "flip axes=[0,2] : f32[2,2,3]",
    "flip axes=[] : f32[]",
    "cat axis=1 : f32[2,1] f32[2,3] f32[2,0]",
    "cat axis=0 : f32[3]",
    "sum axes=[0,2] keep=false : f32[2,3,2]",
    "sum axes=[0,2] keep=true : f32[2,3,2]",
    "sum axes=[] keep=false : f32[]",
    "sum axes=[0] keep=false : f32[0,2]",
    "mean axes=[1] keep=false : f32[2,3]",
    "mean axes=[0,1] keep=true : f32[2,3]",
    "mean axes=[0] keep=false : f32[0,2]",
    "prod axes=[1] keep=false : f32[2,3]",
    "prod axes=[0] keep=true : f32[3,2]",
    "prod axes=[0,2] keep=false : f32[2,2,3]",
    "prod axes=[0,1] keep=true : f32[2,3]",
    "prod axes=[0] keep=false : f32[1]",
    "prod axes=[] keep=false : f32[2]",
    "prod axes=[0] keep=false : f32[0,2]",
    "prod axes=[1,2] keep=false : f32[0,2,2]",
    "max axes=[1] keep=false : f32[2,3]",
    "max axes=[0,2] keep=true : f32[2,2,3]",
    "max axes=[] keep=false : f32[]",
    "max axes=[1] keep=false : f32[0,0]",
    "min axes=[0,1] keep=false : f32[2,3]",
    "any axes=[0] keep=false : bool[2]",
    "all axes=[] keep=false : bool[]",
    "argmax axes=[0] keep=false : f32[3]",
    "argmin axes=[1] keep=true : f32[2,3]",
    "cumsum axis=1 reverse=false : f32[2,4]",
    "cumsum axis=0 reverse=true : f32[3,2]",
    "cumprod axis=1 reverse=false : f32[2,4]",
    "cumprod axis=0 reverse=true : f32[4,2]",
    "cumprod axis=0 reverse=false : f32[0]",
    "cumprod axis=0 reverse=false : f32[1]",
    "linear_scan axis=1 reverse=false : f32[2,4] f32[2,4]",
    "linear_scan axis=0 reverse=true : f32[4,2] f32[4,2]",
    "linear_scan axis=0 reverse=true : f32[0] f32[0]",
    "dot transpose=false : f32[2,3] f32[3,4]",
    "dot transpose=true : f32[2,3] f32[4,3]",
    "dot transpose=false : f32[2,2,3] f32[3,2]",
    "dot transpose=true : f32[2,2,3] f32[1,4,3]",
    "dot transpose=false : f32[2,3] f32[2,3,2]",
    "dot transpose=false : f32[2,1,2,3] f32[3,3,2]",
    "dot transpose=true : f32[1,2,3] f32[2,2,3]",
    "dot transpose=false : f32[2,0] f32[0,3]",
    "dot transpose=true : f32[0,2,3] f32[4,3]",
    "conv stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[2,2,5] f32[3,2,2]",
    "conv stride=[1,1,1] low=[0,0,0] high=[1,0,0] dilation=[2,1,1] extent=[0,0,0] groups=2 : f32[1,4,4] f32[2,2,2]",
    "conv stride=[2,1,1] low=[1,0,0] high=[1,1,0] dilation=[1,2,1] extent=[0,0,0] groups=1 : f32[1,1,4,4] f32[2,1,3,2]",
    "conv stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[1,1,2,2,2] f32[1,1,2,1,2]",
    "conv stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[0,2,5] f32[3,2,2]",
    "conv_input stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[6,0,0] groups=1 : f32[2,3,3] f32[3,2,2]",
    "conv_input stride=[2,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[8,0,0] groups=2 : f32[1,2,3] f32[2,1,2]",
    "conv_input stride=[2,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[1,0,0] groups=1 : f32[1,2,0] f32[2,1,2]",
    "conv_weight stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1] extent=[2,0,0] groups=1 : f32[2,2,5] f32[2,3,3]",
    "conv_weight stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[2,0,0] groups=2 : f32[1,4,5] f32[1,2,3]",
    "conv_weight stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[9,0,0] groups=1 : f32[1,1,3] f32[1,2,0]",
    "max_pool kernel=[2,1,1] stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[2,2,5]",
    "max_pool kernel=[2,2,1] stride=[1,2,1] low=[0,0,0] high=[0,0,0] dilation=[1,2,1] extent=[0,0,0] : f32[1,2,3,5]",
    "max_pool kernel=[2,1,1] stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[0,2,5]",
    "sum_pool kernel=[3,1,1] stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[1,2,6]",
    "sum_pool kernel=[2,2,1] stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,2,1] extent=[0,0,0] : f32[1,1,3,4]",
    "sum_pool_input kernel=[3,1,1] stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[7,0,0] : f32[1,2,2]",
    "sum_pool_input kernel=[3,1,1] stride=[2,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[1,0,0] : f32[1,2,0]",
    "gather axis=1 : f32[3,2] i64[2,4]",
    "gather axis=0 : f32[3] i32[0]",
    "take axis=1 : f32[2,3,2] i64[2,2]",
    "take axis=0 : f32[3] i64[]",
    "take axis=0 : f32[2,2] u8[0]",
    "scatter axis=1 : f32[3,2] i64[2,1] f32[2,1]",
    "scatter axis=0 : f32[3] i64[0] f32[0]",
    "scatter_add axis=1 : f32[3,2] i64[2,4] f32[2,4]",
    "take_add axis=1 : f32[2,3] i64[2,2] f32[2,2,2]",
    "take_add axis=0 : f32[2] i64[] f32[]",
    "sort axis=1 descending=false take=3 : f32[2,3]",
    "sort axis=0 descending=true take=2 : f32[4,2]",
    "sort axis=0 descending=true take=0 : f32[4]",
    "softmax axis=1 : f32[2,3]",
    "softmax axis=0 : f32[3,2]",
    "softmax axis=1 : f32[2,0]",
    "log_softmax axis=1 : f32[2,3]",
    "log_softmax axis=0 : f32[0]",
    "layer_norm axes=1 eps=1e-5 : f32[2,3]",
    "layer_norm axes=1 eps=1e-5 : f32[2,3] f32[3]",
    "layer_norm axes=2 eps=1e-5 : f32[2,2,3] f32[2,3] f32[2,3]",
    "layer_norm axes=1 eps=1e-5 : f32[0,3] f32[3] f32[3]",
    "layer_norm axes=1 eps=1e-5 : f32[2,0] f32[0] f32[0]",
    "rms_norm axes=1 eps=1e-5 : f32[2,3]",
    "rms_norm axes=2 eps=1e-5 : f32[2,2,2] f32[2,2]",
    "attention causal=false scale=0.5 : f32[2,3,2] f32[2,4,2] f32[2,4,3]",
    "attention causal=true scale=0.7 : f32[3,2] f32[3,2] f32[3,1]",
    "attention causal=true scale=0.7 : f32[1,2,3,2] f32[1,2,3,2] f32[1,2,3,2] f32[2,1,3]",
    "attention causal=false scale=1.0 : f32[2,2] f32[3,2] f32[3,2] f32[]",
    "attention causal=false scale=1.0 : f32[2,2] f32[0,2] f32[0,2]",
];
