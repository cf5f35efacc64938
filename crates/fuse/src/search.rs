//! The search for groups: which sets of nodes run as one.
//!
//! Nodes are taken in order. Each that has no group yet is the seed of one: the nodes that use the group's values are
//! tried, nearest first, then those that read what it reads, together with what they need that nothing else has made yet.
//! A set is offered to a clone of each fuser, node by node as it grows; the set with the best score stands. A set from
//! which a way leads out and back in is no group, for it would wait for itself. The effort is counted in offers, never in
//! time, so that two machines find the same plan.

use crate::arrange::arrange;
use crate::plan::{Group, Plan};
use crate::{Fuser, LAUNCH, Limits, Status, Window};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The plan of a window.
pub(crate) fn search<V: 'static>(
    window: &Window<'_>,
    fusers: &[Box<dyn Fuser<V>>],
    limits: &Limits,
) -> Plan<V> {
    let mut budget = limits.offers.saturating_mul(window.items.len());
    let mut made = Grouping::new(window);
    let mut groups: Vec<Group<V>> = Vec::new();
    for seed in 0..window.items.len() {
        if made.owner[seed].is_some() || window.node(seed).is_none() {
            continue;
        }
        let best = fusers
            .iter()
            .filter_map(|fuser| grow(window, fuser.as_ref(), seed, &mut made, limits, &mut budget))
            .max_by(|a, b| a.score.total_cmp(&b.score));
        let Some(best) = best.filter(|best| best.score > 0.0 && best.places.len() > 1) else { continue };
        let optimization = best.fuser.finish(window);
        made.add(&best.places);
        let (name, fuser) = (optimization.name(), best.fuser.name().to_string());
        groups.push(Group { places: best.places, optimization, name, fuser });
    }
    match arrange(window, groups, &made.owner) {
        Some(plan) => plan,
        // Groups that wait for each other are a fault of this search. Every window can run unfused.
        None => {
            debug_assert!(false, "groups wait for each other");
            arrange(window, Vec::new(), &vec![None; window.items.len()]).expect("single nodes are in order")
        }
    }
}

/// What is there when a set grows: the graph of nodes, and the groups so far.
struct Grouping {
    owner: Vec<Option<usize>>,
    groups: Vec<Vec<usize>>,
    /// The nodes whose results each node uses, and those that use its results.
    needs: Vec<SmallVec<[usize; 4]>>,
    feeds: Vec<SmallVec<[usize; 4]>>,
    /// Marks of nodes, valid while they hold the current number.
    marks: Vec<[u32; 3]>,
    mark: u32,
    walks: u32,
}

/// Nodes that a walk looks at before it gives up. Once a group joins forward and backward, a walk may go through all of a
/// training step, which must not end the search for more.
const WALK: usize = 8192;

/// Nodes are tried together for reading the same value if it has this many bytes, and at most so many readers.
const COMMON: usize = 16 * LAUNCH;
const READERS: usize = 8;

/// What a mark means: in the set, seen by the walk, tried.
const SET: usize = 0;
const SEEN: usize = 1;
const TRIED: usize = 2;

impl Grouping {
    fn new(window: &Window<'_>) -> Grouping {
        let count = window.items.len();
        let mut feeds = vec![SmallVec::new(); count];
        let mut needs = Vec::with_capacity(count);
        for at in 0..count {
            let ins = window.node(at).into_iter().flat_map(|n| &n.ins);
            let makers: SmallVec<[usize; 4]> = ins.filter_map(|&id| window.maker(id)).collect();
            makers.iter().for_each(|&maker| feeds[maker].push(at));
            needs.push(makers);
        }
        let (owner, marks) = (vec![None; count], vec![[0; 3]; count]);
        Grouping { owner, groups: Vec::new(), needs, feeds, marks, mark: 0, walks: 0 }
    }

    fn add(&mut self, places: &[usize]) {
        places.iter().for_each(|&at| self.owner[at] = Some(self.groups.len()));
        self.groups.push(places.to_vec());
    }

    /// The first and last place of the node's group, or its own.
    fn span(&self, at: usize) -> (usize, usize) {
        self.owner[at].map_or((at, at), |g| (self.groups[g][0], self.groups[g][self.groups[g].len() - 1]))
    }

    /// Whether no way leads out of the set and back in, once `at` is part of it; it is so without `at`. A group made
    /// before is entered and left as a whole.
    fn stands_alone(&mut self, set: &[usize], at: usize) -> bool {
        // Ways lead forward, except that a group is entered at one place and left at an earlier one. Nothing outside
        // the set's reach, widened by the groups that cross its borders, needs a look.
        let (mut low, mut high) = (set[0].min(at), set[set.len() - 1].max(at));
        loop {
            let crosses = |g: &Vec<usize>, border: usize| g[0] < border && g[g.len() - 1] > border;
            let reach = (self.groups.iter())
                .filter(|g| crosses(g, low) || crosses(g, high))
                .fold((low, high), |(l, h), g| (l.min(g[0]), h.max(g[g.len() - 1])));
            if reach == (low, high) {
                break;
            }
            (low, high) = reach;
        }
        self.reaches_none(at, low, high, true) && self.reaches_none(at, low, high, false)
    }

