//! The order of a plan's steps.

use crate::Window;
use crate::plan::{Group, Plan, PlanStep};
use kiln_ir::{Id, Item};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Orders groups and single nodes so that each runs after what it needs, and frees each value after its last use.
/// `None` if groups wait for each other.
pub(crate) fn arrange<V: 'static>(
    window: &Window<'_>,
    groups: Vec<Group<V>>,
    owner: &[Option<usize>],
) -> Option<Plan<V>> {
    // A unit is a group, or a node of its own; it is numbered by its first place.
    let unit = |at: usize| owner[at].map_or(at, |g| groups[g].places[0]);
    let order = order(window, &unit)?;
    let mut place = vec![usize::MAX; window.items.len()];
    order.iter().enumerate().for_each(|(i, &u)| place[u] = i);
    // Frees, by the step after which they run: the last that uses or makes the value.
    let mut frees: Vec<Vec<usize>> = vec![Vec::new(); order.len()];
    let mut steps: Vec<PlanStep> = Vec::new();
    for (at, item) in window.items.iter().enumerate() {
        let Item::Free(id) = item else { continue };
        let last = window.users(*id).iter().copied().chain(window.maker(*id)).map(|u| place[unit(u)]).max();
        match last {
            Some(last) => frees[last].push(at),
            None => steps.push(PlanStep::Free { at }),
        }
    }
    let internal = |group: &Group<V>, id: Id| !window.leaves(id, &group.places);
    for (step, &u) in order.iter().enumerate() {
        let group = owner[u];
        let mut dying = Vec::new();
        let mut after = Vec::new();
        for &at in &frees[step] {
            let Item::Free(id) = window.items[at] else { continue };
            // Values that live and die inside a group are never there to be freed.
            if group.is_some_and(|g| {
                window.maker(id).is_some_and(|m| owner[m] == Some(g)) && internal(&groups[g], id)
            }) {
                continue;
            }
            // An operand that dies here may be overwritten; only then does its free come with the step.
            if window.users(id).iter().any(|&user| unit(user) == u) {
                dying.push(at);
            }
            after.push(PlanStep::Free { at });
        }
        match group {
            Some(group) => steps.push(PlanStep::Group { group, dying }),
            None => steps.push(PlanStep::Node { at: u, dying }),
        }
        steps.extend(after);
    }
    Some(Plan { groups, steps, items: window.items.len(), recomputed: Vec::new() })
}

/// The units in an order in which they can run, the earliest first where there is a choice.
fn order(window: &Window<'_>, unit: &impl Fn(usize) -> usize) -> Option<Vec<usize>> {
    let count = window.items.len();
    let mut feeds: Vec<Vec<usize>> = vec![Vec::new(); count];
    let mut waits = vec![0usize; count];
    let mut units = 0;
    let mut ready = BinaryHeap::new();
    for at in 0..count {
        let Some(node) = window.node(at) else { continue };
        let own = unit(at);
        units += usize::from(own == at);
        for maker in node.ins.iter().filter_map(|&id| window.maker(id)).map(unit) {
            if maker != own {
                waits[own] += 1;
                feeds[maker].push(own);
            }
        }
    }
    let first = |at: usize| window.node(at).is_some() && unit(at) == at;
    ready.extend((0..count).filter(|&at| first(at) && waits[at] == 0).map(Reverse));
    let mut order = Vec::with_capacity(units);
    while let Some(Reverse(next)) = ready.pop() {
        order.push(next);
        for fed in std::mem::take(&mut feeds[next]) {
            waits[fed] -= 1;
            if waits[fed] == 0 {
                ready.push(Reverse(fed));
            }
        }
    }
    (order.len() == units).then_some(order)
}
