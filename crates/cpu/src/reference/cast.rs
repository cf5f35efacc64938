//! Conversions between dtypes.
//!
//! Floats truncate to integers and saturate, NaN gives 0; integers wrap to narrower ones; everything but 0 is true.
//! f16 and bf16 are reached through f32, from f64 and integers too, as PyTorch does.

use super::array::{Array, Element, with_floats, with_plain};
use super::number::Number;
use half::{bf16, f16};
use kiln_ir::math::Float;
use kiln_ir::{DType, quant};

/// `x` converted.
pub fn cast(x: &Array, to: DType) -> Array {
    match x {
        Array::Q8(blocks) => unpacked(DType::Q8, blocks, to),
        Array::Q4(blocks) => unpacked(DType::Q4, blocks, to),
        x if to.is_quantised() => with_floats!(x, x => packed(to, &each(x, Convert::f32))),
        x => with_plain!(x, x => plain(x, to)),
    }
}

/// The elements of quantised blocks; any other array's elements are its own.
pub fn dequantized<T: Number<Wide: Float>>(x: &Array) -> Vec<T::Wide> {
    match x {
        Array::Q8(blocks) => unpack(DType::Q8, blocks).into_iter().map(|v| Float::of(v as f64)).collect(),
        Array::Q4(blocks) => unpack(DType::Q4, blocks).into_iter().map(|v| Float::of(v as f64)).collect(),
        x => super::number::widen(x.typed::<T>()),
    }
}

fn packed(to: DType, x: &[f32]) -> Array {
    let mut blocks = vec![0; to.bytes(x.len())];
    quant::quantize(to, x, &mut blocks);
    Array::from_bytes(to, &blocks)
}

fn unpacked(from: DType, blocks: &[u8], to: DType) -> Array {
    plain(&unpack(from, blocks), to)
}

fn unpack(from: DType, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / from.size() * quant::BLOCK];
    quant::dequantize(from, blocks, &mut out);
    out
}

fn plain<T: Convert>(x: &[T], to: DType) -> Array {
    match to {
        DType::F64 => each(x, T::f64).into(),
        DType::F32 => each(x, T::f32).into(),
        DType::F16 => each(x, |v| f16::from_f32(v.f32())).into(),
        DType::BF16 => each(x, |v| bf16::from_f32(v.f32())).into(),
        DType::I64 => each(x, T::i64).into(),
        DType::I32 => each(x, T::i32).into(),
        DType::I16 => each(x, T::i16).into(),
        DType::I8 => each(x, T::i8).into(),
        DType::U64 => each(x, T::u64).into(),
        DType::U32 => each(x, T::u32).into(),
        DType::U16 => each(x, T::u16).into(),
        DType::U8 => each(x, T::u8).into(),
        DType::Bool => each(x, T::bool).into(),
        DType::Q8 | DType::Q4 => unreachable!("packing takes floats"),
    }
}

fn each<T: Copy, U>(x: &[T], f: impl Fn(T) -> U) -> Vec<U> {
    x.iter().map(|&v| f(v)).collect()
}

/// An element as every other primitive type.
trait Convert: Element {
    fn f64(self) -> f64;
    fn f32(self) -> f32;
    fn i64(self) -> i64;
    fn i32(self) -> i32;
    fn i16(self) -> i16;
    fn i8(self) -> i8;
    fn u64(self) -> u64;
    fn u32(self) -> u32;
    fn u16(self) -> u16;
    fn u8(self) -> u8;
    fn bool(self) -> bool;
}

macro_rules! converts {
    ($($t:ty, |$x:ident| $as:expr;)*) => {$(
        impl Convert for $t {
            fn f64(self) -> f64 { let $x = self; $as as f64 }
            fn f32(self) -> f32 { let $x = self; $as as f32 }
            fn i64(self) -> i64 { let $x = self; $as as i64 }
            fn i32(self) -> i32 { let $x = self; $as as i32 }
            fn i16(self) -> i16 { let $x = self; $as as i16 }
            fn i8(self) -> i8 { let $x = self; $as as i8 }
            fn u64(self) -> u64 { let $x = self; $as as u64 }
            fn u32(self) -> u32 { let $x = self; $as as u32 }
            fn u16(self) -> u16 { let $x = self; $as as u16 }
            fn u8(self) -> u8 { let $x = self; $as as u8 }
            fn bool(self) -> bool { self != <$t>::default() }
        }
    )*};
}
converts! {
    f64, |x| x; f32, |x| x; f16, |x| x.to_f32(); bf16, |x| x.to_f32();
    i64, |x| x; i32, |x| x; i16, |x| x; i8, |x| x;
    u64, |x| x; u32, |x| x; u16, |x| x; u8, |x| x;
    bool, |x| (x as u8);
}
