//! Functions of f32 without branches or tables, so that a loop which calls them becomes vector code on any instruction
//! set with the same bits on each: only IEEE operations, exact fused multiply-adds, integer operations and selections.
//! They are written for any [`Single`]: f32 itself, or what stands for lanes of f32 in code that is being generated.
//!
//! Coefficients are minimax (Remez) for the error named beside them, rounded to f32. The largest errors, in units in the
//! last place of the result, were measured against f64 over every 37th bit pattern; `tests.rs` holds them on a coarser
//! sweep. Results below the normal range are rounded like all others, never flushed. What has no entry here is libm's.

use super::{Bits, Double, Num, Single, Word};
use std::f32::consts::{FRAC_2_PI, LOG2_E};

pub use libm::{
    acosf as acos, acoshf as acosh, asinf as asin, asinhf as asinh, atan2f as atan2, atanf as atan,
    atanhf as atanh, coshf as cosh, sinhf as sinh, tanf as tan,
};

/// 1.5 · 2^23: a small number added to it is rounded to an integer, which then stands in its lowest bits.
const ROUND: f32 = 12_582_912.0;
/// The nearest to log 2, and what is missing. Both parts of n log 2 are subtracted without a rounding that matters.
const LN2: [f32; 2] = [std::f32::consts::LN_2, -1.904_654_2e-9];
/// log 2 to 15 bits, of which any exponent has an exact multiple, and the rest.
const LN2_SHORT: [f32; 2] = [0.693_145_75, 1.428_606_8e-6];
/// π/2 in three parts, each cut off rather than rounded: all are positive, so that -0 stays -0.
const FRAC_PI_2: [f32; 3] = [f32::from_bits(0x3fc9_0fda), 7.549_789_4e-8, 5.390_302_5e-15];

