//! The value of every elementwise operation on one element: the traits that the tables' value column is written in.
//!
//! f32 and f64 are computed in their own precision, f32 by the polynomials of [`single`] and f64 with the pure-Rust
//! `libm`, never the platform's C library, so that the same program gives the same bits on every machine. f16 and bf16
//! are computed in f32 and rounded once per node; integers wrap. Division by zero and `MIN / -1` are refused by
//! [`Num::divides`] before a value is asked for.

pub mod row;
pub mod single;
pub mod text;
pub mod value;

#[cfg(test)]
mod tests;

use std::ops::{Add, Div, Mul, Sub};

/// Numbers and bool, which is ordered as 0 and 1. Comparisons with NaN are false, but that it differs.
#[allow(missing_docs)]
pub trait Compare: Copy + Send + Sync + 'static {
    /// What a question about it is answered with: bool for a single element.
    type Truth: Bits;
    fn equals(self, o: Self) -> Self::Truth;
    fn differs(self, o: Self) -> Self::Truth;
    fn below(self, o: Self) -> Self::Truth;
    fn at_most(self, o: Self) -> Self::Truth;
    fn above(self, o: Self) -> Self::Truth;
    fn at_least(self, o: Self) -> Self::Truth;
}

/// Numbers: both float widths and every integer, one of them or whatever stands for several.
pub trait Num: Compare {
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Sum; integers wrap.
    fn add(self, o: Self) -> Self;
    /// Difference; integers wrap.
    fn sub(self, o: Self) -> Self;
    /// Product; integers wrap.
    fn mul(self, o: Self) -> Self;
    /// Negative; integers wrap.
    fn neg(self) -> Self;
    /// Absolute value; `MIN` stays.
    fn abs(self) -> Self;
    /// -1, 0 or 1; 0 for NaN.
    fn sign(self) -> Self;
    /// The larger; NaN wins.
    fn maximum(self, o: Self) -> Self;
    /// The smaller; NaN wins.
    fn minimum(self, o: Self) -> Self;
    /// Quotient rounded down.
    fn floor_divide(self, o: Self) -> Self;
    /// Remainder with the sign of the divisor.
    fn remainder(self, o: Self) -> Self;
    /// Remainder with the sign of the dividend.
    fn fmod(self, o: Self) -> Self;
    /// Power; an integer to a negative power is 0 unless the base is 1 or -1.
    fn pow(self, o: Self) -> Self;
    /// Whether it is NaN.
    fn nan(self) -> Self::Truth;
    /// Whether it is an infinity.
    fn inf(self) -> Self::Truth;
    /// Whether a quotient by `o` is defined: an integer's is not by zero, nor `MIN / -1`.
    fn divides(self, o: Self) -> Result<(), DivideError>;
}

/// Why an integer quotient is undefined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DivideError {
    /// The divisor is zero.
    ByZero,
    /// The quotient does not fit: the smallest value over -1.
    Overflow,
}

/// Integers and bool: what bitwise operations work on.
pub trait Bits: Copy + Send + Sync + 'static {
    /// Bitwise and.
    fn and(self, o: Self) -> Self;
    /// Bitwise or.
    fn or(self, o: Self) -> Self;
    /// Bitwise exclusive or.
    fn xor(self, o: Self) -> Self;
    /// All bits flipped; for bool, logical not.
    fn not(self) -> Self;
}

