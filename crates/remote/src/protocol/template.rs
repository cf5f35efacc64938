//! Recurring batches: what two runs of a step have in common is sent once, what differs as a few integers.
//!
//! A batch is split into its *structure* (operations, shapes, which value is which) and its *bindings* (names of values,
//! scalars, random keys, slice bounds). Names are written relative to the first value that the batch defines, so that
//! a training step, whose operands are what the step before it defined, has nearly the same bindings every time; only
//! differences travel.

use super::ProtocolError;
use kiln_device::{Batch, Place, Urgency};
use kiln_ir::wire::{Reader, Table, WireError, Writer};
use kiln_ir::{Field, FieldSink, FieldSource, FormError, Id, Item, Node, Scalar};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Templates that a session keeps at most.
pub const MOST: usize = 256;
/// Bytes that a receiver keeps for them at most. A sender that cuts its batches stays far below.
const MOST_BYTES: usize = 64 << 20;
/// Items of a batch. A sender that cuts its batches stays far below.
const MOST_ITEMS: usize = 8192;
/// Operands of an operation.
const MOST_OPERANDS: usize = 1 << 16;

/// A batch as structure and bindings.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Split {
    /// What recurs.
    pub structure: Vec<u8>,
    /// What does not.
    pub bindings: Vec<u64>,
}

impl Split {
    fn bytes(&self) -> usize {
        self.structure.len() + 8 * self.bindings.len()
    }
}

/// Splits a batch. `table` is this build's.
pub fn split(table: &Table, items: &[Item], place: Place) -> Split {
    let mut lift = Lift { w: Writer::default(), bindings: vec![base(items)] };
    lift.w.bytes.push(place as u8);
    lift.w.int(items.len() as u64);
    let mut names = Names { names: FxHashMap::default(), base: lift.bindings[0] };
    let mut due = lift.bindings[0];
    for item in items {
        match item {
            Item::Free(id) => {
                lift.w.int(0);
                names.refer(*id, &mut lift);
            }
            Item::Run(node) => {
                lift.w.int(table.place(&node.op) + 1);
                node.op.fields(&mut lift);
                lift.w.int(node.ins.len() as u64);
                node.ins.iter().for_each(|id| names.refer(*id, &mut lift));
                lift.w.int(node.outs.len() as u64);
                for id in &node.outs {
                    // Names are drawn one after another, so this is 0 nearly always.
                    lift.bindings.push(id.0.wrapping_sub(due));
                    due = id.0.wrapping_add(1);
                    names.define(*id);
                }
            }
        }
    }
    Split { structure: lift.w.bytes, bindings: lift.bindings }
}

/// The batch of a structure with bindings. `table` is the sender's.
pub fn join(table: &Table, structure: &[u8], bindings: &[u64]) -> Result<Batch, ProtocolError> {
    let mut lower = Lower { r: Reader::new(structure), bindings: bindings.iter() };
    let place = match lower.r.byte()? {
        0 => Place::Reuse,
        1 => Place::Persistent,
        _ => return Err(WireError::Malformed { what: "place" }.into()),
    };
    let count = lower.r.length(2)?;
    if count > MOST_ITEMS {
        return Err(ProtocolError::Misuse("a batch of too many operations"));
    }
    let base = lower.binding()?;
    let mut due = base;
    let mut names: Vec<Id> = Vec::new();
    let mut items = Vec::with_capacity(count.min(1 << 12));
    for _ in 0..count {
        let item = match lower.r.int()?.checked_sub(1) {
            None => Item::Free(lower.referred(&mut names, base)?),
            Some(op) => {
                let op = table.build(op, &mut lower)?;
                let ins = lower.r.length(1)?;
                if ins > MOST_OPERANDS {
                    return Err(ProtocolError::Misuse("an operation with too many operands"));
                }
                let ins = (0..ins).map(|_| lower.referred(&mut names, base)).collect::<Result<_, _>>()?;
                let mut node = Node { op, ins, outs: Default::default() };
                // Results take no bytes of their own; no operation of the table has more than this.
                let outs = usize::try_from(lower.r.int()?).ok().filter(|&n| n <= 64);
                for _ in 0..outs.ok_or(WireError::Malformed { what: "results" })? {
                    let id = Id(due.wrapping_add(lower.binding()?));
                    due = id.0.wrapping_add(1);
                    names.push(id);
                    node.outs.push(id);
                }
                Item::Run(node)
            }
        };
        items.push(item);
    }
    if !lower.r.is_empty() || lower.bindings.next().is_some() {
        return Err(WireError::Malformed { what: "batch" }.into());
    }
    Ok(Batch { items, origins: Vec::new(), place, urgency: Urgency::Now })
}

