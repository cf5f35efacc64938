//! Elementwise nodes of one shape as one pass over memory.

use super::group::Fused;
use super::kernel::is_fusible;
use super::program::{Extent, Program};
use crate::arena::Arena;
use crate::view::View;
use kiln_fuse::{Fuser, Optimization, Status, Window};
use kiln_ir::{Node, Op, Shape};
use std::sync::Arc;

/// Collects elementwise nodes that give one shape, and the numbers they use.
pub(crate) struct Elementwise {
    arena: Arc<Arena>,
    places: Vec<usize>,
    shape: Option<Shape>,
    status: Status,
}

impl Elementwise {
    pub fn new(arena: Arc<Arena>) -> Elementwise {
        Elementwise { arena, places: Vec::new(), shape: None, status: Status::Open }
    }

    fn takes(&mut self, node: &Node, window: &Window<'_>) -> bool {
        match &node.op {
            Op::Full { shape, .. } => shape.is_empty(),
            _ if is_fusible(node, |id| window.meta(id).dtype) => {
                let shape = window.meta(node.outs[0]).shape;
                *self.shape.get_or_insert(shape) == shape
            }
            _ => false,
        }
    }
}

impl Fuser<View> for Elementwise {
    fn name(&self) -> &'static str {
        "elementwise"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        let taken =
            self.status == Status::Open && window.node(at).is_some_and(|node| self.takes(node, window));
        if taken {
            self.places.push(at);
        } else {
            self.status = Status::Closed;
        }
        self.status
    }

    fn status(&self) -> Status {
        self.status
    }

    fn score(&self, window: &Window<'_>) -> f64 {
        super::saved(window, &self.places)
    }

    fn ready(&self) -> bool {
        self.shape.is_some()
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = Elementwise::new(self.arena.clone());
    }

    fn boxed(&self) -> Box<dyn Fuser<View>> {
        let (arena, places) = (self.arena.clone(), self.places.clone());
        Box::new(Elementwise { arena, places, shape: self.shape, status: self.status })
    }

    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<View>> {
        let program = Program::new(window, &self.places, None, |_| Extent::Wide);
        Arc::new(Fused::new(self.name(), program, self.arena.clone()))
    }
}
