//! The bytes that a plan moves: each launch reads what comes from outside it once, and writes what leaves it once. A
//! rearrangement that a device can give as a view moves nothing, and who reads the view reads its elements.

use crate::Window;
use crate::plan::{Plan, PlanStep};
use kiln_ir::{Id, Move, Op};
use rustc_hash::{FxHashMap, FxHashSet};

/// Bytes moved by one run of `plan` over `window`.
pub(crate) fn moved<V>(plan: &Plan<V>, window: &Window<'_>) -> u64 {
    let mut bases: FxHashMap<Id, Base> = FxHashMap::default();
    let mut bytes = 0u64;
    for step in &plan.steps {
        let own;
        let places = match step {
            PlanStep::Free { .. } => continue,
            PlanStep::Group { group, .. } => &plan.groups[*group].places[..],
            PlanStep::Node { at, .. } => {
                own = [*at];
                &own
            }
        };
        match places {
            &[at] if viewed(at, window, &mut bases) => {}
            _ => bytes = bytes.saturating_add(launch(places, window, &bases)),
        }
    }
    bytes
}

/// What a view looks at: the value that holds its elements, how many bytes that is, and whether they are in order.
#[derive(Clone, Copy)]
struct Base {
    id: Id,
    bytes: usize,
    dense: bool,
}

fn base(id: Id, window: &Window<'_>, bases: &FxHashMap<Id, Base>) -> Base {
    bases.get(&id).copied().unwrap_or_else(|| Base { id, bytes: window.meta(id).bytes(), dense: true })
}

/// Whether the node at a place is a view of its operand; if so it is noted.
fn viewed(at: usize, window: &Window<'_>, bases: &mut FxHashMap<Id, Base>) -> bool {
    let Some(node) = window.node(at) else { return false };
    let Op::Move(how) = &node.op else { return false };
    let of = base(node.ins[0], window, bases);
    let dense = match how {
        Move::Reshape(_) if !of.dense => return false,
        Move::Reshape(_) => true,
        Move::Permute(_) | Move::Expand(_) | Move::Slice { .. } => false,
        Move::Assign { .. } | Move::Flip(_) | Move::Cat { .. } => return false,
    };
    let bytes = of.bytes.min(window.meta(node.outs[0]).bytes());
    bases.insert(node.outs[0], Base { bytes, dense, ..of });
    true
}

fn launch(places: &[usize], window: &Window<'_>, bases: &FxHashMap<Id, Base>) -> u64 {
    let nodes = places.iter().filter_map(|&at| window.node(at));
    let mut seen: FxHashSet<Id> = FxHashSet::default();
    // Views of huge extents take no memory, so sums of their bytes may be anything.
    let mut bytes = 0u64;
    for node in nodes {
        for &id in &node.ins {
            let within = window.maker(id).is_some_and(|maker| places.binary_search(&maker).is_ok());
            let from = base(id, window, bases);
            if !within && seen.insert(from.id) {
                bytes = bytes.saturating_add(from.bytes as u64);
            }
        }
        bytes = (node.outs.iter())
            .filter(|&&id| places.len() == 1 || window.leaves(id, places))
            .fold(bytes, |bytes, &id| bytes.saturating_add(window.meta(id).bytes() as u64));
    }
    bytes
}
