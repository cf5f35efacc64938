//! Streams that no recording side writes, handed to the device as anybody may: typed errors or the numbers that the stream
//! means, and nothing written past a buffer. Worth a run with `--release` too, where arithmetic wraps around.

use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Data, Driver, Error, Place, Record, Urgency, replay};
use kiln_ir::{
    AxisSet, Binary, Conv, ConvKind, DType, Id, Item, Meta, Move, Named, Node, Op, OpError, ReduceKind,
    Scalar, ScanKind, Shape, Unary,
};
use std::sync::Arc;

fn run(op: Op, ins: &[u64], out: u64) -> Item {
    let ins: Vec<Id> = ins.iter().map(|&id| Id(id)).collect();
    Item::Run(Node::new(op, &ins, &[Id(out)]))
}

fn submit(cpu: &Cpu, items: Vec<Item>) {
    cpu.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
}

fn write(cpu: &Cpu, id: u64, numbers: &[f32]) {
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let meta = Meta::new(DType::F32, [numbers.len()]);
    cpu.write(Id(id), Data::new(meta, Bytes::new(bytes)), Place::Reuse);
}

fn full(shape: impl Into<Shape>) -> Op {
    Op::Full { shape: shape.into(), value: Scalar::from_bits(DType::F32, 1f32.to_bits() as u64) }
}

fn root(cpu: &Cpu, id: u64) -> Error {
    cpu.read(Id(id)).wait().unwrap_err().root().clone()
}

/// A name that first stands for words and then for bytes, in one window: a kernel that took the one for the other would
/// write four times what its buffer holds.
#[test]
fn a_name_for_two_values_in_one_batch_is_two_values() {
    const N: usize = 16384;
    let numbers: Vec<f32> = (0..N).map(|i| (i % 7) as f32 - 3.0).collect();
    let cpu = Cpu::start();
    write(&cpu, 1, &numbers);
    let sums = Op::Scan { kind: ScanKind::Sum, axis: 0, reverse: false };
    for first in [100, 200] {
        let (made, other) = (first, first + 1);
        submit(
            &cpu,
            vec![
                run(Op::Unary(Unary::Neg), &[1], made),
                run(sums.clone(), &[made], other),
                Item::Free(Id(made)),
                run(Op::Binary(Binary::Lt), &[1, 1], made),
            ],
        );
        let less = cpu.read(Id(made)).wait().unwrap();
        assert_eq!(less.meta, Meta::new(DType::Bool, [N]));
        assert!(less.bytes.iter().all(|&b| b == 0));
        let sums = cpu.read(Id(other)).wait().unwrap();
        let last = f32::from_le_bytes(sums.bytes[4 * N - 4..].try_into().unwrap());
        assert_eq!(last, -numbers.iter().sum::<f32>());
    }
    assert_eq!(cpu.fusion().planned, 0, "such a window has no plan");
    // The same under two names does.
    let lt = run(Op::Binary(Binary::Lt), &[1, 1], 303);
    submit(&cpu, vec![run(Op::Unary(Unary::Neg), &[1], 301), run(sums, &[301], 302), lt]);
    assert_eq!((cpu.fusion().planned, cpu.fusion().fused), (1, 2));
}

#[test]
fn names_of_the_device_are_refused() {
    let cpu = Cpu::start();
    write(&cpu, 1, &[1.0, 2.0]);
    let reserved = Id::LOWERED.first.0;
    let refused = |error: Error| {
        assert!(
            matches!(&error, Error::Op(OpError::Attribute { reason, .. }) if reason.contains("2^62")),
            "{error}"
        );
    };
    write(&cpu, reserved, &[5.0]);
    refused(root(&cpu, reserved));
    submit(
        &cpu,
        vec![
            run(Op::Unary(Unary::Neg), &[1], reserved + 7),
            run(Op::Named(Named::Softmax { axis: 0 }), &[1], 2),
            run(Op::Unary(Unary::Exp), &[2], 3),
        ],
    );
    refused(root(&cpu, reserved + 7));
    assert!(cpu.read(Id(3)).wait().is_ok());
    submit(&cpu, vec![run(Op::Unary(Unary::Neg), &[1], Id::RECOMPUTED.first.0), Item::Free(Id(3))]);
    refused(root(&cpu, Id::RECOMPUTED.first.0));
}

const CONV: Conv =
    Conv { stride: [1; 3], low: [0; 3], high: [0; 3], dilation: [1; 3], groups: 1, extent: [0; 3] };

fn conv(kind: ConvKind, low: u32, high: u32, extent: u32) -> Op {
    let conv = Conv { low: [low, 0, 0], high: [high, 0, 0], extent: [extent, 0, 0], ..CONV };
    Op::Conv { kind, conv }
}

