//! One loop over slices for each elementwise operation and type, from the tables' value column, for the interpreter and
//! the fast device alike. Results of tests, and conditions, are bytes of 0 or 1.
//!
//! f32, and i32's arithmetic, are compiled once for each instruction set and give the same bits on all; f16 and bf16
//! are widened to f32 a piece at a time, computed there and rounded; other types are compiled once.

mod loops;
#[cfg(test)]
mod tests;

use crate::reference::Number;
use crate::versions::versions;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kiln_ir::math::{Bits, DivideError, Num};
use kiln_ir::{Binary, Unary};

/// Floats to floats.
pub fn unary_float<T: FloatLoops>(op: Unary, x: &[T], y: &mut [T]) {
    T::unary_float(op, x, y);
}

/// Floats to floats.
pub fn binary_float<T: FloatLoops>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
    T::binary_float(op, a, b, y);
}

/// Numbers to numbers.
pub fn unary_num<T: NumLoops>(op: Unary, x: &[T], y: &mut [T]) {
    T::unary_num(op, x, y);
}

/// Numbers to bool.
pub fn unary_test<T: NumLoops>(op: Unary, x: &[T], y: &mut [u8]) {
    T::unary_test(op, x, y);
}

/// Numbers to numbers.
pub fn binary_num<T: NumLoops>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
    T::binary_num(op, a, b, y);
}

/// Any two elements to bool.
pub fn binary_compare<T: CompareLoops>(op: Binary, a: &[T], b: &[T], y: &mut [u8]) {
    T::binary_compare(op, a, b, y);
}

/// Integers to integers.
pub fn unary_bits<T: Bits>(op: Unary, x: &[T], y: &mut [T]) {
    loops::unary_bits(op, x, y);
}

/// Integers to integers.
pub fn binary_bits<T: Bits>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
    loops::binary_bits(op, a, b, y);
}

/// Where `cond` is not 0 `a`, else `b`.
pub fn select<T: Copy>(cond: &[u8], a: &[T], b: &[T], y: &mut [T]) {
    select_versions::<T>(cond, a, b, y);
}

/// Each bool flipped.
pub fn flip(x: &[u8], y: &mut [u8]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = x ^ 1);
}

/// Refuses integer quotients that have no value. Remainders by -1 are all 0, so only a quotient overflows.
pub fn check_divisors<T: Number>(op: Binary, a: &[T], b: &[T]) -> Result<(), DivideError> {
    let quotient = op == Binary::FloorDivide;
    for (a, b) in a.iter().zip(b) {
        match a.widen().divides(b.widen()) {
            Err(DivideError::Overflow) if !quotient => {}
            other => other?,
        }
    }
    Ok(())
}

/// Types with the loops of [`unary_float`] and [`binary_float`].
#[allow(missing_docs)]
pub trait FloatLoops: Sized {
    fn unary_float(op: Unary, x: &[Self], y: &mut [Self]);
    fn binary_float(op: Binary, a: &[Self], b: &[Self], y: &mut [Self]);
}

/// Types with the loops of [`unary_num`], [`unary_test`] and [`binary_num`].
#[allow(missing_docs)]
pub trait NumLoops: Sized {
    fn unary_num(op: Unary, x: &[Self], y: &mut [Self]);
    fn unary_test(op: Unary, x: &[Self], y: &mut [u8]);
    fn binary_num(op: Binary, a: &[Self], b: &[Self], y: &mut [Self]);
}

/// Types with the loops of [`binary_compare`].
#[allow(missing_docs)]
pub trait CompareLoops: Sized {
    fn binary_compare(op: Binary, a: &[Self], b: &[Self], y: &mut [u8]);
}

versions! {
    fn f32_unary_float(op: Unary, x: &[f32], y: &mut [f32]) = loops::unary_single;
    fn f32_binary_float(op: Binary, a: &[f32], b: &[f32], y: &mut [f32]) = loops::binary_float;
    fn f32_unary_num(op: Unary, x: &[f32], y: &mut [f32]) = loops::unary_num;
    fn f32_unary_test(op: Unary, x: &[f32], y: &mut [u8]) = loops::unary_test;
    fn f32_binary_num(op: Binary, a: &[f32], b: &[f32], y: &mut [f32]) = loops::binary_num;
    fn f32_binary_compare(op: Binary, a: &[f32], b: &[f32], y: &mut [u8]) = loops::binary_compare;
    fn i32_binary_num(op: Binary, a: &[i32], b: &[i32], y: &mut [i32]) = loops::binary_num;
    fn select_versions<T: Copy>(cond: &[u8], a: &[T], b: &[T], y: &mut [T]) = loops::select;
}

