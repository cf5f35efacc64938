//! One loop over slices for each elementwise operation and type, from the tables' value column: the tables are expanded
//! here and nowhere else, for the interpreter and the fast device alike. f16 and bf16 are computed in f32. Results of
//! tests, and conditions, are bytes of 0 or 1.
#![forbid(unsafe_code)]
// Indexed loops over slices cut to one length: `for_each` over a zip is several more functions to compile for each of
// some six hundred loops.
#![allow(clippy::needless_range_loop)]

use crate::reference::Number;
use kiln_ir::math::{Bits, DivideError, Float, Num};
use kiln_ir::{Binary, Unary};

macro_rules! in_domain {
    (Float Float $body:expr) => {
        $body
    };
    (Num Num $body:expr) => {
        $body
    };
    (Bits Bits $body:expr) => {
        $body
    };
    (Test Test $body:expr) => {
        $body
    };
    (Compare Compare $body:expr) => {
        $body
    };
    ($want:ident $domain:ident $body:expr) => {
        unreachable!(concat!("a ", stringify!($domain), " operation among ", stringify!($want)))
    };
}

macro_rules! unary_loops {
    ($($variant:ident $name:ident $domain:ident $value:expr, $code:literal, $rule:expr, $text:literal;)*) => {
        /// Floats to floats.
        pub fn unary_float<T: Number<Wide: Float>>(op: Unary, x: &[T], y: &mut [T]) {
            match op { $(Unary::$variant => in_domain!(Float $domain map(x, y, $value)),)* }
        }
        /// Numbers to numbers.
        pub fn unary_num<T: Number>(op: Unary, x: &[T], y: &mut [T]) {
            match op { $(Unary::$variant => in_domain!(Num $domain map(x, y, $value)),)* }
        }
        /// Numbers to bool.
        pub fn unary_test<T: Number>(op: Unary, x: &[T], y: &mut [u8]) {
            match op { $(Unary::$variant => in_domain!(Test $domain test(x, y, $value)),)* }
        }
        /// Integers to integers.
        pub fn unary_bits<T: Bits>(op: Unary, x: &[T], y: &mut [T]) {
            match op { $(Unary::$variant => in_domain!(Bits $domain plain(x, y, $value)),)* }
        }
    };
}
kiln_ir::unary_table!(unary_loops);

macro_rules! binary_loops {
    ($($variant:ident $name:ident $domain:ident $value:expr, $code:literal, $rule:expr, $text:literal;)*) => {
        /// Floats to floats.
        pub fn binary_float<T: Number<Wide: Float>>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
            match op { $(Binary::$variant => in_domain!(Float $domain zip(a, b, y, $value)),)* }
        }
        /// Numbers to numbers.
        pub fn binary_num<T: Number>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
            match op { $(Binary::$variant => in_domain!(Num $domain zip(a, b, y, $value)),)* }
        }
        /// Any two elements to bool.
        pub fn binary_compare<T: Copy + PartialOrd>(op: Binary, a: &[T], b: &[T], y: &mut [u8]) {
            match op { $(Binary::$variant => in_domain!(Compare $domain compare(a, b, y, $value)),)* }
        }
        /// Integers to integers.
        pub fn binary_bits<T: Bits>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
            match op { $(Binary::$variant => in_domain!(Bits $domain zip_plain(a, b, y, $value)),)* }
        }
    };
}
kiln_ir::binary_table!(binary_loops);

/// Where `cond` is not 0 `a`, else `b`.
pub fn select<T: Copy>(cond: &[u8], a: &[T], b: &[T], y: &mut [T]) {
    let n = y.len();
    let (cond, a, b) = (&cond[..n], &a[..n], &b[..n]);
    for i in 0..n {
        y[i] = if cond[i] != 0 { a[i] } else { b[i] };
    }
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

fn map<T: Number>(x: &[T], y: &mut [T], f: impl Fn(T::Wide) -> T::Wide) {
    let x = &x[..y.len()];
    for i in 0..y.len() {
        y[i] = T::narrow(f(x[i].widen()));
    }
}

fn test<T: Number>(x: &[T], y: &mut [u8], f: impl Fn(T::Wide) -> bool) {
    let x = &x[..y.len()];
    for i in 0..y.len() {
        y[i] = f(x[i].widen()) as u8;
    }
}

fn plain<T: Copy>(x: &[T], y: &mut [T], f: impl Fn(T) -> T) {
    let x = &x[..y.len()];
    for i in 0..y.len() {
        y[i] = f(x[i]);
    }
}

fn zip<T: Number>(a: &[T], b: &[T], y: &mut [T], f: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    let (a, b) = (&a[..y.len()], &b[..y.len()]);
    for i in 0..y.len() {
        y[i] = T::narrow(f(a[i].widen(), b[i].widen()));
    }
}

fn compare<T: Copy>(a: &[T], b: &[T], y: &mut [u8], f: impl Fn(T, T) -> bool) {
    let (a, b) = (&a[..y.len()], &b[..y.len()]);
    for i in 0..y.len() {
        y[i] = f(a[i], b[i]) as u8;
    }
}

fn zip_plain<T: Copy>(a: &[T], b: &[T], y: &mut [T], f: impl Fn(T, T) -> T) {
    let (a, b) = (&a[..y.len()], &b[..y.len()]);
    for i in 0..y.len() {
        y[i] = f(a[i], b[i]);
    }
}
