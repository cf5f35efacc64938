//! The engine: windows in, plans looked up or searched, plans replayed.

use crate::search::search;
use crate::window::metas;
use crate::{Fuser, Handles, Plan, Window};
use kiln_ir::relative::Relative;
use kiln_ir::{Id, Item, Meta};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Bounds of what the engine does and keeps.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Plans kept; the one unused for longest goes first.
    pub plans: usize,
    /// Nodes of a group.
    pub nodes: usize,
    /// Nodes offered to fusers in one search, for each node of the window.
    pub offers: usize,
}

/// What starting a kernel costs, in bytes moved: the unit of [`Fuser::score`].
pub const LAUNCH: usize = 4096;

impl Default for Limits {
    fn default() -> Limits {
        Limits { plans: 512, nodes: 64, offers: 96 }
    }
}

/// What the engine has done.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Windows run.
    pub windows: u64,
    /// Windows whose plan was there.
    pub hits: u64,
    /// Plans searched for.
    pub planned: u64,
    /// Plans kept now.
    pub plans: u64,
    /// Nodes that ran inside groups.
    pub fused: u64,
    /// Groups and single nodes that ran.
    pub launches: u64,
}

/// Turns windows into plans and runs them.
pub struct Engine<V> {
    fusers: Vec<Box<dyn Fuser<V>>>,
    limits: Limits,
    plans: FxHashMap<u64, Vec<Kept<V>>>,
    relative: Relative,
    clock: u64,
    stats: Stats,
    print: bool,
}

struct Kept<V> {
    structure: Box<[u64]>,
    plan: Arc<Plan<V>>,
    used: u64,
}

impl<V: 'static> Engine<V> {
    /// An engine with these fusers. `KILN_PLAN=1` prints each new plan.
    pub fn new(fusers: Vec<Box<dyn Fuser<V>>>, limits: Limits) -> Engine<V> {
        let print = std::env::var("KILN_PLAN").is_ok_and(|v| !v.is_empty() && v != "0");
        let (plans, relative) = (FxHashMap::default(), Relative::new());
        Engine { fusers, limits, plans, relative, clock: 0, stats: Stats::default(), print }
    }

    /// Whether there is anything to fuse with.
    pub fn is_idle(&self) -> bool {
        self.fusers.is_empty()
    }

    /// What it has done so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The plan for a window; `outside` gives the meta of a value defined before it. Nothing if the window must run
    /// node by node.
    pub fn plan(&mut self, items: &[Item], outside: impl Fn(Id) -> Option<Meta>) -> Option<Arc<Plan<V>>> {
        let known = metas(items, &outside)?;
        self.relative.clear();
        for item in items {
            self.relative.push(item, |id| known[&id]);
        }
        self.clock += 1;
        self.stats.windows += 1;
        let (hash, clock) = (self.relative.hash(), self.clock);
        let kept = self
            .plans
            .get_mut(&hash)
            .and_then(|kept| kept.iter_mut().find(|k| *k.structure == *self.relative.structure()));
        let plan = match kept {
            Some(kept) => {
                kept.used = clock;
                self.stats.hits += 1;
                kept.plan.clone()
            }
            None => {
                let window = Window::new(items, outside)?;
                let plan = Arc::new(search(&window, &self.fusers, &self.limits));
                if self.print {
                    eprintln!("plan {hash:016x}\n{}", plan.describe(items));
                }
                self.keep(hash, plan.clone());
                plan
            }
        };
        let fused: usize = plan.groups.iter().map(|g| g.places.len()).sum();
        self.stats.fused += fused as u64;
        self.stats.launches +=
            plan.steps.iter().filter(|s| !matches!(s, crate::Step::Free { .. })).count() as u64;
        Some(plan)
    }

    /// Runs a window as its plan says.
    pub fn replay(plan: &Plan<V>, items: &[Item], handles: &mut dyn Handles<V>) {
        plan.replay(items, handles);
    }

    fn keep(&mut self, hash: u64, plan: Arc<Plan<V>>) {
        self.stats.planned += 1;
        self.stats.plans += 1;
        let kept = Kept { structure: self.relative.structure().into(), plan, used: self.clock };
        self.plans.entry(hash).or_default().push(kept);
        if self.stats.plans as usize > self.limits.plans {
            let oldest = self.plans.iter().flat_map(|(h, kept)| kept.iter().map(move |k| (k.used, *h))).min();
            if let Some((used, hash)) = oldest
                && let Some(kept) = self.plans.get_mut(&hash)
            {
                kept.retain(|k| k.used != used);
                if kept.is_empty() {
                    self.plans.remove(&hash);
                }
                self.stats.plans -= 1;
            }
        }
    }
}
