//! From the operations of a pass to lane operations.
//!
//! f16 and bf16 are held in lanes as the f32 they stand for and rounded after every step; integers up to 32 bits are
//! held as i32 and wrapped to their width after every step; bool is a mask. Other types have no form here.

use super::graph::{Form, Graph, LaneOp, Target};
use super::rule;
use super::symbol::{self, Real, Truth, Value, Whole, make, pick};
use crate::fused::kernel::{Call, Kernel};
use crate::fused::pass::{Output, Pass};
use kiln_ir::math::{Bits, Compare, Num, Single, Word, value};
use kiln_ir::{DType, Domain, ReduceKind};

/// What is done with the values of a graph.
pub(super) struct Lowered {
    pub graph: Graph,
    pub stores: Vec<Store>,
    pub folds: Vec<Fold>,
}

/// A value written to memory.
pub(super) struct Store {
    pub value: u32,
    pub form: Form,
    /// Which address, counted from the inputs on.
    pub to: u32,
    pub stream: bool,
}

/// A value folded into lanes.
pub(super) struct Fold {
    /// What it takes.
    pub value: u32,
    /// [`LaneOp::Sum`], and what it is after this value.
    pub sum: u32,
    pub next: u32,
    pub start: f32,
    pub to: u32,
}

/// The pass for that instruction set, if all of it has a form.
pub(super) fn lower(pass: &Pass, target: Target) -> Option<Lowered> {
    let (graph, ends) = symbol::write(target, || ends(pass, target));
    let (stores, folds) = ends.filter(|_| !graph.missing)?;
    Some(Lowered { graph, stores, folds })
}

fn ends(pass: &Pass, target: Target) -> Option<(Vec<Store>, Vec<Fold>)> {
    let mut values = Vec::with_capacity(pass.inputs.len() + pass.steps.len());
    for (i, input) in pass.inputs.iter().enumerate() {
        values.push(loaded(i as u32, input.dtype, input.splat, target)?);
    }
    for step in &pass.steps {
        let args = step.args.iter().map(|&a| values.get(a as usize).copied());
        let args = args.collect::<Option<Vec<_>>>()?;
        // Addresses move by the dtypes of the call.
        let condition = (step.call.op == Kernel::Select) as usize;
        let made = applied(&step.call, &args)?;
        if made.dtype() != step.call.to || args[condition..].iter().any(|x| x.dtype() != step.call.from) {
            return None;
        }
        values.push(made);
    }
    let (mut stores, mut folds) = (Vec::new(), Vec::new());
    for (i, output) in pass.outputs.iter().enumerate() {
        let to = (pass.inputs.len() + i) as u32;
        match *output {
            Output::Store { value, stream } => {
                let (value, form) = stored(*values.get(value as usize)?, target);
                stores.push(Store { value: value.node(), form, to, stream });
            }
            Output::Fold { value, kind } => {
                let Any::Real(x, _) = *values.get(value as usize)? else { return None };
                let (start, _) = rule(kind)?;
                let sum = Real(make(LaneOp::Sum(folds.len() as u32), &[]));
                let next = match kind {
                    ReduceKind::Prod => sum * x,
                    ReduceKind::Max => sum.maximum(x),
                    ReduceKind::Min => sum.minimum(x),
                    _ => sum + x,
                };
                folds.push(Fold { value: x.0.node(), sum: sum.0.node(), next: next.0.node(), start, to });
            }
        }
    }
    Some((stores, folds))
}

/// A value of the pass, with its dtype.
#[derive(Clone, Copy)]
enum Any {
    Real(Real, DType),
    Whole(Whole, DType),
    Truth(Truth),
}

impl Any {
    fn dtype(self) -> DType {
        match self {
            Any::Real(_, dtype) | Any::Whole(_, dtype) => dtype,
            Any::Truth(_) => DType::Bool,
        }
    }

    fn value(self) -> Value {
        match self {
            Any::Real(x, _) => x.0,
            Any::Whole(x, _) => x.0,
            Any::Truth(x) => x.0,
        }
    }
}

fn form(dtype: DType) -> Option<Form> {
    Some(match dtype {
        DType::F32 | DType::I32 => Form::Word,
        DType::F16 => Form::Half,
        DType::BF16 => Form::Brain,
        DType::I16 => Form::I16,
        DType::U16 => Form::U16,
        DType::I8 => Form::I8,
        DType::U8 => Form::U8,
        DType::Bool => Form::Bool,
        DType::F64 | DType::I64 | DType::U64 | DType::U32 | DType::Q8 | DType::Q4 => return None,
    })
}

/// The bits of a lane as a value of that dtype.
fn typed(value: Value, dtype: DType) -> Any {
    match dtype {
        DType::Bool => Any::Truth(Truth(value)),
        dtype if dtype.is_float() => Any::Real(Real(value), dtype),
        dtype => Any::Whole(Whole(value), dtype),
    }
}

fn loaded(input: u32, dtype: DType, splat: bool, target: Target) -> Option<Any> {
    let form = form(dtype)?;
    let load = |form| make(if splat { LaneOp::Splat(input, form) } else { LaneOp::Load(input, form) }, &[]);
    Some(match (form, target) {
        (Form::Bool, Target::Avx2) => {
            let bytes = Whole(load(Form::U8));
            Any::Truth(bytes.above(Whole::ZERO))
        }
        _ => typed(load(form), dtype),
    })
}