/// The first value that is defined, else the first that is named.
fn base(items: &[Item]) -> u64 {
    let first = |item: &Item| match item {
        Item::Run(node) => node.outs.first().copied(),
        Item::Free(_) => None,
    };
    let any = |item: &Item| match item {
        Item::Free(id) => Some(*id),
        Item::Run(node) => node.ins.first().copied(),
    };
    items.iter().find_map(first).or_else(|| items.iter().find_map(any)).map_or(0, |id| id.0)
}

/// The names given so far, by first appearance.
struct Names {
    names: FxHashMap<Id, u64>,
    base: u64,
}

impl Names {
    /// How far back the value was named; 0, and a binding, for one that is new.
    fn refer(&mut self, id: Id, lift: &mut Lift) {
        let next = self.names.len() as u64;
        match self.names.get(&id) {
            Some(name) => lift.w.int(next - name),
            None => {
                lift.w.int(0);
                lift.bindings.push(self.base.wrapping_sub(id.0));
                self.names.insert(id, next);
            }
        }
    }

    fn define(&mut self, id: Id) {
        let next = self.names.len() as u64;
        self.names.insert(id, next);
    }
}

/// Takes fields: what may differ between two runs of a step becomes a binding.
struct Lift {
    w: Writer,
    bindings: Vec<u64>,
}

impl FieldSink for Lift {
    fn put(&mut self, key: &'static str, field: Field) {
        match field {
            Field::Scalar(x) => {
                self.w.put(key, Field::DType(x.dtype()));
                self.bindings.push(x.bits());
            }
            Field::Word(x) => self.bindings.push(x),
            Field::Bound(x) => self.bindings.push(x as u64),
            other => self.w.put(key, other),
        }
    }
}

/// Gives back what [`Lift`] took.
struct Lower<'a> {
    r: Reader<'a>,
    bindings: std::slice::Iter<'a, u64>,
}

impl Lower<'_> {
    fn binding(&mut self) -> Result<u64, ProtocolError> {
        self.bindings.next().copied().ok_or(WireError::Truncated.into())
    }

    fn referred(&mut self, names: &mut Vec<Id>, base: u64) -> Result<Id, ProtocolError> {
        match usize::try_from(self.r.int()?) {
            Ok(0) => {
                let id = Id(base.wrapping_sub(self.binding()?));
                names.push(id);
                Ok(id)
            }
            Ok(back) if back <= names.len() => Ok(names[names.len() - back]),
            _ => Err(WireError::Malformed { what: "reference" }.into()),
        }
    }
}

impl FieldSource for Lower<'_> {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        let bad = FormError::BadField { key };
        let mut binding = || self.bindings.next().copied().ok_or(bad.clone());
        Ok(match like {
            Field::Scalar(x) => {
                let bits = binding()?;
                match self.r.get(key, Field::DType(x.dtype()))? {
                    Field::DType(dtype) if !dtype.is_quantised() => {
                        Field::Scalar(Scalar::from_bits(dtype, bits))
                    }
                    _ => return Err(bad),
                }
            }
            Field::Word(_) => Field::Word(binding()?),
            Field::Bound(_) => Field::Bound(usize::try_from(binding()?).map_err(|_| bad)?),
            other => self.r.get(key, other)?,
        })
    }
}

/// Writes what changed from `old` to `new`: gap, difference, and so on. Missing old bindings count as 0.
pub fn difference(old: &[u64], new: &[u64], w: &mut Writer) {
    let mut at = 0;
    for (i, &x) in new.iter().enumerate() {
        let was = old.get(i).copied().unwrap_or(0);
        if x != was {
            let change = x.wrapping_sub(was) as i64;
            w.int((i - at) as u64);
            w.int((change << 1 ^ change >> 63) as u64);
            at = i + 1;
        }
    }
}

