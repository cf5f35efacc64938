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
        let arity = match op {
            Op::Full { .. } | Op::Iota { .. } | Op::Random { .. } => 0,
            Op::Binary(_)
            | Op::Dot { .. }
            | Op::Conv { .. }
            | Op::Gather { .. }
            | Op::Move(Move::Assign { .. }) => 2,
            Op::Scan { kind: ScanKind::Linear, .. } => 2,
            Op::Select | Op::Commit | Op::Scatter { .. } | Op::Named(Named::Attention { .. }) => 3,
            Op::Move(Move::Cat { .. }) | Op::Guard { .. } | Op::Custom(_) => ins.len(),
            _ => 1,
        };
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

fn moved() -> impl Strategy<Value = Move> {
    let range = || (axis(), extent(), extent(), extent());
    prop_oneof![
        shape().prop_map(Move::Reshape),
        vec(axis(), 0..=8).prop_map(|order| Move::Permute(Dims::collect(order))),
        (0usize..5).prop_map(|n| Move::Permute(Dims::collect((0..n as u8).rev()))),
        shape().prop_map(Move::Expand),
        range().prop_map(|(axis, start, end, step)| Move::Slice { axis, start, end, step }),
        range().prop_map(|(axis, start, end, step)| Move::Assign { axis, start, end, step }),
        axes().prop_map(Move::Flip),
        axis().prop_map(|axis| Move::Cat { axis }),
    ]
}

fn named() -> impl Strategy<Value = Named> {
    prop_oneof![
        axis().prop_map(|axis| Named::Softmax { axis }),
        axis().prop_map(|axis| Named::LogSoftmax { axis }),
        (axis(), real()).prop_map(|(axes, eps)| Named::LayerNorm { axes, eps }),
        (axis(), real()).prop_map(|(axes, eps)| Named::RmsNorm { axes, eps }),
        (any::<bool>(), real()).prop_map(|(causal, scale)| Named::Attention { causal, scale }),
    ]
}

fn conv() -> impl Strategy<Value = Op> {
    let kind = select(vec![ConvKind::Forward, ConvKind::Input, ConvKind::Weight]);
    let groups = prop_oneof![4 => Just(1), 2 => 0u32..4, 1 => any::<u32>()];
    (kind, triple(), triple(), triple(), triple(), triple(), groups).prop_map(
        |(kind, stride, low, high, dilation, extent, groups)| Op::Conv {
            kind,
            conv: Conv { stride, low, high, dilation, extent, groups },
        },
    )
}

fn pool() -> impl Strategy<Value = Op> {
    let kind = select(vec![PoolKind::Max, PoolKind::Sum, PoolKind::SumInput]);
    (kind, triple(), triple(), triple(), triple(), triple(), triple()).prop_map(
        |(kind, kernel, stride, low, high, dilation, extent)| Op::Pool {
            kind,
            pool: Pool { kernel, stride, low, high, dilation, extent },
        },
    )
}

/// Any operation at all.
pub fn op() -> impl Strategy<Value = Op> {
    use ReduceKind::*;
    let random = select(vec![RandomKind::Bits, RandomKind::Uniform, RandomKind::Normal]);
    let reduce = select(vec![Sum, Mean, Prod, Max, Min, Any, All, ArgMax, ArgMin]);
    let scan = select(vec![ScanKind::Sum, ScanKind::Prod, ScanKind::Linear]);
    let gather = select(vec![GatherKind::Each, GatherKind::Take]);
    let scatter = select(vec![ScatterKind::Each, ScatterKind::EachAdd, ScatterKind::TakeAdd]);
    let elementwise = prop_oneof![
        select(Unary::ALL).prop_map(Op::Unary),
        select(Binary::ALL).prop_map(Op::Binary),
        Just(Op::Select),
        Just(Op::Commit),
        any::<bool>().prop_map(|finite| Op::Guard { finite }),
        dtype().prop_map(Op::Cast),
    ];
    let sources = prop_oneof![
        (shape(), scalar()).prop_map(|(shape, value)| Op::Full { shape, value }),
        (shape(), dtype(), axis()).prop_map(|(shape, dtype, axis)| Op::Iota { shape, dtype, axis }),
        (random, shape(), dtype(), any::<u64>(), any::<u64>())
            .prop_map(|(kind, shape, dtype, key, offset)| Op::Random { kind, shape, dtype, key, offset }),
    ];
    let lines = prop_oneof![
        2 => (reduce, axes(), any::<bool>()).prop_map(|(kind, axes, keep)| Op::Reduce { kind, axes, keep }),
        1 => (scan, axis(), any::<bool>()).prop_map(|(kind, axis, reverse)| Op::Scan { kind, axis, reverse }),
        1 => any::<bool>().prop_map(|transpose| Op::Dot { transpose }),
        1 => (gather, axis()).prop_map(|(kind, axis)| Op::Gather { kind, axis }),
        1 => (scatter, axis()).prop_map(|(kind, axis)| Op::Scatter { kind, axis }),
        1 => (axis(), any::<bool>(), extent()).prop_map(|(axis, descending, take)| Op::Sort { axis, descending, take }),
    ];
    let custom = (".{0,6}", vec(any::<u8>(), 0..6))
        .prop_map(|(name, attrs)| Op::Custom(Arc::new(CustomCall { name, attrs })));
    prop_oneof![
        2 => elementwise,
        1 => sources,
        3 => moved().prop_map(Op::Move),
        3 => lines,
        2 => conv(),
        2 => pool(),
        1 => named().prop_map(Op::Named),
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
