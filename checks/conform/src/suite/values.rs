//! Operand values: every dtype's edges (NaN, infinities, signed zeros, denormals, smallest and largest), and ordinary
//! numbers between them. The same arguments always give the same value.

use kiln_cpu::reference::Value;
use kiln_ir::{DType, Kind, Meta, Scalar, Shape, philox};

/// What a value is filled with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// The edges one after another, then anything.
    Any,
    /// Finite numbers of ordinary size.
    Tame,
    /// Like `Any`, but no integer is 0.
    Divisor,
    /// Like `Any`, but no integer is 0 or -1, by which the smallest cannot be divided.
    Denominator,
    /// Integers below a bound.
    Index(usize),
}

/// A value of this meta.
pub fn value(meta: Meta, fill: Fill, seed: u64) -> Value {
    if meta.dtype.is_quantised() {
        let plain = value(Meta { dtype: DType::F32, ..meta }, Fill::Tame, seed);
        let mut bytes = vec![0; meta.bytes()];
        kiln_ir::quant::quantize(meta.dtype, plain.slice::<f32>().unwrap_or(&[]), &mut bytes);
        return Value::from_bytes(meta, &bytes);
    }
    let edges = edges(meta.dtype);
    let bytes: Vec<u8> = (0..meta.shape.numel() as u64)
        .flat_map(|i| {
            let bits = philox::wide(seed, 1, i);
            let edge = edges[(i as usize) % edges.len()];
            let scalar = match fill {
                Fill::Index(bound) => Scalar::from_i64(meta.dtype, (bits % bound.max(1) as u64) as i64),
                Fill::Tame => tame(meta.dtype, bits),
                Fill::Any if i < edges.len() as u64 || bits.is_multiple_of(7) => edge,
                Fill::Any => tame(meta.dtype, bits),
                Fill::Divisor | Fill::Denominator => {
                    let x = if i < edges.len() as u64 || bits.is_multiple_of(7) {
                        edge
                    } else {
                        tame(meta.dtype, bits)
                    };
                    let refused = match x.to_i64() {
                        0 => true,
                        -1 => fill == Fill::Denominator,
                        _ => false,
                    };
                    if meta.dtype.is_int() && refused { Scalar::from_i64(meta.dtype, 3) } else { x }
                }
            };
            scalar.to_bytes()
        })
        .collect();
    Value::from_bytes(meta, &bytes)
}

/// The edges of a dtype as a row.
pub fn edge_row(dtype: DType, fill: Fill) -> Value {
    value(Meta { dtype, shape: Shape::from([edges(dtype).len()]) }, fill, 5)
}

fn edges(dtype: DType) -> Vec<Scalar> {
    let bits = |bits: u64| Scalar::from_bits(dtype, bits);
    let top = 8 * dtype.size() as u32 - 1;
    match dtype.kind() {
        Kind::Float | Kind::Quantised => {
            let fraction = match dtype {
                DType::F64 => 52,
                DType::F16 => 10,
                DType::BF16 => 7,
                _ => 23,
            };
            let infinity = Scalar::from_f64(dtype, f64::INFINITY).bits();
            let numbers = [
                0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 20.5, 1e-3, -1e-3, 88.8, -104.0, 1e4,
                -1e4,
            ];
            let shapes = [
                1 << top,
                infinity,
                infinity | 1 << top,
                infinity | 1 << (fraction - 1),
                infinity | 1 << top | 3 << (fraction - 2),
                1,
                1 | 1 << top,
                (1 << fraction) - 1,
                1 << fraction,
                infinity - 1,
                (infinity - 1) | 1 << top,
            ];
            numbers
                .into_iter()
                .map(|x| Scalar::from_f64(dtype, x))
                .chain(shapes.into_iter().map(bits))
                .collect()
        }
        Kind::Signed => {
            let most = (1u64 << top) - 1;
            let numbers = [0, 1, -1, 2, -2, 3, -3, 7, 31, 100, -100];
            let ends = [most, most - 1, most + 1, most + 2];
            numbers
                .into_iter()
                .map(|x| Scalar::from_i64(dtype, x))
                .chain(ends.into_iter().map(bits))
                .collect()
        }
        Kind::Unsigned => {
            [0, 1, 2, 3, 7, 31, 100, u64::MAX, u64::MAX - 1, 1 << top, (1 << top) - 1].map(bits).to_vec()
        }
        Kind::Bool => [0, 1, 1, 0].map(bits).to_vec(),
    }
}

fn tame(dtype: DType, word: u64) -> Scalar {
    match dtype.kind() {
        Kind::Float | Kind::Quantised => Scalar::from_f64(dtype, philox::uniform_wide(word) * 4.0 - 2.0),
        Kind::Signed => Scalar::from_i64(dtype, (word % 23) as i64 - 11),
        Kind::Unsigned => Scalar::from_bits(dtype, word % 23),
        Kind::Bool => Scalar::from_bits(dtype, word >> 9 & 1),
    }
}
