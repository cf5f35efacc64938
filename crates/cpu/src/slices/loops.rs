//! The loops themselves: the tables are expanded here and nowhere else. All is inlined into the callers, of which there
//! is one for each instruction set where that pays.
#![forbid(unsafe_code)]
// Indexed loops over slices cut to one length: `for_each` over a zip is several more functions to compile for each of
// some six hundred loops.
#![allow(clippy::needless_range_loop)]

use kiln_ir::math::{Bits, Float, Num, single};
use kiln_ir::{Binary, Unary};

/// The body where the operation is of the wanted domain.
macro_rules! in_domain {
    (Float Float $body:block) => {
        $body
    };
    (Num Num $body:block) => {
        $body
    };
    (Bits Bits $body:block) => {
        $body
    };
    (Test Test $body:block) => {
        $body
    };
    (Compare Compare $body:block) => {
        $body
    };
    ($want:ident $domain:ident $body:block) => {
        unreachable!(concat!("a ", stringify!($domain), " operation among ", stringify!($want)))
    };
}

/// The value of a one-operand row. A method rather than a closure, because only that can be told to be inlined always.
trait One<T, R> {
    fn value(x: T) -> R;
}

/// The value of a two-operand row.
trait Two<T, R> {
    fn value(a: T, b: T) -> R;
}

macro_rules! unary_loops {
    ($($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: |$x:ident| $value:expr, $($more:tt)* })*) => {
        #[inline(always)]
        pub fn unary_float<T: Float>(op: Unary, x: &[T], y: &mut [T]) {
            match op { $(Unary::$variant => in_domain!(Float $domain {
                struct Row;
                impl<T: Float> One<T, T> for Row {
                    #[inline(always)]
                    fn value($x: T) -> T { $value }
                }
                map::<Row, T, T>(x, y)
            }),)* }
        }
        #[inline(always)]
        pub fn unary_num<T: Num>(op: Unary, x: &[T], y: &mut [T]) {
            match op { $(Unary::$variant => in_domain!(Num $domain {
                struct Row;
                impl<T: Num> One<T, T> for Row {
                    #[inline(always)]
                    fn value($x: T) -> T { $value }
                }
                map::<Row, T, T>(x, y)
            }),)* }
        }
        #[inline(always)]
        pub fn unary_test<T: Num<Truth = bool>>(op: Unary, x: &[T], y: &mut [u8]) {
            match op { $(Unary::$variant => in_domain!(Test $domain {
                struct Row;
                impl<T: Num<Truth = bool>> One<T, u8> for Row {
                    #[inline(always)]
                    fn value($x: T) -> u8 { ($value) as u8 }
                }
                map::<Row, T, u8>(x, y)
            }),)* }
        }
        #[inline(always)]
        pub fn unary_bits<T: Bits>(op: Unary, x: &[T], y: &mut [T]) {
            match op { $(Unary::$variant => in_domain!(Bits $domain {
                struct Row;
                impl<T: Bits> One<T, T> for Row {
                    #[inline(always)]
                    fn value($x: T) -> T { $value }
                }
                map::<Row, T, T>(x, y)
            }),)* }
        }
    };
}
kiln_ir::unary_table!(unary_loops);

macro_rules! binary_loops {
    ($($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: |$a:ident, $b:ident| $value:expr, $($more:tt)* })*) => {
        #[inline(always)]
        pub fn binary_float<T: Float>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
            match op { $(Binary::$variant => in_domain!(Float $domain {
                struct Row;
                impl<T: Float> Two<T, T> for Row {
                    #[inline(always)]
                    fn value($a: T, $b: T) -> T { $value }
                }
                zip::<Row, T, T>(a, b, y)
            }),)* }
        }
        #[inline(always)]
        pub fn binary_num<T: Num>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
            match op { $(Binary::$variant => in_domain!(Num $domain {
                struct Row;
                impl<T: Num> Two<T, T> for Row {
                    #[inline(always)]
                    fn value($a: T, $b: T) -> T { $value }
                }
                zip::<Row, T, T>(a, b, y)
            }),)* }
        }
        #[inline(always)]
        pub fn binary_compare<T: Copy + PartialOrd>(op: Binary, a: &[T], b: &[T], y: &mut [u8]) {
            match op { $(Binary::$variant => in_domain!(Compare $domain {
                struct Row;
                impl<T: PartialOrd> Two<T, u8> for Row {
                    #[inline(always)]
                    fn value($a: T, $b: T) -> u8 { ($value) as u8 }
                }
                zip::<Row, T, u8>(a, b, y)
            }),)* }
        }
        #[inline(always)]
        pub fn binary_bits<T: Bits>(op: Binary, a: &[T], b: &[T], y: &mut [T]) {
            match op { $(Binary::$variant => in_domain!(Bits $domain {
                struct Row;
                impl<T: Bits> Two<T, T> for Row {
                    #[inline(always)]
                    fn value($a: T, $b: T) -> T { $value }
                }
                zip::<Row, T, T>(a, b, y)
            }),)* }
        }
    };
}
kiln_ir::binary_table!(binary_loops);

/// [`unary_float`] for f32: sine and cosine are loops without a branch where every operand is near enough to 0.
#[inline(always)]
pub fn unary_single(op: Unary, x: &[f32], y: &mut [f32]) {
    match op {
        Unary::Sin if near(x) => map::<Sin, f32, f32>(x, y),
        Unary::Cos if near(x) => map::<Cos, f32, f32>(x, y),
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

#[inline(always)]
fn map<V: One<T, R>, T: Copy, R>(x: &[T], y: &mut [R]) {
    let x = &x[..y.len()];
    for i in 0..y.len() {
        y[i] = V::value(x[i]);
    }
}

#[inline(always)]
fn zip<V: Two<T, R>, T: Copy, R>(a: &[T], b: &[T], y: &mut [R]) {
    let (a, b) = (&a[..y.len()], &b[..y.len()]);
    for i in 0..y.len() {
        y[i] = V::value(a[i], b[i]);
    }
}
