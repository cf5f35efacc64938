//! Elementwise functions of one operand that are composed of the tables': powers of 2, the error function's kin, the gamma
//! function's logarithm and its derivatives. Integers become f32; half-precision floats are computed in f32 and rounded once.

use crate::{DType, Tensor, custom_grad, no_grad};
use kiln_device::method;
use std::f64::consts::{FRAC_2_SQRT_PI, LOG10_E, PI};

/// # Elementwise: special functions
impl Tensor {
    /// 2 to the power x.
    #[track_caller]
    pub fn exp2(&self) -> Tensor {
        let _method = method("exp2");
        let (x, dtype) = real(self);
        x.constant(2).pow(&x).to_dtype(dtype)
    }

    /// The logarithm to base 10.
    #[track_caller]
    pub fn log10(&self) -> Tensor {
        let _method = method("log10");
        let (x, dtype) = real(self);
        (x.log() * LOG10_E).to_dtype(dtype)
    }

    /// `1 - erf(x)`, exact where that is small.
    #[track_caller]
    pub fn erfc(&self) -> Tensor {
        let _method = method("erfc");
        let (x, dtype) = real(self);
        let y = no_grad(|| erfc(&x.detach()));
        let at = x.clone();
        let y = custom_grad(&[&x], y, move |g| vec![Some(g * (-at.square()).exp() * -FRAC_2_SQRT_PI)]);
        y.to_dtype(dtype)
    }

    /// The number whose [`Tensor::erf`] is x; infinite at -1 and 1, NaN outside.
    #[track_caller]
    pub fn erfinv(&self) -> Tensor {
        let _method = method("erfinv");
        let (x, dtype) = real(self);
        let y = no_grad(|| erfinv(&x.detach()));
        let at = x.clone();
        // Computed again there, so that it can be differentiated again.
        let slope = move |g: &Tensor| vec![Some(g * at.erfinv().square().exp() * (1.0 / FRAC_2_SQRT_PI))];
        custom_grad(&[&x], y, slope).to_dtype(dtype)
    }

    /// The logarithm of the gamma function's size.
    #[doc(alias("gammaln"))]
    #[track_caller]
    pub fn lgamma(&self) -> Tensor {
        let _method = method("lgamma");
        let (x, dtype) = real(self);
        let x = x.to_dtype(DType::F64);
        let y = no_grad(|| lgamma(&x.detach()));
        let at = x.clone();
        custom_grad(&[&x], y, move |g| vec![Some(g * digamma(&at))]).to_dtype(dtype)
    }

    /// The derivative of [`Tensor::lgamma`]; NaN at the negative integers, infinite at 0.
    #[doc(alias("psi"))]
    #[track_caller]
    pub fn digamma(&self) -> Tensor {
        let _method = method("digamma");
        let (x, dtype) = real(self);
        digamma(&x.to_dtype(DType::F64)).to_dtype(dtype)
    }

    /// `log(x / (1 - x))`, the inverse of the sigmoid. With `eps`, x is held between that and `1 - eps` first.
    #[track_caller]
    pub fn logit(&self, eps: Option<f64>) -> Tensor {
        let _method = method("logit");
        let (x, dtype) = real(self);
        let x = match eps {
            Some(eps) => x.clamp(Some(eps), Some(1.0 - eps)),
            None => x,
        };
        (&x / (1.0 - &x)).log().to_dtype(dtype)
    }

    /// `sin(πx) / (πx)`, and 1 at 0.
    #[track_caller]
    pub fn sinc(&self) -> Tensor {
        let _method = method("sinc");
        let (x, dtype) = real(self);
        let turn = &x * PI;
        // Near 0 the series: there the quotient's derivative is a difference of large numbers.
        let near = turn.abs().lt(1);
        let far = turn.masked_fill(&near, 1);
        let series = polynomial(&turn.masked_fill(&near.logical_not(), 0).square(), &SINC);
        near.where_(&series, &(far.sin() / far)).to_dtype(dtype)
    }

