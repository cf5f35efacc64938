//! Composites and custom operations: lowered to primitives that are evaluated as they are emitted, or run on bytes.

use super::array::Value;
use super::{EvalError, eval};
use crate::memory;
use kiln_ir::{Build, CustomCall, Meta, Op, V, custom, infer, lower};
use smallvec::SmallVec;
use std::cell::RefCell;

/// The results of a composite, or of a custom operation with a lowering, through its primitives.
pub fn eval_lowered(op: &Op, ins: &[&Value]) -> Result<Vec<Value>, EvalError> {
    let metas: SmallVec<[Meta; 4]> = ins.iter().map(|v| v.meta()).collect();
    let want = infer(op, &metas)?;
    let eager =
        Eager { values: RefCell::new(ins.iter().map(|&v| v.copied()).collect()), error: RefCell::new(None) };
    let operands: Vec<V<'_>> = (0..ins.len() as u32).map(|key| V::new(&eager, key)).collect();
    let outs = lower(op, &operands).ok_or_else(|| EvalError::NotLowerable { op: op.name().into() })?;
    if let Some(error) = eager.error.take() {
        return Err(error);
    }
    let values = eager.values.borrow();
    let outs: Vec<Value> = outs.iter().map(|v| values[v.key() as usize].copied()).collect();
    if !outs.iter().map(Value::meta).eq(want) {
        let message = "its lowering gives other results than it infers".into();
        return Err(EvalError::Custom { op: op.name().into(), message });
    }
    Ok(outs)
}

/// The results of a custom operation's own host code.
pub(super) fn custom(call: &CustomCall, ins: &[&Value], outs: &[Meta]) -> Result<Vec<Value>, EvalError> {
    let error = |message: String| EvalError::Custom { op: call.name.clone(), message };
    let op = custom::find(&call.name).ok_or_else(|| error("it is not registered".into()))?;
    let operands: Vec<(Meta, &[u8])> = ins.iter().map(|v| (v.meta(), v.as_bytes())).collect();
    let mut results: Vec<Vec<u8>> = outs.iter().map(|meta| memory::filled(meta.bytes(), 0)).collect();
    let mut filled: Vec<(Meta, &mut [u8])> =
        outs.iter().copied().zip(results.iter_mut().map(|r| &mut r[..])).collect();
    op.eval(&call.attrs, &operands, &mut filled).map_err(error)?;
    Ok(outs.iter().zip(&results).map(|(meta, bytes)| Value::from_bytes(*meta, bytes)).collect())
}

/// A builder that evaluates. After the first error everything is zero, so that the lowering can run to its end.
struct Eager {
    values: RefCell<Vec<Value>>,
    error: RefCell<Option<EvalError>>,
}

impl Build for Eager {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        let outs = {
            let values = self.values.borrow();
            let operands: Vec<&Value> = ins.iter().map(|&key| &values[key as usize]).collect();
            eval(&op, &operands).unwrap_or_else(|error| {
                let metas: SmallVec<[Meta; 4]> = operands.iter().map(|v| v.meta()).collect();
                let outs = infer(&op, &metas)
                    .unwrap_or_else(|e| panic!("a rule wrote an operation that does not fit: {e}"));
                self.error.borrow_mut().get_or_insert(error);
                outs.into_iter().map(Value::zeros).collect()
            })
        };
        let mut values = self.values.borrow_mut();
        let first = values.len() as u32;
        values.extend(outs);
        (first..values.len() as u32).collect()
    }

    fn meta(&self, value: u32) -> Meta {
        self.values.borrow()[value as usize].meta()
    }
}
