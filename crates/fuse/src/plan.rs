//! What is done for a window, in terms of places in it, so that it holds for every window of the same structure.

use crate::again::Again;
use crate::fuser::Handles;
use crate::{Observer, Optimization};
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
    pub steps: Vec<Step>,
    /// How many items its windows have, repeated ones included.
    pub items: usize,
    /// Nodes that are computed again for a group.
    pub(crate) again: Vec<Again>,
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
pub enum Step {
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
        self.steps.iter().filter(|step| !matches!(step, Step::Free { .. })).count()
    }

    /// Nodes that run in groups.
    pub fn fused(&self) -> usize {
        self.groups.iter().map(|group| group.places.len()).sum()
    }

    /// Does for `items` what the plan says. `from` gives the place that an item had before composites were written
    /// out, where they were. Gives the number of groups that fell back.
    pub(crate) fn replay(
        &self,
        items: &[Item],
        from: Option<&[u32]>,
        handles: &mut dyn Handles<V>,
        observers: &mut [Box<dyn Observer>],
    ) -> u64 {
        let freed = |places: &[usize]| -> SmallVec<[Id; 16]> {
            let id = |&at: &usize| if let Item::Free(id) = items[at] { Some(id) } else { None };
            places.iter().filter_map(id).collect()
        };
        let place = |at: usize| from.map_or(at, |from| from[at] as usize);
        let mut fallbacks = 0;
        for step in &self.steps {
            match step {
                Step::Free { at } => {
                    if let Item::Free(id) = items[*at] {
                        handles.free(id);
                    }
                }
                Step::Node { at, dying } => {
                    if let Item::Run(node) = &items[*at] {
                        handles.run(place(*at), node, &freed(dying));
                    }
                }
                Step::Group { group, dying } => {
                    let group = &self.groups[*group];
                    let nodes: SmallVec<[&Node; INLINE]> = (group.places.iter())
                        .filter_map(|&at| if let Item::Run(node) = &items[at] { Some(node) } else { None })
                        .collect();
                    let done = run(group, &nodes, &freed(dying), handles);
                    match &done {
                        Ok(()) => observers.iter_mut().for_each(|o| o.group(&group.name, nodes.len())),
                        Err(error) => observers.iter_mut().for_each(|o| o.fallback(&group.name, error)),
                    }
                    if done.is_err() {
                        fallbacks += 1;
                        self.unfused(group, &nodes, items, &place, handles);
                    }
                }
            }
        }
        fallbacks
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
        for id in nodes.iter().flat_map(|n| &n.outs) {
            let ends = items.iter().any(|item| matches!(item, Item::Free(free) if free == id));
            if ends && !self.frees_later(items, *id) {
                handles.free(*id);
            }
        }
    }

    fn frees_later(&self, items: &[Item], id: Id) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Free { at } if items[*at] == Item::Free(id)))
    }

    /// About how many bytes it takes.
    pub(crate) fn bytes(&self) -> usize {
        let dying: usize = (self.steps.iter())
            .map(|step| match step {
                Step::Group { dying, .. } | Step::Node { dying, .. } => dying.len(),
                Step::Free { .. } => 0,
            })
            .sum();
        // A group's program is about as long as its list of nodes, times the size of an instruction.
        (self.fused() * 16 + dying) * size_of::<usize>() + size_of_val(&self.steps[..])
    }

    /// The plan as text: a line a step, with what each group fuses.
    pub fn describe(&self, items: &[Item]) -> String {
        let mut text = String::new();
        for step in &self.steps {
            let _ = match step {
                Step::Group { group, .. } => {
                    let group = &self.groups[*group];
                    let ops: Vec<&str> = (group.places.iter())
                        .filter_map(|&at| {
                            if let Item::Run(node) = &items[at] { Some(node.op.name()) } else { None }
                        })
                        .collect();
                    writeln!(text, "{} of {}: {}", group.name, ops.len(), ops.join(" "))
                }
                Step::Node { at, .. } => writeln!(text, "{}", items[*at]),
                Step::Free { .. } => Ok(()),
            };
        }
        text
    }
}

/// Runs a group. One that panics has not run: its results are put only when all went well.
fn run<V>(
    group: &Group<V>,
    nodes: &[&Node],
    dying: &[Id],
    handles: &mut dyn Handles<V>,
) -> Result<(), Error> {
    let run = AssertUnwindSafe(|| group.optimization.execute(nodes, dying, handles));
    catch_unwind(run).unwrap_or_else(|_| {
        Err(Error::Panicked { op: group.name.clone(), message: "in a fused group".into() })
    })
}
