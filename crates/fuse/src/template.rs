//! A window as it is recognised again: operations and relative names in one flat list, compared item by item with what
//! comes. Extents must be those it was made with; numbers, random keys and the place of a slice are left open.

use kiln_ir::{Id, Item, Meta, Op};
use rustc_hash::{FxHashMap, FxHashSet};

/// Stands for a free in the list.
const FREE: u32 = u32::MAX;

/// What a window must look like.
pub(crate) struct Template {
    /// For each item: `FREE` and a value, or an operation, how many operands and results, and the operands. Values are
    /// numbered as they appear, so that a number not seen before is a value from outside.
    code: Vec<u32>,
    /// The operations that occur, each once.
    ops: Vec<Op>,
    /// Metas of the values from outside, as they appear.
    outside: Vec<Meta>,
    items: usize,
}

/// What comparing needs; kept between comparisons for its memory.
#[derive(Default)]
pub(crate) struct Names {
    /// The name of each value of the window, by number.
    pub ids: Vec<Id>,
    /// Those that came from outside, and the highest of them.
    seen: FxHashSet<Id>,
    top: Option<Id>,
    made: Definitions,
}

/// The names that a window has defined so far. They are drawn from a counter, so a list in order is enough but for windows
/// that somebody made up.
#[derive(Default)]
struct Definitions {
    list: Vec<Id>,
    /// All of them, once one came out of order.
    set: FxHashSet<Id>,
}

impl Definitions {
    fn clear(&mut self) {
        self.list.clear();
        self.set.clear();
    }

    fn contains(&self, id: Id) -> bool {
        match self.list.last() {
            _ if !self.set.is_empty() => self.set.contains(&id),
            Some(last) => id <= *last && self.list.binary_search(&id).is_ok(),
            None => false,
        }
    }

    /// Whether it is new.
    fn add(&mut self, id: Id) -> bool {
        if self.set.is_empty() {
            if self.list.last().is_none_or(|last| *last < id) {
                self.list.push(id);
                return true;
            }
            self.set.extend(self.list.drain(..));
        }
        self.set.insert(id)
    }
}

impl Template {
    /// The template of `items`; `metas` has the values from outside.
    pub fn new(items: &[Item], metas: &FxHashMap<Id, Meta>) -> Template {
        let mut template =
            Template { code: Vec::new(), ops: Vec::new(), outside: Vec::new(), items: items.len() };
        let mut numbers: FxHashMap<Id, u32> = FxHashMap::default();
        let mut known: FxHashMap<&Op, u32> = FxHashMap::default();
        for item in items {
            match item {
                Item::Free(id) => {
                    template.code.push(FREE);
                    template.operand(*id, &mut numbers, metas);
                }
                Item::Run(node) => {
                    let next = template.ops.len() as u32;
                    let op = *known.entry(&node.op).or_insert(next);
                    if op == next {
                        template.ops.push(node.op.clone());
                    }
                    template.code.push(op);
                    template.code.push(counts(node.ins.len(), node.outs.len()));
                    for id in &node.ins {
                        template.operand(*id, &mut numbers, metas);
                    }
                    for id in &node.outs {
                        let next = numbers.len() as u32;
                        numbers.insert(*id, next);
                    }
                }
            }
        }
        template
    }

    fn operand(&mut self, id: Id, numbers: &mut FxHashMap<Id, u32>, metas: &FxHashMap<Id, Meta>) {
        let next = numbers.len() as u32;
        let number = *numbers.entry(id).or_insert(next);
        self.code.push(number);
        if number == next {
            self.outside.push(metas[&id]);
        }
    }

    /// Whether `items` are a window of this template; their names are left in `names`.
    pub fn matches(&self, items: &[Item], names: &mut Names, meta: impl Fn(Id) -> Option<Meta>) -> bool {
        names.ids.clear();
        names.seen.clear();
        names.made.clear();
        names.top = None;
        items.len() == self.items && self.compare(items, names, meta).is_some()
    }

    fn compare(&self, items: &[Item], names: &mut Names, meta: impl Fn(Id) -> Option<Meta>) -> Option<()> {
        let mut code = self.code.iter().copied();
        let mut outside = self.outside.iter();
        // Every name stands for one value, as in the window that the template was made of.
        let mut known = |number: u32, id: Id, names: &mut Names| {
            if let Some(&same) = names.ids.get(number as usize) {
                return (same == id).then_some(());
            }
            let same = meta(id)? == *outside.next()? && !id.is_reserved() && !names.made.contains(id);
            names.ids.push(id);
            names.top = names.top.max(Some(id));
            (same && names.seen.insert(id)).then_some(())
        };
        for item in items {
            let op = code.next()?;
            match item {
                Item::Free(id) => {
                    if op != FREE {
                        return None;
                    }
                    known(code.next()?, *id, names)?;
                }
                Item::Run(node) => {
                    let expected = self.ops.get(op as usize)?;
                    let shape = counts(node.ins.len(), node.outs.len());
                    if code.next()? != shape || !expected.is_alike(&node.op) {
                        return None;
                    }
                    for id in &node.ins {
                        known(code.next()?, *id, names)?;
                    }
                    for &id in &node.outs {
                        let used = Some(id) <= names.top && names.seen.contains(&id);
                        if used || id.is_reserved() || !names.made.add(id) {
                            return None;
                        }
                        names.ids.push(id);
                    }
                }
            }
        }
        Some(())
    }

    /// About how many bytes it takes.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.code[..]) + size_of_val(&self.ops[..]) + size_of_val(&self.outside[..])
    }
}

fn counts(ins: usize, outs: usize) -> u32 {
    (ins as u32) << 8 | outs as u32 & 0xff
}

/// A cheap hash of a window, by which templates are found that may fit.
pub(crate) fn fingerprint(items: &[Item]) -> u64 {
    let mut hash = items.len() as u64;
    for item in items {
        let word = match item {
            Item::Free(_) => 0,
            Item::Run(node) => 1 + ((node.op.code() as u64) << 8) + node.ins.len() as u64,
        };
        hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    hash
}