/// Views of huge extents take no memory, and what a kernel makes of them might: products of such extents that wrap around
/// to a small buffer.
#[test]
fn scratch_of_huge_extents_is_refused() {
    let cpu = Cpu::start();
    let mut next = 0;
    let mut fails = |a: &[usize], b: &[usize], op: Op| {
        let [x, w, y] = [next + 1, next + 2, next + 3];
        next += 3;
        submit(&cpu, vec![run(full(a), &[], x), run(full(b), &[], w), run(op.clone(), &[x, w], y)]);
        let error = root(&cpu, y);
        let typed = matches!(error, Error::Op(OpError::TooLarge { .. }) | Error::OutOfMemory { .. });
        assert!(typed, "{op} of {a:?} and {b:?}: {error}");
    };
    for depth in [1 << 58, 1 << 44, (1 << 43) - 1, 1 << 40] {
        fails(&[1, depth, 1], &[1, depth, 1], conv(ConvKind::Forward, 63, 0, 0));
    }
    for taps in [1usize << 31, 1 << 30, 3 << 29] {
        let padding = taps as u32 - 1;
        let input = conv(ConvKind::Input, padding, padding + 1, 1);
        fails(&[1, 1, taps + 1], &[1, 1, taps], input);
        fails(&[1, 1, taps], &[1, 1, taps], conv(ConvKind::Input, padding, padding, 1));
    }
    // Three axes of padding, whose product is 2^99.
    let wide = u32::MAX;
    let padded = Conv { low: [wide; 3], high: [wide; 3], dilation: [wide; 3], ..CONV };
    fails(&[1, 1, 9, 9, 9], &[1, 1, 2, 2, 2], Op::Conv { kind: ConvKind::Forward, conv: padded });
}

/// Rows whose scratch in a fused group would be a few times their extent.
#[test]
fn huge_rows_are_refused_before_they_are_made() {
    let cpu = Cpu::start();
    let mut next = 0;
    for length in [(1usize << 59) - 1, 1 << 57, 1 << 46] {
        let [x, y, m, z] = [next + 1, next + 2, next + 3, next + 4];
        next += 4;
        let max = Op::Reduce { kind: ReduceKind::Max, axes: AxisSet::default().with(0), keep: true };
        submit(
            &cpu,
            vec![
                run(
                    Op::Full { shape: [length].into(), value: Scalar::from_bits(DType::F64, 1f64.to_bits()) },
                    &[],
                    x,
                ),
                run(Op::Unary(Unary::Exp), &[x], y),
                run(max, &[y], m),
                run(Op::Binary(Binary::Sub), &[y, m], z),
            ],
        );
        assert!(matches!(root(&cpu, z), Error::Op(OpError::TooLarge { .. })));
    }
}

#[test]
fn a_slice_of_a_huge_view_is_still_that() {
    let cpu = Cpu::start();
    let end = Op::Move(Move::Slice { axis: 0, start: (1 << 45) - 3, end: 1 << 45, step: 1 });
    submit(&cpu, vec![run(full(1 << 45), &[], 1), run(end, &[1], 2), run(Op::Unary(Unary::Neg), &[2], 3)]);
    let data = cpu.read(Id(3)).wait().unwrap();
    assert_eq!(&data.bytes[..], (-1f32).to_le_bytes().repeat(3));
}

/// A recording is a file, and a file may say anything.
#[test]
fn a_recording_whose_names_stand_for_two_values_is_refused_before_anything_runs() {
    let path = std::env::temp_dir().join(format!("kiln-hostile-{}.rec", std::process::id()));
    let neg = |of: u64, to: u64| run(Op::Unary(Unary::Neg), &[of], to);
    let cases = [
        (vec![neg(1, 2), Item::Free(Id(2)), neg(1, 2)], "v2 is defined already"),
        (vec![neg(1, 2), neg(1, 1)], "v1 is defined already"),
        (vec![neg(7, 2), neg(1, 2)], "v2 is defined already"),
        (vec![neg(1, Id::LOWERED.first.0)], "only a device may give"),
        (
            vec![Item::Run(Node::new(Op::Unary(Unary::Neg), &[Id(1)], &[Id(2), Id(3)]))],
            "gives 1 values, not 2",
        ),
    ];
    for (items, reason) in cases {
        // What is recorded is what was asked, not what came of it.
        let record = Record::new(Arc::new(Cpu::start()), &path).unwrap();
        let data = Data::new(Meta::new(DType::F32, [1]), Bytes::new(vec![0; 4]));
        record.write(Id(1), data, Place::Reuse);
        record.submit(Batch { items, ..Batch::default() });
        drop(record);
        let cpu = Cpu::start();
        let error = replay(&path, &cpu).unwrap_err();
        assert!(matches!(&error, Error::Recording { reason: r, .. } if r.contains(reason)), "{error}");
        assert_eq!(cpu.memory().values, 0);
    }
    std::fs::remove_file(&path).unwrap();
}
