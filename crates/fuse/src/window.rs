//! A stretch of the stream with what planning needs to know about it.

use kiln_ir::{Id, Item, Meta, Node, Op, infer};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

/// The items of one submission, and the metas of all values in it.
pub struct Window<'a> {
    /// The items.
    pub items: &'a [Item],
    values: FxHashMap<Id, Value>,
}

/// What is known of a value.
struct Value {
    meta: Meta,
    maker: Option<usize>,
    users: SmallVec<[usize; 4]>,
    freed: bool,
}

impl<'a> Window<'a> {
    /// A window over `items`; `outside` gives the meta of a value defined before it. `None` if a value is unknown, an
    /// operation does not fit or a name stands for two values: such a window runs node by node, where its errors are told.
    pub fn new(items: &'a [Item], outside: impl Fn(Id) -> Option<Meta>) -> Option<Window<'a>> {
        let value = |meta| Value { meta, maker: None, users: SmallVec::new(), freed: false };
        let values = metas(items, outside)?.into_iter().map(|(id, meta)| (id, value(meta))).collect();
        let mut window = Window { items, values };
        for (at, item) in items.iter().enumerate() {
            match item {
                Item::Free(id) => window.values.get_mut(id)?.freed = true,
                Item::Run(node) => {
                    for id in &node.outs {
                        window.values.get_mut(id)?.maker = Some(at);
                    }
                    for id in &node.ins {
                        window.values.get_mut(id)?.users.push(at);
                    }
                }
            }
        }
        Some(window)
    }

    /// The node at a place, unless it is a free.
    pub fn node(&self, at: usize) -> Option<&'a Node> {
        match &self.items[at] {
            Item::Run(node) => Some(node),
            Item::Free(_) => None,
        }
    }

    /// A value's meta.
    pub fn meta(&self, id: Id) -> Meta {
        self.values[&id].meta
    }

    /// The place that defines a value, if it is in the window.
    pub fn maker(&self, id: Id) -> Option<usize> {
        self.values.get(&id)?.maker
    }

    /// The places that use a value.
    pub fn users(&self, id: Id) -> &[usize] {
        self.values.get(&id).map_or(&[], |value| &value.users[..])
    }

    /// Whether a value is still there after the window.
    pub fn survives(&self, id: Id) -> bool {
        self.values.get(&id).is_none_or(|value| !value.freed)
    }

    /// Whether a value is needed by anything but the nodes at `places` (ascending): by another node, or after the window.
    pub fn leaves(&self, id: Id, places: &[usize]) -> bool {
        self.values.get(&id).is_none_or(|value| {
            !value.freed || value.users.iter().any(|at| places.binary_search(at).is_err())
        })
    }
}

/// The metas of all values in a stretch. `None` unless every name stands for one value in all of it: whatever is known of a
/// value is kept by its name, so one that is defined twice, or after it was used from outside or ended, has no plan.
pub(crate) fn metas(items: &[Item], outside: impl Fn(Id) -> Option<Meta>) -> Option<FxHashMap<Id, Meta>> {
    let mut metas: FxHashMap<Id, Meta> = FxHashMap::with_capacity_and_hasher(items.len(), Default::default());
    let mut freed: FxHashSet<Id> = FxHashSet::default();
    for item in items {
        let node = match item {
            Item::Run(node) => node,
            Item::Free(id) => {
                // A free of something that never was is told where it runs alone.
                if !metas.contains_key(id) {
                    metas.insert(*id, outside(*id)?);
                }
                freed.insert(*id).then_some(())?;
                continue;
            }
        };
        let mut ins: SmallVec<[Meta; 4]> = SmallVec::new();
        for id in &node.ins {
            let meta = match metas.get(id) {
                Some(_) if freed.contains(id) => return None,
                Some(meta) => *meta,
                None => {
                    let meta = outside(*id)?;
                    metas.insert(*id, meta);
                    meta
                }
            };
            ins.push(meta);
        }
        let outs = infer(&node.op, &ins).ok()?;
        if outs.len() != node.outs.len() || matches!(node.op, Op::Custom(_)) && node.outs.is_empty() {
            return None;
        }
        for (id, meta) in node.outs.iter().zip(outs) {
            if metas.insert(*id, meta).is_some() {
                return None;
            }
        }
    }
    Some(metas)
}
