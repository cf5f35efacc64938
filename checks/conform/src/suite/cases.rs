//! What is run: one generator for each class of operation. Most cases are lines of text (`crate::cases`).

use super::values::{Fill, edge_row, value};
use crate::cases;
use kiln_cpu::reference::Value;
use kiln_ir::text::parse_op;
use kiln_ir::*;
use smallvec::SmallVec;
use std::sync::{Arc, Once};

/// An operation on operands.
pub struct Case {
    pub op: Op,
    pub ins: Vec<Value>,
    /// Whether it runs in every layout, or row-major only.
    pub strided: bool,
}

/// The cases of a class.
pub fn cases(class: Class) -> Vec<Case> {
    match class {
        Class::Full => full(),
        Class::Iota => iota(),
        Class::Random => random(),
        Class::Unary => unary(),
        Class::Binary => binary(),
        Class::Select => lines(class),
        Class::Cast => cast(),
        Class::Move => lines(class),
        Class::Reduce => reduce(),
        Class::Scan => lines(class),
        Class::Dot => lines(class),
        Class::Conv => lines(class),
        Class::Pool => lines(class),
        Class::Gather => lines(class),
        Class::Scatter => lines(class),
        Class::Sort => lines(class),
        Class::Guard => guard(),
        Class::Commit => lines(class),
        Class::Named => lines(class),
        Class::Custom => custom_cases(),
    }
}

fn dense(op: Op, ins: Vec<Value>) -> Case {
    Case { op, ins, strided: false }
}

fn plain() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|d| !d.is_quantised())
}

fn shapes() -> [Shape; 6] {
    [Shape::from([]), [0].into(), [1].into(), [17].into(), [3, 0, 2].into(), [2, 3, 5].into()]
}

fn full() -> Vec<Case> {
    let edges = |dtype| {
        let row = edge_row(dtype, Fill::Any);
        let size = dtype.size();
        let bits = |b: &[u8]| b.iter().rev().fold(0u64, |n, &b| n << 8 | b as u64);
        row.to_bytes().chunks(size).map(|b| Scalar::from_bits(dtype, bits(b))).collect::<Vec<_>>()
    };
    let one = |shape: Shape, value: Scalar| dense(Op::Full { shape, value }, Vec::new());
    let values = plain().flat_map(|d| edges(d).into_iter().map(move |x| one([2].into(), x)));
    let sizes = plain().flat_map(|d| shapes().map(|shape| one(shape, Scalar::from_f64(d, 1.0))));
    values.chain(sizes).collect()
}

fn iota() -> Vec<Case> {
    let mut out = Vec::new();
    for dtype in plain() {
        for shape in [Shape::from([0]), [1].into(), [300].into(), [2, 0, 3].into(), [2, 3, 4].into()] {
            let axes = 0..shape.len() as u8;
            let ops = axes.map(|axis| Op::Iota { shape, dtype, axis }).filter(|op| infer(op, &[]).is_ok());
            out.extend(ops.map(|op| dense(op, Vec::new())));
        }
    }
    out
}

fn random() -> Vec<Case> {
    let mut out = Vec::new();
    for kind in [RandomKind::Bits, RandomKind::Uniform, RandomKind::Normal] {
        for dtype in plain() {
            for (shape, key, offset) in shapes()
                .into_iter()
                .zip(0u64..)
                .map(|(s, i)| (s, i * 77, i))
                .chain([([1025].into(), u64::MAX, u64::MAX)])
            {
                let op = Op::Random { kind, shape, dtype, key, offset };
                if infer(&op, &[]).is_ok() {
                    out.push(dense(op, Vec::new()));
                }
            }
        }
    }
    out
}

fn unary() -> Vec<Case> {
    let mut out = Vec::new();
    for &op in Unary::ALL {
        let op = Op::Unary(op);
        for dtype in DType::ALL {
            let fits = |shape: Shape| infer(&op, &[Meta { dtype, shape }]).is_ok();
            if !fits([32].into()) {
                continue;
            }
            out.push(dense(op.clone(), vec![edge_row(dtype, Fill::Any)]));
            for shape in shapes() {
                out.push(Case {
                    op: op.clone(),
                    ins: vec![value(Meta { dtype, shape }, Fill::Any, 1)],
                    strided: shape.len() == 3,
                });
            }
        }
        // Around a tile, and around what one thread takes.
        for n in [511, 1023, 1024, 1025, 32 * 1024 + 1] {
            if infer(&op, &[Meta::new(DType::F32, [n])]).is_ok() {
                out.push(dense(op.clone(), vec![value(Meta::new(DType::F32, [n]), Fill::Any, 2)]));
            }
        }
    }
    out
}

