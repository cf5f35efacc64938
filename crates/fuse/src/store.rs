//! The plans that are kept, bounded in bytes; what was unused for longest goes first.
//!
//! There are two levels. A *structure* (operations, names, which extents are equal) has a plan with its kernels. An
//! *instance* is a window of that structure with its exact extents, in the form in which it is recognised at once.

use crate::Plan;
use crate::lowered::Lowered;
use crate::template::Template;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// A window that is recognised by comparing.
pub(crate) struct Instance<V> {
    pub template: Template,
    pub lowered: Option<Lowered>,
    pub plan: Arc<Plan<V>>,
    /// Bytes that a run moves.
    pub moved: u64,
    /// Hash of its structure.
    pub hash: u64,
    pub fingerprint: u64,
    /// The instance that followed it last time.
    pub next: Option<usize>,
    used: u64,
    bytes: usize,
}

struct Structure<V> {
    structure: Box<[u64]>,
    plan: Arc<Plan<V>>,
    used: u64,
}

pub(crate) struct Store<V> {
    structures: FxHashMap<u64, SmallVec<[Structure<V>; 1]>>,
    instances: Vec<Option<Instance<V>>>,
    /// Instances by fingerprint.
    alike: FxHashMap<u64, SmallVec<[usize; 2]>>,
    clock: u64,
    bytes: usize,
    plans: usize,
}

impl<V> Structure<V> {
    fn bytes(&self) -> usize {
        size_of_val(&self.structure[..]) + self.plan.bytes()
    }
}

impl<V> Store<V> {
    pub fn new() -> Store<V> {
        let (structures, alike) = (FxHashMap::default(), FxHashMap::default());
        Store { structures, instances: Vec::new(), alike, clock: 0, bytes: 0, plans: 0 }
    }

    /// How many plans are kept, and about how many bytes they and their instances take.
    pub fn size(&self) -> (usize, usize) {
        (self.plans, self.bytes)
    }

    pub fn instance(&self, at: usize) -> Option<&Instance<V>> {
        self.instances.get(at)?.as_ref()
    }

    pub fn instance_mut(&mut self, at: usize) -> Option<&mut Instance<V>> {
        self.instances.get_mut(at)?.as_mut()
    }

    /// Instances that may be those of a window.
    pub fn alike(&self, fingerprint: u64) -> &[usize] {
        self.alike.get(&fingerprint).map_or(&[], |found| &found[..])
    }

    /// Notes that an instance is used now.
    pub fn touch(&mut self, at: usize) {
        self.clock += 1;
        if let Some(Some(instance)) = self.instances.get_mut(at) {
            instance.used = self.clock;
        }
    }

    /// The plan of a structure.
    pub fn plan(&mut self, hash: u64, structure: &[u64]) -> Option<Arc<Plan<V>>> {
        self.clock += 1;
        let kept = self.structures.get_mut(&hash)?.iter_mut().find(|kept| *kept.structure == *structure)?;
        kept.used = self.clock;
        Some(kept.plan.clone())
    }

    pub fn keep_plan(&mut self, hash: u64, structure: &[u64], plan: Arc<Plan<V>>) {
        self.clock += 1;
        let kept = Structure { structure: structure.into(), plan, used: self.clock };
        self.bytes += kept.bytes();
        self.plans += 1;
        self.structures.entry(hash).or_default().push(kept);
    }

    pub fn keep_instance(
        &mut self,
        template: Template,
        lowered: Option<Lowered>,
        plan: Arc<Plan<V>>,
        moved: u64,
        hash: u64,
        fingerprint: u64,
    ) -> usize {
        self.clock += 1;
        let bytes = size_of::<Instance<V>>() + template.bytes() + lowered.as_ref().map_or(0, Lowered::bytes);
        let (next, used) = (None, self.clock);
        let instance = Instance { template, lowered, plan, moved, hash, fingerprint, next, used, bytes };
        self.bytes += bytes;
        let at = self.instances.iter().position(Option::is_none).unwrap_or_else(|| {
            self.instances.push(None);
            self.instances.len() - 1
        });
        self.instances[at] = Some(instance);
        self.alike.entry(fingerprint).or_default().push(at);
        at
    }

    /// Lets go of what was unused for longest until all fits in `limit` bytes with room to spare, but never of what
    /// was used last.
    pub fn shrink(&mut self, limit: usize) {
        if self.bytes <= limit {
            return;
        }
        let mut ages: Vec<u64> = self.instances.iter().flatten().map(|i| i.used).collect();
        ages.extend(self.structures.values().flatten().map(|kept| kept.used));
        ages.sort_unstable();
        // An instance and its plan are used together: the last two ages stay.
        for &age in ages.iter().take(ages.len().saturating_sub(2)) {
            if self.bytes <= limit - limit / 8 {
                break;
            }
            self.drop_used(age);
        }
        self.structures.retain(|_, kept| !kept.is_empty());
        self.alike.retain(|_, found| !found.is_empty());
    }

    fn drop_used(&mut self, age: u64) {
        if let Some(at) = self.instances.iter().position(|i| i.as_ref().is_some_and(|i| i.used == age)) {
            if let Some(old) = self.instances[at].take() {
                self.bytes -= old.bytes;
                if let Some(found) = self.alike.get_mut(&old.fingerprint) {
                    found.retain(|other| *other != at);
                }
            }
            return;
        }
        for kept in self.structures.values_mut() {
            if let Some(at) = kept.iter().position(|kept| kept.used == age) {
                self.bytes -= kept.remove(at).bytes();
                self.plans -= 1;
                return;
            }
        }
    }
}
