//! The elementwise operations, one line each: variant, name, domain, value, derivative, documentation.
//!
//! A line is all there is to such an operation: the tensor method, the text and wire names, the CPU kernels, the
//! derivative and the tests are made from it. `|x|` is written in [`crate::math`]'s traits, `|g, x, y|` (gradient of
//! the result, operand, result) in recorded values ([`crate::V`]). To add one, see CONTRIBUTING.md.

use crate::V;

/// Which dtypes an elementwise operation takes, and what it gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Domain {
    /// Floats to the same float.
    Float,
    /// Floats and integers to the same dtype.
    Num,
    /// Integers and bool to the same dtype.
    Bits,
    /// Floats and integers to bool.
    Test,
    /// Every plain dtype to bool.
    Compare,
}

/// The derivative of a one-operand elementwise operation.
#[derive(Clone, Copy)]
pub enum Grad1 {
    /// The gradient of the operand from (gradient of the result, operand, result).
    Is(for<'a> fn(V<'a>, V<'a>, V<'a>) -> V<'a>),
    /// Zero wherever it is defined.
    Zero,
    /// There is none, for this reason.
    No(&'static str),
}

/// The gradient of one operand from (gradient of the result, first operand, second operand, result).
pub type Rule2 = for<'a> fn(V<'a>, V<'a>, V<'a>, V<'a>) -> V<'a>;

/// The derivative of a two-operand elementwise operation.
#[derive(Clone, Copy)]
pub enum Grad2 {
    /// The gradients of both operands.
    Is(Rule2, Rule2),
    /// Zero wherever it is defined.
    Zero,
    /// There is none, for this reason.
    No(&'static str),
}

/// Hands each row of a table to `$m` as `Variant name "Documentation." { domain: .., value: .., grad: .. }`. How a row is
/// written is known here alone. A macro that needs no column takes the braces as one `$columns:tt`; one that does takes
/// the first ones by name and the rest as `$($more:tt)*`: a new column changes neither.
#[macro_export]
macro_rules! table_rows {
    ($m:ident $($variant:ident $name:ident $domain:ident |$($x:ident),+| $value:expr, $rule:expr, $doc:literal;)*) => {
        $m! { $($variant $name $doc { domain: $domain, value: |$($x),+| $value, grad: $rule })* }
    };
}

/// Calls the macro `$m` with the one-operand table, in the form of [`table_rows!`].
#[macro_export]
#[rustfmt::skip]
macro_rules! unary_table { ($m:ident) => { $crate::table_rows! { $m
    Neg         neg          Num   |x| x.neg(),                         Is(|g, _, _| -g),                                    "The negative.";
    Abs         abs          Num   |x| x.abs(),                         Is(|g, x, _| g * x.sign()),                          "The absolute value.";
    Sign        sign         Num   |x| x.sign(),                        Zero,                                                "-1, 0 or 1.";
    Square      square       Num   |x| x.mul(x),                        Is(|g, x, _| g * 2.0 * x),                           "x times x.";
    Exp         exp          Float |x| x.exp(),                         Is(|g, _, y| g * y),                                 "e to the power x.";
    Expm1       expm1        Float |x| x.exp_m1(),                      Is(|g, _, y| g * (y + 1.0)),                         "exp(x) - 1, exact near 0.";
    Log         log          Float |x| x.ln(),                          Is(|g, x, _| g / x),                                 "The natural logarithm.";
    Log1p       log1p        Float |x| x.ln_1p(),                       Is(|g, x, _| g / (x + 1.0)),                         "log(1 + x), exact near 0.";
    Log2        log2         Float |x| x.log2(),                        Is(|g, x, _| g / (x * std::f64::consts::LN_2)),      "The logarithm to base 2.";
    Sqrt        sqrt         Float |x| x.sqrt(),                        Is(|g, _, y| g / (y * 2.0)),                         "The square root.";
    Rsqrt       rsqrt        Float |x| x.sqrt().recip(),                Is(|g, _, y| g * -0.5 * y * y * y),                  "1 / sqrt(x).";
    Reciprocal  reciprocal   Float |x| x.recip(),                       Is(|g, _, y| -g * y * y),                            "1 / x.";
    Sin         sin          Float |x| x.sin(),                         Is(|g, x, _| g * x.cos()),                           "The sine.";
    Cos         cos          Float |x| x.cos(),                         Is(|g, x, _| -g * x.sin()),                          "The cosine.";
    Tan         tan          Float |x| x.tan(),                         Is(|g, _, y| g * (y * y + 1.0)),                     "The tangent.";
    Asin        asin         Float |x| x.asin(),                        Is(|g, x, _| g * (1.0 - x * x).rsqrt()),             "The inverse sine.";
    Acos        acos         Float |x| x.acos(),                        Is(|g, x, _| -g * (1.0 - x * x).rsqrt()),            "The inverse cosine.";
    Atan        atan         Float |x| x.atan(),                        Is(|g, x, _| g / (x * x + 1.0)),                     "The inverse tangent.";
    Sinh        sinh         Float |x| x.sinh(),                        Is(|g, x, _| g * x.cosh()),                          "The hyperbolic sine.";
    Cosh        cosh         Float |x| x.cosh(),                        Is(|g, x, _| g * x.sinh()),                          "The hyperbolic cosine.";
    Tanh        tanh         Float |x| x.tanh(),                        Is(|g, _, y| g * (1.0 - y * y)),                     "The hyperbolic tangent.";
    Asinh       asinh        Float |x| x.asinh(),                       Is(|g, x, _| g * (x * x + 1.0).rsqrt()),             "The inverse hyperbolic sine.";
    Acosh       acosh        Float |x| x.acosh(),                       Is(|g, x, _| g * (x * x - 1.0).rsqrt()),             "The inverse hyperbolic cosine.";
    Atanh       atanh        Float |x| x.atanh(),                       Is(|g, x, _| g / (1.0 - x * x)),                     "The inverse hyperbolic tangent.";
    Erf         erf          Float |x| x.erf(),                         Is(|g, x, _| g * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI), "The error function.";
    Sigmoid     sigmoid      Float |x| x.sigmoid(),                     Is(|g, _, y| g * y * (1.0 - y)),                     "1 / (1 + exp(-x)).";
    LogSigmoid  log_sigmoid  Float |x| x.log_sigmoid(),                 Is(|g, x, _| g * (-x).sigmoid()),                              "log(sigmoid(x)), without overflow.";
    Softplus    softplus     Float |x| x.softplus(),                    Is(|g, x, _| g * x.sigmoid()),                                 "log(1 + exp(x)).";
    Relu        relu         Num   |x| x.maximum(Num::ZERO),            Is(|g, _, y| g.keep_where(y.gt(0.0))),               "max(x, 0).";
    Silu        silu         Float |x| x.mul(x.sigmoid()),              Is(|g, x, _| { let s = x.sigmoid(); g * s * (x * (1.0 - s) + 1.0) }), "x times sigmoid(x).";
    Mish        mish         Float |x| x.mul(x.softplus().tanh()),      Is(|g, x, _| { let t = x.softplus().tanh(); g * (t + x * x.sigmoid() * (1.0 - t * t)) }), "x times tanh(softplus(x)).";
    HardSigmoid hardsigmoid  Float |x| x.hard_sigmoid(),                Is(|g, x, _| (g / 6.0).keep_where(x.gt(-3.0)).keep_where(x.lt(3.0))), "A piecewise linear sigmoid: min(max(x + 3, 0), 6) / 6.";
    HardSwish   hardswish    Float |x| x.mul(x.hard_sigmoid()),         Is(|g, x, _| x.lt(3.0).choose((g * (x / 3.0 + 0.5)).keep_where(x.gt(-3.0)), g)), "x times hardsigmoid(x).";
    Gelu        gelu         Float |x| x.gelu(),                        Is(|g, x, _| { let cdf = ((x * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0) * 0.5; let pdf = (x * x * -0.5).exp() * 0.398_942_280_401_432_7; g * (cdf + x * pdf) }), "The Gaussian error linear unit, exact form.";
    GeluTanh    gelu_tanh    Float |x| x.gelu_tanh(),                   Is(|g, x, _| { let t = ((x + x * x * x * 0.044715) * 0.797_884_560_802_865_4).tanh(); let du = (x * x * 0.134145 + 1.0) * 0.797_884_560_802_865_4; g * ((t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * du) }), "The Gaussian error linear unit, tanh form.";
    Floor       floor        Float |x| x.floor(),                       Zero,                                                "The largest integer not above x.";
    Ceil        ceil         Float |x| x.ceil(),                        Zero,                                                "The smallest integer not below x.";
    Round       round        Float |x| x.round_even(),                  Zero,                                                "The nearest integer, halves to even.";
    Trunc       trunc        Float |x| x.trunc(),                       Zero,                                                "The integer part.";
    IsNan       isnan        Test  |x| x.nan(),                         No("the result is bool"),                            "Whether x is NaN.";
    IsInf       isinf        Test  |x| x.inf(),                         No("the result is bool"),                            "Whether x is an infinity.";
    IsFinite    isfinite     Test  |x| x.nan().or(x.inf()).not(),       No("the result is bool"),                            "Whether x is neither NaN nor an infinity.";
    Not         bitwise_not  Bits  |x| x.not(),                         No("integers have no derivative"),                   "All bits flipped; for bool, logical not.";
} } }

/// Calls the macro `$m` with the two-operand table, in the form of [`table_rows!`].
#[macro_export]
#[rustfmt::skip]
macro_rules! binary_table { ($m:ident) => { $crate::table_rows! { $m
    Add         add          Num     |a, b| a.add(b),          Is(|g, _, _, _| g, |g, _, _, _| g),                              "a + b.";
    Sub         sub          Num     |a, b| a.sub(b),          Is(|g, _, _, _| g, |g, _, _, _| -g),                             "a - b.";
    Mul         mul          Num     |a, b| a.mul(b),          Is(|g, _, b, _| g * b, |g, a, _, _| g * a),                      "a times b.";
    Div         div          Float   |a, b| a.div(b),          Is(|g, _, b, _| g / b, |g, a, b, _| -g * a / (b * b)),           "a / b. Integers are divided as f32.";
    Pow         pow          Num     |a, b| a.pow(b),          Is(|g, a, b, _| (g * b * a.pow(b - 1.0)).drop_where(b.eq(0.0)), |g, a, b, y| (g * y * a.log()).drop_where(a.eq(0.0).and(b.ge(0.0)))), "a to the power b.";
    FloorDivide floor_divide Num     |a, b| a.floor_divide(b), Zero,                                                          "a / b rounded down; an integer divided by 0 is an error.";
    Remainder   remainder    Num     |a, b| a.remainder(b),    Is(|g, _, _, _| g, |g, a, b, _| -g * a.floor_divide(b)),   "The remainder of a / b, with the sign of b.";
    Fmod        fmod         Num     |a, b| a.fmod(b),         Is(|g, _, _, _| g, |g, a, b, _| -g * (a / b).trunc()),           "The remainder of a / b, with the sign of a.";
    Maximum     maximum      Num     |a, b| a.maximum(b),      Is(|g, a, b, _| g.unless_tied(a, b, a.lt_v(b)), |g, a, b, _| g.unless_tied(a, b, b.lt_v(a))), "The larger of a and b; NaN if either is.";
    Minimum     minimum      Num     |a, b| a.minimum(b),      Is(|g, a, b, _| g.unless_tied(a, b, b.lt_v(a)), |g, a, b, _| g.unless_tied(a, b, a.lt_v(b))), "The smaller of a and b; NaN if either is.";
    Atan2       atan2        Float   |a, b| a.atan2(b),        Is(|g, a, b, _| { let r = a * a + b * b; (g * b / r).drop_where(r.eq(0.0)) }, |g, a, b, _| { let r = a * a + b * b; (-g * a / r).drop_where(r.eq(0.0)) }), "The angle of the point (b, a).";
    Eq          eq           Compare |a, b| a.equals(b),       No("the result is bool"),                                        "Whether a equals b.";
    Ne          ne           Compare |a, b| a.differs(b),      No("the result is bool"),                                        "Whether a differs from b.";
    Lt          lt           Compare |a, b| a.below(b),        No("the result is bool"),                                        "Whether a is below b.";
    Le          le           Compare |a, b| a.at_most(b),      No("the result is bool"),                                        "Whether a is at most b.";
    Gt          gt           Compare |a, b| a.above(b),        No("the result is bool"),                                        "Whether a is above b.";
    Ge          ge           Compare |a, b| a.at_least(b),     No("the result is bool"),                                        "Whether a is at least b.";
    And         bitwise_and  Bits    |a, b| a.and(b),          No("integers have no derivative"),                               "Bitwise and; for bool, logical.";
    Or          bitwise_or   Bits    |a, b| a.or(b),           No("integers have no derivative"),                               "Bitwise or; for bool, logical.";
    Xor         bitwise_xor  Bits    |a, b| a.xor(b),          No("integers have no derivative"),                               "Bitwise exclusive or; for bool, logical.";
} } }

macro_rules! define {
    ($what:ident, $grad:ident, $summary:literal; $($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: $value:expr, grad: $rule:expr })*) => {
        #[doc = $summary]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $what { $(#[doc = $doc] $variant,)* }

        impl $what {
            /// Every operation of the table, in its order.
            pub const ALL: &'static [$what] = &[$($what::$variant,)*];

            /// Its name: the tensor method, and the word in text and wire forms.
            pub const fn name(self) -> &'static str {
                match self { $($what::$variant => stringify!($name),)* }
            }

            /// The operation with this name.
            pub fn from_name(name: &str) -> Option<$what> {
                match name { $(stringify!($name) => Some($what::$variant),)* _ => None }
            }

            /// Which dtypes it takes and gives.
            pub const fn domain(self) -> Domain {
                match self { $($what::$variant => Domain::$domain,)* }
            }

            /// Its derivative.
            pub fn grad(self) -> $grad {
                #[allow(unused_imports)]
                use $grad::*;
                match self { $($what::$variant => $rule,)* }
            }

            /// One sentence on what it computes.
            pub const fn doc(self) -> &'static str {
                match self { $($what::$variant => $doc,)* }
            }
        }
    };
}

macro_rules! define_unary { ($($rows:tt)*) => { define! { Unary, Grad1, "An elementwise operation of one operand."; $($rows)* } } }
macro_rules! define_binary { ($($rows:tt)*) => { define! { Binary, Grad2, "An elementwise operation of two operands, which broadcast."; $($rows)* } } }
unary_table!(define_unary);
binary_table!(define_binary);

impl Binary {
    /// Whether an integer division may fail on its operands' values.
    pub const fn divides(self) -> bool {
        matches!(self, Binary::FloorDivide | Binary::Remainder | Binary::Fmod)
    }
}