/// Applies what [`difference`] wrote.
pub fn apply(bindings: &mut [u64], r: &mut Reader<'_>) -> Result<(), ProtocolError> {
    let mut at = 0usize;
    while !r.is_empty() {
        let (gap, change) = (r.int()?, r.int()?);
        at = usize::try_from(gap).ok().and_then(|gap| at.checked_add(gap)).unwrap_or(usize::MAX);
        let slot = bindings.get_mut(at).ok_or(WireError::Malformed { what: "bindings" })?;
        *slot = slot.wrapping_add((change >> 1 ^ (change & 1).wrapping_neg()) as i64 as u64);
        at += 1;
    }
    Ok(())
}

/// How a batch is to be sent.
#[derive(PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Sending {
    /// As a new template; an old one to forget first, and the encoded bindings.
    Define { template: u64, forget: Option<u64>, bindings: Vec<u8> },
    /// As a call.
    Call { template: u64, bindings: Vec<u8> },
}

/// The sender's templates.
#[derive(Default)]
pub struct Sender {
    /// By structure; equal structures are one allocation, see [`Sender::send`].
    templates: FxHashMap<usize, KnownTemplate>,
    next: u64,
    clock: u64,
}

struct KnownTemplate {
    template: u64,
    /// Keeps the allocation, and so the key.
    _structure: Arc<[u8]>,
    bindings: Vec<u64>,
    used: u64,
}

impl Sender {
    /// Decides how to send a batch, and takes note of it. The caller shares equal structures: it is by its address
    /// that one is known.
    pub fn send(&mut self, structure: &Arc<[u8]>, bindings: &[u64]) -> Sending {
        self.clock += 1;
        let key = structure.as_ptr() as usize;
        let mut w = Writer::default();
        if let Some(known) = self.templates.get_mut(&key) {
            difference(&known.bindings, bindings, &mut w);
            known.bindings.clear();
            known.bindings.extend_from_slice(bindings);
            known.used = self.clock;
            return Sending::Call { template: known.template, bindings: w.bytes };
        }
        let forget = (self.templates.len() >= MOST).then(|| self.forget_oldest()).flatten();
        let template = self.next;
        self.next += 1;
        w.int(bindings.len() as u64);
        difference(&[], bindings, &mut w);
        let (structure, held) = (structure.clone(), bindings.to_vec());
        let known = KnownTemplate { template, _structure: structure, bindings: held, used: self.clock };
        self.templates.insert(key, known);
        Sending::Define { template, forget, bindings: w.bytes }
    }

    fn forget_oldest(&mut self) -> Option<u64> {
        let oldest = self.templates.iter().min_by_key(|(_, known)| known.used).map(|(key, _)| *key)?;
        self.templates.remove(&oldest).map(|known| known.template)
    }
}

/// The receiver's templates.
#[derive(Default)]
pub struct Receiver {
    templates: FxHashMap<u64, Split>,
    bytes: usize,
}

impl Receiver {
    /// A new template and its first batch.
    pub fn define(
        &mut self,
        table: &Table,
        template: u64,
        structure: &[u8],
        bindings: &[u8],
    ) -> Result<Batch, ProtocolError> {
        if self.templates.len() >= MOST || self.templates.contains_key(&template) {
            return Err(ProtocolError::Misuse("a template too many"));
        }
        let mut r = Reader::new(bindings);
        // Bindings that are 0 take no bytes, but each belongs to something in the structure that does.
        let count = usize::try_from(r.int()?).ok().filter(|&n| n <= 2 + 2 * structure.len());
        let count = count.ok_or(WireError::Malformed { what: "bindings" })?;
        if self.bytes + structure.len() + 8 * count > MOST_BYTES {
            return Err(ProtocolError::Misuse("templates of too many bytes"));
        }
        let mut split = Split { structure: structure.to_vec(), bindings: vec![0; count] };
        apply(&mut split.bindings, &mut r)?;
        let batch = join(table, &split.structure, &split.bindings)?;
        self.bytes += split.bytes();
        self.templates.insert(template, split);
        Ok(batch)
    }