/// The two float widths that arithmetic is done in.
#[allow(missing_docs)]
pub trait Float: Num {
    fn of(x: f64) -> Self;
    fn div(self, o: Self) -> Self;
    fn exp(self) -> Self;
    fn exp_m1(self) -> Self;
    fn ln(self) -> Self;
    fn ln_1p(self) -> Self;
    fn log2(self) -> Self;
    fn sqrt(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tan(self) -> Self;
    fn asin(self) -> Self;
    fn acos(self) -> Self;
    fn atan(self) -> Self;
    fn atan2(self, o: Self) -> Self;
    fn sinh(self) -> Self;
    fn cosh(self) -> Self;
    fn tanh(self) -> Self;
    fn asinh(self) -> Self;
    fn acosh(self) -> Self;
    fn atanh(self) -> Self;
    fn erf(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    fn trunc(self) -> Self;
    fn round_even(self) -> Self;
    /// `self * a + b` with one rounding.
    fn fma(self, a: Self, b: Self) -> Self;
    /// `a` where that is true, else `b`.
    fn pick(truth: Self::Truth, a: Self, b: Self) -> Self;
    /// This size with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;

    #[inline(always)]
    fn recip(self) -> Self {
        Self::ONE.div(self)
    }
    /// With z = exp(-|x|), which cannot overflow, 1 - z / (1 + z) or z - z z / (1 + z): the sum's rounding hardly counts.
    /// Within 1.6 ulp in f32.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        let z = self.abs().neg().exp();
        let whole = Self::pick(self.below(Self::ZERO), z, Self::ONE);
        whole.neg().fma(z.div(Self::ONE.add(z)), whole)
    }
    /// `log(1 + exp(x))`, and x itself above 20, where they agree.
    #[inline(always)]
    fn softplus(self) -> Self {
        let soft = self.exp().ln_1p();
        Self::pick(self.above(Self::of(20.0)), self, soft)
    }
    #[inline(always)]
    fn log_sigmoid(self) -> Self {
        self.minimum(Self::ZERO).sub(self.abs().neg().exp().ln_1p())
    }
    #[inline(always)]
    fn hard_sigmoid(self) -> Self {
        self.add(Self::of(3.0)).maximum(Self::ZERO).minimum(Self::of(6.0)).div(Self::of(6.0))
    }
    #[inline(always)]
    fn gelu(self) -> Self {
        Self::of(0.5).mul(self).mul(Self::ONE.add(self.mul(Self::of(std::f64::consts::FRAC_1_SQRT_2)).erf()))
    }
    #[inline(always)]
    fn gelu_tanh(self) -> Self {
        let inner = self.add(Self::of(0.044715).mul(self).mul(self).mul(self));
        Self::of(0.5).mul(self).mul(Self::ONE.add(Self::of(0.797_884_560_802_865_4).mul(inner).tanh()))
    }
}

/// The quotient of two floats rounded down, as [`Num::floor_divide`] has it.
#[inline(always)]
pub fn float_floor_divide<T: Float>(a: T, b: T) -> T {
    let rest = a.fmod(b);
    let exact = a.sub(rest).div(b);
    let across = rest.differs(T::ZERO).and(b.below(T::ZERO).xor(rest.below(T::ZERO)));
    let quotient = T::pick(across, exact.sub(T::ONE), exact);
    let floor = quotient.floor();
    let floor = T::pick(quotient.sub(floor).above(T::of(0.5)), floor.add(T::ONE), floor);
    let whole = a.div(b);
    let y = T::pick(quotient.equals(T::ZERO), T::ZERO.copysign(whole), floor);
    T::pick(b.equals(T::ZERO), whole, y)
}

/// The remainder of two floats with the sign of the divisor, as [`Num::remainder`] has it.
#[inline(always)]
pub fn float_remainder<T: Float>(a: T, b: T) -> T {
    let rest = a.fmod(b);
    let across = rest.differs(T::ZERO).and(b.below(T::ZERO).xor(rest.below(T::ZERO)));
    T::pick(across, rest.add(b), rest)
}

/// Lanes of f32, with their bits: what the polynomials of [`single`] are written in.
#[allow(missing_docs)]
pub trait Single:
    Float + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// As many lanes of 32 bits.
    type Word: Word<Truth = Self::Truth>;
    /// As many lanes of f64.
    type Double: Double<Truth = Self::Truth, Single = Self>;
    /// A constant in every lane.
    fn lit(x: f32) -> Self;
    fn to_word(self) -> Self::Word;
    fn from_word(bits: Self::Word) -> Self;
    /// From an i32.
    fn of_signed(x: Self::Word) -> Self;
    /// As f64, exactly.
    fn widen(self) -> Self::Double;
}

