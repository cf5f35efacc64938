//! One loop over slices for each elementwise operation and type, from the tables' value column. Bool is a byte of 0 or
//! 1 here; f16 and bf16 are computed in f32.

use crate::reference::Number;
use kiln_ir::math::{Bits, DivideError, Float, Num};
use kiln_ir::{Binary, Unary};

macro_rules! in_domain {
    (Float Float $body:expr) => { $body };
    (Num Num $body:expr) => { $body };
    (Bits Bits $body:expr) => { $body };
    (Test Test $body:expr) => { $body };
    (Compare Compare $body:expr) => { $body };
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
    for (((y, &c), &a), &b) in y.iter_mut().zip(cond).zip(a).zip(b) {
        *y = if c != 0 { a } else { b };
    }
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
    y.iter_mut().zip(x).for_each(|(y, x)| *y = T::narrow(f(x.widen())));
}

fn test<T: Number>(x: &[T], y: &mut [u8], f: impl Fn(T::Wide) -> bool) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = f(x.widen()) as u8);
}

fn plain<T: Copy>(x: &[T], y: &mut [T], f: impl Fn(T) -> T) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = f(x));
}

fn zip<T: Number>(a: &[T], b: &[T], y: &mut [T], f: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = T::narrow(f(a.widen(), b.widen())));
}

fn compare<T: Copy>(a: &[T], b: &[T], y: &mut [u8], f: impl Fn(T, T) -> bool) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, &a), &b)| *y = f(a, b) as u8);
}

fn zip_plain<T: Copy>(a: &[T], b: &[T], y: &mut [T], f: impl Fn(T, T) -> T) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, &a), &b)| *y = f(a, b));
}

/// Conversion of one element: what `as` does, f16 and bf16 through f32.
pub trait To<D> {
    /// The converted element.
    fn to(self) -> D;
}

macro_rules! conversions {
    ($($from:ident)* => $to:tt) => { $(conversions!(@one $from $to);)* };
    (@one $from:ident [$($to:ident)*]) => {
        $(impl To<$to> for $from { fn to(self) -> $to { self as $to } })*
        impl To<half::f16> for $from { fn to(self) -> half::f16 { half::f16::from_f32(self as f32) } }
        impl To<half::bf16> for $from { fn to(self) -> half::bf16 { half::bf16::from_f32(self as f32) } }
        impl To<$from> for half::f16 { fn to(self) -> $from { self.to_f32() as $from } }
        impl To<$from> for half::bf16 { fn to(self) -> $from { self.to_f32() as $from } }
    };
}
conversions!(f64 f32 i64 i32 i16 i8 u64 u32 u16 u8 => [f64 f32 i64 i32 i16 i8 u64 u32 u16 u8]);

impl To<half::f16> for half::f16 {
    fn to(self) -> half::f16 {
        self
    }
}
impl To<half::bf16> for half::bf16 {
    fn to(self) -> half::bf16 {
        self
    }
}
impl To<half::bf16> for half::f16 {
    fn to(self) -> half::bf16 {
        half::bf16::from_f32(self.to_f32())
    }
}
impl To<half::f16> for half::bf16 {
    fn to(self) -> half::f16 {
        half::f16::from_f32(self.to_f32())
    }
}

/// Every element converted.
pub fn convert<S: Copy + To<D>, D>(x: &[S], y: &mut [D]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = x.to());
}

/// Whether each element is not 0.
pub fn truth<S: Copy + To<f64>>(x: &[S], y: &mut [u8]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x.to() != 0.0) as u8);
}
