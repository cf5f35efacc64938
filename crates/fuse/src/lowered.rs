//! A window whose composites are written out as primitives. The items are kept, and bound anew to each window that
//! looks the same: only names and numbers change.

use kiln_ir::{Id, Item, Node};
use rustc_hash::FxHashMap;

/// The written-out items of a window, and how they come from its own.
pub(crate) struct Lowered {
    /// The items, bound to the last window.
    pub items: Vec<Item>,
    /// For each item, the place of the item it comes from.
    pub from: Vec<u32>,
    /// Where names of the window stand: item, operand, number of the value.
    names: Vec<(u32, Slot, u32)>,
    /// Items whose operation may differ from window to window.
    open: Vec<u32>,
}

#[derive(Clone, Copy)]
enum Slot {
    In(u32),
    Out(u32),
    Free,
}

impl Lowered {
    /// From a window, its written-out `items`, and the window's names by number. `twins` are places of items that are
    /// copies, and of what they are copies of.
    pub fn new(window: &[Item], items: Vec<Item>, ids: &[Id], twins: &[(usize, usize)]) -> Lowered {
        let numbers: FxHashMap<Id, u32> = ids.iter().enumerate().map(|(i, &id)| (id, i as u32)).collect();
        let mut from = origins(window, &items);
        twins.iter().for_each(|&(copy, of)| from[copy] = from[of]);
        let (mut names, mut open) = (Vec::new(), Vec::new());
        for (at, item) in items.iter().enumerate() {
            let mut name = |slot, id| {
                if let Some(&number) = numbers.get(id) {
                    names.push((at as u32, slot, number));
                }
            };
            match item {
                Item::Free(id) => name(Slot::Free, id),
                Item::Run(node) => {
                    node.ins.iter().enumerate().for_each(|(k, id)| name(Slot::In(k as u32), id));
                    node.outs.iter().enumerate().for_each(|(k, id)| name(Slot::Out(k as u32), id));
                    let own = matches!(&window[from[at] as usize], Item::Run(own) if own.op == node.op);
                    if own && node.op.is_open() {
                        open.push(at as u32);
                    }
                }
            }
        }
        Lowered { items, from, names, open }
    }

    /// Binds the items to a window of the same look.
    pub fn bind(&mut self, window: &[Item], ids: &[Id]) {
        for &(at, slot, number) in &self.names {
            let id = ids[number as usize];
            match (&mut self.items[at as usize], slot) {
                (Item::Run(node), Slot::In(k)) => node.ins[k as usize] = id,
                (Item::Run(node), Slot::Out(k)) => node.outs[k as usize] = id,
                (Item::Free(free), _) => *free = id,
                (Item::Run(_), Slot::Free) => unreachable!("only a free has that slot"),
            }
        }
        for &at in &self.open {
            let own = &window[self.from[at as usize] as usize];
            if let (Item::Run(node), Item::Run(own)) = (&mut self.items[at as usize], own) {
                node.op.clone_from(&own.op);
            }
        }
    }

    /// About how many bytes it takes.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.items[..]) + size_of_val(&self.names[..]) + self.from.len() * 4
    }
}

/// For each written-out item, the place of the item it comes from: what a window's own node defines tells where it
/// stands, and what stands between belongs to the composite that comes next.
fn origins(window: &[Item], items: &[Item]) -> Vec<u32> {
    let mut made: FxHashMap<Id, u32> = FxHashMap::default();
    let mut freed: FxHashMap<Id, u32> = FxHashMap::default();
    for (at, item) in window.iter().enumerate() {
        match item {
            Item::Free(id) => _ = freed.insert(*id, at as u32),
            Item::Run(Node { outs, .. }) => made.extend(outs.iter().map(|&id| (id, at as u32))),
        }
    }
    let mut from = vec![u32::MAX; items.len()];
    let mut next = window.len().saturating_sub(1) as u32;
    for (at, item) in items.iter().enumerate().rev() {
        if let Item::Run(node) = item {
            next = node.outs.iter().find_map(|id| made.get(id)).copied().unwrap_or(next);
            from[at] = next;
        }
    }
    let mut last = 0;
    for (at, item) in items.iter().enumerate() {
        match item {
            Item::Free(id) => from[at] = freed.get(id).copied().unwrap_or(last),
            Item::Run(_) => last = from[at],
        }
    }
    from
}
