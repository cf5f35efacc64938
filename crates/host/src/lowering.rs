//! Composites, and custom operations that have a lowering, in a window written as the primitives they stand for, so that
//! those can fuse with what is around them.

use kiln_device::Batch;
use kiln_ir::{Build, Id, Item, Meta, Node, Op, V, custom, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::RefCell;

/// Whether it stands for other operations; of a custom one, whether it may.
pub(crate) fn composite(item: &Item) -> bool {
    match item {
        Item::Run(Node { op: Op::Named(_), .. }) => true,
        Item::Run(Node { op: Op::Custom(call), .. }) => custom::may_lower(call),
        _ => false,
    }
}

/// The batch without composites but those that the device `claims`; `None` if nothing is to be written out, or it does not
/// fit together.
pub(crate) fn lowered(
    batch: &Batch,
    outside: impl Fn(Id) -> Option<Meta>,
    claims: impl Fn(&Op, &[Meta]) -> bool,
) -> Option<Batch> {
    if !batch.items.iter().any(composite) {
        return None;
    }
    let mut out = Batch { items: Vec::new(), origins: Vec::new(), ..*batch };
    let mut metas: FxHashMap<Id, Meta> = FxHashMap::default();
    let (mut inner, mut any) = (0, false);
    for (at, item) in batch.items.iter().enumerate() {
        let Item::Run(node) = item else {
            push(&mut out, batch, at, item.clone());
            continue;
        };
        let mut ins: SmallVec<[Meta; 4]> = SmallVec::new();
        for id in &node.ins {
            let meta = metas.get(id).copied().or_else(|| outside(*id))?;
            metas.insert(*id, meta);
            ins.push(meta);
        }
        let outs = infer(&node.op, &ins).ok()?;
        metas.extend(node.outs.iter().copied().zip(outs.iter().copied()));
        let whole = !composite(item) || matches!(node.op, Op::Named(_)) && claims(&node.op, &ins);
        let written = if whole { None } else { expand(node, &ins, &outs, &mut inner)? };
        any |= written.is_some();
        match written {
            Some(items) => items.into_iter().for_each(|item| push(&mut out, batch, at, item)),
            None => push(&mut out, batch, at, item.clone()),
        }
    }
    any.then_some(out)
}

fn push(out: &mut Batch, batch: &Batch, at: usize, item: Item) {
    out.items.push(item);
    out.origins.extend(batch.origins.get(at));
}

/// The items that a composite stands for, or `Some(None)` if it is to run as it is.
fn expand(node: &Node, ins: &[Meta], want: &[Meta], inner: &mut u64) -> Option<Option<Vec<Item>>> {
    let writer = Writer {
        state: RefCell::new(State {
            ids: node.ins.to_vec(),
            metas: ins.to_vec(),
            items: Vec::new(),
            next: *inner,
        }),
    };
    let mut outs: SmallVec<[u32; 2]> = {
        let given: SmallVec<[V<'_>; 4]> = (0..ins.len()).map(|i| V::new(&writer, i as u32)).collect();
        match kiln_ir::lower(&node.op, &given) {
            Some(outs) => outs.iter().map(|v| v.key()).collect(),
            None if matches!(node.op, Op::Custom(_)) => return Some(None),
            None => return None,
        }
    };
    // A user's lowering is held to what was inferred; it fails where it runs by itself.
    if !outs.iter().map(|&key| writer.meta(key)).eq(want.iter().copied()) {
        return Some(None);
    }
    // A result is a value of its own, not an operand or another result again.
    for at in 0..outs.len() {
        if (outs[at] as usize) < ins.len() || outs[..at].contains(&outs[at]) {
            outs[at] = writer.emit(Op::Cast(want[at].dtype), &[outs[at]])[0];
        }
    }
    let state = writer.state.into_inner();
    let names: FxHashMap<Id, Id> =
        outs.iter().zip(&node.outs).map(|(&key, &id)| (state.ids[key as usize], id)).collect();
    let rename = |id: &mut Id| *id = *names.get(id).unwrap_or(id);
    let mut items = state.items;
    for item in &mut items {
        if let Item::Run(node) = item {
            node.ins.iter_mut().chain(&mut node.outs).for_each(rename);
        }
    }
    let made = state.ids[ins.len()..].iter().filter(|id| !names.contains_key(id));
    items.extend(made.map(|&id| Item::Free(id)));
    *inner = state.next;
    Some(Some(items))
}

/// A builder that writes items.
struct Writer {
    state: RefCell<State>,
}

struct State {
    ids: Vec<Id>,
    metas: Vec<Meta>,
    items: Vec<Item>,
    next: u64,
}

impl Build for Writer {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        let state = &mut *self.state.borrow_mut();
        let metas: SmallVec<[Meta; 4]> = ins.iter().map(|&key| state.metas[key as usize]).collect();
        let outs = infer(&op, &metas)
            .unwrap_or_else(|e| panic!("a lowering wrote an operation that does not fit: {e}"));
        let ins = ins.iter().map(|&key| state.ids[key as usize]).collect();
        let mut node = Node { op, ins, outs: SmallVec::new() };
        let first = state.ids.len() as u32;
        for meta in outs {
            let id = Id::LOWERED.at(state.next);
            state.next += 1;
            node.outs.push(id);
            state.ids.push(id);
            state.metas.push(meta);
        }
        state.items.push(Item::Run(node));
        (first..state.ids.len() as u32).collect()
    }

    fn meta(&self, value: u32) -> Meta {
        self.state.borrow().metas[value as usize]
    }
}
