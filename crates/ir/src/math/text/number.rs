//! Numbers that are not computed but written down: what the tables' value column and the polynomials make of these is
//! text. Functions of f32 are calls of the prelude's, which are written by these too.

use super::form::Form;
use super::write::{Atom, Typed, dialect, inexact, make};
use crate::DType;
use crate::math::{
    Bits, Compare, DivideError, Double, Float, Num, Single, Word, float_floor_divide, float_remainder, single,
};
use std::ops::{Add, Div, Mul, Sub};

macro_rules! types {
    ($($name:ident $dtype:ident;)*) => {$(
        /// A value of a dtype.
        #[derive(Clone, Copy)]
        pub(super) struct $name(pub Atom);

        impl Typed for $name {
            const DTYPE: DType = DType::$dtype;
            fn atom(self) -> Atom { self.0 }
            fn from_atom(atom: Atom) -> $name { $name(atom) }
        }
    )*};
}
types! { F64 F64; F32 F32; I64 I64; I32 I32; I16 I16; I8 I8; U64 U64; U32 U32; U16 U16; U8 U8; Truth Bool; }

/// Runs the body with `$T` as the type of an integer dtype.
macro_rules! with_integer {
    ($dtype:expr, $T:ident => $body:expr) => {
        with_integer!(@match $dtype, $T => $body; I64 I32 I16 I8 U64 U32 U16 U8)
    };
    (@match $dtype:expr, $T:ident => $body:expr; $($t:ident)*) => {
        match $dtype {
            $(DType::$t => { use $t as $T; $body })*
            _ => None,
        }
    };
}
pub(super) use with_integer;

/// The same for every number; f16 and bf16 are held as f32.
macro_rules! with_number {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F64 => { use F64 as $T; $body }
            DType::F32 | DType::F16 | DType::BF16 => { use F32 as $T; $body }
            other => with_integer!(other, $T => $body),
        }
    };
}
pub(super) use with_number;

fn new<T: Typed>(form: &str, args: &[(DType, Atom)]) -> T {
    T::from_atom(make::<T>(form, args))
}

fn float<T: Typed>(form: Form, args: &[(DType, Atom)]) -> T {
    new(form.spelling(dialect(), T::DTYPE == DType::F64), args)
}

macro_rules! compared {
    ($($t:ident)*) => {$(
        impl Compare for $t {
            type Truth = Truth;
            fn equals(self, o: $t) -> Truth { new("# == #", &[self.arg(), o.arg()]) }
            fn differs(self, o: $t) -> Truth { new("# != #", &[self.arg(), o.arg()]) }
            fn below(self, o: $t) -> Truth { new("# < #", &[self.arg(), o.arg()]) }
            fn at_most(self, o: $t) -> Truth { new("# <= #", &[self.arg(), o.arg()]) }
            fn above(self, o: $t) -> Truth { new("# > #", &[self.arg(), o.arg()]) }
            fn at_least(self, o: $t) -> Truth { new("# >= #", &[self.arg(), o.arg()]) }
        }
    )*};
}
compared!(F64 F32 I64 I32 I16 I8 U64 U32 U16 U8 Truth);

/// Methods that are one form.
macro_rules! one {
    ($($name:ident $form:ident)*) => { $(fn $name(self) -> Self { float(Form::$form, &[self.arg()]) })* };
}
macro_rules! two {
    ($($name:ident $form:ident)*) => { $(fn $name(self, o: Self) -> Self { float(Form::$form, &[self.arg(), o.arg()]) })* };
}

macro_rules! floats {
    ($($t:ident $one:literal $infinity:literal)*) => {$(
        impl Num for $t {
            const ZERO: $t = $t(Atom::Number(0));
            const ONE: $t = $t(Atom::Number($one));
            one!(neg Neg abs Abs);
            two!(add Add sub Sub mul Mul fmod Fmod maximum Max minimum Min);
            fn sign(self) -> $t {
                let below = $t::pick(self.below($t::ZERO), $t::ONE.neg(), $t::ZERO);
                $t::pick(self.above($t::ZERO), $t::ONE, below)
            }
            fn floor_divide(self, o: $t) -> $t { float_floor_divide(self, o) }
            fn remainder(self, o: $t) -> $t { float_remainder(self, o) }
            fn pow(self, o: $t) -> $t { self.power_of(o) }
            fn nan(self) -> Truth { self.differs(self) }
            fn inf(self) -> Truth { self.abs().equals($t(Atom::Number($infinity))) }
            fn divides(self, _: $t) -> Result<(), DivideError> { Ok(()) }
        }
    )*};
}
floats! { F64 0x3ff0_0000_0000_0000 0x7ff0_0000_0000_0000 F32 0x3f80_0000 0x7f80_0000 }

/// What both widths have in one form.
macro_rules! alike {
    () => {
        one!(sqrt Sqrt floor Floor ceil Ceil trunc Trunc round_even Round);
        two!(div Div copysign CopySign);
        fn fma(self, a: Self, b: Self) -> Self {
            float(Form::Fma, &[self.arg(), a.arg(), b.arg()])
        }
        fn pick(truth: Truth, a: Self, b: Self) -> Self {
            new("# ? # : #", &[truth.arg(), a.arg(), b.arg()])
        }
    };
}