/// Lanes of f64: what functions of f32 are computed in where f32 is not enough.
#[allow(missing_docs)]
pub trait Double: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    /// What a question about it is answered with.
    type Truth: Bits;
    /// What it is narrowed to.
    type Single;
    /// A constant in every lane.
    fn lit(x: f64) -> Self;
    /// Rounded to f32.
    fn narrow(self) -> Self::Single;
    /// `self * a + b` with one rounding.
    fn fused(self, a: Self, b: Self) -> Self;
    fn same(self, o: Self) -> Self::Truth;
    fn less(self, o: Self) -> Self::Truth;
    /// `a` where that is true, else `b`.
    fn choose(truth: Self::Truth, a: Self, b: Self) -> Self;
    /// 2^n, where the lowest eleven bits of this are those of n.
    fn power(self) -> Self;
    /// Whether the lowest bit is set.
    fn is_odd(self) -> Self::Truth;
}

/// Lanes of 32 bits.
#[allow(missing_docs)]
pub trait Word: Num + Bits {
    /// A constant in every lane.
    fn lit(x: u32) -> Self;
    fn shl(self, by: u32) -> Self;
    fn shr(self, by: u32) -> Self;
    /// As [`Word::shr`], with copies of the highest bit shifted in.
    fn sar(self, by: u32) -> Self;
    fn is_even(self) -> Self::Truth;
}

