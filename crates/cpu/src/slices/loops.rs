//! The loops themselves, one for each row of the tables. All is inlined into the callers, of which there is one for each
//! instruction set where that pays.
#![forbid(unsafe_code)]
// Indexed loops over slices cut to one length: `for_each` over a zip is several more functions to compile for each of
// some six hundred loops.
#![allow(clippy::needless_range_loop)]

use kiln_ir::math::row::{self, One, Two, WithOne, WithTwo};
use kiln_ir::math::{Bits, Compare, Float, Num, single};
use kiln_ir::{Binary, Unary};

/// Operands, and where results go.
struct Loop<X, Y>(X, Y);

impl<T: Copy, R> WithOne<T, R> for Loop<&[T], &mut [R]> {
    type Result = ();
    #[inline(always)]
    fn with<V: One<T, R>>(self) {
        let Loop(x, y) = self;
        let x = &x[..y.len()];
        for i in 0..y.len() {
            y[i] = V::value(x[i]);
        }
    }
}

impl<T: Copy, R> WithTwo<T, R> for Loop<(&[T], &[T]), &mut [R]> {
    type Result = ();
    #[inline(always)]
    fn with<V: Two<T, R>>(self) {
        let Loop((a, b), y) = self;
        let (a, b) = (&a[..y.len()], &b[..y.len()]);
        for i in 0..y.len() {
            y[i] = V::value(a[i], b[i]);
        }
    }
}

/// Operands, and the bytes where answers go.
struct Ask<'a, X>(X, &'a mut [u8]);

impl<T: Copy> WithOne<T, bool> for Ask<'_, &[T]> {
    type Result = ();
    #[inline(always)]
    fn with<V: One<T, bool>>(self) {
        let Ask(x, y) = self;
        let x = &x[..y.len()];
        for i in 0..y.len() {
            y[i] = V::value(x[i]) as u8;
        }
    }
}

impl<T: Copy> WithTwo<T, bool> for Ask<'_, (&[T], &[T])> {
    type Result = ();
    #[inline(always)]
    fn with<V: Two<T, bool>>(self) {
        let Ask((a, b), y) = self;
        let (a, b) = (&a[..y.len()], &b[..y.len()]);
        for i in 0..y.len() {
            y[i] = V::value(a[i], b[i]) as u8;
        }
    }
}

#[inline(always)]
pub fn unary_float<T: Float>(op: Unary, x: &[T], y: &mut [T]) {
    row::unary_float(op, Loop(x, y)).expect("an operation on floats");
}

#[inline(always)]
pub fn unary_num<T: Num>(op: Unary, x: &[T], y: &mut [T]) {
    row::unary_num(op, Loop(x, y)).expect("an operation on numbers");
}

#[inline(always)]
pub fn unary_test<T: Num<Truth = bool>>(op: Unary, x: &[T], y: &mut [u8]) {
    row::unary_test(op, Ask(x, y)).expect("a test");
}

#[inline(always)]
pub fn unary_bits<T: Bits>(op: Unary, x: &[T], y: &mut [T]) {
    row::unary_bits(op, Loop(x, y)).expect("an operation on bits");
}

#[inline(always)]
pub fn binary_float<T: Float>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
    row::binary_float(op, Loop((a, b), y)).expect("an operation on floats");
}

#[inline(always)]
pub fn binary_num<T: Num>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
    row::binary_num(op, Loop((a, b), y)).expect("an operation on numbers");
}

#[inline(always)]
pub fn binary_compare<T: Compare<Truth = bool>>(op: Binary, a: &[T], b: &[T], y: &mut [u8]) {
    row::binary_compare(op, Ask((a, b), y)).expect("a comparison");
}

#[inline(always)]
pub fn binary_bits<T: Bits>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
    row::binary_bits(op, Loop((a, b), y)).expect("an operation on bits");
}

/// [`unary_float`] for f32: sine and cosine are loops without a branch where every operand is near enough to 0.
#[inline(always)]
pub fn unary_single(op: Unary, x: &[f32], y: &mut [f32]) {
    match op {
        Unary::Sin if near(x) => Loop(x, y).with::<Sin>(),
        Unary::Cos if near(x) => Loop(x, y).with::<Cos>(),
        other => unary_float(other, x, y),
    }
}

struct Sin;
impl One<f32, f32> for Sin {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        single::sin_near(x)
    }
}

struct Cos;
impl One<f32, f32> for Cos {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        single::cos_near(x)
    }
}

#[inline(always)]
fn near(x: &[f32]) -> bool {
    !x.iter().fold(false, |far, x| far | (x.abs() >= single::NEAR))
}

#[inline(always)]
pub fn select<T: Copy>(cond: &[u8], a: &[T], b: &[T], y: &mut [T]) {
    let n = y.len();
    let (cond, a, b) = (&cond[..n], &a[..n], &b[..n]);
    for i in 0..n {
        y[i] = if cond[i] != 0 { a[i] } else { b[i] };
    }
}
