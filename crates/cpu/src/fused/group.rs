//! A fused program as the engine sees it.

use super::bind::{Bound, Kept, Plan, zeros};
use super::program::Program;
use super::schedule::{Schedule, schedule};
use crate::arena::Arena;
use crate::cpu::Context;
use crate::view::View;
use kiln_device::Error;
use kiln_fuse::{Failure, Handles, Optimization};
use kiln_ir::{Id, Meta, Node, infer};
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
            let metas = metas(nodes, handles)?;
            let schedule = |short| schedule(&self.program, nodes, |id| Some(metas.get(&id)?.dtype), short);
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

    /// Numbers that it takes for zero are no part of the structure.
    fn holds(&self, nodes: &[&Node], _: &dyn Handles<View>) -> bool {
        zeros(&self.program, nodes)
    }

    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<View>) -> Result<(), Failure> {
        let cx = Context { arena: &self.arena, place: handles.place() };
        let plan = self.plan(nodes, handles);
        let plan = plan.ok_or_else(|| Error::Unsupported { op: self.name.into(), device: "cpu".into() })?;
        let bound = Bound::new(&cx, &plan, &self.kept, nodes, dying, handles)?;
        let reserved = bound.reserve(&cx)?;
        bound.spend(self.name, dying, || {
            bound.run();
            Ok(())
        })?;
        drop(reserved);
        self.kept.finish(bound, handles);
        Ok(())
    }
}

/// The metas of all operands and results. Nothing if a name stands for two values, or an operation does not fit.
pub(super) fn metas(nodes: &[&Node], handles: &dyn Handles<View>) -> Option<FxHashMap<Id, Meta>> {
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
        let out = *infer(&node.op, &ins).ok()?.first()?;
        if metas.insert(*node.outs.first()?, out).is_some() {
            return None;
        }
    }
    Some(metas)
}
