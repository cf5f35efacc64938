//! The plain interpreter: what every operation means, value by value.
//!
//! [`eval`] takes an operation and typed row-major [`Value`]s and gives new ones; [`run`] does so for a whole verified
//! program. Each operation is one readable function over typed slices: nothing is fused, shared, strided or threaded.
//! Fast kernels are tested against it bit for bit, which is why the order of additions has a file of its own
//! ([`order`]).
#![forbid(unsafe_code)]
// `OpError` holds shapes inline and is as large in `infer`; errors are rare and never in a loop.
#![allow(clippy::result_large_err)]

mod array;
mod number;
pub mod order;
mod view;

mod elementwise;
mod cast;
mod movement;
mod source;
mod reduce;
mod scan;
mod dot;
mod window;
mod conv;
mod pool;
mod index;
mod sort;
mod composite;

#[cfg(test)]
mod tests;

pub use array::{Array, Element, Value};
pub use composite::eval_lowered;
pub use number::Number;
pub(crate) use window::Window;

use crate::memory;
use kiln_ir::math::DivideError;
use kiln_ir::{Id, Item, Meta, Op, OpError, Verified, infer};
use smallvec::SmallVec;
use std::collections::HashMap;

/// Why an operation has no result.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EvalError {
    #[error(transparent)]
    Op(#[from] OpError),
    /// An index above `i64::MAX` is reported as that.
    #[error("{op}: index {index} is out of range for an axis of length {length}")]
    Index { op: String, index: i64, length: usize },
    #[error("{op}: {}", reason(.error))]
    Divide { op: String, error: DivideError },
    #[error("{op}: {message}")]
    Custom { op: String, message: String },
    #[error("{op} has no lowering")]
    NotLowerable { op: String },
    #[error("input {id} must be {want}, got {got:?}")]
    Input { id: Id, want: Meta, got: Option<Meta> },
}

fn reason(error: &DivideError) -> &'static str {
    match error {
        DivideError::ByZero => "an integer is divided by zero",
        DivideError::Overflow => "the smallest integer is divided by -1",
    }
}

/// The results of `op` on `ins`. On a device, what it takes of memory is counted: see `memory.rs`.
pub fn eval(op: &Op, ins: &[&Value]) -> Result<Vec<Value>, EvalError> {
    let mark = memory::mark();
    let outs = evaluated(op, ins)?;
    mark.keep(outs.iter().map(|value| value.meta().bytes()).sum());
    Ok(outs)
}

fn evaluated(op: &Op, ins: &[&Value]) -> Result<Vec<Value>, EvalError> {
    let metas: SmallVec<[Meta; 4]> = ins.iter().map(|v| v.meta()).collect();
    let outs = infer(op, &metas)?;
    let shape = outs.first().map(|meta| meta.shape).unwrap_or_default();
    let one = |data: Array| vec![Value { shape, data }];
    let results = match op {
        Op::Full { shape, value } => one(source::full(shape, *value)),
        Op::Iota { shape, dtype, axis } => one(source::iota(shape, *dtype, *axis as usize)),
        Op::Random { kind, shape, dtype, key, offset } => {
            one(source::random(*kind, shape.numel(), *dtype, *key, *offset))
        }
        Op::Unary(op) => one(elementwise::unary(*op, &ins[0].data)),
        Op::Binary(op) => one(elementwise::binary(*op, ins[0], ins[1], &shape)?),
        Op::Select => one(elementwise::select(ins[0], ins[1], ins[2], &shape)),
        Op::Cast(dtype) => one(cast::cast(&ins[0].data, *dtype)),
        Op::Move(op) => one(movement::movement(op, ins)),
        Op::Reduce { kind, axes, keep: _ } => one(reduce::reduce(*kind, *axes, ins[0])),
        Op::Scan { kind, axis, reverse } => one(scan::scan(*kind, *axis as usize, *reverse, ins)),
        Op::Dot { transpose } => one(dot::dot(*transpose, ins[0], ins[1], &shape)),
        Op::Conv { kind, conv } => one(conv::conv(*kind, conv, ins[0], ins[1], &shape)),
        Op::Pool { kind, pool } => {
            pool::pool(*kind, pool, ins[0], &shape).into_iter().map(|data| Value { shape, data }).collect()
        }
        Op::Gather { kind, axis } => one(index::gather(*kind, *axis as usize, ins[0], ins[1])?),
        Op::Scatter { kind, axis } => one(index::scatter(*kind, *axis as usize, ins[0], ins[1], ins[2])?),
        Op::Sort { axis, descending, take } => {
            let sorted = sort::sort(*axis as usize, *descending, *take, ins[0]);
            sorted.into_iter().map(|data| Value { shape, data }).collect()
        }
        Op::Guard { finite } => {
            let fine = ins.iter().all(|x| !finite || elementwise::all_finite(&x.data));
            vec![Value::new([], vec![fine])]
        }
        // A choice between whole values.
        Op::Commit => one(elementwise::select(ins[0], ins[1], ins[2], &shape)),
        Op::Named(_) => eval_lowered(op, ins)?,
        Op::Custom(call) => match kiln_ir::custom::may_lower(call).then(|| eval_lowered(op, ins)) {
            None | Some(Err(EvalError::NotLowerable { .. })) => composite::custom(call, ins, &outs)?,
            Some(lowered) => lowered?,
        },
    };
    debug_assert!(results.iter().map(Value::meta).eq(outs), "{op} gave another meta than inferred");
    Ok(results)
}

/// Runs a program; gives every value that is alive at its end, inputs included.
pub fn run(program: &Verified, inputs: &HashMap<Id, Value>) -> Result<HashMap<Id, Value>, EvalError> {
    let mut values = HashMap::new();
    for &(id, want) in &program.program.inputs {
        match inputs.get(&id) {
            Some(value) if value.meta() == want => values.insert(id, value.clone()),
            value => return Err(EvalError::Input { id, want, got: value.map(Value::meta) }),
        };
    }
    for item in &program.program.items {
        match item {
            Item::Run(node) => {
                let ins: Vec<&Value> = node.ins.iter().map(|id| &values[id]).collect();
                let outs = eval(&node.op, &ins)?;
                values.extend(node.outs.iter().copied().zip(outs));
            }
            Item::Free(id) => {
                values.remove(id);
            }
        }
    }
    Ok(values)
}
