//! What is done for a window, in terms of places in it, so that it holds for every window of the same structure.

use crate::fuser::Handles;
use crate::recompute::Recompute;
use crate::{Failure, Observer, Optimization};
use kiln_device::Error;
use kiln_ir::{Id, Item, Node};
use smallvec::SmallVec;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The steps for a window.
pub struct Plan<V> {
    /// The groups that run as one.
    pub groups: Vec<Group<V>>,
    /// The steps, in order.
    pub steps: Vec<PlanStep>,
    /// How many items its windows have, repeated ones included.
    pub items: usize,
    /// Nodes that are computed again for a group.
    pub(crate) recomputed: Vec<Recompute>,
}

/// Nodes that run as one.
pub struct Group<V> {
    /// Their places, ascending.
    pub places: Vec<usize>,
    /// What runs them.
    pub optimization: Arc<dyn Optimization<V>>,
    /// Its name.
    pub name: String,
    /// The name of the fuser that made it.
    pub fuser: String,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PlanStep {
    /// Runs a group. `dying` are the places of frees of operands that it uses last.
    Group {
        /// Which one.
        group: usize,
        /// Places of frees.
        dying: Vec<usize>,
    },
    /// Runs a node of its own.
    Node {
        /// Its place.
        at: usize,
        /// Places of frees.
        dying: Vec<usize>,
    },
    /// Ends a value.
    Free {
        /// Its place.
        at: usize,
    },
}

/// Nodes of a group that are listed without touching the heap.
const INLINE: usize = 256;

impl<V> Plan<V> {
    /// Groups and single nodes that run.
    pub fn launches(&self) -> usize {
        self.steps.iter().filter(|step| !matches!(step, PlanStep::Free { .. })).count()
    }

    /// Nodes that run in groups.
    pub fn fused(&self) -> usize {
        self.groups.iter().map(|group| group.places.len()).sum()
    }

    /// Does for `items` what the plan says. `from` gives the place that an item had before composites were written
    /// out, where they were. Tells which groups did not run as one.
    pub(crate) fn replay(
        &self,
        items: &[Item],
        from: Option<&[u32]>,
        handles: &mut dyn Handles<V>,
        observers: &mut [Box<dyn Observer>],
    ) -> Unfused {
        let freed = |places: &[usize]| -> SmallVec<[Id; 16]> {
            let id = |&at: &usize| if let Item::Free(id) = items[at] { Some(id) } else { None };
            places.iter().filter_map(id).collect()
        };
        let place = |at: usize| from.map_or(at, |from| from[at] as usize);
        let mut count = Unfused::default();
        for step in &self.steps {
            match step {
                PlanStep::Free { at } => {
                    if let Item::Free(id) = items[*at] {
                        handles.free(id);
                    }
                }
                PlanStep::Node { at, dying } => {
                    if let Item::Run(node) = &items[*at] {
                        handles.run(place(*at), node, &freed(dying));
                    }
                }
                PlanStep::Group { group, dying } => {
                    let group = &self.groups[*group];
                    let nodes: SmallVec<[&Node; INLINE]> = (group.places.iter())
                        .filter_map(|&at| if let Item::Run(node) = &items[at] { Some(node) } else { None })
                        .collect();
                    handles.begins(place(group.places[0]), &nodes);
                    let ran = run(group, &nodes, &freed(dying), handles);
                    handles.ends(&group.name, &nodes);
                    match ran {
                        Ran::Done => observers.iter_mut().for_each(|o| o.group(&group.name, nodes.len())),
                        Ran::Guarded => {
                            count.guarded += 1;
                            observers.iter_mut().for_each(|o| o.guarded(&group.name, nodes.len()));
                            self.unfused(group, &nodes, items, &place, handles);
                        }
                        Ran::Failed(Failure::Unfit(error)) => {
                            count.fallbacks += 1;
                            observers.iter_mut().for_each(|o| o.fallback(&group.name, &error));
                            self.unfused(group, &nodes, items, &place, handles);
                        }
                        Ran::Failed(Failure::Spent(error)) => {
                            count.fallbacks += 1;
                            observers.iter_mut().for_each(|o| o.fallback(&group.name, &error));
                            handles.fail(place(group.places[0]), &nodes, error);
                            self.free_inner(&nodes, items, handles);
                        }
                    }
                }
            }
        }
        count
    }

