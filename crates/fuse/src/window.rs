//! A stretch of the stream with what planning needs to know about it.

use kiln_ir::{Id, Item, Meta, Node, Op, infer};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

/// The items of one submission, and the metas of all values in it.
pub struct Window<'a> {
    /// The items.
    pub items: &'a [Item],
    metas: FxHashMap<Id, Meta>,
    makers: FxHashMap<Id, usize>,
    users: FxHashMap<Id, SmallVec<[usize; 4]>>,
    freed: FxHashSet<Id>,
}

impl<'a> Window<'a> {
    /// A window over `items`; `outside` gives the meta of a value defined before it. Nothing if a value is unknown or
    /// an operation does not fit: such a window runs node by node, where its errors are told.
    pub fn new(items: &'a [Item], outside: impl Fn(Id) -> Option<Meta>) -> Option<Window<'a>> {
        let metas = metas(items, outside)?;
        let mut window = Window {
            items,
            metas,
            makers: FxHashMap::default(),
            users: FxHashMap::default(),
            freed: FxHashSet::default(),
        };
        for (at, item) in items.iter().enumerate() {
            match item {
                Item::Free(id) => {
                    window.freed.insert(*id);
                }
                Item::Run(node) => {
                    window.makers.extend(node.outs.iter().map(|&id| (id, at)));
                    for id in &node.ins {
                        window.users.entry(*id).or_default().push(at);
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
        self.metas[&id]
    }

    /// The place that defines a value, if it is in the window.
    pub fn maker(&self, id: Id) -> Option<usize> {
        self.makers.get(&id).copied()
    }

    /// The places that use a value.
    pub fn users(&self, id: Id) -> &[usize] {
        self.users.get(&id).map_or(&[], |users| &users[..])
    }

    /// Whether a value is still there after the window.
    pub fn survives(&self, id: Id) -> bool {
        !self.freed.contains(&id)
    }

    /// Whether a value is needed by anything but the nodes at `places` (ascending): by another node, or after the window.
    pub fn leaves(&self, id: Id, places: &[usize]) -> bool {
        self.survives(id) || self.users(id).iter().any(|at| places.binary_search(at).is_err())
    }
}

/// The metas of all values in a stretch.
pub(crate) fn metas(items: &[Item], outside: impl Fn(Id) -> Option<Meta>) -> Option<FxHashMap<Id, Meta>> {
    let mut metas: FxHashMap<Id, Meta> = FxHashMap::with_capacity_and_hasher(items.len(), Default::default());
    for item in items {
        let Item::Run(node) = item else { continue };
        let mut ins: SmallVec<[Meta; 4]> = SmallVec::new();
        for id in &node.ins {
            let meta = match metas.get(id) {
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
        metas.extend(node.outs.iter().copied().zip(outs));
    }
    // A free of something that never was is told where it runs alone.
    for item in items {
        if let Item::Free(id) = item
            && !metas.contains_key(id)
        {
            metas.insert(*id, outside(*id)?);
        }
    }
    Some(metas)
}
