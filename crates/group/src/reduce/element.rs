//! The elements of buffers, and how two of them become one.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kiln_ir::math::Num;

/// How two numbers become one.
pub trait Rule {
    /// Whether the result is divided at the end.
    const MEAN: bool = false;
    fn of<T: Num>(a: T, b: T) -> T;
}
pub struct Add;
pub struct Mean;
pub struct Mul;
pub struct Max;
pub struct Min;
impl Rule for Add {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.add(b)
    }
}
impl Rule for Mean {
    const MEAN: bool = true;
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.add(b)
    }
}
impl Rule for Mul {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.mul(b)
    }
}
impl Rule for Max {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.maximum(b)
    }
}
impl Rule for Min {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.minimum(b)
    }
}

/// Elements at a time.
pub const LANES: usize = 32;

/// An element of a buffer.
pub trait Element: Copy {
    fn blank() -> Self;
    fn lanes<R: Rule>(a: &[Self; LANES], b: &[Self; LANES]) -> [Self; LANES];
    fn over(self, k: usize) -> Self;
}

macro_rules! floats {
    ($($t:ident)*) => {$(
        impl Element for $t {
            #[inline(always)]
            fn blank() -> $t { 0.0 }
            #[inline(always)]
            fn lanes<R: Rule>(a: &[$t; LANES], b: &[$t; LANES]) -> [$t; LANES] {
                std::array::from_fn(|i| {
                    let y = R::of(a[i], b[i]);
                    if y.is_nan() { $t::NAN } else { y }
                })
            }
            #[inline(always)]
            fn over(self, k: usize) -> $t {
                let y = self / k as $t;
                if y.is_nan() { $t::NAN } else { y }
            }
        }
    )*};
}
floats! { f32 f64 }

macro_rules! ints {
    ($($t:ident)*) => {$(
        impl Element for $t {
            #[inline(always)]
            fn blank() -> $t { 0 }
            #[inline(always)]
            fn lanes<R: Rule>(a: &[$t; LANES], b: &[$t; LANES]) -> [$t; LANES] {
                std::array::from_fn(|i| R::of(a[i], b[i]))
            }
            fn over(self, _: usize) -> $t { unreachable!("integers have no mean") }
        }
    )*};
}
ints! { i64 i32 i16 i8 u64 u32 u16 u8 }

impl Element for bf16 {
    #[inline(always)]
    fn blank() -> bf16 {
        bf16::ZERO
    }
    #[inline(always)]
    fn lanes<R: Rule>(a: &[bf16; LANES], b: &[bf16; LANES]) -> [bf16; LANES] {
        std::array::from_fn(|i| narrow(R::of(widen(a[i]), widen(b[i]))))
    }
    #[inline(always)]
    fn over(self, k: usize) -> bf16 {
        narrow(self.to_f32() / k as f32)
    }
}

#[inline(always)]
fn widen(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// To the nearest, ties to even; without a branch, so that it becomes vectors.
#[inline(always)]
pub(super) fn narrow(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded })
}

impl Element for f16 {
    #[inline(always)]
    fn blank() -> f16 {
        f16::ZERO
    }
    #[inline(always)]
    fn lanes<R: Rule>(a: &[f16; LANES], b: &[f16; LANES]) -> [f16; LANES] {
        let (mut x, mut y, mut out) = ([0f32; LANES], [0f32; LANES], [f16::ZERO; LANES]);
        a.convert_to_f32_slice(&mut x);
        b.convert_to_f32_slice(&mut y);
        let z: [f32; LANES] = <f32 as Element>::lanes::<R>(&x, &y);
        out.convert_from_f32_slice(&z);
        out.map(|h| if h.is_nan() { f16::NAN } else { h })
    }
    #[inline(always)]
    fn over(self, k: usize) -> f16 {
        let y = f16::from_f32(self.to_f32() / k as f32);
        if y.is_nan() { f16::NAN } else { y }
    }
}
