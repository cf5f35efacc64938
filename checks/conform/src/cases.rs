//! The cases of structured operations as text, `operation : operands`: for the suite, where f32 stands for every dtype that
//! `infer` takes there, and for the tests of derivatives (`tests/rules`), where it stands for every float. Cases that need
//! values of their own are made in `suite/cases.rs`, those of elementwise operations from the tables.

use kiln_ir::text::{parse_meta, parse_op};
use kiln_ir::{Class, DType, Meta, Op};

/// A case with `dtype` in place of f32.
///
/// # Panics
/// If the line does not have that form.
pub fn parse(line: &str, dtype: DType) -> (Op, Vec<Meta>) {
    let (op, ins) = line.split_once(" : ").expect("a line is `operation : operands`");
    let meta = |text: &str| parse_meta(text).unwrap_or_else(|| panic!("{line}: {text} is no meta"));
    let swap = |m: Meta| if m.dtype == DType::F32 { Meta { dtype, ..m } } else { m };
    let op = parse_op(op).unwrap_or_else(|e| panic!("{line}: {e}"));
    (op, ins.split_whitespace().map(|text| swap(meta(text))).collect())
}

/// The cases of a class; a class that is new in the IR does not compile here.
pub const fn lines(class: Class) -> &'static [&'static str] {
    match class {
        Class::Select => SELECT,
        Class::Cast => CAST,
        Class::Move => MOVE,
        Class::Reduce => REDUCE,
        Class::Scan => SCAN,
        Class::Dot => DOT,
        Class::Conv => CONV,
        Class::Pool => POOL,
        Class::Gather => GATHER,
        Class::Scatter => SCATTER,
        Class::Sort => SORT,
        Class::Commit => COMMIT,
        Class::Named => NAMED,
        Class::Full | Class::Iota | Class::Random | Class::Guard => &[],
        Class::Unary | Class::Binary | Class::Custom => &[],
    }
}

// Nor does an operation without a case, where its class has some.
const _: () = {
    let mut class = 0;
    while class < Class::ALL.len() {
        let (names, lines) = (Class::ALL[class].names(), lines(Class::ALL[class]));
        let mut name = 0;
        while name < names.len() && !lines.is_empty() {
            if !starts_one(names[name].as_bytes(), lines) {
                panic!("{}", names[name]);
            }
            name += 1;
        }
        class += 1;
    }
};

/// Whether a line begins with this word.
const fn starts_one(word: &[u8], lines: &[&str]) -> bool {
    let mut at = 0;
    while at < lines.len() {
        if let Some((start, [b' ', ..])) = lines[at].as_bytes().split_at_checked(word.len()) {
            let mut same = 0;
            while same < word.len() && start[same] == word[same] {
                same += 1;
            }
            if same == word.len() {
                return true;
            }
        }
        at += 1;
    }
    false
}

/// The cases of all classes.
pub fn all() -> impl Iterator<Item = &'static str> {
    Class::ALL.iter().flat_map(|&class| lines(class)).copied()
}

#[rustfmt::skip]
const SELECT: &[&str] = &[
    "select : bool[2,3] f32[3] f32[2,1]",
    "select : bool[] f32[] f32[4]",
    "select : bool[0] f32[1] f32[]",
    "select : bool[2,1,5] f32[2,3,5] f32[2,3,5]",
    "select : bool[1025] f32[1025] f32[1]",
];

#[rustfmt::skip]
const CAST: &[&str] = &[
    "cast dtype=f32 : f32[2]",
    "cast dtype=f32 : f32[]",
];

