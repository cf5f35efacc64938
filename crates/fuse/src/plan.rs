//! What is done for a window, in terms of places in it, so that it holds for every window of the same structure.

use crate::Optimization;
use crate::fuser::Handles;
use kiln_ir::{Id, Item, Node};
use smallvec::SmallVec;
use std::fmt::Write;
use std::sync::Arc;

/// The steps for a window.
pub struct Plan<V> {
    /// The groups that run as one.
    pub groups: Vec<Group<V>>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

/// Nodes that run as one.
pub struct Group<V> {
    /// Their places, ascending.
    pub places: Vec<usize>,
    /// What runs them.
    pub optimization: Arc<dyn Optimization<V>>,
    /// Its name.
    pub name: String,
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

impl<V> Plan<V> {
    /// Does for `items` what the plan says.
    pub fn replay(&self, items: &[Item], handles: &mut dyn Handles<V>) {
        let freed = |places: &[usize]| -> SmallVec<[Id; 4]> {
            places
                .iter()
                .filter_map(|&at| if let Item::Free(id) = items[at] { Some(id) } else { None })
                .collect()
        };
        for step in &self.steps {
            match step {
                Step::Free { at } => {
                    if let Item::Free(id) = items[*at] {
                        handles.free(id);
                    }
                }
                Step::Node { at, dying } => {
                    if let Item::Run(node) = &items[*at] {
                        handles.run(*at, node, &freed(dying));
                    }
                }
                Step::Group { group, dying } => {
                    let group = &self.groups[*group];
                    let nodes: SmallVec<[&Node; 16]> = (group.places.iter())
                        .filter_map(|&at| if let Item::Run(node) = &items[at] { Some(node) } else { None })
                        .collect();
                    if group.optimization.execute(&nodes, &freed(dying), handles).is_err() {
                        // Unfused, each failure is told at its own node. Inner values then need an end of their own.
                        for (&at, node) in group.places.iter().zip(&nodes) {
                            handles.run(at, node, &[]);
                        }
                        for id in nodes.iter().flat_map(|n| &n.outs) {
                            let ends =
                                items.iter().any(|item| matches!(item, Item::Free(free) if free == id));
                            if ends && !self.frees_later(items, *id) {
                                handles.free(*id);
                            }
                        }
                    }
                }
            }
        }
    }

    fn frees_later(&self, items: &[Item], id: Id) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Free { at } if items[*at] == Item::Free(id)))
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
