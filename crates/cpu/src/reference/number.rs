//! The types that arithmetic on each dtype is done in.

use super::array::Element;
use crate::memory;
use half::{bf16, f16};
use kiln_ir::math::{Float, Num};

/// An element with arithmetic: f16 and bf16 are computed in f32 and rounded to nearest even once per node, every other
/// number in its own type. This is also the type that reductions, products and windows accumulate in.
pub trait Number: Element {
    /// The type it is computed in.
    type Wide: Num;
    /// The value as the wider type.
    fn widen(self) -> Self::Wide;
    /// The wider value rounded.
    fn narrow(wide: Self::Wide) -> Self;
    /// `a * b + acc`, with one rounding for floats.
    fn fma(a: Self::Wide, b: Self::Wide, acc: Self::Wide) -> Self::Wide;
}

macro_rules! own {
    ($($t:ident)*, |$a:ident, $b:ident, $acc:ident| $fma:expr) => {$(
        impl Number for $t {
            type Wide = $t;
            #[inline]
            fn widen(self) -> $t { self }
            #[inline]
            fn narrow(wide: $t) -> $t { wide }
            #[inline]
            fn fma($a: $t, $b: $t, $acc: $t) -> $t { $fma }
        }
    )*};
}
own!(f64 f32, |a, b, acc| Float::fma(a, b, acc));
own!(i64 i32 i16 i8 u64 u32 u16 u8, |a, b, acc| Num::add(Num::mul(a, b), acc));

macro_rules! halves {
    ($($t:ident)*) => {$(
        impl Number for $t {
            type Wide = f32;
            #[inline]
            fn widen(self) -> f32 { self.to_f32() }
            #[inline]
            fn narrow(wide: f32) -> $t { $t::from_f32(wide) }
            #[inline]
            fn fma(a: f32, b: f32, acc: f32) -> f32 { a.mul_add(b, acc) }
        }
    )*};
}
halves!(f16 bf16);

/// All of `x` as the wider type.
pub fn widen<T: Number>(x: &[T]) -> Vec<T::Wide> {
    memory::collect(x.len(), x.iter().map(|v| v.widen()))
}

/// All of `x` rounded.
pub fn narrow<T: Number>(x: &[T::Wide]) -> Vec<T> {
    memory::collect(x.len(), x.iter().map(|&v| T::narrow(v)))
}