/// Functions that the target's library has, which rounds in its own way.
macro_rules! library {
    ($($name:ident $function:literal)*) => {
        $(fn $name(self) -> Self { inexact(); new(concat!($function, "(#)"), &[self.arg()]) })*
    };
}

impl Float for F64 {
    alike!();
    library! {
        exp "exp" exp_m1 "expm1" ln "log" ln_1p "log1p" log2 "log2" sin "sin" cos "cos" tan "tan" asin "asin" acos "acos"
        atan "atan" sinh "sinh" cosh "cosh" tanh "tanh" asinh "asinh" acosh "acosh" atanh "atanh" erf "erf"
    }
    fn of(x: f64) -> F64 {
        F64(Atom::Number(x.to_bits()))
    }
    fn atan2(self, o: F64) -> F64 {
        inexact();
        new("atan2(#, #)", &[self.arg(), o.arg()])
    }
}

impl F64 {
    fn power_of(self, o: F64) -> F64 {
        inexact();
        new("pow(#, #)", &[self.arg(), o.arg()])
    }
}

/// Functions that the prelude has, each written by the function of [`single`] that is named beside it.
macro_rules! written {
    ($($name:ident $function:ident)*) => {
        $(fn $name(self) -> F32 { new(concat!("kiln_", stringify!($function), "_f32(#)"), &[self.arg()]) })*
    };
}

/// The names of the prelude's functions of f32, how many operands they take, and what writes their result.
#[allow(clippy::type_complexity)]
pub(super) const FUNCTIONS: &[(&str, usize, fn(F32, F32) -> F32)] = &[
    ("exp", 1, |x, _| single::exp(x)),
    ("expm1", 1, |x, _| single::expm1(x)),
    ("log", 1, |x, _| single::log(x)),
    ("log1p", 1, |x, _| single::log1p(x)),
    ("log2", 1, |x, _| single::log2(x)),
    ("tanh", 1, |x, _| single::tanh(x)),
    ("erf", 1, |x, _| single::erf(x)),
    ("sin_near", 1, |x, _| single::sin_near(x)),
    ("cos_near", 1, |x, _| single::cos_near(x)),
    ("pow", 2, single::pow),
];

impl Float for F32 {
    alike!();
    written! { exp exp exp_m1 expm1 ln log ln_1p log1p log2 log2 tanh tanh erf erf }
    library! {
        tan "tanf" asin "asinf" acos "acosf" atan "atanf" sinh "sinhf" cosh "coshf" asinh "asinhf" acosh "acoshf" atanh "atanhf"
    }
    fn of(x: f64) -> F32 {
        F32::lit(x as f32)
    }
    fn sin(self) -> F32 {
        self.near_or("kiln_sin_near_f32", "sinf")
    }
    fn cos(self) -> F32 {
        self.near_or("kiln_cos_near_f32", "cosf")
    }
    fn atan2(self, o: F32) -> F32 {
        inexact();
        new("atan2f(#, #)", &[self.arg(), o.arg()])
    }
}

impl F32 {
    fn power_of(self, o: F32) -> F32 {
        new("kiln_pow_f32(#, #)", &[self.arg(), o.arg()])
    }

    /// A function of the prelude below [`single::NEAR`], and one of the target's library from there on.
    fn near_or(self, near: &str, library: &str) -> F32 {
        inexact();
        let far = self.abs().at_least(F32::lit(single::NEAR));
        new(&format!("# ? {library}(#) : {near}(#)"), &[far.arg(), self.arg(), self.arg()])
    }
}

impl Single for F32 {
    type Word = U32;
    type Double = F64;
    fn lit(x: f32) -> F32 {
        F32(Atom::Number(x.to_bits() as u64))
    }
    fn to_word(self) -> U32 {
        new("kiln_bits(#)", &[self.arg()])
    }
    fn from_word(bits: U32) -> F32 {
        new("kiln_float(#)", &[bits.arg()])
    }
    fn of_signed(x: U32) -> F32 {
        new("(float)(int)#", &[x.arg()])
    }
    fn widen(self) -> F64 {
        new("(double)#", &[self.arg()])
    }
}

impl Double for F64 {
    type Truth = Truth;
    type Single = F32;
    fn lit(x: f64) -> F64 {
        F64(Atom::Number(x.to_bits()))
    }
    fn narrow(self) -> F32 {
        new("(float)#", &[self.arg()])
    }
    fn fused(self, a: F64, b: F64) -> F64 {
        self.fma(a, b)
    }
    fn same(self, o: F64) -> Truth {
        self.equals(o)
    }
    fn less(self, o: F64) -> Truth {
        self.below(o)
    }
    fn choose(truth: Truth, a: F64, b: F64) -> F64 {
        F64::pick(truth, a, b)
    }
    fn power(self) -> F64 {
        new("kiln_double(kiln_double_bits(#) + 1023ull << 52)", &[self.arg()])
    }
    fn is_odd(self) -> Truth {
        new("(kiln_double_bits(#) & 1ull) != 0ull", &[self.arg()])
    }
}

