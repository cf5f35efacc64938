use super::single::{self, NEAR};
use super::*;
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_PI_2, PI, SQRT_2, TAU};

#[test]
fn integer_edges_are_defined() {
    assert_eq!((-7i32).floor_divide(2), -4);
    assert_eq!((-7i32).remainder(2), 1);
    assert_eq!((-7i32).fmod(2), -1);
    assert_eq!(i64::MIN.divides(-1), Err(DivideError::Overflow));
    assert_eq!(5u8.divides(0), Err(DivideError::ByZero));
    assert_eq!(5u8.divides(255), Ok(()));
    assert_eq!(Num::pow(2i32, -1), 0);
    assert_eq!(Num::pow(-1i32, -3), -1);
    assert_eq!(Num::abs(i8::MIN), i8::MIN);
}

#[test]
fn maximum_propagates_nan() {
    assert!(Num::maximum(f32::NAN, 1.0).nan() && Num::maximum(1f32, f32::NAN).nan());
    assert!(Num::minimum(f64::NAN, 1.0).nan() && Num::minimum(1f64, f64::NAN).nan());
}

/// |got - want| in units in the last place of an f32 of want's size; 0 if both are NaN or round to one f32.
fn ulps(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if got.to_bits() == rounded.to_bits() || (got.is_nan() && want.is_nan()) {
        return 0.0;
    }
    // What overflows is measured as if the range went on.
    let got = if got.is_infinite() { 2f64.powi(128).copysign(got as f64) } else { got as f64 };
    let exponent = ((want.abs().to_bits() >> 52) as i32 - 1023).clamp(-126, 127);
    let error = (got - want).abs() / 2f64.powi(exponent - 23);
    if error.is_nan() || (got == 0.0 && want == 0.0) { f64::INFINITY } else { error }
}

/// Every `step`th bit pattern, and those around edges and roots.
fn sweep(step: usize) -> impl Iterator<Item = f32> {
    let edges = [
        0.0,
        f32::MIN_POSITIVE,
        1e-45,
        1.0,
        0.5,
        0.875,
        2.0,
        4.0,
        9.02,
        10.0,
        20.0,
        87.33,
        88.02,
        88.72,
        89.0,
        103.28,
        103.97,
        104.0,
        1.618,
        FRAC_1_SQRT_2,
        SQRT_2,
        NEAR,
        16_777_216.0,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        0.346_573_6,
        1.039_720_8,
        PI,
        FRAC_PI_2,
        TAU,
        22.0,
        355.0,
        710.0,
        104_348.0,
    ];
    let near = edges
        .into_iter()
        .flat_map(|x: f32| (-300..300).map(move |d| f32::from_bits(x.to_bits().wrapping_add_signed(d))));
    let near = near.flat_map(|x| [x, -x]);
    near.chain((0..1usize << 32).step_by(step).map(|bits| f32::from_bits(bits as u32)))
}

/// The largest error over a sweep, and where.
fn worst(f: fn(f32) -> f32, exact: fn(f64) -> f64, step: usize, within: f32) -> (f64, f32) {
    let points = sweep(step).filter(|x| x.is_nan() || x.abs() <= within);
    points.map(|x| (ulps(f(x), exact(x as f64)), x)).fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
}