    /// `x * log(other)`, and 0 where x is 0 but `other` not NaN.
    #[track_caller]
    pub fn xlogy(&self, other: &Tensor) -> Tensor {
        let _method = method("xlogy");
        let beside = other.le(0).bitwise_or(other.isinf());
        let zero = self.eq(0).bitwise_and(beside);
        self * zero.where_(&other.full_like(1), other).log()
    }
}

/// x as a float of at least 32 bits, and the dtype of the result.
#[track_caller]
fn real(x: &Tensor) -> (Tensor, DType) {
    let dtype = x.dtype().unpacked();
    let dtype = if dtype.is_float() { dtype } else { DType::F32 };
    (x.to_dtype(dtype).widened(), dtype)
}

/// `c[0] + c[1] x + ...`.
#[track_caller]
fn polynomial(x: &Tensor, c: &[f64]) -> Tensor {
    let mut terms = c.iter().rev();
    let mut sum = x.constant(terms.next().copied().unwrap_or(0.0));
    for &term in terms {
        sum = sum * x + term;
    }
    sum
}

/// Of `sin(x) / x`, by powers of x².
const SINC: [f64; 9] = [
    1.0,
    -1.0 / 6.0,
    1.0 / 120.0,
    -1.0 / 5040.0,
    1.0 / 362_880.0,
    -1.0 / 39_916_800.0,
    1.0 / 6_227_020_800.0,
    -1.0 / 1_307_674_368_000.0,
    1.0 / 355_687_428_096_000.0,
];

/// Chebyshev coefficients of `erfc(x) exp(x²)` for x of at least 0, over `4 / (2 + x) - 1`.
const ERFC: [f64; 24] = [
    0.377_376_099_625_959_47,
    0.482_509_119_650_680_7,
    0.122_324_595_330_977_04,
    0.017_831_149_719_276_793,
    0.000_321_173_652_494_398_35,
    -0.000_350_395_256_479_615_7,
    -2.243_880_650_620_326e-5,
    1.053_743_311_935_606_4e-5,
    5.671_331_132_647_553e-7,
    -4.297_681_576_665_876e-7,
    5.104_952_512_865_141e-9,
    1.889_969_931_817_960_6e-8,
    -2.242_755_529_856_193e-9,
    -6.855_254_370_550_185e-10,
    2.148_795_952_573_399_3e-10,
    5.515_409_718_485_674e-12,
    -1.347_749_504_806_345_3e-11,
    2.086_389_467_210_599_7e-12,
    4.481_881_445_148_597e-13,
    -2.268_417_577_787_565e-13,
    1.850_586_751_974_842_7e-14,
    1.150_961_139_754_772e-14,
    -4.009_890_147_071_25e-15,
    1.398_284_570_577_713e-16,
];

#[track_caller]
fn erfc(x: &Tensor) -> Tensor {
    let (terms, split) = if x.dtype() == DType::F64 { (24, 134_217_729.0) } else { (12, 4097.0) };
    // Beyond this the result is 0, and products of infinities would be NaN.
    let size = x.abs().minimum(40.0);
    let t = 4.0 / (&size + 2.0) - 1.0;
    let twice = &t * 2.0;
    let (mut sum, mut before) = (x.constant(ERFC[terms - 1]), x.constant(0.0));
    for &c in ERFC[1..terms - 1].iter().rev() {
        (sum, before) = (&twice * &sum - before + c, sum);
    }
    sum = &t * sum - before + ERFC[0];
    // exp(-x²) with the square in two parts, the first of which is exact.
    let shifted = &size * split;
    let high = &shifted - (&shifted - &size);
    let low = (&size - &high) * (&size + &high);
    let positive = sum * (-high.square()).exp() * (-low).exp();
    x.lt(0).where_(&(2.0 - &positive), &positive)
}

