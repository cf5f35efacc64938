//! Conversions between dtypes.
//!
//! Floats truncate to integers and saturate, NaN gives 0; integers wrap to narrower ones; everything but 0 is true.
//! f16 and bf16 are reached through f32, from f64 and integers too, as PyTorch does. The loops are [`crate::convert`]'s.

use super::array::{Array, with_floats, with_plain};
use super::elementwise::{filled, tested};
use super::number::Number;
use crate::convert::{Kind, Plain, convert, truth};
use crate::memory;
use kiln_ir::math::Float;
use kiln_ir::{DType, quant};

/// `x` converted.
pub fn cast(x: &Array, to: DType) -> Array {
    match x {
        Array::Q8(blocks) => unpacked(DType::Q8, blocks, to),
        Array::Q4(blocks) => unpacked(DType::Q4, blocks, to),
        x if to.is_quantised() => with_floats!(x, x => packed(to, &floats(x))),
        x => with_plain!(x, x => plain(x, to)),
    }
}

/// The elements of quantised blocks; any other array's elements are its own.
pub fn dequantized<T: Number<Wide: Float>>(x: &Array) -> Vec<T::Wide> {
    match x {
        Array::Q8(blocks) => wide(&unpack(DType::Q8, blocks)),
        Array::Q4(blocks) => wide(&unpack(DType::Q4, blocks)),
        x => super::number::widen(x.typed::<T>()),
    }
}

fn wide<W: Float>(x: &[f32]) -> Vec<W> {
    memory::collect(x.len(), x.iter().map(|&v| Float::of(v as f64)))
}

fn packed(to: DType, x: &[f32]) -> Array {
    let mut blocks = memory::filled(to.bytes(x.len()), 0);
    quant::quantize(to, x, &mut blocks);
    Array::from_bytes(to, &blocks)
}

fn unpacked(from: DType, blocks: &[u8], to: DType) -> Array {
    of_kind(&unpack(from, blocks), to)
}

fn unpack(from: DType, blocks: &[u8]) -> Vec<f32> {
    let mut out = memory::filled(blocks.len() / from.size() * quant::BLOCK, 0.0);
    quant::dequantize(from, blocks, &mut out);
    out
}

fn floats<T: Plain>(x: &[T]) -> Vec<f32> {
    let mut out = memory::filled(x.len(), 0.0);
    convert(T::kind(x, &mut memory::filled(x.len(), T::Kind::default())), &mut out);
    out
}

fn plain<T: Plain>(x: &[T], to: DType) -> Array {
    of_kind(T::kind(x, &mut memory::filled(x.len(), T::Kind::default())), to)
}

fn of_kind<K: Kind>(x: &[K], to: DType) -> Array {
    let n = x.len();
    match to {
        DType::F64 => filled::<f64>(n, &|y| convert(x, y)),
        DType::F32 => filled::<f32>(n, &|y| convert(x, y)),
        DType::F16 => filled::<half::f16>(n, &|y| convert(x, y)),
        DType::BF16 => filled::<half::bf16>(n, &|y| convert(x, y)),
        DType::I64 => filled::<i64>(n, &|y| convert(x, y)),
        DType::I32 => filled::<i32>(n, &|y| convert(x, y)),
        DType::I16 => filled::<i16>(n, &|y| convert(x, y)),
        DType::I8 => filled::<i8>(n, &|y| convert(x, y)),
        DType::U64 => filled::<u64>(n, &|y| convert(x, y)),
        DType::U32 => filled::<u32>(n, &|y| convert(x, y)),
        DType::U16 => filled::<u16>(n, &|y| convert(x, y)),
        DType::U8 => filled::<u8>(n, &|y| convert(x, y)),
        DType::Bool => tested(n, &|y| truth(x, y)),
        DType::Q8 | DType::Q4 => unreachable!("packing takes floats"),
    }
}