type Case = (&'static str, fn(f32) -> f32, fn(f64) -> f64, f64);

const FUNCTIONS: &[Case] = &[
    ("exp", single::exp, libm::exp, 0.8),
    ("expm1", single::expm1, libm::expm1, 1.45),
    ("log", single::log, libm::log, 0.9),
    ("log1p", single::log1p, libm::log1p, 1.5),
    ("log2", single::log2, libm::log2, 1.0),
    ("tanh", single::tanh, libm::tanh, 1.45),
    ("erf", single::erf, libm::erf, 1.15),
    ("sigmoid", Float::sigmoid, Float::sigmoid, 1.6),
    ("sin", single::sin, libm::sin, 1.6),
    ("cos", single::cos, libm::cos, 1.6),
];

/// How densely the functions are tried: `KILN_SWEEP=37` takes a minute.
fn step() -> usize {
    kiln_env::SWEEP.get().unwrap_or(4001)
}

#[test]
fn errors_are_as_stated() {
    for &(name, f, exact, bound) in FUNCTIONS {
        let (error, at) = worst(f, exact, step(), f32::INFINITY);
        println!("{name}: {error:.3} ulp at {at:e}");
        assert!(error <= bound, "{name}({at:e}) is {:e}, {error:.2} ulp off {:e}", f(at), exact(at as f64));
    }
}

#[test]
fn powers_are_nearly_exact_and_have_the_edges_of_c() {
    let bases = [
        0.0,
        1e-45,
        1e-40,
        1e-30,
        0.1,
        0.5,
        0.999_999_9,
        1.0,
        1.000_000_1,
        1.5,
        2.0,
        3.0,
        10.0,
        1e10,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
    ];
    let exponents = [
        0.0,
        1e-45,
        0.1,
        0.5,
        1.0,
        1.5,
        2.0,
        3.0,
        4.0,
        7.0,
        10.5,
        126.0,
        150.0,
        16_777_215.0,
        16_777_216.0,
        1e9,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
    ];
    let both = |x: f32| [x, -x];
    for a in bases.into_iter().flat_map(both) {
        for b in exponents.into_iter().flat_map(both) {
            let (got, want) = (single::pow(a, b), libm::pow(a as f64, b as f64));
            let signs = got.is_nan() || got.is_sign_negative() == want.is_sign_negative();
            assert!(signs && ulps(got, want) <= 0.6, "{a:e} to {b:e} is {got:e}, not {want:e}");
        }
    }
    let (mut error, mut at) = (0.0, (0.0, 0.0));
    for (i, a) in sweep(step()).enumerate() {
        let b = [2.0, 3.0, -1.0, 0.5, -0.5, 1.7, 11.3, -40.0, 0.01][i % 9];
        let found = ulps(single::pow(a, b), libm::pow(a as f64, b as f64));
        if found > error {
            (error, at) = (found, (a, b));
        }
    }
    println!("pow: {error:.3} ulp at {at:?}");
    assert!(error <= 0.51, "{error} ulp at {at:?}");
}

#[test]
fn small_integers_and_squares_are_exact() {
    for x in 1..=4096 {
        let x = x as f32;
        assert_eq!(Num::pow(x, 2.0), x * x);
        assert_eq!(Num::pow(x, 1.0), x);
        assert_eq!(Num::pow(x * x, 0.5), x);
    }
    for n in -149..128 {
        assert_eq!(Float::log2(2f64.powi(n) as f32), n as f32);
        assert_eq!(Num::pow(2f32, n as f32), 2f64.powi(n) as f32);
    }
}

/// Functions made of the above, absolutely near where they are sums that cancel.
#[test]
fn compositions_stay_near() {
    let cases: [Case; 6] = [
        ("softplus", Float::softplus, Float::softplus, 3.0),
        ("log_sigmoid", Float::log_sigmoid, Float::log_sigmoid, 3.0),
        ("gelu", Float::gelu, Float::gelu, 4.0),
        ("gelu_tanh", Float::gelu_tanh, Float::gelu_tanh, 4.0),
        ("silu", |x| Num::mul(x, Float::sigmoid(x)), |x| Num::mul(x, Float::sigmoid(x)), 3.0),
        (
            "mish",
            |x| Num::mul(x, Float::tanh(Float::softplus(x))),
            |x| Num::mul(x, Float::tanh(Float::softplus(x))),
            4.0,
        ),
    ];
    for (name, f, exact, bound) in cases {
        for x in sweep(40_009).filter(|x| x.abs() < 80.0) {
            let (got, want) = (f(x) as f64, exact(x as f64));
            let near =
                (got - want).abs() <= bound * 2f64.powi(-24) * want.abs().max((x as f64).abs().min(1.0));
            assert!(near || ulps(got as f32, want) <= bound, "{name}({x:e}) is {got:e}, not {want:e}");
        }
    }
}