    /// Runs a group's nodes by themselves, where each failure is told at its own node. Inner values then need an end.
    #[cold]
    fn unfused(
        &self,
        group: &Group<V>,
        nodes: &[&Node],
        items: &[Item],
        place: &dyn Fn(usize) -> usize,
        handles: &mut dyn Handles<V>,
    ) {
        for (&at, node) in group.places.iter().zip(nodes) {
            handles.run(place(at), node, &[]);
        }
        self.free_inner(nodes, items, handles);
    }

    /// Ends the values that a group would have kept to itself.
    fn free_inner(&self, nodes: &[&Node], items: &[Item], handles: &mut dyn Handles<V>) {
        for id in nodes.iter().flat_map(|n| &n.outs) {
            let ends = items.iter().any(|item| matches!(item, Item::Free(free) if free == id));
            if ends && !self.frees_later(items, *id) {
                handles.free(*id);
            }
        }
    }

    fn frees_later(&self, items: &[Item], id: Id) -> bool {
        self.steps.iter().any(|step| matches!(step, PlanStep::Free { at } if items[*at] == Item::Free(id)))
    }

    /// About how many bytes it takes.
    pub(crate) fn bytes(&self) -> usize {
        let dying: usize = (self.steps.iter())
            .map(|step| match step {
                PlanStep::Group { dying, .. } | PlanStep::Node { dying, .. } => dying.len(),
                PlanStep::Free { .. } => 0,
            })
            .sum();
        // A group's program is about as long as its list of nodes, times the size of an instruction.
        (self.fused() * 16 + dying) * size_of::<usize>() + size_of_val(&self.steps[..])
    }

    /// The plan as text: a line per step, with what each group fuses.
    pub fn describe(&self, items: &[Item]) -> String {
        let mut text = String::new();
        for step in &self.steps {
            let _ = match step {
                PlanStep::Group { group, .. } => {
                    let group = &self.groups[*group];
                    let ops: Vec<&str> = (group.places.iter())
                        .filter_map(|&at| {
                            if let Item::Run(node) = &items[at] { Some(node.op.name()) } else { None }
                        })
                        .collect();
                    writeln!(text, "{} of {}: {}", group.name, ops.len(), ops.join(" "))
                }
                PlanStep::Node { at, .. } => writeln!(text, "{}", items[*at]),
                PlanStep::Free { .. } => Ok(()),
            };
        }
        text
    }
}

/// Groups of a run whose nodes did not run as one.
#[derive(Default)]
pub(crate) struct Unfused {
    /// What they take for granted was not so.
    pub guarded: u64,
    /// They failed.
    pub fallbacks: u64,
}

enum Ran {
    Done,
    Guarded,
    Failed(Failure),
}

/// Runs a group. One that panics has left its operands as they were, or said otherwise itself: its results are put only when
/// all went well.
fn run<V>(group: &Group<V>, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<V>) -> Ran {
    let run = AssertUnwindSafe(|| {
        if !group.optimization.holds(nodes, handles) {
            return Ran::Guarded;
        }
        match group.optimization.execute(nodes, dying, handles) {
            Ok(()) => Ran::Done,
            Err(failure) => Ran::Failed(failure),
        }
    });
    catch_unwind(run).unwrap_or_else(|_| {
        let (op, message) = (group.name.clone(), "in a fused group".into());
        Ran::Failed(Failure::Unfit(Error::Panicked { op, message }))
    })
}
