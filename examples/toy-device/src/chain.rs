//! The toy's fuser: elementwise nodes of f32 with one operand, one after another, in one walk over memory.

use kiln::Error;
use kiln::device::reference::{self, Value};
use kiln::fuse::{Failure, Fuser, Handles, LAUNCH, Optimization, Status, Window};
use kiln::ir::{DType, Id, Node, Op};
use std::sync::Arc;

/// Collects a chain: each node uses what the one before gave, and nothing else does.
#[derive(Clone, Default)]
pub struct Chain {
    places: Vec<usize>,
    closed: bool,
}

impl Chain {
    fn fits(&self, at: usize, window: &Window<'_>) -> bool {
        let Some(node) = window.node(at) else { return false };
        let plain = |id: Id| window.meta(id).dtype == DType::F32;
        if !matches!(node.op, Op::Unary(_)) || !plain(node.ins[0]) || !plain(node.outs[0]) {
            return false;
        }
        let Some(&last) = self.places.last() else { return true };
        let made = window.node(last).map(|n| n.outs[0]);
        made == Some(node.ins[0]) && !window.leaves(node.ins[0], &[at])
    }
}

impl Fuser<Value> for Chain {
    fn name(&self) -> &'static str {
        "chain"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        match !self.closed && self.fits(at, window) {
            true => self.places.push(at),
            false => self.closed = true,
        }
        self.status()
    }

    fn status(&self) -> Status {
        if self.closed { Status::Closed } else { Status::Open }
    }

    fn score(&self, _: &Window<'_>) -> f64 {
        (LAUNCH * self.places.len().saturating_sub(1)) as f64
    }

    fn ready(&self) -> bool {
        self.places.len() > 1
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = Chain::default();
    }

    fn boxed(&self) -> Box<dyn Fuser<Value>> {
        Box::new(self.clone())
    }

    fn finish(&self, _: &Window<'_>) -> Arc<dyn Optimization<Value>> {
        Arc::new(Fused { nodes: self.places.len() })
    }
}

/// A chain that runs as one: the values between are never put into the table.
struct Fused {
    nodes: usize,
}

impl Optimization<Value> for Fused {
    fn name(&self) -> String {
        "chain".into()
    }

    fn len(&self) -> usize {
        self.nodes
    }

    fn execute(&self, nodes: &[&Node], _: &[Id], handles: &mut dyn Handles<Value>) -> Result<(), Failure> {
        let (first, last) = (nodes[0].ins[0], nodes[nodes.len() - 1].outs[0]);
        let mut value = handles.get(first).cloned().ok_or(Error::UnknownValue(first))?;
        for node in nodes {
            let failed =
                |e: reference::EvalError| Error::Custom { op: node.op.name().into(), message: e.to_string() };
            value = reference::eval(&node.op, &[&value]).map_err(failed)?.swap_remove(0);
        }
        handles.put(last, value);
        Ok(())
    }
}
