//! Arbitrary operations of every class, with wild attributes, and streams of them.

use kiln_ir::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use std::sync::Arc;

const HUGE: [usize; 8] =
    [usize::MAX, usize::MAX - 1, isize::MAX as usize, 1 << 63, 1 << 62, 1 << 32, u32::MAX as usize, 1 << 31];

pub fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0usize..6, 1 => Just(32), 1 => Just(64), 1 => select(&HUGE[..]), 1 => any::<usize>()]
}

pub fn shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        4 => vec(0usize..5, 0..=5),
        2 => vec(extent(), 0..=8),
        1 => vec(select(&HUGE[..]), 0..=8),
    ]
    .prop_map(Shape::from)
}

pub fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![3 => Just(DType::F32), 2 => select(&DType::ALL[..])]
}

pub fn meta() -> impl Strategy<Value = Meta> {
    (dtype(), shape()).prop_map(|(dtype, shape)| Meta { dtype, shape })
}

/// Operands that have a chance to fit together: one dtype, and shapes that differ in a few extents.
pub fn metas() -> impl Strategy<Value = Vec<Meta>> {
    let like = (meta(), vec((0usize..8, extent(), any::<u8>()), 0..5)).prop_map(|(first, changes)| {
        let mut metas = vec![first];
        for (axis, extent, how) in changes {
            let mut next = first;
            if how % 3 > 0 && axis < next.shape.len() {
                next.shape[axis] = extent;
            }
            if how % 5 == 0 {
                next.dtype = [DType::I64, DType::Bool, DType::Q8][how as usize % 3];
            }
            metas.push(next);
        }
        metas
    });
    prop_oneof![2 => like, 1 => vec(meta(), 0..5)]
}

/// An operation with operands of the right number and dtype, which leaves the shapes to chance.
pub fn application() -> impl Strategy<Value = (Op, Vec<Meta>)> {
    (op(), metas(), meta()).prop_map(|(op, mut ins, spare)| {
        let first = *ins.first().unwrap_or(&spare);
        let (least, most) = op.operands().into_inner();
        let arity = ins.len().clamp(least, most);
        ins.resize(arity, first);
        ins.iter_mut().for_each(|meta| meta.dtype = first.dtype);
        match op {
            Op::Select => ins[0].dtype = DType::Bool,
            Op::Commit => ins[0] = Meta::new(DType::Bool, []),
            Op::Gather { .. } | Op::Scatter { .. } => ins[1].dtype = DType::I64,
            _ => {}
        }
        (op, ins)
    })
}

fn axis() -> impl Strategy<Value = u8> {
    prop_oneof![6 => 0u8..5, 1 => any::<u8>()]
}

fn axes() -> impl Strategy<Value = AxisSet> {
    let set = |bits: u8| (0..8).filter(|i| bits >> i & 1 == 1).fold(AxisSet::default(), AxisSet::with);
    prop_oneof![3 => (0u8..8).prop_map(set), 1 => any::<u8>().prop_map(set)]
}

fn triple() -> impl Strategy<Value = [u32; 3]> {
    let n = || prop_oneof![6 => 0u32..4, 1 => Just(u32::MAX), 1 => any::<u32>()];
    prop_oneof![3 => Just([1; 3]), 2 => Just([0; 3]), 5 => [n(), n(), n()]]
}

fn scalar() -> impl Strategy<Value = Scalar> {
    (dtype(), any::<u64>()).prop_map(|(dtype, bits)| Scalar::from_bits(dtype, bits))
}

fn real() -> impl Strategy<Value = Real> {
    any::<u64>().prop_map(|bits| Real::new(f64::from_bits(bits)))
}

fn order() -> impl Strategy<Value = Dims<u8>> {
    prop_oneof![
        1 => vec(axis(), 0..=8).prop_map(Dims::collect),
        1 => (0usize..5).prop_map(|n| Dims::collect((0..n as u8).rev())),
    ]
}