#[rustfmt::skip]
const MOVE: &[&str] = &[
    "reshape shape=[6] : f32[2,3]",
    "reshape shape=[3,2] : f32[2,3]",
    "reshape shape=[2,2,3,5] : f32[4,15]",
    "reshape shape=[5,2,3,2] : f32[2,6,5]",
    "reshape shape=[] : f32[1,1]",
    "reshape shape=[1] : f32[]",
    "reshape shape=[0,7] : f32[0,3]",
    "permute order=[2,0,1] : f32[2,3,4]",
    "permute order=[1,0] : f32[33,31]",
    "permute order=[] : f32[]",
    "permute order=[1,0] : f32[0,3]",
    "expand shape=[4,2,3] : f32[2,1]",
    "expand shape=[0,3] : f32[1,3]",
    "expand shape=[] : f32[]",
    "expand shape=[5,7] : f32[]",
    "slice axis=1 start=1 end=5 step=2 : f32[2,5]",
    "slice axis=0 start=2 end=2 step=1 : f32[3]",
    "slice axis=1 start=3 end=5 step=1 : f32[0,5]",
    "slice axis=0 start=1 end=3 step=100 : f32[3,2]",
    "slice axis=0 start=0 end=3 step=18446744073709551615 : f32[3,2]",
    "assign axis=1 start=1 end=5 step=3 : f32[2,6] f32[2,2]",
    "assign axis=0 start=0 end=0 step=1 : f32[3] f32[0]",
    "assign axis=0 start=0 end=3 step=1 : f32[3,2] f32[3,2]",
    "assign axis=1 start=2 end=3 step=1 : f32[0,5] f32[0,1]",
    "flip axes=[0,2] : f32[2,2,3]",
    "flip axes=[] : f32[]",
    "flip axes=[0,1] : f32[0,5]",
    "flip axes=[0] : f32[1025]",
    "cat axis=1 : f32[2,1] f32[2,3] f32[2,0]",
    "cat axis=0 : f32[3]",
    "cat axis=0 : f32[0] f32[0]",
    "cat axis=0 : f32[513,2] f32[1,2] f32[511,2]",
];

#[rustfmt::skip]
const REDUCE: &[&str] = &[
    "sum axes=[0,2] keep=false : f32[2,3,5]",
    "sum axes=[0,2] keep=true : f32[2,3,5]",
    "sum axes=[1] keep=false : f32[2,3,5]",
    "sum axes=[] keep=false : f32[]",
    "sum axes=[] keep=false : f32[2,3]",
    "sum axes=[0] keep=false : f32[0,2]",
    "sum axes=[0] keep=false : f32[15]",
    "sum axes=[0] keep=false : f32[16]",
    "sum axes=[0] keep=false : f32[17]",
    "sum axes=[1] keep=false : f32[3,1]",
    "sum axes=[0] keep=false : f32[511]",
    "sum axes=[0] keep=false : f32[513]",
    "sum axes=[1] keep=false : f32[2,1025]",
    "sum axes=[0] keep=false : f32[1025,3]",
    "sum axes=[0] keep=false : f32[3,1025]",
    "sum axes=[0,1] keep=false : f32[181,183]",
    "sum axes=[1] keep=true : f32[1100,33]",
    "sum axes=[0] keep=false : f32[66000]",
    "mean axes=[1] keep=false : f32[2,3]",
    "mean axes=[0,1] keep=true : f32[2,3]",
    "mean axes=[0] keep=false : f32[0,2]",
    "mean axes=[0] keep=false : f32[65,2]",
    "mean axes=[0] keep=false : f32[5000]",
    "prod axes=[1] keep=false : f32[2,3]",
    "prod axes=[0] keep=true : f32[3,2]",
    "prod axes=[0] keep=false : f32[0,2]",
    "prod axes=[0] keep=false : f32[600]",
    "prod axes=[0,2] keep=false : f32[2,2,3]",
    "prod axes=[0,1] keep=true : f32[2,3]",
    "prod axes=[0] keep=false : f32[1]",
    "prod axes=[] keep=false : f32[2]",
    "prod axes=[1,2] keep=false : f32[0,2,2]",
    "max axes=[1] keep=false : f32[2,3]",
    "max axes=[0,2] keep=true : f32[2,2,3]",
    "max axes=[] keep=false : f32[]",
    "max axes=[1] keep=false : f32[0,0]",
    "max axes=[0] keep=false : f32[1025]",
    "min axes=[0,1] keep=false : f32[2,3]",
    "min axes=[0] keep=false : f32[65,3]",
    "any axes=[0] keep=false : bool[2,3]",
    "any axes=[0] keep=false : bool[0,3]",
    "any axes=[0] keep=false : bool[2]",
    "all axes=[] keep=false : bool[]",
    "all axes=[0,1] keep=true : bool[2,3]",
    "argmax axes=[0] keep=false : f32[40]",
    "argmax axes=[0] keep=true : f32[3,4]",
    "argmax axes=[0] keep=false : f32[3]",
    "argmin axes=[1] keep=true : f32[2,40]",
    "argmin axes=[1] keep=true : f32[2,3]",
];