impl Single for f32 {
    type Word = u32;
    type Double = f64;
    #[inline(always)]
    fn lit(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_word(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn of_signed(x: u32) -> f32 {
        x as i32 as f32
    }
    #[inline(always)]
    fn widen(self) -> f64 {
        self as f64
    }
}

impl Double for f64 {
    type Truth = bool;
    type Single = f32;
    #[inline(always)]
    fn lit(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn narrow(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn fused(self, a: f64, b: f64) -> f64 {
        self.mul_add(a, b)
    }
    #[inline(always)]
    fn same(self, o: f64) -> bool {
        self == o
    }
    #[inline(always)]
    fn less(self, o: f64) -> bool {
        self < o
    }
    #[inline(always)]
    fn choose(truth: bool, a: f64, b: f64) -> f64 {
        if truth { a } else { b }
    }
    #[inline(always)]
    fn power(self) -> f64 {
        f64::from_bits(self.to_bits().wrapping_add(1023) << 52)
    }
    #[inline(always)]
    fn is_odd(self) -> bool {
        self.to_bits() & 1 == 1
    }
}

impl Word for u32 {
    #[inline(always)]
    fn lit(x: u32) -> u32 {
        x
    }
    #[inline(always)]
    fn shl(self, by: u32) -> u32 {
        self << by
    }
    #[inline(always)]
    fn shr(self, by: u32) -> u32 {
        self >> by
    }
    #[inline(always)]
    fn sar(self, by: u32) -> u32 {
        (self as i32 >> by) as u32
    }
    #[inline(always)]
    fn is_even(self) -> bool {
        self & 1 == 0
    }
}

macro_rules! compared {
    ($($t:ident)*) => {$(
        impl Compare for $t {
            type Truth = bool;
            #[inline(always)]
            fn equals(self, o: $t) -> bool { self == o }
            #[inline(always)]
            fn differs(self, o: $t) -> bool { self != o }
            #[inline(always)]
            fn below(self, o: $t) -> bool { self < o }
            #[inline(always)]
            fn at_most(self, o: $t) -> bool { self <= o }
            #[inline(always)]
            fn above(self, o: $t) -> bool { self > o }
            #[inline(always)]
            fn at_least(self, o: $t) -> bool { self >= o }
        }
    )*};
}
compared!(f64 f32 i64 i32 i16 i8 u64 u32 u16 u8 bool);

macro_rules! floats {
    ($($t:ident by $functions:ident;)*) => {$(
        impl Num for $t {
            const ZERO: $t = 0.0;
            const ONE: $t = 1.0;
            #[inline(always)]
            fn add(self, o: $t) -> $t { self + o }
            #[inline(always)]
            fn sub(self, o: $t) -> $t { self - o }
            #[inline(always)]
            fn mul(self, o: $t) -> $t { self * o }
            #[inline(always)]
            fn neg(self) -> $t { -self }
            #[inline(always)]
            fn abs(self) -> $t { $t::abs(self) }
            #[inline(always)]
            fn sign(self) -> $t {
                if self > 0.0 { 1.0 } else if self < 0.0 { -1.0 } else { 0.0 }
            }
            // Commutative and associative to the bit, so that a reduction's order does not matter: every NaN is the
            // same, and of two zeros the maximum is the positive one. Equal numbers differ in the sign of zero at most.
            // Without branches, because lanes of a reduction become a vector only so.
            #[inline(always)]
            fn maximum(self, o: $t) -> $t {
                let larger = if self > o { self } else { o };
                let tied = $t::from_bits(self.to_bits() & o.to_bits());
                let y = if self == o { tied } else { larger };
                if self.is_nan() | o.is_nan() { $t::NAN } else { y }
            }
            #[inline(always)]
            fn minimum(self, o: $t) -> $t {
                let smaller = if self < o { self } else { o };
                let tied = $t::from_bits(self.to_bits() | o.to_bits());
                let y = if self == o { tied } else { smaller };
                if self.is_nan() | o.is_nan() { $t::NAN } else { y }
            }
            #[inline(always)]
            fn floor_divide(self, o: $t) -> $t { float_floor_divide(self, o) }
            #[inline(always)]
            fn remainder(self, o: $t) -> $t { float_remainder(self, o) }
            #[inline(always)]
            fn fmod(self, o: $t) -> $t { self % o }
            #[inline(always)]
            fn pow(self, o: $t) -> $t { $functions::pow(self, o) }
            #[inline(always)]
            fn nan(self) -> bool { self.is_nan() }
            #[inline(always)]
            fn inf(self) -> bool { self.is_infinite() }
            #[inline(always)]
            fn divides(self, _: $t) -> Result<(), DivideError> { Ok(()) }
        }
        impl Float for $t {
            #[inline(always)]
            fn of(x: f64) -> $t { x as $t }
            #[inline(always)]
            fn div(self, o: $t) -> $t { self / o }
            #[inline(always)]
            fn exp(self) -> $t { $functions::exp(self) }
            #[inline(always)]
            fn exp_m1(self) -> $t { $functions::expm1(self) }
            #[inline(always)]
            fn ln(self) -> $t { $functions::log(self) }
            #[inline(always)]
            fn ln_1p(self) -> $t { $functions::log1p(self) }
            #[inline(always)]
            fn log2(self) -> $t { $functions::log2(self) }
            #[inline(always)]
            fn sqrt(self) -> $t { $t::sqrt(self) }
            #[inline(always)]
            fn sin(self) -> $t { $functions::sin(self) }
            #[inline(always)]
            fn cos(self) -> $t { $functions::cos(self) }
            #[inline(always)]
            fn tan(self) -> $t { $functions::tan(self) }
            #[inline(always)]
            fn asin(self) -> $t { $functions::asin(self) }
            #[inline(always)]
            fn acos(self) -> $t { $functions::acos(self) }
            #[inline(always)]
            fn atan(self) -> $t { $functions::atan(self) }
            #[inline(always)]
            fn atan2(self, o: $t) -> $t { $functions::atan2(self, o) }
            #[inline(always)]
            fn sinh(self) -> $t { $functions::sinh(self) }
            #[inline(always)]
            fn cosh(self) -> $t { $functions::cosh(self) }
            #[inline(always)]
            fn tanh(self) -> $t { $functions::tanh(self) }
            #[inline(always)]
            fn asinh(self) -> $t { $functions::asinh(self) }
            // libm gives numbers for operands far below its domain.
            #[inline(always)]
            fn acosh(self) -> $t { if self < 1.0 { $t::NAN } else { $functions::acosh(self) } }
            #[inline(always)]
            fn atanh(self) -> $t { $functions::atanh(self) }
            #[inline(always)]
            fn erf(self) -> $t { $functions::erf(self) }
            #[inline(always)]
            fn floor(self) -> $t { $t::floor(self) }
            #[inline(always)]
            fn ceil(self) -> $t { $t::ceil(self) }
            #[inline(always)]
            fn trunc(self) -> $t { $t::trunc(self) }
            #[inline(always)]
            fn round_even(self) -> $t { $t::round_ties_even(self) }
            #[inline(always)]
            fn fma(self, a: $t, b: $t) -> $t { self.mul_add(a, b) }
            #[inline(always)]
            fn pick(truth: bool, a: $t, b: $t) -> $t { if truth { a } else { b } }
            #[inline(always)]
            fn copysign(self, sign: $t) -> $t { $t::copysign(self, sign) }
        }
    )*};
}
floats! { f32 by single; f64 by double; }

/// Functions of f64.
mod double {
    pub use libm::{
        acos, acosh, asin, asinh, atan, atan2, atanh, cos, cosh, erf, exp, expm1, log, log1p, log2, pow, sin,
        sinh, tan, tanh,
    };
}

macro_rules! ints {
    ($($t:ident $signed:literal)*) => {$(
        #[allow(unused_comparisons)]
        impl Num for $t {
            const ZERO: $t = 0;
            const ONE: $t = 1;
            #[inline(always)]
            fn add(self, o: $t) -> $t { self.wrapping_add(o) }
            #[inline(always)]
            fn sub(self, o: $t) -> $t { self.wrapping_sub(o) }
            #[inline(always)]
            fn mul(self, o: $t) -> $t { self.wrapping_mul(o) }
            #[inline(always)]
            fn neg(self) -> $t { self.wrapping_neg() }
            #[inline(always)]
            fn abs(self) -> $t { if self < 0 { self.wrapping_neg() } else { self } }
            #[inline(always)]
            fn sign(self) -> $t {
                if self > 0 { 1 } else if self < 0 { (0 as $t).wrapping_sub(1) } else { 0 }
            }
            #[inline(always)]
            fn maximum(self, o: $t) -> $t { Ord::max(self, o) }
            #[inline(always)]
            fn minimum(self, o: $t) -> $t { Ord::min(self, o) }
            #[inline(always)]
            fn floor_divide(self, o: $t) -> $t {
                if o == 0 {
                    return 0;
                }
                let quotient = self.wrapping_div(o);
                let rest = self.wrapping_rem(o);
                if rest != 0 && (rest < 0) != (o < 0) { quotient.wrapping_sub(1) } else { quotient }
            }
            #[inline(always)]
            fn remainder(self, o: $t) -> $t {
                if o == 0 {
                    return 0;
                }
                let rest = self.wrapping_rem(o);
                if rest != 0 && (rest < 0) != (o < 0) { rest.wrapping_add(o) } else { rest }
            }
            #[inline(always)]
            fn fmod(self, o: $t) -> $t { if o == 0 { 0 } else { self.wrapping_rem(o) } }
            #[inline(always)]
            fn pow(self, o: $t) -> $t {
                if o < 0 {
                    let minus_one = (0 as $t).wrapping_sub(1);
                    return match self {
                        1 => 1,
                        x if x == minus_one => if o & 1 == 0 { 1 } else { minus_one },
                        _ => 0,
                    };
                }
                let (mut base, mut exponent, mut out) = (self, o, 1 as $t);
                while exponent > 0 {
                    if exponent & 1 == 1 {
                        out = out.wrapping_mul(base);
                    }
                    base = base.wrapping_mul(base);
                    exponent >>= 1;
                }
                out
            }
            #[inline(always)]
            fn nan(self) -> bool { false }
            #[inline(always)]
            fn inf(self) -> bool { false }
            #[inline(always)]
            fn divides(self, o: $t) -> Result<(), DivideError> {
                if o == 0 {
                    Err(DivideError::ByZero)
                } else if $signed && self == $t::MIN && o == (0 as $t).wrapping_sub(1) {
                    Err(DivideError::Overflow)
                } else {
                    Ok(())
                }
            }
        }
        impl Bits for $t {
            #[inline(always)]
            fn and(self, o: $t) -> $t { self & o }
            #[inline(always)]
            fn or(self, o: $t) -> $t { self | o }
            #[inline(always)]
            fn xor(self, o: $t) -> $t { self ^ o }
            #[inline(always)]
            fn not(self) -> $t { !self }
        }
    )*};
}
ints!(i64 true i32 true i16 true i8 true u64 false u32 false u16 false u8 false);

impl Bits for bool {
    #[inline(always)]
    fn and(self, o: bool) -> bool {
        self & o
    }
    #[inline(always)]
    fn or(self, o: bool) -> bool {
        self | o
    }
    #[inline(always)]
    fn xor(self, o: bool) -> bool {
        self ^ o
    }
    #[inline(always)]
    fn not(self) -> bool {
        !self
    }
}