fn binary() -> Vec<Case> {
    let mut out = Vec::new();
    for &kind in Binary::ALL {
        let op = Op::Binary(kind);
        let right = match kind {
            Binary::FloorDivide => Fill::Denominator,
            kind if kind.divides() => Fill::Divisor,
            _ => Fill::Any,
        };
        let mut push = |a: Value, b: Value, strided: bool| {
            if infer(&op, &[a.meta(), b.meta()]).is_ok() {
                out.push(Case { op: op.clone(), ins: vec![a, b], strided });
            }
        };
        for dtype in plain() {
            let meta = |shape: &[usize]| Meta { dtype, shape: shape.into() };
            // Every edge with every edge.
            let (a, b) = (edge_row(dtype, Fill::Any), edge_row(dtype, right));
            let n = a.shape[0];
            push(Value { shape: [n, 1].into(), ..a }, Value { shape: [1, n].into(), ..b }, false);
            let pairs: [(&[usize], &[usize]); 10] = [
                (&[], &[]),
                (&[0], &[0]),
                (&[0, 3], &[1]),
                (&[1], &[5]),
                (&[5], &[]),
                (&[2, 3, 5], &[2, 3, 5]),
                (&[3, 1], &[4, 1, 5]),
                (&[2, 3, 5], &[5]),
                (&[2, 3, 1], &[1, 5]),
                (&[17], &[17]),
            ];
            for (a, b) in pairs {
                push(value(meta(a), Fill::Any, 3), value(meta(b), right, 4), a.len() * b.len() > 1);
            }
        }
        for (a, b) in [([1025], [1025]), ([33_000], [1]), ([1], [1023])] {
            let (a, b) = (Meta::new(DType::F32, a), Meta::new(DType::F32, b));
            push(value(a, Fill::Any, 5), value(b, right, 6), false);
        }
    }
    out
}

fn cast() -> Vec<Case> {
    let mut out = Vec::new();
    for from in DType::ALL {
        for to in DType::ALL {
            let op = Op::Cast(to);
            let mut push = |x: Value, strided: bool| {
                if infer(&op, &[x.meta()]).is_ok() {
                    out.push(Case { op: op.clone(), ins: vec![x], strided });
                }
            };
            if !from.is_quantised() && !to.is_quantised() {
                push(edge_row(from, Fill::Any), false);
            }
            for shape in
                [Shape::from([]), [0].into(), [7].into(), [2, 3, 5].into(), [2, 64].into(), [3, 0, 32].into()]
            {
                let meta = Meta { dtype: from, shape };
                // What packing does with infinities is the packer's affair.
                let fill = if to.is_quantised() { Fill::Tame } else { Fill::Any };
                if meta.check().is_ok() {
                    push(value(meta, fill, 7), true);
                }
            }
        }
    }
    out
}

fn reduce() -> Vec<Case> {
    let mut out = lines(Class::Reduce);
    // Extremes among zeros of both signs: which one it is must not depend on where they stand.
    let zeros = |n: usize, shift: usize| {
        (0..n).map(|i| if (i / 3 + shift).is_multiple_of(2) { 0f32 } else { -0.0 }).collect::<Vec<_>>()
    };
    for (name, axes) in
        ["max", "min", "sum", "argmax", "argmin"].into_iter().flat_map(|n| ["[0]", "[1]"].map(|a| (n, a)))
    {
        let op = parse_op(&format!("{name} axes={axes} keep=false")).expect("an operation");
        for (rows, shift) in [(2, 0), (2, 1), (40, 0), (40, 1)] {
            out.push(Case {
                op: op.clone(),
                ins: vec![Value::new([rows, 33], zeros(rows * 33, shift))],
                strided: true,
            });
        }
    }
    out
}

