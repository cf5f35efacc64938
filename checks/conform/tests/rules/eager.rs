//! A builder that computes at once, by the interpreter: what the rules are checked on.

use kiln_cpu::reference::{self, Value};
use kiln_ir::*;
use smallvec::SmallVec;
use std::cell::RefCell;

/// Values and the nodes that gave them, in order.
#[derive(Default)]
pub struct Eager {
    values: RefCell<Vec<Value>>,
    nodes: RefCell<Vec<Node>>,
}

impl Eager {
    /// A value of these numbers, as `meta` holds them.
    pub fn leaf(&self, meta: Meta, data: Vec<f64>) -> V<'_> {
        let bytes: Vec<u8> = data.iter().flat_map(|&x| Scalar::from_f64(meta.dtype, x).to_bytes()).collect();
        let mut values = self.values.borrow_mut();
        values.push(Value::from_bytes(meta, &bytes));
        V::new(self, values.len() as u32 - 1)
    }

    /// The numbers of a value of f64.
    pub fn data(&self, v: V<'_>) -> Vec<f64> {
        self.values.borrow()[v.key() as usize].slice::<f64>().expect("the rules are tried in f64").to_vec()
    }

    pub fn nodes(&self) -> Vec<Node> {
        self.nodes.borrow().clone()
    }
}

impl Build for Eager {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        let mut values = self.values.borrow_mut();
        let operands: Vec<&Value> = ins.iter().map(|&k| &values[k as usize]).collect();
        let outs = reference::eval(&op, &operands).unwrap_or_else(|e| panic!("{op}: {e}"));
        let keys: SmallVec<[u32; 2]> = (values.len() as u32..).take(outs.len()).collect();
        values.extend(outs);
        let id = |keys: &[u32]| keys.iter().map(|&k| Id(k as u64)).collect::<Vec<_>>();
        self.nodes.borrow_mut().push(Node::new(op, &id(ins), &id(&keys)));
        keys
    }

    fn meta(&self, value: u32) -> Meta {
        self.values.borrow()[value as usize].meta()
    }
}
