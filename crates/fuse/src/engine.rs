//! The engine: windows in, plans looked up or searched, plans replayed.
//!
//! A window is first compared with the one that followed the last window before: where a step recurs that is all. Then
//! with those that look like it, then its structure is looked up, then the cache on disk, and only then is a plan
//! searched for.

use crate::disk::Disk;
use crate::lowered::Lowered;
use crate::moved::moved;
use crate::observer::{NewPlan, Print};
use crate::recompute::{expand, improve};
use crate::search::search;
use crate::store::Store;
use crate::template::{Names, Template, fingerprint};
use crate::window::metas;
use crate::{Fuser, Handles, Observer, Plan, Window};
use kiln_ir::relative::Relative;
use kiln_ir::{Id, Item, Meta};
use std::sync::Arc;

/// Bounds of what the engine does and keeps.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes that plans may take; those unused for longest go first.
    pub bytes: usize,
    /// Nodes of a group.
    pub nodes: usize,
    /// Nodes offered to fusers in one search, for each node of the window.
    pub offers: usize,
    /// Bytes that the files of [`Engine::cache`] may take, those of other processes included; the oldest go first.
    pub disk: u64,
}

/// What starting a kernel costs, in bytes moved: the unit of [`Fuser::score`].
pub const LAUNCH: usize = 4096;

impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 64 << 20, nodes: 64, offers: 96, disk: 64 << 20 }
    }
}

/// What the engine has done.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Windows run.
    pub windows: u64,
    /// Windows whose plan was there.
    pub hits: u64,
    /// Windows that were recognised by comparing alone.
    pub matched: u64,
    /// Plans searched for.
    pub planned: u64,
    /// Plans read from the disk.
    pub loaded: u64,
    /// Plans kept now.
    pub plans: u64,
    /// About how many bytes they take.
    pub bytes: u64,
    /// Nodes that ran inside groups.
    pub fused: u64,
    /// Groups and single nodes that ran.
    pub launches: u64,
    /// Groups whose nodes ran by themselves since what the groups take for granted was not so.
    pub guarded: u64,
    /// Groups that failed, so that their nodes ran by themselves or failed too.
    pub fallbacks: u64,
    /// Bytes that launches read from outside themselves and left behind, each once.
    pub moved: u64,
}

/// What the engine asks the device about a window.
pub trait WindowContext {
    /// The meta of a value defined before the window; `None` if it is not there or poisoned.
    fn meta(&self, id: Id) -> Option<Meta>;

    /// The items with composites and custom operations written out as primitives, if there are any that the device does
    /// not take whole. New names must be those of no recorded value, and the same at every call.
    fn lower(&self, _items: &[Item]) -> Option<Vec<Item>> {
        None
    }
}

impl<F: Fn(Id) -> Option<Meta>> WindowContext for F {
    fn meta(&self, id: Id) -> Option<Meta> {
        self(id)
    }
}

/// Names the plan of the window that was looked up last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket(usize);

/// Turns windows into plans and runs them.
pub struct Engine<V> {
    fusers: Vec<Box<dyn Fuser<V>>>,
    limits: Limits,
    store: Store<V>,
    disk: Option<Disk>,
    observers: Vec<Box<dyn Observer>>,
    relative: Relative,
    names: Names,
    last: Option<usize>,
    stats: Stats,
}