/// `c[0] + c[1] x + c[2] x² + …`
#[inline(always)]
fn polynomial<T: Single, const N: usize>(x: T, c: [f32; N]) -> T {
    let mut sum = T::lit(c[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        sum = sum.fma(x, T::lit(c[i]));
    }
    sum
}

/// 2^n for n in -126..=127, of which only the lowest nine bits are looked at: those of n + [`ROUND`] will do.
#[inline(always)]
fn exponent<T: Single>(n: T::Word) -> T {
    T::from_word(n.add(T::Word::lit(127)).shl(23))
}

/// x = n log 2 + r with |r| at most half of log 2: (n + [`ROUND`], r).
#[inline(always)]
fn reduce<T: Single>(x: T) -> (T, T) {
    let shifted = x.fma(T::lit(LOG2_E), T::lit(ROUND));
    let n = shifted - T::lit(ROUND);
    (shifted, n.fma(T::lit(-LN2[1]), n.fma(T::lit(-LN2[0]), x)))
}

/// x, but `top` if it is above that; a NaN stays.
#[inline(always)]
fn at_most<T: Single>(x: T, top: f32) -> T {
    T::pick(x.above(T::lit(top)), T::lit(top), x)
}

/// x, but `bottom` if it is below that; a NaN stays.
#[inline(always)]
fn at_least<T: Single>(x: T, bottom: f32) -> T {
    T::pick(x.below(T::lit(bottom)), T::lit(bottom), x)
}

/// exp(r) - 1 for |r| up to half of log 2, within 2^-31.8 of itself.
#[inline(always)]
fn small_exp_m1<T: Single>(r: T) -> T {
    let q =
        polynomial(r, [0.5, 0.166_666_66, 0.041_666_348, 0.008_333_391_5, 0.001_394_165_2, 0.000_198_459_6]);
    (r * r).fma(q, r)
}

/// exp(r) for |r| up to half of log 2, within 2^-28.
#[inline(always)]
fn small_exp<T: Single>(r: T) -> T {
    let q = polynomial(r, [0.499_999_94, 0.166_665_15, 0.041_668_456, 0.008_369_419, 0.001_381_314_5]);
    // 1 + r is rounded; what that lost is small enough to join the rest.
    let sum = T::ONE + r;
    sum + (r * r).fma(q, r - (sum - T::ONE))
}

/// e to the power x, within 0.8 ulp.
#[inline(always)]
pub fn exp<T: Single>(x: T) -> T {
    // Beyond these the result is an infinity and 0.
    let (shifted, r) = reduce(at_least(at_most(x, 89.0), -104.0));
    // In two factors, each a normal number, though the result may be none: the first product is exact.
    let n = shifted.to_word();
    let half = n.shr(1);
    // Where nothing of it remains, a 0 from the first: a product that underflows costs more than all the rest.
    let p = T::pick(x.below(T::lit(-104.0)), T::ZERO, small_exp(r));
    p * exponent(half) * exponent(n.sub(half))
}

/// exp(x) - 1, within 1.45 ulp.
#[inline(always)]
pub fn expm1<T: Single>(x: T) -> T {
    let (shifted, r) = reduce(at_least(at_most(x, 89.0), -20.0));
    let p = small_exp_m1(r);
    // Half of 2^n, because 2^128 is not a number; but half of the smallest numbers is none either.
    let half: T = exponent((shifted - T::ONE).to_word());
    let y = T::lit(2.0) * half.fma(p, half - T::lit(0.5));
    T::pick(shifted.equals(T::lit(ROUND)), p, y).copysign(x)
}

/// The hyperbolic tangent, within 1.45 ulp.
#[inline(always)]
pub fn tanh<T: Single>(x: T) -> T {
    // Below 0.625 x + x³ P(x²), within 2^-27.7; above 1 - 2z / (1 + z) with z = exp(-2|x|); from 9.02 on it is 1.
    let square = x * x;
    let p = polynomial(square, [-0.333_332_8, 0.133_314_42, -0.053_739_71, 0.020_639_08, -0.005_704_981]);
    let small = (x * square).fma(p, x);
    let a = at_most(x.abs(), 10.0);
    let (shifted, r) = reduce(T::lit(-2.0) * a);
    let z = exponent::<T>(shifted.to_word()) * small_exp(r);
    let large = T::ONE - (z + z) / (T::ONE + z);
    T::pick(a.below(T::lit(0.625)), small, large).copysign(x)
}

/// The error function, within 1.15 ulp.
#[inline(always)]
pub fn erf<T: Single>(x: T) -> T {
    // Below 0.875 x + x E(x²), within 2^-26.8; above 1 - exp(Q(|x|)), within 2^-29; from 3.92 on it is 1.
    let e = polynomial(
        x * x,
        [0.128_379_15, -0.376_125_5, 0.112_824_55, -0.026_791_463, 0.005_032_181_3, -0.000_620_325_5],
    );
    let small = x.fma(e, x);
    let a = at_most(x.abs(), 4.0);
    let q = polynomial(
        a,
        [
            -0.000_133_585,
            -1.127_936_1,
            -0.636_737_3,
            -0.104_327_425,
            0.022_420_177,
            -0.003_092_281_5,
            0.000_200_995_08,
        ],
    );
    let (shifted, r) = reduce(q);
    let large = exponent::<T>(shifted.to_word()).neg().fma(small_exp(r), T::ONE);
    T::pick(a.below(T::lit(0.875)), small, large.copysign(x))
}

/// A positive finite x as (e, m - 1): x = 2^e m, with m from √½ to √2.
#[inline(always)]
fn split<T: Single>(x: T) -> (T, T) {
    let tiny = x.below(T::lit(f32::MIN_POSITIVE));
    let bits = T::pick(tiny, x * T::lit(8_388_608.0), x).to_word();
    let above = bits.sub(T::Word::lit(std::f32::consts::FRAC_1_SQRT_2.to_bits()));
    let e = T::of_signed(above.sar(23)) - T::pick(tiny, T::lit(23.0), T::ZERO);
    let m = T::from_word(bits.sub(above.and(T::Word::lit(0xff80_0000))));
    (e, m - T::ONE)
}

/// e log 2 + log(1 + f), from its own relative error of 2^-27.3 on where e is 0.
#[inline(always)]
fn ln_of_parts<T: Single>(e: T, f: T) -> T {
    let p = polynomial(
        f,
        [
            0.333_333_3,
            -0.250_008_2,
            0.200_012_27,
            -0.166_233_57,
            0.142_017_54,
            -0.131_601_78,
            0.127_615_94,
            -0.076_345_28,
        ],
    );
    let rest = (f * f).fma(f.fma(p, T::lit(-0.5)), e * T::lit(LN2_SHORT[1]));
    e.fma(T::lit(LN2_SHORT[0]), f + rest)
}

/// A logarithm's value `y` where x is positive and finite, else what it must be.
#[inline(always)]
fn edges<T: Single>(x: T, y: T) -> T {
    let zero = T::pick(x.equals(T::ZERO), T::lit(f32::NEG_INFINITY), T::lit(f32::NAN));
    let y = T::pick(x.above(T::ZERO), y, zero);
    T::pick(x.below(T::lit(f32::INFINITY)), y, x)
}

/// The natural logarithm, within 0.9 ulp.
#[inline(always)]
pub fn log<T: Single>(x: T) -> T {
    let (e, f) = split(x);
    edges(x, ln_of_parts(e, f))
}

/// log(1 + x), within 1.5 ulp.
#[inline(always)]
pub fn log1p<T: Single>(x: T) -> T {
    let u = T::ONE + x;
    let big = u - T::ONE;
    // What the sum lost, exactly (Knuth); it joins the fraction at its scale.
    let lost = (T::ONE - (u - big)) + (x - big);
    let (e, f) = split(u);
    let scale = exponent((T::lit(ROUND) - at_most(e, 126.0)).to_word());
    edges(u, ln_of_parts(e, lost.fma(scale, f))).copysign(x)
}

/// The logarithm to base 2, within 1 ulp; that of a power of two is exact.
#[inline(always)]
pub fn log2<T: Single>(x: T) -> T {
    // log2(1 + f) is f times log2 e, of which the nearest f32 is split off, and the rest, within 2^-27.8.
    let (e, f) = split(x);
    let p = polynomial(
        f,
        [
            1.920_041_5e-8,
            -0.721_347_33,
            0.480_898_23,
            -0.360_696_64,
            0.288_567_4,
            -0.239_617_39,
            0.204_600_69,
            -0.191_062_93,
            0.186_174_62,
            -0.109_948_75,
        ],
    );
    edges(x, e + f.fma(T::lit(LOG2_E), f * p))
}

/// Below this in magnitude sine and cosine are [`sin_near`] and [`cos_near`]; from it on they are libm's, which reduces
/// by as many digits of π as it takes.
pub const NEAR: f32 = 131_072.0;

/// The sine, within 1.6 ulp.
#[inline(always)]
pub fn sin(x: f32) -> f32 {
    if x.abs() >= NEAR { libm::sinf(x) } else { sin_near(x) }
}

/// The cosine, within 1.6 ulp.
#[inline(always)]
pub fn cos(x: f32) -> f32 {
    if x.abs() >= NEAR { libm::cosf(x) } else { cos_near(x) }
}

/// The sine of a number below [`NEAR`] in magnitude.
#[inline(always)]
pub fn sin_near<T: Single>(x: T) -> T {
    wave(x, 0)
}

/// The cosine of a number below [`NEAR`] in magnitude.
#[inline(always)]
pub fn cos_near<T: Single>(x: T) -> T {
    wave(x, 1)
}

/// The sine of x and `quarters` right angles.
#[inline(always)]
fn wave<T: Single>(x: T, quarters: u32) -> T {
    let shifted = x.fma(T::lit(FRAC_2_PI), T::lit(ROUND));
    let n = (shifted - T::lit(ROUND)).neg();
    // The first difference is exact: both sides are multiples of 2^-23 below 1.
    let r = n.fma(T::lit(FRAC_PI_2[0]), x);
    let r = n.fma(T::lit(FRAC_PI_2[2]), n.fma(T::lit(FRAC_PI_2[1]), r));
    let square = r * r;
    // Within 2^-27.8 and 2^-33.
    let s = polynomial(square, [-0.166_666_54, 0.008_332_113, -0.000_195_087_41]);
    let c = polynomial(square, [0.041_666_646, -0.001_388_730_6, 0.000_024_431_205]);
    let s = (r * square).fma(s, r).copysign(r);
    let c = square.fma(square.fma(c, T::lit(-0.5)), T::ONE);
    let quarter = shifted.to_word().add(T::Word::lit(quarters));
    let y = T::pick(quarter.is_even(), s, c);
    T::from_word(y.to_word().xor(quarter.and(T::Word::lit(2)).shl(30)))
}

/// a to the power b, within 0.51 ulp, by logarithm and power in f64; edges as in C.
#[inline(always)]
pub fn pow<T: Single>(a: T, b: T) -> T {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // Within 2^-38.4 of itself.
    const LOG2: [f64; 14] = [
        1.4426950408865715,
        -0.7213475203273897,
        0.4808983488049353,
        -0.36067379317509146,
        0.28853879552721334,
        -0.2404464310304671,
        0.20610712877939347,
        -0.1804368222109381,
        0.16021663243550027,
        -0.14249774752358932,
        0.13027505655626473,
        -0.13463335225141376,
        0.1325175709702058,
        -0.06973914048279253,
    ];
    // Within 2^-34.5 of itself for half an exponent either way.
    const EXP2: [f64; 8] = [
        0.9999999999613807,
        0.6931471807298147,
        0.24022651201127326,
        0.0555041035028196,
        0.009618026851269706,
        0.0013333924109917323,
        0.00015469421335224424,
        1.520179731165458e-05,
    ];

    let number = T::Double::lit;
    let choose = T::Double::choose;
    let (size, wide) = (a.abs(), b.widen());
    let (e, f) = split(size);
    let (e, f) = (e.widen(), f.widen());
    let log = f.fused(wide_polynomial(f, LOG2), e);
    let log = choose(size.equals(T::ZERO), number(f64::NEG_INFINITY), log);
    let log = choose(size.below(T::lit(f32::INFINITY)), log, size.widen());
    let t = wide * log;
    let t = choose(number(200.0).less(t), number(200.0), t);
    let t = choose(t.less(number(-200.0)), number(-200.0), t);
    let shifted = t + number(ROUND);
    let y = (wide_polynomial(t - (shifted - number(ROUND)), EXP2) * shifted.power()).narrow();

    // From 2^24 on every number is even.
    let even = b.abs().at_least(T::lit(16_777_216.0));
    let shifted = wide + number(ROUND);
    let whole = even.or((shifted - number(ROUND)).same(wide));
    let odd = even.not().and(whole).and(shifted.is_odd());
    let y = T::pick(odd, y.copysign(a), y);
    let rooted = a.below(T::ZERO).and(size.below(T::lit(f32::INFINITY))).and(whole.not());
    let y = T::pick(rooted, T::lit(f32::NAN), y);
    let turned = a.equals(T::lit(-1.0)).and(b.abs().equals(T::lit(f32::INFINITY)));
    T::pick(b.equals(T::ZERO).or(a.equals(T::ONE)).or(turned), T::ONE, y)
}

#[inline(always)]
fn wide_polynomial<T: Double, const N: usize>(x: T, c: [f64; N]) -> T {
    let mut sum = T::lit(c[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        sum = sum.fused(x, T::lit(c[i]));
    }
    sum
}
