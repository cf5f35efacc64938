//! The relative form: what a window of the stream looks like when names do not matter.
//!
//! Values and extents are renamed by first appearance; scalars, random keys, slice bounds and the extents themselves
//! are lifted into bindings. Two windows with equal structure can share a plan and differ only in bindings. The hash is
//! kept as items arrive, so that recognising a recurring step costs a few integer operations an item.

use crate::{Field, FieldSink, Id, Item, Meta, Op};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

/// A window in relative form, growing item by item.
#[derive(Clone, Default)]
pub struct Relative {
    values: FxHashMap<Id, u32>,
    extents: FxHashMap<usize, u32>,
    structure: Vec<u64>,
    bindings: Vec<u64>,
    hash: u64,
}

impl Relative {
    /// An empty window.
    pub fn new() -> Relative {
        Relative::default()
    }

    /// Forgets everything but keeps its memory.
    pub fn clear(&mut self) {
        self.values.clear();
        self.extents.clear();
        self.structure.clear();
        self.bindings.clear();
        self.hash = 0;
    }

    /// Appends an item. `meta` gives the meta of an operand or a result.
    pub fn push(&mut self, item: &Item, meta: impl Fn(Id) -> Meta) {
        let from = self.structure.len();
        match item {
            Item::Free(id) => {
                self.structure.push(1);
                self.operand(*id, &meta);
            }
            Item::Run(node) => {
                self.structure.push(class(&node.op));
                let mut lift = Lift { relative: self, bounds: false };
                node.op.fields(&mut lift);
                let bounds = lift.bounds;
                self.structure.push((node.ins.len() as u64) << 32 | node.outs.len() as u64);
                node.ins.iter().for_each(|id| self.operand(*id, &meta));
                for id in &node.outs {
                    let name = self.values.len() as u32;
                    self.values.insert(*id, name);
                    // Lifted bounds decide the result's extents, and whether one of them broadcasts.
                    if bounds {
                        self.shape(&meta(*id).shape);
                    }
                }
            }
        }
        let mut hasher = FxHasher::default();
        self.hash.hash(&mut hasher);
        self.structure[from..].hash(&mut hasher);
        self.hash = hasher.finish();
    }

    /// Hash of the structure so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The structure so far: equal exactly when two windows can share kernels.
    pub fn structure(&self) -> &[u64] {
        &self.structure
    }

    /// What was lifted out of the structure, in order: scalars, random words, bounds and extents.
    pub fn bindings(&self) -> &[u64] {
        &self.bindings
    }

    fn operand(&mut self, id: Id, meta: &impl Fn(Id) -> Meta) {
        let next = self.values.len() as u32;
        let name = *self.values.entry(id).or_insert(next);
        self.structure.push(name as u64);
        if name == next {
            let meta = meta(id);
            self.structure.push(meta.dtype as u64);
            self.shape(&meta.shape);
        }
    }

    fn shape(&mut self, shape: &[usize]) {
        self.structure.push(shape.len() as u64);
        for &d in shape {
            self.extent(d);
        }
    }

    /// 0 and 1 change what a kernel does, so they stay in the structure; every other extent is a name.
    fn extent(&mut self, d: usize) {
        if d <= 1 {
            return self.structure.push(d as u64);
        }
        let next = self.extents.len() as u32;
        let name = *self.extents.entry(d).or_insert(next);
        if name == next {
            self.bindings.push(d as u64);
        }
        self.structure.push(name as u64 + 2);
    }
}

/// A number that stands for the operation without its fields.
fn class(op: &Op) -> u64 {
    let mut hasher = FxHasher::default();
    op.form_name().hash(&mut hasher);
    hasher.finish()
}

struct Lift<'a> {
    relative: &'a mut Relative,
    /// Whether a bound was lifted.
    bounds: bool,
}

impl FieldSink for Lift<'_> {
    fn put(&mut self, _: &'static str, field: Field) {
        let relative = &mut *self.relative;
        match field {
            Field::Shape(x) => relative.shape(&x),
            Field::Scalar(x) => {
                relative.structure.push(x.dtype() as u64);
                relative.bindings.push(x.bits());
            }
            Field::Word(x) => relative.bindings.push(x),
            Field::Bound(x) => {
                relative.bindings.push(x as u64);
                self.bounds = true;
            }
            Field::Real(x) => relative.bindings.push(x.get().to_bits()),
            Field::DType(x) => relative.structure.push(x as u64),
            Field::Axis(x) => relative.structure.push(x as u64),
            Field::Axes(x) => relative.structure.push(x.0 as u64),
            Field::Order(x) => relative.structure.extend(x.iter().map(|&p| p as u64)),
            Field::Flag(x) => relative.structure.push(x as u64),
            Field::Triple(x) => relative.structure.extend(x.iter().map(|&n| n as u64)),
            Field::Count(x) => relative.structure.push(x as u64),
            Field::Name(x) => bytes(&mut relative.structure, x.as_bytes()),
            Field::Bytes(x) => bytes(&mut relative.structure, &x),
        }
    }
}

fn bytes(structure: &mut Vec<u64>, bytes: &[u8]) {
    structure.push(bytes.len() as u64);
    structure.extend(bytes.iter().map(|&b| b as u64));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;
    use crate::verify;

    fn relative(text: &str) -> Relative {
        let verified = verify(parse(text).unwrap()).unwrap();
        let mut relative = Relative::new();
        for item in &verified.program.items {
            relative.push(item, |id| verified.metas[&id]);
        }
        relative
    }

    const STEP: &str = "a = input f32[4,8]\nc = full shape=[] value=f32:2.0\nb = mul a c\nd = sum b axes=[1] keep=false\nfree b";

    #[test]
    fn names_scalars_and_sizes_do_not_matter() {
        let other = "v9 = input f32[5,7]\nv3 = full shape=[] value=f32:3.0\nv7 = mul v9 v3\nv8 = sum v7 axes=[1] keep=false\nfree v7";
        let (a, b) = (relative(STEP), relative(other));
        assert_eq!(a.structure(), b.structure());
        assert_eq!(a.hash(), b.hash());
        assert_ne!(a.bindings(), b.bindings());
    }

    #[test]
    fn a_slice_that_broadcasts_has_another_structure() {
        let text = |end| {
            format!(
                "x = input f32[9]\ny = input f32[5]\na = slice x axis=0 start=0 end={end} step=1\nb = add a y"
            )
        };
        assert_ne!(relative(&text(1)).hash(), relative(&text(5)).hash());
        let moved = text(5).replace("start=0 end=5", "start=3 end=8");
        assert_eq!(relative(&moved).hash(), relative(&text(5)).hash());
    }

    #[test]
    fn structure_matters() {
        let a = relative(STEP);
        for (from, to) in [
            ("[4,8]", "[8,8]"),
            ("[4,8]", "[1,8]"),
            ("mul", "add"),
            ("axes=[1]", "axes=[0]"),
            ("free b", "free a"),
            ("f32", "f64"),
        ] {
            assert_ne!(a.hash(), relative(&STEP.replace(from, to)).hash(), "{from} -> {to}");
        }
    }
}
