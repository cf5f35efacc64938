//! A builder that evaluates with the interpreter and keeps the nodes: what lowerings and rules emit, with what every
//! value should be. A trace is submitted whole, each value freed after its last use.

use super::cases::Case;
use super::{Problem, Suite};
use kiln_cpu::reference::{self, Value};
use kiln_ir::*;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::HashMap;

/// Values by key, and the nodes that gave them; a node's names are keys.
#[derive(Default)]
pub struct Trace {
    pub values: RefCell<Vec<Value>>,
    pub nodes: RefCell<Vec<Node>>,
}

impl Trace {
    pub fn leaf(&self, value: Value) -> V<'_> {
        self.values.borrow_mut().push(value);
        V::new(self, self.values.borrow().len() as u32 - 1)
    }
}

impl Build for Trace {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        let outs = {
            let values = self.values.borrow();
            let ins: Vec<&Value> = ins.iter().map(|&k| &values[k as usize]).collect();
            reference::eval(&op, &ins).unwrap_or_else(|e| panic!("the interpreter fails on {op}: {e}"))
        };
        let mut values = self.values.borrow_mut();
        let keys: SmallVec<[u32; 2]> = (values.len() as u32..).take(outs.len()).collect();
        values.extend(outs);
        let ids = |keys: &[u32]| keys.iter().map(|&k| Id(k as u64)).collect::<SmallVec<[Id; 4]>>();
        self.nodes.borrow_mut().push(Node::new(op, &ids(ins), &ids(&keys)));
        keys
    }

    fn meta(&self, value: u32) -> Meta {
        self.values.borrow()[value as usize].meta()
    }
}

impl Suite<'_> {
    /// A composite that the device leaves to the recording side.
    pub fn lowered(&mut self, case: &Case) {
        let trace = Trace::default();
        let ins: Vec<V<'_>> = case.ins.iter().map(|x| trace.leaf(x.clone())).collect();
        if let Some(outs) = lower(&case.op, &ins) {
            let keys: Vec<u32> = outs.iter().map(|v| v.key()).collect();
            self.trace(&format!("lowering of {}", case.op), &trace, &keys);
        }
    }

    /// Runs a trace and compares the values of `keys`, which later nodes may use too.
    pub fn trace(&mut self, name: &str, trace: &Trace, keys: &[u32]) {
        let (values, nodes) = (trace.values.borrow(), trace.nodes.borrow());
        let metas = |ids: &[Id]| ids.iter().map(|id| values[id.0 as usize].meta()).collect::<Vec<_>>();
        if !nodes.iter().all(|node| self.device.supports(&node.op, &metas(&node.ins))) {
            return;
        }
        let exact =
            nodes.iter().all(|n| (self.options.ulps)(&n.op, values[n.outs[0].0 as usize].data.dtype()) == 0);
        if !exact {
            // A difference that is allowed in one node may grow in the next: each starts from the interpreter's values.
            for node in nodes.iter() {
                let ins = node.ins.iter().map(|id| values[id.0 as usize].clone()).collect();
                self.case(&Case { op: node.op.clone(), ins, strided: false });
            }
            return;
        }
        let mut last: HashMap<Id, usize> = HashMap::new();
        for (at, node) in nodes.iter().enumerate() {
            last.extend(node.ins.iter().map(|&id| (id, at)));
        }
        let made: Vec<Id> = nodes.iter().flat_map(|n| n.outs.iter().copied()).collect();
        let is_made = |id: &Id| made.contains(id);
        let mut names: HashMap<Id, Id> = HashMap::new();
        for key in (0..values.len() as u64).map(Id) {
            let name = if is_made(&key) { self.fresh() } else { self.write(&values[key.0 as usize]) };
            names.insert(key, name);
        }
        let kept = |id: &Id| keys.contains(&(id.0 as u32));
        let mut items = Vec::new();
        for (at, node) in nodes.iter().enumerate() {
            let name = |ids: &[Id]| ids.iter().map(|id| names[id]).collect::<Vec<_>>();
            items.push(Item::Run(Node::new(node.op.clone(), &name(&node.ins), &name(&node.outs))));
            let ended = node
                .ins
                .iter()
                .chain(&node.outs)
                .filter(|id| last.get(id).is_none_or(|&l| l == at) && !kept(id));
            let mut ended: Vec<Id> = ended.copied().collect();
            ended.sort();
            ended.dedup();
            for id in ended {
                if let Some(name) = names.remove(&id) {
                    items.push(Item::Free(name));
                }
            }
        }
        self.submit(items);
        for &key in keys {
            let op = nodes.iter().find(|n| n.outs.contains(&Id(key as u64))).map(|n| &n.op);
            match (names.get(&Id(key as u64)), op) {
                (Some(&id), Some(op)) => {
                    self.compare_nans(&|| name.to_string(), "its result", op, true, id, &values[key as usize])
                }
                (Some(_), None) => {}
                (None, _) => self.found(name, Problem::NoCase),
            }
        }
        self.free(names.into_values());
    }
}
