//! The search for groups: which sets of nodes run as one.
//!
//! Nodes are taken in order. Each that has no group yet is the seed of one: the nodes that use the group's values are
//! tried, nearest first, together with what they need that nothing else has made yet. A set is offered to a clone of
//! each fuser; the set with the best score stands. A set from which a way leads out and back in is no group, for it
//! would wait for itself. The effort is counted in offers, never in time, so that two
//! machines find the same plan.

use crate::plan::{Group, Plan, Step};
use crate::{Fuser, Limits, Status, Window};
use kiln_ir::{Id, Item};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The plan of a window.
pub(crate) fn search<V: 'static>(
    window: &Window<'_>,
    fusers: &[Box<dyn Fuser<V>>],
    limits: &Limits,
) -> Plan<V> {
    let mut owner: Vec<Option<usize>> = vec![None; window.items.len()];
    let mut groups: Vec<Group<V>> = Vec::new();
    let mut budget = limits.offers.saturating_mul(window.items.len());
    let fed = feeds(window);
    for seed in 0..window.items.len() {
        if owner[seed].is_some() || window.node(seed).is_none() {
            continue;
        }
        let best = fusers
            .iter()
            .filter_map(|fuser| {
                let made = Made {
                    owner: &owner,
                    groups: &groups.iter().map(|g| &g.places[..]).collect::<Vec<_>>(),
                    fed: &fed,
                };
                grow(window, fuser.as_ref(), seed, &made, limits, &mut budget)
            })
            .max_by(|a, b| a.score.total_cmp(&b.score));
        let Some(best) = best.filter(|best| best.score > 0.0 && best.places.len() > 1) else { continue };
        let optimization = best.fuser.finish(window);
        for &at in &best.places {
            owner[at] = Some(groups.len());
        }
        groups.push(Group {
            places: best.places,
            optimization: Arc::clone(&optimization),
            name: optimization.name(),
        });
    }
    match arrange(window, groups, &owner) {
        Some(plan) => plan,
        // Groups that wait for each other are a fault of this search. Every window can run unfused.
        None => {
            arrange(window, Vec::new(), &vec![None; window.items.len()]).expect("single nodes are in order")
        }
    }
}

/// What is there when a set grows: the groups so far, and which nodes use each node's results.
struct Made<'a> {
    owner: &'a [Option<usize>],
    groups: &'a [&'a [usize]],
    fed: &'a [Vec<usize>],
}

impl Made<'_> {
    /// Whether no way leads from the set out and back in. A group made before is entered and left as a whole.
    fn stands_alone(&self, set: &BTreeSet<usize>) -> bool {
        // Ways lead forward, except that a group is entered at one place and left at an earlier one: nothing behind the
        // last place of the set and of the groups that reach back across it needs a look.
        let mut last = set.last().copied().unwrap_or(0);
        while let Some((_, end)) = self
            .groups
            .iter()
            .map(|g| (g[0], g[g.len() - 1]))
            .find(|&(first, end)| first < last && end > last)
        {
            last = end;
        }
        let first = |at: usize| self.owner[at].map_or(at, |g| self.groups[g][0]);
        let mut seen = vec![false; self.fed.len()];
        let mut places: Vec<usize> = Vec::new();
        let visit = |from: usize, places: &mut Vec<usize>| {
            places.extend(self.fed[from].iter().filter(|&&to| !set.contains(&to) && first(to) <= last));
        };
        set.iter().for_each(|&at| visit(at, &mut places));
        while let Some(at) = places.pop() {
            let whole = self.owner[at].map_or(std::slice::from_ref(&at), |g| self.groups[g]);
            for &at in whole {
                if !std::mem::replace(&mut seen[at], true) {
                    if self.fed[at].iter().any(|to| set.contains(to)) {
                        return false;
                    }
                    visit(at, &mut places);
                }
            }
        }
        true
    }
}

/// The nodes that use each node's results.
fn feeds(window: &Window<'_>) -> Vec<Vec<usize>> {
    let mut fed = vec![Vec::new(); window.items.len()];
    for at in 0..window.items.len() {
        for maker in window.node(at).iter().flat_map(|n| &n.ins).filter_map(|&id| window.maker(id)) {
            fed[maker].push(at);
        }
    }
    fed
}

struct Found<V> {
    places: Vec<usize>,
    fuser: Box<dyn Fuser<V>>,
    score: f64,
}

impl<V> Clone for Found<V> {
    fn clone(&self) -> Found<V> {
        Found { places: self.places.clone(), fuser: self.fuser.boxed(), score: self.score }
    }
}