/// Coefficients by M. Giles: of `w - 2.5` below 5, of `sqrt(w) - 3` above, with `w = -log(1 - x²)`.
const NEAR: [f64; 9] = [
    1.501_409_41,
    0.246_640_727,
    -0.004_177_681_64,
    -0.001_253_725_03,
    0.000_218_580_87,
    -4.391_506_54e-6,
    -3.523_387_7e-6,
    3.432_739_39e-7,
    2.810_226_36e-8,
];
const FAR: [f64; 9] = [
    2.832_976_82,
    1.001_674_06,
    0.009_438_870_47,
    -0.007_622_461_3,
    0.005_739_507_73,
    -0.003_673_428_44,
    0.001_349_343_22,
    0.000_100_950_558,
    -0.000_200_214_257,
];

#[track_caller]
fn erfinv(x: &Tensor) -> Tensor {
    let size = x.abs();
    let w = -((1.0 - &size) * (&size + 1.0)).log();
    let near = polynomial(&(&w - 2.5), &NEAR);
    let far = polynomial(&(w.maximum(5.0).sqrt() - 3.0), &FAR);
    let mut y = w.lt(5).where_(&near, &far) * x;
    if x.dtype() == DType::F64 {
        // The polynomials are good to seven digits; each step of Newton's method doubles them.
        for _ in 0..2 {
            let slope = (-y.square()).exp() * FRAC_2_SQRT_PI;
            y = &y - (y.erf() - x) / slope;
        }
    }
    let edge = x.sign() * f64::INFINITY;
    size.eq(1).where_(&edge, &size.gt(1).where_(&x.full_like(f64::NAN), &y))
}

/// Stirling's series from 8 on; smaller numbers are moved there by the recurrence, and those below 1/2 mirrored first.
#[track_caller]
fn lgamma(x: &Tensor) -> Tensor {
    const SERIES: [f64; 7] = [
        1.0 / 12.0,
        -1.0 / 360.0,
        1.0 / 1260.0,
        -1.0 / 1680.0,
        1.0 / 1188.0,
        -691.0 / 360_360.0,
        1.0 / 156.0,
    ];
    let mirrored = x.lt(0.5);
    let z = mirrored.where_(&(1.0 - x), x);
    let small = z.lt(8);
    let low = z.masked_fill(&small.logical_not(), 1);
    let mut product = low.clone();
    for k in 1..8 {
        product = product * (&low + k);
    }
    let w = small.where_(&(&z + 8), &z);
    let inverse = w.reciprocal();
    let series = &inverse * polynomial(&inverse.square(), &SERIES);
    let log = (&w - 0.5) * w.log() - &w + (0.5 * (2.0 * PI).ln()) + series;
    let y = log - product.log().masked_fill(&small.logical_not(), 0);
    let turn = (x - x.floor()) * PI;
    let y = mirrored.where_(&((PI / turn.sin()).log() - &y), &y);
    y.masked_fill(&x.isinf(), f64::INFINITY)
}

/// The asymptotic series from 8 on, moved and mirrored as in [`lgamma`]: sums and quotients, so that it has derivatives of
/// every order.
#[track_caller]
fn digamma(x: &Tensor) -> Tensor {
    const SERIES: [f64; 7] =
        [1.0 / 12.0, -1.0 / 120.0, 1.0 / 252.0, -1.0 / 240.0, 1.0 / 132.0, -691.0 / 32_760.0, 1.0 / 12.0];
    let mirrored = x.lt(0.5);
    let z = mirrored.where_(&(1.0 - x), x);
    let mut moved = z.reciprocal();
    for k in 1..8 {
        moved = moved + (&z + k).reciprocal();
    }
    let w = &z + 8;
    let inverse = w.reciprocal();
    let square = inverse.square();
    let y = w.log() - &inverse * 0.5 - &square * polynomial(&square, &SERIES) - moved;
    let whole = x.eq(x.floor());
    let turn = (x - x.detach().floor()).masked_fill(&whole, 0.5) * PI;
    let y = mirrored.where_(&(&y - PI / turn.tan()), &y);
    let zero = x.eq(0);
    let pole = whole.bitwise_and(x.lt(0));
    let edge = -x.detach().reciprocal();
    zero.where_(&edge, &y.masked_fill(&pole, f64::NAN))
}
