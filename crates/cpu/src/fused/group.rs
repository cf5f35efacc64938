//! A fused program as the engine sees it.

use super::bind::{Bound, Kept, Plan, zeros};
use super::program::Program;
use super::schedule::{Schedule, schedule};
use crate::arena::Arena;
use crate::cpu::Context;
use crate::view::View;
use kiln_device::Error;
use kiln_fuse::{Handles, Optimization};
use kiln_ir::{DType, Id, Meta, Node, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};

/// A program that executes. What follows from its structure is found at the first run and kept.
pub(super) struct Fused {
    name: &'static str,
    program: Program,
    arena: Arc<Arena>,
    schedules: OnceLock<Option<[Arc<Schedule>; 2]>>,
    kept: Kept,
}

impl Fused {
    pub fn new(name: &'static str, program: Program, arena: Arc<Arena>) -> Fused {
        Fused { name, program, arena, schedules: OnceLock::new(), kept: Kept::default() }
    }

    fn plan(&self, nodes: &[&Node], handles: &dyn Handles<View>) -> Option<Plan<'_>> {
        let made = || {
            let dtypes = dtypes(nodes, handles)?;
            let schedule = |short| schedule(&self.program, nodes, |id| dtypes.get(&id).copied(), short);
            Some([Arc::new(schedule(false)?), Arc::new(schedule(true)?)])
        };
        let [long, short] = self.schedules.get_or_init(made).as_ref()?;
        Some(Plan { program: &self.program, long, short, parted: false })
    }
}

impl Optimization<View> for Fused {
    fn name(&self) -> String {
        self.name.into()
    }

    fn len(&self) -> usize {
        self.program.nodes as usize
    }

    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<View>) -> Result<(), Error> {
        let cx = Context { arena: &self.arena, place: handles.place() };
        let plan = self.plan(nodes, handles);
        let plan = plan.ok_or_else(|| Error::Unsupported { op: self.name.into(), device: "cpu".into() })?;
        zeros(&self.program, nodes)?;
        let bound = Bound::new(&cx, &plan, &self.kept, nodes, dying, handles)?;
        let reserved = bound.reserve(&cx)?;
        bound.run();
        drop(reserved);
        self.kept.finish(bound, handles);
        Ok(())
    }

    fn state(&self) -> Vec<u8> {
        self.program.encode()
    }
}

/// The dtypes of all operands and results.
pub(super) fn dtypes(nodes: &[&Node], handles: &dyn Handles<View>) -> Option<FxHashMap<Id, DType>> {
    let mut metas: FxHashMap<Id, Meta> = FxHashMap::default();
    for node in nodes {
        let mut ins: SmallVec<[Meta; 3]> = SmallVec::new();
        for &id in &node.ins {
            let meta = match metas.get(&id) {
                Some(meta) => *meta,
                None => handles.get(id)?.meta(),
            };
            metas.insert(id, meta);
            ins.push(meta);
        }
        metas.insert(*node.outs.first()?, *infer(&node.op, &ins).ok()?.first()?);
    }
    Some(metas.into_iter().map(|(id, meta)| (id, meta.dtype)).collect())
}