/// The cases of a class's lines: with tame values in every layout, with edges row-major.
fn lines(class: Class) -> Vec<Case> {
    let mut out = Vec::new();
    for line in cases::lines(class) {
        let (op, metas) = cases::parse(line, DType::F32);
        let large = metas.iter().any(|m| m.shape.numel() > 512);
        for dtype in plain() {
            let swap = |m: &Meta| if m.dtype == DType::F32 { Meta { dtype, ..*m } } else { *m };
            let metas: Vec<Meta> = metas.iter().map(swap).collect();
            // Of large ones a float and an integer will do.
            let wanted = !large || matches!(dtype, DType::F32 | DType::BF16 | DType::I32);
            if !wanted || infer(&op, &metas).is_err() {
                continue;
            }
            for fill in [Fill::Tame, Fill::Any] {
                let operand =
                    |(i, meta): (usize, &Meta)| value(*meta, fill_of(&op, i, &metas, fill), 10 + i as u64);
                let ins = metas.iter().enumerate().map(operand).collect();
                out.push(Case { op: op.clone(), ins, strided: fill == Fill::Tame });
            }
        }
    }
    out
}

/// Indices stay in range; everything else is filled as asked.
fn fill_of(op: &Op, i: usize, metas: &[Meta], fill: Fill) -> Fill {
    match op {
        Op::Gather { axis, .. } | Op::Scatter { axis, .. } if i == 1 => {
            Fill::Index(metas[0].shape[*axis as usize])
        }
        _ => fill,
    }
}

/// Values that are all finite, and values with an infinity or NaN among the first, the last, or of one of several.
fn guard() -> Vec<Case> {
    let mut out = Vec::new();
    for dtype in plain() {
        let meta = |shape: &[usize]| Meta { dtype, shape: shape.into() };
        for finite in [false, true] {
            let mut push = |ins: Vec<Value>| out.push(Case { op: Op::Guard { finite }, ins, strided: true });
            let tame = |n: usize, seed| value(meta(&[n]), Fill::Tame, seed);
            push(vec![value(meta(&[2, 3, 5]), Fill::Tame, 1)]);
            push(vec![value(meta(&[2, 3, 5]), Fill::Any, 1), tame(0, 2)]);
            push(vec![tame(1, 1), tame(1025, 2), edge_row(dtype, Fill::Any)]);
            let all: Vec<Value> = (0..40).map(|i| tame(1 + i % 3, i as u64)).collect();
            push(all);
            let mut bytes = tame(40_000, 3).to_bytes();
            if dtype == DType::F32 {
                let at = bytes.len() - 4;
                bytes[at..].copy_from_slice(&f32::NAN.to_le_bytes());
            }
            push(vec![Value::from_bytes(meta(&[40_000]), &bytes)]);
        }
    }
    out
}

/// `attrs[0]` times the first operand plus the second, in i32, and the number of elements.
struct Axpy;

pub const AXPY: &str = "conform.axpy";

impl custom::CustomOp for Axpy {
    fn name(&self) -> &str {
        AXPY
    }

    fn outputs(&self) -> usize {
        2
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        match ins {
            [a, b] if a == b && a.dtype == DType::I32 => {
                Ok(smallvec::smallvec![*a, Meta::new(DType::I64, [])])
            }
            _ => {
                Err(OpError::Custom { op: AXPY.into(), message: "takes two i32 tensors of one shape".into() })
            }
        }
    }

    fn eval(
        &self,
        attrs: &[u8],
        ins: &[(Meta, &[u8])],
        outs: &mut [(Meta, &mut [u8])],
    ) -> Result<(), String> {
        let factor = *attrs.first().ok_or("the factor is missing")? as i32;
        let numbers = |bytes: &[u8]| -> Vec<i32> {
            bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let (a, b) = (numbers(ins[0].1), numbers(ins[1].1));
        if a.contains(&i32::MIN) {
            return Err("the smallest number is refused".into());
        }
        for ((out, a), b) in outs[0].1.chunks_exact_mut(4).zip(&a).zip(&b) {
            out.copy_from_slice(&factor.wrapping_mul(*a).wrapping_add(*b).to_le_bytes());
        }
        outs[1].1.copy_from_slice(&(a.len() as i64).to_le_bytes());
        Ok(())
    }
}

/// The custom operation of the suite, registered.
pub fn axpy(factor: u8) -> Op {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        custom::register(Axpy).expect("no other operation has this name");
    });
    Op::Custom(Arc::new(CustomCall { name: AXPY.into(), attrs: vec![factor] }))
}

fn custom_cases() -> Vec<Case> {
    let meta = |shape: Shape| Meta { dtype: DType::I32, shape };
    let operands = |shape| vec![value(meta(shape), Fill::Tame, 1), value(meta(shape), Fill::Tame, 2)];
    shapes().map(|shape| Case { op: axpy(3), ins: operands(shape), strided: true }).into()
}