    /// Whether no way of at least one node outside the set leads from `at` to the set, forward or backward. No also
    /// where that takes too long to tell.
    fn reaches_none(&mut self, at: usize, low: usize, high: usize, forward: bool) -> bool {
        self.walks += 1;
        let (set, seen) = (self.mark, self.walks);
        let mut places: SmallVec<[usize; 32]> = SmallVec::new();
        let mut looks = 0;
        let next = if forward { &self.feeds[at] } else { &self.needs[at] };
        places.extend(next.iter().copied().filter(|&to| to != at && self.marks[to][SET] != set));
        while let Some(from) = places.pop() {
            let (first, last) = self.span(from);
            if first > high || last < low {
                continue;
            }
            let own = [from];
            let whole = self.owner[from].map_or(&own[..], |g| &self.groups[g][..]);
            for &from in whole {
                if self.marks[from][SEEN] == seen {
                    continue;
                }
                self.marks[from][SEEN] = seen;
                looks += 1;
                if looks > WALK {
                    return false;
                }
                let next = if forward { &self.feeds[from] } else { &self.needs[from] };
                for &to in next {
                    if self.marks[to][SET] == set || to == at {
                        return false;
                    }
                    if self.marks[to][SEEN] != seen {
                        places.push(to);
                    }
                }
            }
        }
        true
    }
}

struct Candidate<V> {
    places: Vec<usize>,
    fuser: Box<dyn Fuser<V>>,
    score: f64,
}

/// The best set that grows from `seed`.
fn grow<V: 'static>(
    window: &Window<'_>,
    fuser: &dyn Fuser<V>,
    seed: usize,
    made: &mut Grouping,
    limits: &Limits,
    budget: &mut usize,
) -> Option<Candidate<V>> {
    let mut fuser = fuser.boxed();
    fuser.reset();
    *budget = budget.checked_sub(1)?;
    if fuser.offer(seed, window) == Status::Closed {
        return None;
    }
    made.mark += 1;
    let mark = made.mark;
    made.marks[seed][SET] = mark;
    let score = fuser.score(window);
    let mut now = Candidate { places: vec![seed], fuser, score };
    // The last set that could run, where the one at hand cannot.
    let mut ready: Option<Candidate<V>> = None;
    let mut users: BinaryHeap<Reverse<usize>> = made.feeds[seed].iter().map(|&at| Reverse(at)).collect();
    let mut others: BinaryHeap<Reverse<usize>> = readers(window, seed).map(Reverse).collect();
    // A node itself, and then whatever it needs that has no group yet, nearest first.
    let mut wanted: Vec<usize> = made.needs[seed].to_vec();
    loop {
        let (at, asked) = match wanted.pop() {
            Some(at) => (at, true),
            None => match users.pop().or_else(|| others.pop()) {
                Some(Reverse(at)) => (at, false),
                None => break,
            },
        };
        if made.owner[at].is_some() || made.marks[at][SET] == mark || now.places.len() >= limits.nodes {
            continue;
        }
        // A node is tried once as a user, and again only where something taken needs it.
        if !asked && std::mem::replace(&mut made.marks[at][TRIED], mark) == mark {
            continue;
        }
        // Cheap to ask first: most of what is near does not fit.
        let Some(found) = offer(window, &now, at, budget) else { continue };
        if found.score < now.score || !made.stands_alone(&now.places, at) {
            continue;
        }
        let old = std::mem::replace(&mut now, found);
        if old.fuser.ready() && !now.fuser.ready() {
            ready = Some(old);
        }
        made.marks[at][SET] = mark;
        wanted.extend_from_slice(&made.needs[at]);
        users.extend(made.feeds[at].iter().map(|&at| Reverse(at)));
        others.extend(readers(window, at).map(Reverse));
    }
    if now.fuser.ready() { Some(now) } else { ready }
}

/// The nodes that read much of what the one at `at` reads, unless many do.
fn readers<'a>(window: &'a Window<'_>, at: usize) -> impl Iterator<Item = usize> + 'a {
    let operands = window.node(at).into_iter().flat_map(|node| &node.ins);
    let large = operands.filter(|&&id| window.meta(id).bytes() >= COMMON);
    large.map(|&id| window.users(id)).filter(|users| users.len() <= READERS).flatten().copied()
}

/// The set `now` with `at`: a clone is offered it, or all anew where it does not come last.
fn offer<V: 'static>(
    window: &Window<'_>,
    now: &Candidate<V>,
    at: usize,
    budget: &mut usize,
) -> Option<Candidate<V>> {
    let place = now.places.partition_point(|&other| other < at);
    let last = place == now.places.len();
    *budget = budget.checked_sub(if last { 1 } else { now.places.len() + 1 })?;
    let mut fuser = now.fuser.boxed();
    let mut places = Vec::with_capacity(now.places.len() + 1);
    places.extend_from_slice(&now.places[..place]);
    places.push(at);
    places.extend_from_slice(&now.places[place..]);
    if last {
        if fuser.offer(at, window) == Status::Closed {
            return None;
        }
    } else {
        fuser.reset();
        if places.iter().any(|&at| fuser.offer(at, window) == Status::Closed) {
            return None;
        }
    }
    let score = fuser.score(window);
    Some(Candidate { places, fuser, score })
}
