//! The fuser: two elementwise operations behind each other are one launch.

use super::{Cell, Stream, cell};
use kiln_device::Error;
use kiln_fuse::{Failure, Fuser, Handles, LAUNCH, Optimization, Status, Window};
use kiln_ir::{Id, Node, Op};
use std::sync::Arc;

#[derive(Clone)]
pub struct Pair {
    places: Vec<usize>,
    closed: bool,
    stream: Arc<Stream>,
}

impl Pair {
    pub fn new(stream: Arc<Stream>) -> Pair {
        Pair { places: Vec::new(), closed: false, stream }
    }

    fn fits(&self, at: usize, window: &Window<'_>) -> bool {
        let Some(node) = window.node(at).filter(|node| matches!(node.op, Op::Unary(_))) else { return false };
        match self.places[..] {
            [] => true,
            [first] => {
                let made = window.node(first).map(|node| node.outs[0]);
                made == Some(node.ins[0]) && !window.leaves(node.ins[0], &[at])
            }
            _ => false,
        }
    }
}

impl Fuser<Cell> for Pair {
    fn name(&self) -> &'static str {
        "pair"
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
        LAUNCH as f64
    }

    fn ready(&self) -> bool {
        self.places.len() == 2
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        (self.places, self.closed) = (Vec::new(), false);
    }

    fn boxed(&self) -> Box<dyn Fuser<Cell>> {
        Box::new(self.clone())
    }

    fn finish(&self, _: &Window<'_>) -> Arc<dyn Optimization<Cell>> {
        Arc::new(Fused(self.stream.clone()))
    }
}

struct Fused(Arc<Stream>);

impl Optimization<Cell> for Fused {
    fn name(&self) -> String {
        "pair".into()
    }

    fn len(&self) -> usize {
        2
    }

    fn execute(&self, nodes: &[&Node], _: &[Id], handles: &mut dyn Handles<Cell>) -> Result<(), Failure> {
        let given = nodes[0].ins[0];
        let x = handles.get(given).cloned().ok_or(Error::UnknownValue(given))?;
        let (y, z) = (cell(x.meta), cell(x.meta));
        let steps = vec![
            (nodes[0].op.clone(), vec![x], vec![y.clone()]),
            (nodes[1].op.clone(), vec![y], vec![z.clone()]),
        ];
        self.0.launch("pair", steps);
        handles.put(nodes[1].outs[0], z);
        Ok(())
    }
}
