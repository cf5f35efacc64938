//! Values made from nothing: constants, counts and random streams.

use super::array::{Array, Value};
use super::cast::cast;
use super::movement::owned;
use super::view::{View, around};
use crate::memory::collect;
use half::{bf16, f16};
use kiln_ir::{DType, Meta, Move, RandomKind, Scalar, Shape, philox};

/// One value everywhere.
pub fn full(shape: &Shape, value: Scalar) -> Array {
    let one = Value::from_bytes(Meta::new(value.dtype(), []), &value.to_bytes());
    super::movement::movement(&Move::Expand(*shape), &[&one])
}

/// Each element's index along an axis; wrapped or rounded where the dtype cannot hold it.
pub fn iota(shape: &Shape, dtype: DType, axis: usize) -> Array {
    let (_, length, _) = around(shape, axis);
    let counts: Vec<i64> = collect(length, 0..length as i64);
    let line = Shape::collect((0..shape.len()).map(|i| if i == axis { length } else { 1 }));
    cast(&owned(View::whole(&line).expanded(shape).read(&counts)).into(), dtype)
}

/// Element `i` is a function of (`key`, `offset`, `i`) alone.
pub fn random(kind: RandomKind, n: usize, dtype: DType, key: u64, offset: u64) -> Array {
    let elements = 0..n as u64;
    let words = elements.clone().map(|i| philox::word(key, offset, i));
    let wides = elements.clone().map(|i| philox::wide(key, offset, i));
    match (kind, dtype) {
        (RandomKind::Bits, dtype) if dtype.size() == 8 => cast(&collect(n, wides).into(), dtype),
        (RandomKind::Bits, dtype) => cast(&collect(n, words).into(), dtype),
        (RandomKind::Uniform, DType::F64) => collect(n, wides.map(philox::uniform_wide)).into(),
        (RandomKind::Uniform, DType::F16) => collect(n, words.map(uniform_f16)).into(),
        (RandomKind::Uniform, DType::BF16) => collect(n, words.map(uniform_bf16)).into(),
        (RandomKind::Uniform, _) => collect(n, words.map(philox::uniform)).into(),
        (RandomKind::Normal, dtype) => {
            cast(&collect(n, elements.map(|i| philox::normal(key, offset, i))).into(), dtype)
        }
    }
}

/// As many high bits as the significand holds, so that the value is exact and never rounds up to 1.
fn uniform_f16(word: u32) -> f16 {
    f16::from_f32((word >> 21) as f32 * (1.0 / 2048.0))
}

fn uniform_bf16(word: u32) -> bf16 {
    bf16::from_f32((word >> 24) as f32 * (1.0 / 256.0))
}