/// The lanes to write, and how.
fn stored(value: Any, target: Target) -> (Value, Form) {
    match (value, target) {
        (Any::Truth(x), Target::Avx2) => (Whole(x.0).and(Whole::ONE).0, Form::U8),
        (Any::Truth(x), Target::Avx512) => (x.0, Form::Bool),
        (Any::Real(x, DType::BF16), _) => (x.to_word().shr(16).0, Form::U16),
        (Any::Real(x, DType::F16), _) => (x.0, Form::Half),
        (Any::Real(x, _), _) => (x.0, Form::Word),
        (Any::Whole(x, dtype), _) => match (dtype.size(), target) {
            (1, Target::Avx2) => (x.and(Word::lit(0xff)).0, Form::U8),
            (2, Target::Avx2) => (x.and(Word::lit(0xffff)).0, Form::U16),
            (1, Target::Avx512) => (x.0, Form::U8),
            (2, Target::Avx512) => (x.0, Form::U16),
            _ => (x.0, Form::Word),
        },
    }
}

fn applied(call: &Call, args: &[Any]) -> Option<Any> {
    let from = call.from;
    match call.op {
        Kernel::Cast => cast(*args.first()?, call.to),
        Kernel::Select => {
            let [Any::Truth(condition), a, b] = *args else { return None };
            if let (Any::Truth(a), Any::Truth(b)) = (a, b) {
                return Some(Any::Truth(condition.and(a).or(condition.not().and(b))));
            }
            Some(typed(pick(condition, a.value(), b.value()), from))
        }
        Kernel::Unary(op) => Some(match (*args.first()?, op.domain()) {
            (Any::Real(x, dtype), Domain::Float) => rounded(value::unary_float(op, x)?, dtype),
            (Any::Real(x, dtype), Domain::Num) => rounded(value::unary_num(op, x)?, dtype),
            (Any::Real(x, _), Domain::Test) => Any::Truth(value::unary_test(op, x)?),
            (Any::Whole(x, dtype), Domain::Num) => wrap(value::unary_num(op, x)?, dtype),
            (Any::Whole(x, _), Domain::Test) => Any::Truth(value::unary_test(op, x)?),
            (Any::Whole(x, dtype), Domain::Bits) => wrap(value::unary_bits(op, x)?, dtype),
            (Any::Truth(x), Domain::Bits) => Any::Truth(value::unary_bits(op, x)?),
            _ => return None,
        }),
        Kernel::Binary(op) => Some(match (*args.first()?, *args.get(1)?, op.domain()) {
            (Any::Real(a, dtype), Any::Real(b, _), Domain::Float) => {
                rounded(value::binary_float(op, a, b)?, dtype)
            }
            (Any::Real(a, dtype), Any::Real(b, _), Domain::Num) => {
                rounded(value::binary_num(op, a, b)?, dtype)
            }
            (Any::Real(a, _), Any::Real(b, _), Domain::Compare) => {
                Any::Truth(value::binary_compare(op, a, b)?)
            }
            (Any::Whole(a, dtype), Any::Whole(b, _), Domain::Num) => {
                wrap(value::binary_num(op, a, b)?, dtype)
            }
            (Any::Whole(a, _), Any::Whole(b, _), Domain::Compare) => {
                Any::Truth(value::binary_compare(op, a, b)?)
            }
            (Any::Whole(a, dtype), Any::Whole(b, _), Domain::Bits) => {
                wrap(value::binary_bits(op, a, b)?, dtype)
            }
            (Any::Truth(a), Any::Truth(b), Domain::Compare) => Any::Truth(value::binary_compare(op, a, b)?),
            (Any::Truth(a), Any::Truth(b), Domain::Bits) => Any::Truth(value::binary_bits(op, a, b)?),
            _ => return None,
        }),
    }
}

/// An f32 rounded as one of that dtype is.
fn rounded(x: Real, dtype: DType) -> Any {
    let x = match dtype {
        DType::F16 => Real(make(LaneOp::Half, &[x.0])),
        DType::BF16 => symbol::brain(x),
        _ => x,
    };
    Any::Real(x, dtype)
}

/// An i32 wrapped to the width of a dtype.
fn wrap(x: Whole, dtype: DType) -> Any {
    let x = match dtype {
        DType::U8 => x.and(Word::lit(0xff)),
        DType::U16 => x.and(Word::lit(0xffff)),
        DType::I8 => x.shl(24).sar(24),
        DType::I16 => x.shl(16).sar(16),
        _ => x,
    };
    Any::Whole(x, dtype)
}

fn cast(x: Any, to: DType) -> Option<Any> {
    form(to)?;
    Some(match x {
        Any::Real(x, _) if to == DType::Bool => Any::Truth(x.differs(Real::ZERO)),
        Any::Real(x, _) if to.is_float() => rounded(x, to),
        Any::Real(x, _) => {
            let (low, high) = match to {
                DType::U8 => (0, 0xff),
                DType::I8 => (-0x80, 0x7f),
                DType::U16 => (0, 0xffff),
                DType::I16 => (-0x8000, 0x7fff),
                _ => return Some(Any::Whole(symbol::to_int(x), to)),
            };
            let clamped = symbol::to_int(x).maximum(Word::lit(low as u32)).minimum(Word::lit(high));
            Any::Whole(clamped, to)
        }
        Any::Whole(x, _) if to == DType::Bool => Any::Truth(x.differs(Whole::ZERO)),
        Any::Whole(x, _) if to.is_float() => rounded(Real::of_signed(x), to),
        Any::Whole(x, _) => wrap(x, to),
        Any::Truth(x) if to == DType::Bool => Any::Truth(x),
        Any::Truth(x) if to.is_float() => Any::Real(Real(pick(x, Real::ONE.0, Value::Lit(0))), to),
        Any::Truth(x) => Any::Whole(Whole(pick(x, Value::Lit(1), Value::Lit(0))), to),
    })
}
