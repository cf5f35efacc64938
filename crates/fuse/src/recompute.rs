//! Values computed again rather than kept. A group that reads what another group leaves behind for it alone, typically
//! backward reading what forward made, takes a copy of the nodes that make it where that moves fewer bytes.

use crate::arrange::arrange;
use crate::moved::moved;
use crate::plan::{Group, Plan};
use crate::{Fuser, Status, Window};
use kiln_ir::{Id, Item, Meta, Node, Op};
use rustc_hash::{FxHashMap, FxHashSet};

/// The longest chain of nodes that is repeated for one value.
const DEPTH: usize = 4;

/// Nodes that are repeated for one group, in terms of places in the window.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Recompute {
    /// The nodes, ascending.
    pub nodes: Vec<usize>,
    /// The nodes that take the repeated values, ascending.
    pub users: Vec<usize>,
}

/// A window with nodes repeated.
pub(crate) struct Expansion {
    pub items: Vec<Item>,
    /// The new place of each item.
    pub places: Vec<usize>,
    /// For each of the [`Recompute`], the places of its copies.
    pub copies: Vec<Vec<usize>>,
    /// The places of all copies, and of what they are copies of.
    pub twins: Vec<(usize, usize)>,
}

/// Writes the copies before their first users. What they read, and they themselves, are freed at the end: a plan frees
/// after the last use wherever the free stands.
pub(crate) fn expand(items: &[Item], recomputed: &[Recompute]) -> Expansion {
    let node = |at: usize| if let Item::Run(node) = &items[at] { Some(node) } else { None };
    let read: FxHashSet<Id> = (recomputed.iter().flat_map(|a| &a.nodes))
        .flat_map(|&at| node(at).into_iter().flat_map(|n| n.ins.iter().copied()))
        .collect();
    let mut names: Vec<FxHashMap<Id, Id>> = vec![FxHashMap::default(); recomputed.len()];
    let mut expanded = Expansion {
        items: Vec::with_capacity(items.len() + 8),
        places: vec![0; items.len()],
        copies: vec![Vec::new(); recomputed.len()],
        twins: Vec::new(),
    };
    let (mut late, mut next) = (Vec::new(), Id::RECOMPUTED.first.0);
    for (at, item) in items.iter().enumerate() {
        for (k, own) in recomputed.iter().enumerate().filter(|(_, own)| own.users[0] == at) {
            for (from, node) in own.nodes.iter().filter_map(|&from| Some((from, node(from)?))) {
                let mut copy = renamed(node, &names[k]);
                for id in &mut copy.outs {
                    names[k].insert(*id, Id(next));
                    *id = Id(next);
                    next += 1;
                }
                expanded.copies[k].push(expanded.items.len());
                expanded.twins.push((expanded.items.len(), expanded.places[from]));
                expanded.items.push(Item::Run(copy));
            }
        }
        match item {
            Item::Free(id) if read.contains(id) => {
                late.push(at);
                continue;
            }
            Item::Free(_) => {
                expanded.places[at] = expanded.items.len();
                expanded.items.push(item.clone());
            }
            Item::Run(node) => {
                let user = recomputed.iter().position(|own| own.users.binary_search(&at).is_ok());
                expanded.places[at] = expanded.items.len();
                expanded
                    .items
                    .push(Item::Run(user.map_or_else(|| node.clone(), |k| renamed(node, &names[k]))));
            }
        }
    }
    for at in late {
        expanded.places[at] = expanded.items.len();
        expanded.items.push(items[at].clone());
    }
    expanded.items.extend((Id::RECOMPUTED.first.0..next).map(|id| Item::Free(Id(id))));
    expanded
}

fn renamed(node: &Node, names: &FxHashMap<Id, Id>) -> Node {
    let mut node = node.clone();
    node.ins.iter_mut().for_each(|id| *id = *names.get(id).unwrap_or(id));
    node
}

/// The plan, or one that repeats nodes and moves fewer bytes. `outside` gives the meta of a value defined before.
pub(crate) fn improve<V: 'static>(
    window: &Window<'_>,
    plan: Plan<V>,
    fusers: &[Box<dyn Fuser<V>>],
    outside: impl Fn(Id) -> Option<Meta>,
) -> Plan<V> {
    let mut chosen = choose(window, &plan);
    while !chosen.is_empty() {
        let recomputed: Vec<Recompute> = chosen.iter().map(|(_, recomputed)| recomputed.clone()).collect();
        let expanded = expand(window.items, &recomputed);
        let Some(wider) = Window::new(&expanded.items, &outside) else { return plan };
        let mut groups = Vec::with_capacity(plan.groups.len());
        let mut refused = None;
        for (number, group) in plan.groups.iter().enumerate() {
            let mine = chosen.iter().position(|(owner, _)| *owner == number);
            let mut places: Vec<usize> = group.places.iter().map(|&at| expanded.places[at]).collect();
            places.extend(mine.into_iter().flat_map(|k| &expanded.copies[k]));
            places.sort_unstable();
            match rebuilt(&wider, fusers, &group.fuser, places) {
                Some(group) => groups.push(group),
                None => {
                    refused = Some(mine);
                    break;
                }
            }
        }
        match refused {
            Some(Some(k)) => {
                chosen.remove(k);
                continue;
            }
            Some(None) => return plan,
            None => {}
        }
        let mut owner = vec![None; expanded.items.len()];
        for (number, group) in groups.iter().enumerate() {
            group.places.iter().for_each(|&at| owner[at] = Some(number));
        }
        return match arrange(&wider, groups, &owner) {
            Some(better) if moved(&better, &wider) < moved(&plan, window) => Plan { recomputed, ..better },
            _ => plan,
        };
    }
    plan
}