/// Wild fields of every kind, in the order in which they are asked for.
#[derive(Clone, Debug)]
struct Wild {
    shape: Shape,
    scalar: Scalar,
    dtype: DType,
    axis: u8,
    axes: AxisSet,
    order: Dims<u8>,
    flag: bool,
    real: Real,
    count: u32,
    bounds: Vec<usize>,
    words: Vec<u64>,
    triples: Vec<[u32; 3]>,
}

fn wild() -> impl Strategy<Value = Wild> {
    let count = prop_oneof![4 => Just(1), 2 => 0u32..4, 1 => any::<u32>()];
    let few = (shape(), scalar(), dtype(), axis(), axes(), order(), any::<bool>(), real(), count);
    (few, vec(extent(), 3), vec(any::<u64>(), 2), vec(triple(), 6)).prop_map(
        |((shape, scalar, dtype, axis, axes, order, flag, real, count), bounds, words, triples)| Wild {
            shape,
            scalar,
            dtype,
            axis,
            axes,
            order,
            flag,
            real,
            count,
            bounds,
            words,
            triples,
        },
    )
}

impl FieldSource for Wild {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        let missing = FormError::BadField { key };
        Ok(match like {
            Field::Shape(_) => Field::Shape(self.shape),
            Field::Scalar(_) => Field::Scalar(self.scalar),
            Field::DType(_) => Field::DType(self.dtype),
            Field::Axis(_) => Field::Axis(self.axis),
            Field::Axes(_) => Field::Axes(self.axes),
            Field::Order(_) => Field::Order(self.order),
            Field::Flag(_) => Field::Flag(self.flag),
            Field::Bound(_) => Field::Bound(self.bounds.pop().ok_or(missing)?),
            Field::Word(_) => Field::Word(self.words.pop().ok_or(missing)?),
            Field::Real(_) => Field::Real(self.real),
            Field::Triple(_) => Field::Triple(self.triples.pop().ok_or(missing)?),
            Field::Count(_) => Field::Count(self.count),
            Field::Name(_) | Field::Bytes(_) => return Err(missing),
        })
    }
}

/// Any operation at all.
pub fn op() -> impl Strategy<Value = Op> {
    let elementwise = |name: &str| Unary::from_name(name).is_some() || Binary::from_name(name).is_some();
    let names: Vec<&str> = Op::names().into_iter().filter(|n| !elementwise(n) && *n != "custom").collect();
    let structured = (select(names), wild())
        .prop_map(|(name, mut wild)| Op::build(name, &mut wild).expect("there are fields of every kind"));
    let custom = (".{0,6}", vec(any::<u8>(), 0..6))
        .prop_map(|(name, attrs)| Op::Custom(Arc::new(CustomCall { name, attrs })));
    prop_oneof![
        1 => select(Unary::ALL).prop_map(Op::Unary),
        1 => select(Binary::ALL).prop_map(Op::Binary),
        12 => structured,
        1 => custom,
    ]
}

/// A stream in which every name is new and every operand defined; its operations need not fit.
pub fn program() -> impl Strategy<Value = Program> {
    let item = (op(), vec(any::<Index>(), 0..4), 1usize..3, prop::bool::weighted(0.3));
    (any::<u64>(), any::<u64>(), vec(meta(), 0..4), vec(item, 0..12)).prop_map(
        |(base, step, inputs, items)| {
            // An odd factor makes all ids differ.
            let mut next = 0u64;
            let mut fresh = || {
                next += 1;
                Id(base.wrapping_add(next.wrapping_mul(step | 1)))
            };
            let mut program = Program {
                inputs: inputs.into_iter().map(|meta| (fresh(), meta)).collect(),
                items: Vec::new(),
            };
            let mut alive: Vec<Id> = program.inputs.iter().map(|(id, _)| *id).collect();
            for (op, ins, outs, free) in items {
                if free && let [.., id] = alive[..] {
                    alive.pop();
                    program.items.push(Item::Free(id));
                    continue;
                }
                let ins: Vec<Id> =
                    if alive.is_empty() { Vec::new() } else { ins.iter().map(|i| *i.get(&alive)).collect() };
                let outs: Vec<Id> = (0..outs).map(|_| fresh()).collect();
                alive.extend(&outs);
                program.items.push(Item::Run(Node::new(op, &ins, &outs)));
            }
            program
        },
    )
}
