//! Functions of f32 without branches or tables, so that a loop which calls them becomes vector code on any instruction
//! set with the same bits on each: only IEEE operations, exact fused multiply-adds, integer operations and selections.
//!
//! Coefficients are minimax (Remez) for the error named beside them, rounded to f32. The largest errors, in units in the
//! last place of the result, were measured against f64 over every 37th bit pattern; `tests.rs` holds them on a coarser
//! sweep. Results below the normal range are rounded like all others, never flushed. What has no entry here is libm's.

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
fn polynomial<const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut sum = c[N - 1];
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        sum = sum.mul_add(x, c[i]);
    }
    sum
}

/// 2^n for n in -126..=127, of which only the lowest nine bits are looked at: those of n + [`ROUND`] will do.
#[inline(always)]
fn exponent(n: u32) -> f32 {
    f32::from_bits(n.wrapping_add(127) << 23)
}

/// x = n log 2 + r with |r| at most half of log 2: (n + [`ROUND`], r).
#[inline(always)]
fn reduce(x: f32) -> (f32, f32) {
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    (shifted, n.mul_add(-LN2[1], n.mul_add(-LN2[0], x)))
}

/// exp(r) - 1 for |r| up to half of log 2, within 2^-31.8 of itself.
#[inline(always)]
fn small_exp_m1(r: f32) -> f32 {
    let q =
        polynomial(r, [0.5, 0.166_666_66, 0.041_666_348, 0.008_333_391_5, 0.001_394_165_2, 0.000_198_459_6]);
    (r * r).mul_add(q, r)
}

/// exp(r) for |r| up to half of log 2, within 2^-28.
#[inline(always)]
fn small_exp(r: f32) -> f32 {
    let q = polynomial(r, [0.499_999_94, 0.166_665_15, 0.041_668_456, 0.008_369_419, 0.001_381_314_5]);
    // 1 + r is rounded; what that lost is small enough to join the rest.
    let sum = 1.0 + r;
    sum + (r * r).mul_add(q, r - (sum - 1.0))
}

/// e to the power x, within 0.8 ulp.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is an infinity and 0.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let (shifted, r) = reduce(x);
    // In two factors, each a normal number, though the result may be none: the first product is exact.
    let n = shifted.to_bits();
    let half = n >> 1;
    small_exp(r) * exponent(half) * exponent(n.wrapping_sub(half))
}

/// exp(x) - 1, within 1.45 ulp.
#[inline(always)]
pub fn expm1(x: f32) -> f32 {
    let bounded = if x > 89.0 { 89.0 } else { x };
    let bounded = if bounded < -20.0 { -20.0 } else { bounded };
    let (shifted, r) = reduce(bounded);
    let p = small_exp_m1(r);
    // Half of 2^n, because 2^128 is not a number; but half of the smallest numbers is none either.
    let half = exponent((shifted - 1.0).to_bits());
    let y = 2.0 * half.mul_add(p, half - 0.5);
    (if shifted == ROUND { p } else { y }).copysign(x)
}

/// The hyperbolic tangent, within 1.45 ulp.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // Below 0.625 x + x³ P(x²), within 2^-27.7; above 1 - 2z / (1 + z) with z = exp(-2|x|); from 9.02 on it is 1.
    let square = x * x;
    let p = polynomial(square, [-0.333_332_8, 0.133_314_42, -0.053_739_71, 0.020_639_08, -0.005_704_981]);
    let small = (x * square).mul_add(p, x);
    let a = x.abs();
    let a = if a > 10.0 { 10.0 } else { a };
    let (shifted, r) = reduce(-2.0 * a);
    let z = exponent(shifted.to_bits()) * small_exp(r);
    let large = 1.0 - (z + z) / (1.0 + z);
    (if a < 0.625 { small } else { large }).copysign(x)
}

/// The error function, within 1.15 ulp.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    // Below 0.875 x + x E(x²), within 2^-26.8; above 1 - exp(Q(|x|)), within 2^-29; from 3.92 on it is 1.
    let e = polynomial(
        x * x,
        [0.128_379_15, -0.376_125_5, 0.112_824_55, -0.026_791_463, 0.005_032_181_3, -0.000_620_325_5],
    );
    let small = x.mul_add(e, x);
    let a = x.abs();
    let a = if a > 4.0 { 4.0 } else { a };
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
    let large = (-exponent(shifted.to_bits())).mul_add(small_exp(r), 1.0);
    if a < 0.875 { small } else { large.copysign(x) }
}