/// Implements a trait by one function for each of its functions, which has the arguments of the first.
macro_rules! by {
    ($($trait:ident for $($t:ident)*: $functions:tt;)*) => { $($(by!(@one $trait $t $functions);)*)* };
    (@one FloatLoops $t:ident [$unary:path, $binary:path]) => {
        impl FloatLoops for $t {
            fn unary_float(op: Unary, x: &[$t], y: &mut [$t]) { $unary(op, x, y) }
            fn binary_float(op: Binary, a: &[$t], b: &[$t], y: &mut [$t]) { $binary(op, a, b, y) }
        }
    };
    (@one NumLoops $t:ident [$unary:path, $test:path, $binary:path]) => {
        impl NumLoops for $t {
            fn unary_num(op: Unary, x: &[$t], y: &mut [$t]) { $unary(op, x, y) }
            fn unary_test(op: Unary, x: &[$t], y: &mut [u8]) { $test(op, x, y) }
            fn binary_num(op: Binary, a: &[$t], b: &[$t], y: &mut [$t]) { $binary(op, a, b, y) }
        }
    };
    (@one CompareLoops $t:ident [$compare:path]) => {
        impl CompareLoops for $t {
            fn binary_compare(op: Binary, a: &[$t], b: &[$t], y: &mut [u8]) { $compare(op, a, b, y) }
        }
    };
}
by! {
    FloatLoops for f32: [f32_unary_float, f32_binary_float];
    FloatLoops for f64: [loops::unary_float, loops::binary_float];
    NumLoops for f32: [f32_unary_num, f32_unary_test, f32_binary_num];
    NumLoops for i32: [loops::unary_num, loops::unary_test, i32_binary_num];
    NumLoops for f64 i64 i16 i8 u64 u32 u16 u8: [loops::unary_num, loops::unary_test, loops::binary_num];
    CompareLoops for f32: [f32_binary_compare];
    CompareLoops for f64 i64 i32 i16 i8 u64 u32 u16 u8 bool: [loops::binary_compare];
}

/// Elements that are widened at a time.
const PIECE: usize = 512;

macro_rules! halves {
    ($($t:ident $widen:path, $narrow:path;)*) => {$(
        impl FloatLoops for $t {
            fn unary_float(op: Unary, x: &[$t], y: &mut [$t]) {
                one(x, y, $widen, $narrow, |x, y: &mut [f32]| f32_unary_float(op, x, y));
            }
            fn binary_float(op: Binary, a: &[$t], b: &[$t], y: &mut [$t]) {
                two(a, b, y, $widen, $narrow, |a, b, y: &mut [f32]| f32_binary_float(op, a, b, y));
            }
        }
        impl NumLoops for $t {
            fn unary_num(op: Unary, x: &[$t], y: &mut [$t]) {
                one(x, y, $widen, $narrow, |x, y: &mut [f32]| f32_unary_num(op, x, y));
            }
            fn unary_test(op: Unary, x: &[$t], y: &mut [u8]) {
                one(x, y, $widen, keep, |x, y| f32_unary_test(op, x, y));
            }
            fn binary_num(op: Binary, a: &[$t], b: &[$t], y: &mut [$t]) {
                two(a, b, y, $widen, $narrow, |a, b, y: &mut [f32]| f32_binary_num(op, a, b, y));
            }
        }
        impl CompareLoops for $t {
            fn binary_compare(op: Binary, a: &[$t], b: &[$t], y: &mut [u8]) {
                two(a, b, y, $widen, keep, |a, b, y| f32_binary_compare(op, a, b, y));
            }
        }
    )*};
}
halves! { f16 widen_f16, narrow_f16; bf16 widen_bf16, narrow_bf16; }

/// Runs `f` over pieces of `x` widened to f32; its results, of type R, are narrowed to D.
fn one<T, R: Copy + Default, D>(
    x: &[T],
    y: &mut [D],
    widen: fn(&[T], &mut [f32]),
    narrow: fn(&[R], &mut [D]),
    f: impl Fn(&[f32], &mut [R]),
) {
    let (mut wide, mut result) = ([0f32; PIECE], [R::default(); PIECE]);
    for (x, y) in x.chunks(PIECE).zip(y.chunks_mut(PIECE)) {
        let (wide, result) = (&mut wide[..y.len()], &mut result[..y.len()]);
        widen(x, wide);
        f(wide, result);
        narrow(result, y);
    }
}

/// As [`one`], for two operands.
fn two<T, R: Copy + Default, D>(
    a: &[T],
    b: &[T],
    y: &mut [D],
    widen: fn(&[T], &mut [f32]),
    narrow: fn(&[R], &mut [D]),
    f: impl Fn(&[f32], &[f32], &mut [R]),
) {
    let (mut first, mut second, mut result) = ([0f32; PIECE], [0f32; PIECE], [R::default(); PIECE]);
    for ((a, b), y) in a.chunks(PIECE).zip(b.chunks(PIECE)).zip(y.chunks_mut(PIECE)) {
        let n = y.len();
        widen(a, &mut first[..n]);
        widen(b, &mut second[..n]);
        f(&first[..n], &second[..n], &mut result[..n]);
        narrow(&result[..n], y);
    }
}

fn keep(x: &[u8], y: &mut [u8]) {
    y.copy_from_slice(x);
}

fn widen_f16(x: &[f16], y: &mut [f32]) {
    x.convert_to_f32_slice(y);
}

fn narrow_f16(x: &[f32], y: &mut [f16]) {
    y.convert_from_f32_slice(x);
}

/// Signalling NaNs become quiet, as arithmetic would make them.
fn widen_bf16(x: &[bf16], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        let bits = x.to_bits();
        let quiet = if bits & 0x7fff > 0x7f80 { 0x40 } else { 0 };
        *y = f32::from_bits(((bits | quiet) as u32) << 16);
    }
}

/// To nearest, halves to even; a NaN stays one.
fn narrow_bf16(x: &[f32], y: &mut [bf16]) {
    for (y, x) in y.iter_mut().zip(x) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let bits = if x.is_nan() { (bits >> 16) | 0x40 } else { rounded };
        *y = bf16::from_bits(bits as u16);
    }
}