/// The best set that grows from `seed`.
fn grow<V: 'static>(
    window: &Window<'_>,
    fuser: &dyn Fuser<V>,
    seed: usize,
    made: &Made<'_>,
    limits: &Limits,
    budget: &mut usize,
) -> Option<Found<V>> {
    let makers =
        |at: usize| window.node(at).into_iter().flat_map(|n| &n.ins).filter_map(|&id| window.maker(id));
    let mut now = offer(window, fuser, &BTreeSet::from([seed]), budget)?;
    let mut set = BTreeSet::from([seed]);
    let mut best = None;
    for at in seed..window.items.len() {
        if at != seed && !makers(at).any(|maker| set.contains(&maker)) {
            continue;
        }
        // The node itself, and then whatever it needs that has no group yet, nearest first.
        let mut wanted = if at == seed { makers(at).collect() } else { vec![at] };
        while let Some(at) = wanted.pop() {
            if made.owner[at].is_some() || set.contains(&at) || set.len() >= limits.nodes {
                continue;
            }
            let mut wider = set.clone();
            wider.insert(at);
            // Cheap to ask first: most of what is near does not fit.
            let Some(found) = offer(window, fuser, &wider, budget) else { continue };
            if found.score < now.score || !made.stands_alone(&wider) {
                continue;
            }
            (now, set) = (found, wider);
            wanted.extend(makers(at));
            if now.fuser.ready() {
                best = Some(now.clone());
            }
        }
    }
    best
}

fn offer<V: 'static>(
    window: &Window<'_>,
    fuser: &dyn Fuser<V>,
    set: &BTreeSet<usize>,
    budget: &mut usize,
) -> Option<Found<V>> {
    *budget = budget.checked_sub(set.len())?;
    let mut fuser = fuser.boxed();
    fuser.reset();
    for &at in set {
        if fuser.offer(at, window) == Status::Closed {
            return None;
        }
    }
    let score = fuser.score(window);
    Some(Found { places: set.iter().copied().collect(), fuser, score })
}

/// Orders groups and single nodes so that each runs after what it needs, and frees each value after its last use.
/// Nothing if groups wait for each other.
fn arrange<V: 'static>(
    window: &Window<'_>,
    groups: Vec<Group<V>>,
    owner: &[Option<usize>],
) -> Option<Plan<V>> {
    // A unit is a group, or a node of its own; it is numbered by its first place.
    let unit = |at: usize| owner[at].map_or(at, |g| groups[g].places[0]);
    let members = |at: usize| owner[at].map_or_else(|| vec![at], |g| groups[g].places.clone());
    let mut waits: FxHashMap<usize, BTreeSet<usize>> = FxHashMap::default();
    let mut feeds: FxHashMap<usize, BTreeSet<usize>> = FxHashMap::default();
    let mut units: BTreeSet<usize> = BTreeSet::new();
    for at in 0..window.items.len() {
        let Some(node) = window.node(at) else { continue };
        units.insert(unit(at));
        for maker in node.ins.iter().filter_map(|&id| window.maker(id)).map(unit) {
            if maker != unit(at) {
                waits.entry(unit(at)).or_default().insert(maker);
                feeds.entry(maker).or_default().insert(unit(at));
            }
        }
    }
    let mut ready: BTreeSet<usize> = units.iter().copied().filter(|u| !waits.contains_key(u)).collect();
    let mut order = Vec::with_capacity(units.len());
    while let Some(next) = ready.pop_first() {
        order.push(next);
        for fed in feeds.remove(&next).unwrap_or_default() {
            if let Some(left) = waits.get_mut(&fed) {
                left.remove(&next);
                if left.is_empty() {
                    ready.insert(fed);
                }
            }
        }
    }
    debug_assert_eq!(order.len(), units.len(), "groups wait for each other");
    if order.len() != units.len() {
        return None;
    }
    let place: FxHashMap<usize, usize> = order.iter().enumerate().map(|(i, &u)| (u, i)).collect();
    // Frees, by the step after which they run: the last that uses or makes the value.
    let mut frees: Vec<Vec<usize>> = vec![Vec::new(); order.len()];
    let mut first: Vec<usize> = Vec::new();
    for (at, item) in window.items.iter().enumerate() {
        let Item::Free(id) = item else { continue };
        let last = window.users(*id).iter().copied().chain(window.maker(*id)).map(|u| place[&unit(u)]).max();
        match last {
            Some(last) => frees[last].push(at),
            None => first.push(at),
        }
    }
    let internal = |group: &Group<V>, id: Id| !window.leaves(id, &group.places);
    let mut steps: Vec<Step> = first.into_iter().map(|at| Step::Free { at }).collect();
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
            let used = members(u).iter().any(|&m| window.node(m).is_some_and(|n| n.ins.contains(&id)));
            if used {
                dying.push(at);
            }
            after.push(Step::Free { at });
        }
        match group {
            Some(group) => steps.push(Step::Group { group, dying }),
            None => steps.push(Step::Node { at: u, dying }),
        }
        steps.extend(after);
    }
    Some(Plan { groups, steps })
}
