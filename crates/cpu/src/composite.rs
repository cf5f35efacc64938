//! Composites run as the primitives they stand for, one after another.

use crate::cpu::CpuKernels;
use crate::view::View;
use kiln_device::{Error, Place};
use kiln_host::{Arg, Kernels};
use kiln_ir::{Build, Meta, Op, V, infer};
use smallvec::SmallVec;
use std::cell::RefCell;

/// A builder that executes what is written in it.
pub(crate) struct Eager<'a> {
    kernels: &'a CpuKernels,
    place: Place,
    given: usize,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// Metas go on after a failure, so that the lowering can finish.
    metas: Vec<Meta>,
    views: Vec<Option<View>>,
    failed: Option<Error>,
}

impl<'a> Eager<'a> {
    pub fn new(kernels: &'a CpuKernels, place: Place, ins: impl Iterator<Item = View>) -> Eager<'a> {
        let views: Vec<Option<View>> = ins.map(Some).collect();
        let metas = views.iter().flatten().map(View::meta).collect();
        let given = views.len();
        Eager { kernels, place, given, state: RefCell::new(State { metas, views, failed: None }) }
    }

    /// The results; `None` if the operation stands for no others.
    pub fn lower(self, op: &Op) -> Result<Option<SmallVec<[View; 2]>>, Error> {
        let keys = |op: &Op| -> Option<SmallVec<[u32; 2]>> {
            let given: SmallVec<[V<'_>; 4]> = (0..self.given).map(|i| V::new(&self, i as u32)).collect();
            Some(kiln_ir::lower(op, &given)?.iter().map(|v| v.key()).collect())
        };
        let Some(outs) = keys(op) else { return Ok(None) };
        let state = self.state.into_inner();
        match state.failed {
            Some(error) => Err(error),
            None => Ok(outs.iter().map(|&key| state.views[key as usize].clone()).collect()),
        }
    }
}

impl Build for Eager<'_> {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        let state = &mut *self.state.borrow_mut();
        let metas: SmallVec<[Meta; 4]> = ins.iter().map(|&key| state.metas[key as usize]).collect();
        let outs = infer(&op, &metas)
            .unwrap_or_else(|e| panic!("a lowering wrote an operation that does not fit: {e}"));
        let args: Option<SmallVec<[Arg<View>; 4]>> =
            ins.iter().map(|&key| state.views[key as usize].clone().map(Arg::Shared)).collect();
        let views = args.map(|mut args| self.kernels.eval(&op, &mut args, self.place));
        let mut views = match views {
            Some(Ok(views)) => views.into_iter().map(Some).collect(),
            Some(Err(error)) => {
                state.failed.get_or_insert(error);
                Vec::new()
            }
            None => Vec::new(),
        };
        views.resize(outs.len(), None);
        let first = state.metas.len() as u32;
        state.metas.extend(outs);
        state.views.extend(views);
        (first..state.metas.len() as u32).collect()
    }

    fn meta(&self, value: u32) -> Meta {
        self.state.borrow().metas[value as usize]
    }
}