/// A positive finite x as (e, m - 1): x = 2^e m, with m from √½ to √2.
#[inline(always)]
fn split(x: f32) -> (f32, f32) {
    let tiny = x < f32::MIN_POSITIVE;
    let bits = (if tiny { x * 8_388_608.0 } else { x }).to_bits();
    let above = bits.wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits()) as i32;
    let e = (above >> 23) as f32 - if tiny { 23.0 } else { 0.0 };
    let m = f32::from_bits(bits.wrapping_sub((above as u32) & 0xff80_0000));
    (e, m - 1.0)
}

/// e log 2 + log(1 + f), from its own relative error of 2^-27.3 on where e is 0.
#[inline(always)]
fn ln_of_parts(e: f32, f: f32) -> f32 {
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
    let rest = (f * f).mul_add(f.mul_add(p, -0.5), e * LN2_SHORT[1]);
    e.mul_add(LN2_SHORT[0], f + rest)
}

/// A logarithm's value `y` where x is positive and finite, else what it must be.
#[inline(always)]
fn edges(x: f32, y: f32) -> f32 {
    let zero = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    let y = if x > 0.0 { y } else { zero };
    if x < f32::INFINITY { y } else { x }
}

/// The natural logarithm, within 0.9 ulp.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let (e, f) = split(x);
    edges(x, ln_of_parts(e, f))
}

/// log(1 + x), within 1.5 ulp.
#[inline(always)]
pub fn log1p(x: f32) -> f32 {
    let u = 1.0 + x;
    let big = u - 1.0;
    // What the sum lost, exactly (Knuth); it joins the fraction at its scale.
    let lost = (1.0 - (u - big)) + (x - big);
    let (e, f) = split(u);
    let scale = exponent((ROUND - if e > 126.0 { 126.0 } else { e }).to_bits());
    edges(u, ln_of_parts(e, lost.mul_add(scale, f))).copysign(x)
}

/// The logarithm to base 2, within 1 ulp; that of a power of two is exact.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
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
    edges(x, e + f.mul_add(LOG2_E, f * p))
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
pub fn sin_near(x: f32) -> f32 {
    wave(x, 0)
}

/// The cosine of a number below [`NEAR`] in magnitude.
#[inline(always)]
pub fn cos_near(x: f32) -> f32 {
    wave(x, 1)
}

/// The sine of x and `quarters` right angles.
#[inline(always)]
fn wave(x: f32, quarters: u32) -> f32 {
    let shifted = x.mul_add(FRAC_2_PI, ROUND);
    let n = -(shifted - ROUND);
    // The first difference is exact: both sides are multiples of 2^-23 below 1.
    let r = n.mul_add(FRAC_PI_2[2], n.mul_add(FRAC_PI_2[1], n.mul_add(FRAC_PI_2[0], x)));
    let square = r * r;
    // Within 2^-27.8 and 2^-33.
    let s = polynomial(square, [-0.166_666_54, 0.008_332_113, -0.000_195_087_41]);
    let c = polynomial(square, [0.041_666_646, -0.001_388_730_6, 0.000_024_431_205]);
    let s = (r * square).mul_add(s, r).copysign(r);
    let c = square.mul_add(square.mul_add(c, -0.5), 1.0);
    let quarter = shifted.to_bits().wrapping_add(quarters);
    let y = if quarter & 1 == 0 { s } else { c };
    f32::from_bits(y.to_bits() ^ ((quarter & 2) << 30))
}

/// a to the power b, within 0.51 ulp, by logarithm and power in f64; edges as in C.
#[inline(always)]
pub fn pow(a: f32, b: f32) -> f32 {
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

    let (size, wide) = (a.abs(), b as f64);
    let (e, f) = split(size);
    let log = (f as f64).mul_add(wide_polynomial(f as f64, LOG2), e as f64);
    let log = if size == 0.0 { f64::NEG_INFINITY } else { log };
    let log = if size < f32::INFINITY { log } else { size as f64 };
    let t = wide * log;
    let t = if t > 200.0 { 200.0 } else { t };
    let t = if t < -200.0 { -200.0 } else { t };
    let shifted = t + ROUND;
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let y = (wide_polynomial(t - (shifted - ROUND), EXP2) * power) as f32;

    // From 2^24 on every number is even.
    let even = b.abs() >= 16_777_216.0;
    let shifted = wide + ROUND;
    let whole = even | (shifted - ROUND == wide);
    let odd = !even & whole & (shifted.to_bits() & 1 == 1);
    let y = if odd { y.copysign(a) } else { y };
    let y = if (a < 0.0) & (size < f32::INFINITY) & !whole { f32::NAN } else { y };
    if (b == 0.0) | (a == 1.0) | ((a == -1.0) & (b.abs() == f32::INFINITY)) { 1.0 } else { y }
}

#[inline(always)]
fn wide_polynomial<const N: usize>(x: f64, c: [f64; N]) -> f64 {
    let mut sum = c[N - 1];
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        sum = sum.mul_add(x, c[i]);
    }
    sum
}
