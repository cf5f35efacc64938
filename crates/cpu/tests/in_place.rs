//! Results that take the place of an operand which the same kernel still needs.
#![allow(missing_docs)]

use kiln_cpu::{Cpu, Reference};
use kiln_device::{Batch, Bytes, Data, Driver, Place, Urgency};
use kiln_ir::{AxisSet, Binary, DType, Id, Item, Meta, Node, Op, ReduceKind, Scalar, Unary};

/// Short rows are copied to be reduced together. Where there is no generated code, as for f64, the copy was made after
/// the square root had been written over the rows.
#[test]
fn rows_that_are_reduced_later_are_copied_before_a_result_takes_their_place() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for shape in [[2, 2, 9], [2, 3, 5], [3, 1, 7], [2, 16, 16], [2, 512, 64]] {
            let meta = Meta::new(dtype, &shape[..]);
            let numbers = (0..meta.shape.numel()).map(|i| (i * 7919 % 101) as f64 / 16.0);
            let bytes: Vec<u8> = numbers.flat_map(|x| Scalar::from_f64(dtype, x).to_bytes()).collect();
            let run = |device: &dyn Driver| {
                device.write(Id(1), Data::new(meta, Bytes::new(bytes.clone())), Place::Reuse);
                let mean = Op::Reduce { kind: ReduceKind::Mean, axes: AxisSet::one(1).with(2), keep: true };
                let node = |op, ins: &[u64], out| {
                    let ins: Vec<Id> = ins.iter().map(|&id| Id(id)).collect();
                    Item::Run(Node::new(op, &ins, &[Id(out)]))
                };
                let items = vec![
                    node(Op::Unary(Unary::Sqrt), &[1], 2),
                    node(mean, &[1], 3),
                    Item::Free(Id(1)),
                    node(Op::Binary(Binary::Mul), &[2, 3], 4),
                ];
                device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
                [2, 3, 4].map(|id| device.read(Id(id)).wait().unwrap().bytes.to_vec())
            };
            let cpu = Cpu::start();
            assert_eq!(run(&cpu), run(&Reference::start()), "{meta}");
            assert!(cpu.fusion().fused >= 3, "{:?}", cpu.fusion());
        }
    }
}