    /// The batch of a call.
    pub fn call(&mut self, table: &Table, template: u64, bindings: &[u8]) -> Result<Batch, ProtocolError> {
        let split =
            self.templates.get_mut(&template).ok_or(ProtocolError::Misuse("a template that is not known"))?;
        apply(&mut split.bindings, &mut Reader::new(bindings))?;
        join(table, &split.structure, &split.bindings)
    }

    /// A template is not called any more.
    pub fn forget(&mut self, template: u64) {
        self.bytes -= self.templates.remove(&template).map_or(0, |split| split.bytes());
    }

    /// Bytes and number of templates held.
    pub fn held(&self) -> (usize, usize) {
        (self.bytes, self.templates.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(first: u64, rate: &str) -> Vec<Item> {
        // A step of training: its parameter (v1) is replaced by what it defines last.
        let text = format!(
            "a = input f32[4]\np = input f32[4]\nn = full shape=[] value=f32:{rate}\nb = mul a n\nc = exp b\nfree b\nd = sub p c\nfree c\nfree p\nfree n"
        );
        let program = kiln_ir::text::parse(&text).unwrap();
        let rename = |id: Id| Id(id.0 + first);
        let mut items = program.items;
        for item in &mut items {
            match item {
                Item::Free(id) => *id = rename(*id),
                Item::Run(node) => {
                    node.ins.iter_mut().for_each(|id| *id = rename(*id));
                    node.outs.iter_mut().for_each(|id| *id = rename(*id));
                }
            }
        }
        items
    }

    #[test]
    fn a_recurring_batch_is_sent_once() {
        let table = Table::local();
        let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
        let mut sizes = Vec::new();
        let mut structure: Arc<[u8]> = Arc::from([]);
        for i in 0..5 {
            let items = step(100 * i, &format!("{i}.5"));
            let split = split(&table, &items, Place::Reuse);
            if *structure != *split.structure {
                structure = split.structure.clone().into();
            }
            let (size, batch) = match sender.send(&structure, &split.bindings) {
                Sending::Define { template, bindings, .. } => {
                    assert_eq!(i, 0);
                    let batch = receiver.define(&table, template, &split.structure, &bindings).unwrap();
                    (split.structure.len() + bindings.len(), batch)
                }
                Sending::Call { template, bindings } => {
                    (bindings.len(), receiver.call(&table, template, &bindings).unwrap())
                }
            };
            assert_eq!(batch.items, items);
            sizes.push(size);
        }
        assert!(sizes[1..].iter().all(|&s| s < sizes[0] / 4), "{sizes:?}");
    }

    #[test]
    fn templates_are_bounded_on_both_sides() {
        let table = Table::local();
        let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
        for i in 0..2 * MOST {
            // Another shape every time.
            let text = format!("a = input f32[{}]\nb = exp a", i + 1);
            let program = kiln_ir::text::parse(&text).unwrap();
            let mut items = program.items;
            items.push(Item::Run(Node::new(
                kiln_ir::text::parse_op(&format!("full shape=[{}] value=f32:1.0", i + 1)).unwrap(),
                &[],
                &[Id(900)],
            )));
            let split = split(&table, &items, Place::Persistent);
            let sending = sender.send(&split.structure.clone().into(), &split.bindings);
            let Sending::Define { template, forget, bindings } = sending else { panic!("new") };
            forget.into_iter().for_each(|t| receiver.forget(t));
            let batch = receiver.define(&table, template, &split.structure, &bindings).unwrap();
            assert_eq!((batch.items, batch.place), (items, Place::Persistent));
        }
        assert_eq!(receiver.held().1, MOST);
    }

    #[test]
    fn changed_bytes_are_an_error_or_another_batch_but_never_a_panic() {
        let table = Table::local();
        let split = split(&table, &step(7, "0.1"), Place::Reuse);
        for end in 0..split.structure.len() {
            assert!(join(&table, &split.structure[..end], &split.bindings).is_err());
        }
        for at in 0..split.structure.len() {
            for bit in 0..8 {
                let mut changed = split.structure.clone();
                changed[at] ^= 1 << bit;
                let _ = join(&table, &changed, &split.bindings);
            }
        }
        let mut r = Reader::new(&[5, 2]);
        assert!(apply(&mut [0; 3], &mut r).is_err());
    }
}