#[rustfmt::skip]
const SCAN: &[&str] = &[
    "cumsum axis=1 reverse=false : f32[2,4]",
    "cumsum axis=0 reverse=true : f32[3,2]",
    "cumsum axis=0 reverse=false : f32[0]",
    "cumsum axis=0 reverse=false : f32[1025]",
    "cumprod axis=1 reverse=false : f32[2,4]",
    "cumprod axis=0 reverse=true : f32[4,2]",
    "cumprod axis=0 reverse=false : f32[1]",
    "cumprod axis=0 reverse=false : f32[0]",
    "logcumsumexp axis=1 reverse=false : f32[2,4]",
    "logcumsumexp axis=0 reverse=true : f32[4,2]",
    "logcumsumexp axis=0 reverse=false : f32[0]",
    "logcumsumexp axis=0 reverse=false : f32[1025]",
    "linear_scan axis=1 reverse=false : f32[2,4] f32[2,4]",
    "linear_scan axis=0 reverse=true : f32[4,2] f32[4,2]",
    "linear_scan axis=0 reverse=true : f32[0] f32[0]",
];

#[rustfmt::skip]
const DOT: &[&str] = &[
    "dot transpose=false : f32[1,1] f32[1,1]",
    "dot transpose=false : f32[2,3] f32[3,4]",
    "dot transpose=true : f32[2,3] f32[4,3]",
    "dot transpose=false : f32[2,2,3] f32[3,2]",
    "dot transpose=true : f32[2,2,3] f32[1,4,3]",
    "dot transpose=false : f32[2,3] f32[2,3,2]",
    "dot transpose=false : f32[2,1,2,3] f32[3,3,2]",
    "dot transpose=true : f32[1,2,3] f32[2,2,3]",
    "dot transpose=false : f32[2,0] f32[0,3]",
    "dot transpose=true : f32[0,2,3] f32[4,3]",
    "dot transpose=false : f32[3,0,2] f32[2,3]",
    "dot transpose=false : f32[1,17] f32[17,1]",
    "dot transpose=false : f32[17,16] f32[16,15]",
    "dot transpose=false : f32[1,513] f32[513,3]",
    "dot transpose=true : f32[3,511] f32[17,511]",
    "dot transpose=false : f32[33,1025] f32[1025,2]",
    "dot transpose=false : f32[130,129] f32[129,131]",
    "dot transpose=true : f32[5,64] q8[7,64]",
    "dot transpose=false : f32[5,7] q8[7,64]",
    "dot transpose=true : f32[2,3,32] q4[7,32]",
    "dot transpose=false : f32[1,2] q4[2,32]",
];

#[rustfmt::skip]
const CONV: &[&str] = &[
    "conv stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[2,2,5] f32[3,2,2]",
    "conv stride=[1,1,1] low=[0,0,0] high=[1,0,0] dilation=[2,1,1] extent=[0,0,0] groups=2 : f32[1,4,4] f32[2,2,2]",
    "conv stride=[2,1,1] low=[1,0,0] high=[1,1,0] dilation=[1,2,1] extent=[0,0,0] groups=1 : f32[1,1,4,4] f32[2,1,3,2]",
    "conv stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[1,1,2,2,2] f32[1,1,2,1,2]",
    "conv stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[0,2,5] f32[3,2,2]",
    "conv stride=[1,1,1] low=[1,1,0] high=[1,1,0] dilation=[1,1,1] extent=[0,0,0] groups=1 : f32[2,5,9,7] f32[6,5,3,3]",
    "conv_input stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[6,0,0] groups=1 : f32[2,3,3] f32[3,2,2]",
    "conv_input stride=[2,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[8,0,0] groups=2 : f32[1,2,3] f32[2,1,2]",
    "conv_input stride=[2,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[1,0,0] groups=1 : f32[1,2,0] f32[2,1,2]",
    "conv_weight stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1] extent=[2,0,0] groups=1 : f32[2,2,5] f32[2,3,3]",
    "conv_weight stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[2,0,0] groups=2 : f32[1,4,5] f32[1,2,3]",
    "conv_weight stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[9,0,0] groups=1 : f32[1,1,3] f32[1,2,0]",
];