/// The nodes at these places as a group of that fuser, if it takes them and it would be searched for.
pub(crate) fn rebuilt<V: 'static>(
    window: &Window<'_>,
    fusers: &[Box<dyn Fuser<V>>],
    name: &str,
    places: Vec<usize>,
) -> Option<Group<V>> {
    let mut fuser = fusers.iter().find(|fuser| fuser.name() == name)?.boxed();
    fuser.reset();
    let taken = places.iter().all(|&at| fuser.offer(at, window) == Status::Open);
    (taken && fuser.ready() && fuser.score(window) > 0.0).then(|| {
        let optimization = fuser.finish(window);
        Group { places, name: optimization.name(), optimization, fuser: name.to_string() }
    })
}

/// What would be worth repeating, with the number of the group it is for.
fn choose<V>(window: &Window<'_>, plan: &Plan<V>) -> Vec<(usize, Recompute)> {
    let mut owner = vec![None; window.items.len()];
    for (number, group) in plan.groups.iter().enumerate() {
        group.places.iter().for_each(|&at| owner[at] = Some(number));
    }
    let mut chosen = Vec::new();
    for (number, group) in plan.groups.iter().enumerate() {
        let within = |at: &usize| group.places.binary_search(at).is_ok();
        let mut operands: Vec<Id> = (group.places.iter())
            .flat_map(|&at| window.node(at).into_iter().flat_map(|node| node.ins.iter().copied()))
            .filter(|&id| !window.maker(id).is_some_and(|maker| within(&maker)))
            .collect();
        operands.sort_unstable();
        operands.dedup();
        let mut all = Chain { loaded: operands.iter().copied().collect(), ..Chain::default() };
        let mut users = Vec::new();
        for &id in &operands {
            let Some(maker) = window.maker(id) else { continue };
            let Some(from) = owner[maker] else { continue };
            let from = &plan.groups[from].places;
            let alone = |user: &usize| {
                from.binary_search(user).is_ok()
                    || within(user) && window.node(*user).is_some_and(|n| is_elementwise(&n.op))
            };
            if window.survives(id) || !window.users(id).iter().all(alone) {
                continue;
            }
            let mut chain = all.clone();
            chain.loaded.remove(&id);
            let fits = chain.take(window, from, maker, DEPTH);
            if fits && chain.cost - all.cost < 2 * window.meta(id).bytes() {
                all = chain;
                users.extend(window.users(id).iter().copied().filter(within));
            }
        }
        if !users.is_empty() {
            users.sort_unstable();
            users.dedup();
            all.nodes.sort_unstable();
            chosen.push((number, Recompute { nodes: all.nodes, users }));
        }
    }
    chosen
}

/// Nodes to repeat, and what that reads.
#[derive(Clone, Default)]
struct Chain {
    nodes: Vec<usize>,
    /// What the group reads anyway.
    loaded: FxHashSet<Id>,
    /// Bytes of what it would read besides.
    cost: usize,
}

impl Chain {
    /// Takes the node at a place of the group `from`, and what it needs that `from` keeps to itself.
    fn take(&mut self, window: &Window<'_>, from: &[usize], at: usize, depth: usize) -> bool {
        if self.nodes.contains(&at) {
            return true;
        }
        let Some(node) = window.node(at).filter(|node| is_elementwise(&node.op)) else { return false };
        if depth == 0 {
            return false;
        }
        for &id in &node.ins {
            let maker = window.maker(id);
            if self.loaded.contains(&id) || maker.is_some_and(|maker| self.nodes.contains(&maker)) {
                continue;
            }
            match maker.filter(|maker| from.binary_search(maker).is_ok()) {
                Some(maker) if !window.leaves(id, from) => {
                    if !self.take(window, from, maker, depth - 1) {
                        return false;
                    }
                }
                _ => {
                    self.cost += window.meta(id).bytes();
                    self.loaded.insert(id);
                }
            }
        }
        self.nodes.push(at);
        true
    }
}

/// Whether repeating it costs little and cannot fail.
fn is_elementwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Commit | Op::Cast(_) | Op::Full { .. })
        && !op.is_fallible()
}