macro_rules! operators {
    ($($trait:ident $name:ident: $($t:ident)*;)*) => {$($(
        impl $trait for $t {
            type Output = $t;
            fn $name(self, o: $t) -> $t { float(Form::$trait, &[self.arg(), o.arg()]) }
        }
    )*)*};
}
operators! { Add add: F32 F64; Sub sub: F32 F64; Mul mul: F32 F64; Div div: F32; }

macro_rules! ints {
    ($($t:ident $name:literal $c:literal $unsigned:literal;)*) => {$(
        impl Num for $t {
            const ZERO: $t = $t(Atom::Number(0));
            const ONE: $t = $t(Atom::Number(1));
            // What does not fit wraps, which only unsigned numbers are known to.
            fn add(self, o: $t) -> $t {
                new(concat!("(", $c, ")((", $unsigned, ")# + (", $unsigned, ")#)"), &[self.arg(), o.arg()])
            }
            fn sub(self, o: $t) -> $t {
                new(concat!("(", $c, ")((", $unsigned, ")# - (", $unsigned, ")#)"), &[self.arg(), o.arg()])
            }
            fn mul(self, o: $t) -> $t {
                new(concat!("(", $c, ")((", $unsigned, ")# * (", $unsigned, ")#)"), &[self.arg(), o.arg()])
            }
            fn neg(self) -> $t {
                $t::ZERO.sub(self)
            }
            fn abs(self) -> $t {
                let negative = self.neg();
                new("# < 0 ? # : #", &[self.arg(), negative.arg(), self.arg()])
            }
            fn sign(self) -> $t {
                new(concat!("# > 0 ? 1 : # < 0 ? (", $c, ")-1 : 0"), &[self.arg(), self.arg()])
            }
            fn maximum(self, o: $t) -> $t {
                new("# > # ? # : #", &[self.arg(), o.arg(), self.arg(), o.arg()])
            }
            fn minimum(self, o: $t) -> $t {
                new("# < # ? # : #", &[self.arg(), o.arg(), self.arg(), o.arg()])
            }
            fn floor_divide(self, o: $t) -> $t {
                new(concat!("kiln_floor_divide_", $name, "(#, #)"), &[self.arg(), o.arg()])
            }
            fn remainder(self, o: $t) -> $t {
                new(concat!("kiln_remainder_", $name, "(#, #)"), &[self.arg(), o.arg()])
            }
            fn fmod(self, o: $t) -> $t {
                new(concat!("kiln_fmod_", $name, "(#, #)"), &[self.arg(), o.arg()])
            }
            fn pow(self, o: $t) -> $t {
                new(concat!("kiln_pow_", $name, "(#, #)"), &[self.arg(), o.arg()])
            }
            fn nan(self) -> Truth {
                Truth(Atom::Number(0))
            }
            fn inf(self) -> Truth {
                Truth(Atom::Number(0))
            }
            fn divides(self, _: $t) -> Result<(), DivideError> {
                Ok(())
            }
        }

        impl Bits for $t {
            fn and(self, o: $t) -> $t { new(concat!("(", $c, ")(# & #)"), &[self.arg(), o.arg()]) }
            fn or(self, o: $t) -> $t { new(concat!("(", $c, ")(# | #)"), &[self.arg(), o.arg()]) }
            fn xor(self, o: $t) -> $t { new(concat!("(", $c, ")(# ^ #)"), &[self.arg(), o.arg()]) }
            fn not(self) -> $t { new(concat!("(", $c, ")~#"), &[self.arg()]) }
        }
    )*};
}
ints! {
    I64 "i64" "long long" "unsigned long long";
    I32 "i32" "int" "unsigned int";
    I16 "i16" "short" "unsigned int";
    I8 "i8" "signed char" "unsigned int";
    U64 "u64" "unsigned long long" "unsigned long long";
    U32 "u32" "unsigned int" "unsigned int";
    U16 "u16" "unsigned short" "unsigned int";
    U8 "u8" "unsigned char" "unsigned int";
}

impl Word for U32 {
    fn lit(x: u32) -> U32 {
        U32(Atom::Number(x as u64))
    }
    fn shl(self, by: u32) -> U32 {
        new(&format!("# << {by}"), &[self.arg()])
    }
    fn shr(self, by: u32) -> U32 {
        new(&format!("# >> {by}"), &[self.arg()])
    }
    fn sar(self, by: u32) -> U32 {
        new(&format!("(unsigned int)((int)# >> {by})"), &[self.arg()])
    }
    fn is_even(self) -> Truth {
        new("(# & 1u) == 0u", &[self.arg()])
    }
}

impl Bits for Truth {
    fn and(self, o: Truth) -> Truth {
        new("# & #", &[self.arg(), o.arg()])
    }
    fn or(self, o: Truth) -> Truth {
        new("# | #", &[self.arg(), o.arg()])
    }
    fn xor(self, o: Truth) -> Truth {
        new("# ^ #", &[self.arg(), o.arg()])
    }
    fn not(self) -> Truth {
        new("!#", &[self.arg()])
    }
}