impl<V: 'static> Engine<V> {
    /// An engine with these fusers. `KILN_PLAN=1` prints each new plan.
    pub fn new(fusers: Vec<Box<dyn Fuser<V>>>, limits: Limits) -> Engine<V> {
        let mut engine = Engine {
            fusers,
            limits,
            store: Store::new(),
            disk: None,
            observers: Vec::new(),
            relative: Relative::new(),
            names: Names::default(),
            last: None,
            stats: Stats::default(),
        };
        if kiln_env::PLAN.is_on() {
            engine.observe(Box::new(Print));
        }
        engine
    }

    /// Keeps plans in the folder `dir` too. `tag` names whatever decides what the fusers make, such as a version of
    /// their kernels: plans of another tag are not read.
    pub fn cache(&mut self, dir: impl Into<std::path::PathBuf>, tag: &str) {
        let names: Vec<&str> = self.fusers.iter().map(|fuser| fuser.name()).collect();
        self.disk = Some(Disk::new(dir.into(), &format!("{tag} {}", names.join(" ")), self.limits.disk));
    }

    /// Tells `observer` from now on what is done.
    pub fn observe(&mut self, observer: Box<dyn Observer>) {
        self.observers.push(observer);
    }

    /// Adds a fuser. Where it scores better than the others, its groups are made. Plans made before are forgotten.
    pub fn add(&mut self, fuser: Box<dyn Fuser<V>>) {
        if let Some(disk) = &mut self.disk {
            disk.also(fuser.name());
        }
        self.fusers.push(fuser);
        (self.store, self.last) = (Store::new(), None);
    }

    /// Whether there is anything to fuse with.
    pub fn is_idle(&self) -> bool {
        self.fusers.is_empty()
    }

    /// What it has done so far.
    pub fn stats(&self) -> Stats {
        let (plans, bytes) = self.store.size();
        Stats { plans: plans as u64, bytes: bytes as u64, ..self.stats }
    }

    /// Finds the plan for a window, or makes it. `None` if the window must run node by node.
    pub fn plan(&mut self, items: &[Item], source: &impl WindowContext) -> Option<Ticket> {
        let at = match self.recognise(items, source) {
            Some(at) => {
                self.stats.matched += 1;
                self.stats.hits += 1;
                self.store.touch(at);
                at
            }
            None => self.look_up(items, source)?,
        };
        self.stats.windows += 1;
        if let Some(last) = self.last.replace(at)
            && let Some(instance) = self.store.instance_mut(last)
        {
            instance.next = Some(at);
        }
        Some(Ticket(at))
    }

    /// The instance that the window is one of, by comparing.
    fn recognise(&mut self, items: &[Item], source: &impl WindowContext) -> Option<usize> {
        let Engine { store, names, .. } = self;
        let mut fits = |at: usize| {
            let instance = store.instance(at);
            instance.is_some_and(|i| i.template.matches(items, names, |id| source.meta(id)))
        };
        let next = self.last.and_then(|last| store.instance(last)?.next).filter(|&next| fits(next));
        next.or_else(|| store.alike(fingerprint(items)).iter().copied().find(|&at| fits(at)))
    }

    /// The instance of a window that was not recognised: its plan is looked up by structure, or made.
    #[cold]
    fn look_up(&mut self, items: &[Item], source: &impl WindowContext) -> Option<usize> {
        let known = metas(items, |id| source.meta(id))?;
        // What it writes out itself takes these names.
        if known.keys().any(|id| id.is_reserved()) {
            return None;
        }
        let expanded = source.lower(items);
        let whole = expanded.as_deref().unwrap_or(items);
        self.relative.clear();
        // What a composite is written as may depend on more than its structure: a user's lowering, or a device that takes
        // some sizes whole. So what was written is looked up.
        let inner = match &expanded {
            Some(whole) => Some(metas(whole, |id| source.meta(id))?),
            None => None,
        };
        let inner = inner.as_ref().unwrap_or(&known);
        whole.iter().for_each(|item| self.relative.push(item, |id| inner[&id]));
        let hash = self.relative.hash();
        let plan = match self.store.plan(hash, self.relative.structure()) {
            Some(plan) => {
                self.stats.hits += 1;
                plan
            }
            None => self.make(hash, whole, source)?,
        };
        let (expanded, twins) = match &plan.recomputed[..] {
            [] => (expanded, Vec::new()),
            recomputed => {
                let recomputed = expand(whole, recomputed);
                (Some(recomputed.items), recomputed.twins)
            }
        };
        let whole = expanded.as_deref().unwrap_or(items);
        if plan.items != whole.len() {
            return None;
        }
        let template = Template::new(items, &known);
        // Fills in the names, and makes sure that the window will be recognised.
        if !template.matches(items, &mut self.names, |id| source.meta(id)) {
            return None;
        }
        let moved = moved(&plan, &Window::new(whole, |id| source.meta(id))?);
        let lowered = expanded.map(|expanded| Lowered::new(items, expanded, &self.names.ids, &twins));
        let at = self.store.keep_instance(template, lowered, plan, moved, hash, fingerprint(items));
        self.store.shrink(self.limits.bytes);
        Some(at)
    }

    fn make(&mut self, hash: u64, items: &[Item], source: &impl WindowContext) -> Option<Arc<Plan<V>>> {
        let structure = self.relative.structure();
        let outside = |id| source.meta(id);
        let window = Window::new(items, outside)?;
        let saved =
            self.disk.as_ref().and_then(|disk| disk.load(hash, structure, &window, &self.fusers, outside));
        let loaded = saved.is_some();
        let plan = match saved {
            Some(plan) => {
                self.stats.loaded += 1;
                plan
            }
            None => {
                let plan = search(&window, &self.fusers, &self.limits);
                let plan = improve(&window, plan, &self.fusers, outside);
                self.stats.planned += 1;
                if let Some(disk) = &mut self.disk {
                    disk.save(hash, structure, &plan);
                }
                plan
            }
        };
        if !self.observers.is_empty() {
            let text = match &plan.recomputed[..] {
                [] => plan.describe(items),
                recomputed => plan.describe(&expand(items, recomputed).items),
            };
            let (groups, launches) = (plan.groups.len(), plan.launches());
            let told = NewPlan { hash, groups, launches, loaded, text: &text };
            self.observers.iter_mut().for_each(|observer| observer.planned(&told));
        }
        let plan = Arc::new(plan);
        self.store.keep_plan(hash, structure, plan.clone());
        Some(plan)
    }

    /// Runs the window that was looked up last, by its plan.
    pub fn replay(&mut self, ticket: Ticket, items: &[Item], handles: &mut dyn Handles<V>) {
        let Some(instance) = self.store.instance_mut(ticket.0) else { return };
        self.stats.fused += instance.plan.fused() as u64;
        self.stats.launches += instance.plan.launches() as u64;
        self.stats.moved = self.stats.moved.saturating_add(instance.moved);
        self.observers.iter_mut().for_each(|observer| observer.window(instance.hash, items.len()));
        let (items, from) = match &mut instance.lowered {
            Some(lowered) => {
                lowered.bind(items, &self.names.ids);
                (&lowered.items[..], Some(&lowered.from[..]))
            }
            None => (items, None),
        };
        let unfused = instance.plan.replay(items, from, handles, &mut self.observers);
        self.stats.guarded += unfused.guarded;
        self.stats.fallbacks += unfused.fallbacks;
    }
}
