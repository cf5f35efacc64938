//! A device from scratch, in a page: the suite passes on it, and finds what is wrong with a broken one.

use kiln_conform::suite::{Options, Problem, check, check_with};
use kiln_cpu::reference::{self, EvalError, Value};
use kiln_device::{Batch, Bytes, Data, DeviceInfo, Driver, Error, Memory, Pending, Place};
use kiln_ir::{DType, Id, Item, Meta, Node, Op, Unary};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Executes in `submit`, one node after another.
struct Toy {
    table: Mutex<HashMap<Id, Result<Value, Error>>>,
    /// How many units in the last place its `exp` is off.
    off: u32,
}

impl Toy {
    fn new(off: u32) -> Arc<Toy> {
        Arc::new(Toy { table: Mutex::default(), off })
    }

    fn eval(&self, node: &Node, table: &HashMap<Id, Result<Value, Error>>) -> Result<Vec<Value>, Error> {
        let failed = |cause: Error| Error::Failed {
            op: node.op.name().into(),
            value: node.outs[0],
            origin: None,
            cause: Arc::new(cause),
        };
        let fine = |id: &Id| table.get(id).and_then(|slot| slot.as_ref().ok());
        match (&node.op, &node.ins[..]) {
            (Op::Guard { .. }, ins) if ins.iter().any(|id| fine(id).is_none()) => {
                return Ok(vec![Value::new([], vec![false])]);
            }
            (Op::Commit, [ok, _, old]) if fine(ok).and_then(Value::slice) != Some(&[true][..]) => {
                return fine(old)
                    .map(|old| vec![old.clone()])
                    .ok_or_else(|| failed(Error::UnknownValue(*old)));
            }
            _ => {}
        }
        let mut ins = Vec::new();
        for id in &node.ins {
            match table.get(id) {
                Some(Ok(value)) => ins.push(value),
                Some(Err(error)) => return Err(error.clone()),
                None => return Err(failed(Error::UnknownValue(*id))),
            }
        }
        let mut outs = reference::eval(&node.op, &ins).map_err(|e| {
            failed(match e {
                EvalError::Op(error) => Error::Op(error),
                EvalError::Index { op, index, length } => Error::Index { op, index, length },
                EvalError::Divide { op, error } => Error::Divide { op, error },
                EvalError::Custom { op, message } => Error::Custom { op, message },
                EvalError::NotLowerable { op } => Error::Unsupported { op, device: "toy".into() },
                EvalError::Input { id, .. } => Error::UnknownValue(id),
            })
        })?;
        if node.op == Op::Unary(Unary::Exp)
            && let Some(x) = outs[0].slice::<f32>()
        {
            let wrong =
                x.iter().map(|x| if x.is_normal() { f32::from_bits(x.to_bits() + self.off) } else { *x });
            outs[0] = Value::new(outs[0].shape, wrong.collect());
        }
        Ok(outs)
    }
}

impl Driver for Toy {
    fn info(&self) -> DeviceInfo {
        DeviceInfo::new("toy", "toy-1")
    }

    fn submit(&self, batch: Batch) {
        let mut table = self.table.lock().unwrap();
        for item in &batch.items {
            match item {
                Item::Free(id) => drop(table.remove(id)),
                Item::Run(node) => match self.eval(node, &table) {
                    Ok(outs) => table.extend(node.outs.iter().copied().zip(outs.into_iter().map(Ok))),
                    Err(error) => table.extend(node.outs.iter().map(|&id| (id, Err(error.clone())))),
                },
            }
        }
    }

    fn write(&self, id: Id, data: Data, _: Place) {
        self.table.lock().unwrap().insert(id, Ok(Value::from_bytes(data.meta, &data.bytes)));
    }

    fn read(&self, id: Id) -> Pending<Data> {
        Pending::ready(match self.table.lock().unwrap().get(&id) {
            Some(Ok(value)) => Ok(Data::new(value.meta(), Bytes::new(value.to_bytes()))),
            Some(Err(error)) => Err(error.clone()),
            None => Err(Error::UnknownValue(id)),
        })
    }

    fn sync(&self) -> Pending<()> {
        Pending::ready(Ok(()))
    }

    fn supports(&self, op: &Op, _: &[Meta]) -> bool {
        // Composites are left to the recording side.
        !matches!(op, Op::Named(_))
    }

    fn memory(&self) -> Memory {
        Memory { values: self.table.lock().unwrap().len(), ..Memory::default() }
    }
}

#[test]
fn a_device_from_scratch_conforms() {
    let mut first = None;
    let totals = check(Toy::new(0), &mut |finding| {
        first.get_or_insert(finding.to_string());
    });
    assert!(totals.findings == 0 && totals.cases > 10_000, "{totals:?}, first: {first:?}");
}

#[test]
fn a_wrong_exp_is_found() {
    let mut direct = 0;
    let totals = check(Toy::new(2), &mut |finding| {
        let text = finding.to_string();
        assert!(matches!(&finding.problem, Problem::Value { .. }), "{text}");
        direct += finding.case.starts_with("exp :") as usize;
    });
    assert!(direct >= 5 && totals.findings > direct, "{direct} of {totals:?}");
}

#[test]
fn a_tolerance_is_by_operation() {
    let near = |op: &Op, _: DType| if *op == Op::Unary(Unary::Exp) { 2 } else { 0 };
    let totals = check_with(Toy::new(2), &Options { ulps: Box::new(near) }, &mut |finding| {
        // Composites that contain it are exact in no tolerance of their own.
        assert!(!finding.case.starts_with("exp :"), "{finding}");
    });
    assert!(totals.cases > 10_000);
}