#[rustfmt::skip]
const POOL: &[&str] = &[
    "max_pool kernel=[2,1,1] stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[2,2,5]",
    "max_pool kernel=[2,2,1] stride=[1,2,1] low=[0,0,0] high=[0,0,0] dilation=[1,2,1] extent=[0,0,0] : f32[1,2,3,5]",
    "max_pool kernel=[2,1,1] stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[0,2,5]",
    "sum_pool kernel=[3,1,1] stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[0,0,0] : f32[1,2,6]",
    "sum_pool kernel=[2,2,1] stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,2,1] extent=[0,0,0] : f32[1,1,3,4]",
    "sum_pool_input kernel=[3,1,1] stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[7,0,0] : f32[1,2,2]",
    "sum_pool_input kernel=[3,1,1] stride=[2,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[1,0,0] : f32[1,2,0]",
];

#[rustfmt::skip]
const GATHER: &[&str] = &[
    "gather axis=1 : f32[3,2] i64[2,4]",
    "gather axis=0 : f32[3] i32[0]",
    "gather axis=0 : f32[5,3] u8[7,2]",
    "take axis=1 : f32[2,3,2] i64[2,2]",
    "take axis=0 : f32[3] i64[]",
    "take axis=0 : f32[2,2] u8[0]",
    "take axis=0 : f32[0,2] i16[0]",
    "take axis=0 : f32[70,9] i8[33]",
    "take axis=0 : f32[7,3] u64[2,2]",
];

#[rustfmt::skip]
const SCATTER: &[&str] = &[
    "scatter axis=1 : f32[3,2] i64[2,1] f32[2,1]",
    "scatter axis=0 : f32[3] i64[0] f32[0]",
    "scatter axis=0 : f32[3,2] u16[7,2] f32[7,2]",
    "scatter_add axis=1 : f32[3,2] i64[2,4] f32[2,4]",
    "scatter_add axis=0 : f32[2] i32[9] f32[9]",
    "take_add axis=1 : f32[2,3] i64[2,2] f32[2,2,2]",
    "take_add axis=0 : f32[2] i64[] f32[]",
    "take_add axis=0 : f32[5,3] u32[17] f32[17,3]",
];

#[rustfmt::skip]
const SORT: &[&str] = &[
    "sort axis=1 descending=false take=3 : f32[2,3]",
    "sort axis=0 descending=true take=2 : f32[4,2]",
    "sort axis=0 descending=true take=0 : f32[4]",
    "sort axis=0 descending=false take=50 : f32[50]",
    "sort axis=0 descending=true take=50 : f32[50]",
    "sort axis=1 descending=false take=0 : f32[3,0]",
];

#[rustfmt::skip]
const COMMIT: &[&str] = &[
    "commit : bool[] f32[] f32[]",
    "commit : bool[] f32[2,3,5] f32[2,3,5]",
    "commit : bool[] f32[0] f32[0]",
    "commit : bool[] f32[1025] f32[1025]",
];

#[rustfmt::skip]
const NAMED: &[&str] = &[
    "softmax axis=1 : f32[2,3]",
    "softmax axis=0 : f32[3,2]",
    "softmax axis=1 : f32[2,0]",
    "softmax axis=1 : f32[3,1025]",
    "log_softmax axis=1 : f32[2,3]",
    "log_softmax axis=0 : f32[0]",
    "layer_norm axes=1 eps=1e-5 : f32[2,3]",
    "layer_norm axes=1 eps=1e-5 : f32[2,3] f32[3]",
    "layer_norm axes=2 eps=1e-5 : f32[2,2,3] f32[2,3] f32[2,3]",
    "layer_norm axes=1 eps=1e-5 : f32[0,3] f32[3] f32[3]",
    "layer_norm axes=1 eps=1e-5 : f32[2,0] f32[0] f32[0]",
    "layer_norm axes=1 eps=1e-5 : f32[5,513] f32[513] f32[513]",
    "rms_norm axes=1 eps=1e-5 : f32[2,3]",
    "rms_norm axes=2 eps=1e-5 : f32[2,2,2] f32[2,2]",
    "attention causal=false scale=0.5 : f32[2,3,2] f32[2,4,2] f32[2,4,3]",
    "attention causal=true scale=0.7 : f32[3,2] f32[3,2] f32[3,1]",
    "attention causal=true scale=0.7 : f32[1,2,3,2] f32[1,2,3,2] f32[1,2,3,2] f32[2,1,3]",
    "attention causal=false scale=1.0 : f32[2,2] f32[3,2] f32[3,2] f32[]",
    "attention causal=false scale=1.0 : f32[2,2] f32[0,2] f32[0,2]",
];
