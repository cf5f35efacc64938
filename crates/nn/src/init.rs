//! Initial values of parameters, under PyTorch's names. Each function gives a new parameter, f32, in the device's
//! long-lived memory; a layer's fields are public, so `layer.weight = init::kaiming_normal(..)` is how one is replaced.

use kiln_tensor::{DType, Device, Shape, Tensor};
use std::f64::consts::SQRT_2;

/// Which side of a weight counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fan {
    /// Numbers that go into one result: keeps the variance of results.
    #[default]
    In,
    /// Results that one number goes into: keeps the variance of gradients.
    Out,
}

/// What comes after a weight.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Nonlinearity {
    /// Nothing, or a convolution's sum.
    Linear,
    /// A sigmoid.
    Sigmoid,
    /// A tanh.
    Tanh,
    /// A ReLU.
    Relu,
    /// A leaky ReLU with this slope.
    LeakyRelu(f64),
    /// A SELU.
    Selu,
}

impl Nonlinearity {
    /// By how much a weight's deviation is enlarged for it.
    #[doc(alias("calculate_gain"))]
    pub fn gain(self) -> f64 {
        match self {
            Nonlinearity::Linear | Nonlinearity::Sigmoid => 1.0,
            Nonlinearity::Tanh => 5.0 / 3.0,
            Nonlinearity::Relu => SQRT_2,
            Nonlinearity::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
            Nonlinearity::Selu => 0.75,
        }
    }
}

/// How many numbers go into one result of a weight `[outputs, inputs, ..]`, and how many results one number goes into.
///
/// # Panics
/// If the shape has less than two axes.
#[track_caller]
pub fn fans(shape: impl Into<Shape>) -> (usize, usize) {
    let shape = shape.into();
    assert!(shape.len() >= 2, "init: a weight of shape {shape:?} has no inputs and outputs");
    let window: usize = shape[2..].iter().product();
    (shape[1] * window, shape[0] * window)
}

/// Uniform within ±1/√n: what most layers begin with, n being their inputs.
#[track_caller]
pub(crate) fn uniform(shape: &[usize], n: usize, device: &Device) -> Tensor {
    let bound = 1.0 / (n.max(1) as f64).sqrt();
    let _persistent = device.persistent_scope();
    (Tensor::rand(shape, device) * (2.0 * bound) - bound).requires_grad()
}

/// Uniform in `low..high`.
#[doc(alias("uniform_"))]
#[track_caller]
pub fn uniform_between(shape: impl Into<Shape>, low: f64, high: f64, device: &Device) -> Tensor {
    let _persistent = device.persistent_scope();
    (Tensor::rand(shape, device) * (high - low) + low).requires_grad()
}

/// Normal with this mean and standard deviation.
#[doc(alias("normal_"))]
#[track_caller]
pub fn normal(shape: impl Into<Shape>, mean: f64, std: f64, device: &Device) -> Tensor {
    let _persistent = device.persistent_scope();
    (Tensor::randn(shape, device) * std + mean).requires_grad()
}

/// Normal with this mean and standard deviation, of which only the part within `low..high` is drawn.
#[doc(alias("trunc_normal_"))]
#[track_caller]
pub fn trunc_normal(
    shape: impl Into<Shape>,
    mean: f64,
    std: f64,
    low: f64,
    high: f64,
    device: &Device,
) -> Tensor {
    assert!(std > 0.0 && low < high, "trunc_normal: nothing lies within {low}..{high} by {std}");
    let _persistent = device.persistent_scope();
    let shape = shape.into();
    // Draws outside are drawn again; what is left after some rounds is held to the bounds.
    let mut x = Tensor::randn(shape, device) * std + mean;
    for _ in 0..8 {
        let inside = x.ge(low).logical_and(&x.le(high));
        x = inside.where_(&x, &(Tensor::randn(shape, device) * std + mean));
    }
    x.clamp(Some(low), Some(high)).requires_grad()
}

/// One value everywhere.
#[doc(alias("constant_"))]
#[track_caller]
pub fn constant(shape: impl Into<Shape>, value: f64, device: &Device) -> Tensor {
    let _persistent = device.persistent_scope();
    Tensor::full(shape, value, DType::F32, device).requires_grad()
}

/// Zeros.
#[doc(alias("zeros_"))]
#[track_caller]
pub fn zeros(shape: impl Into<Shape>, device: &Device) -> Tensor {
    constant(shape, 0.0, device)
}

/// Ones.
#[doc(alias("ones_"))]
#[track_caller]
pub fn ones(shape: impl Into<Shape>, device: &Device) -> Tensor {
    constant(shape, 1.0, device)
}

/// The identity, for a weight of n inputs and outputs.
#[doc(alias("eye_"))]
#[track_caller]
pub fn eye(n: usize, device: &Device) -> Tensor {
    let _persistent = device.persistent_scope();
    Tensor::eye(n, device).requires_grad()
}

/// Uniform, so that results and gradients keep their variance alike (Glorot).
#[doc(alias("xavier_uniform_", "glorot_uniform"))]
#[track_caller]
pub fn xavier_uniform(shape: impl Into<Shape>, gain: f64, device: &Device) -> Tensor {
    let shape = shape.into();
    let (inputs, outputs) = fans(shape);
    let bound = gain * (6.0 / (inputs + outputs).max(1) as f64).sqrt();
    uniform_between(shape, -bound, bound, device)
}

/// Normal, so that results and gradients keep their variance alike (Glorot).
#[doc(alias("xavier_normal_", "glorot_normal"))]
#[track_caller]
pub fn xavier_normal(shape: impl Into<Shape>, gain: f64, device: &Device) -> Tensor {
    let shape = shape.into();
    let (inputs, outputs) = fans(shape);
    normal(shape, 0.0, gain * (2.0 / (inputs + outputs).max(1) as f64).sqrt(), device)
}

/// Uniform, so that what comes out of the nonlinearity keeps its variance (He). PyTorch's defaults are `Fan::In` and
/// `Nonlinearity::LeakyRelu(0.0)`.
///
/// ```
/// use kiln_nn::{Linear, init};
/// # let device = kiln_tensor::Device::cpu();
/// let mut layer = Linear::new(64, 32, &device);
/// layer.weight = init::kaiming_uniform([32, 64], init::Fan::In, init::Nonlinearity::Relu, &device);
/// ```
#[doc(alias("kaiming_uniform_", "he_uniform"))]
#[track_caller]
pub fn kaiming_uniform(shape: impl Into<Shape>, fan: Fan, after: Nonlinearity, device: &Device) -> Tensor {
    let shape = shape.into();
    let bound = 3f64.sqrt() * deviation(shape, fan, after);
    uniform_between(shape, -bound, bound, device)
}

/// Normal, so that what comes out of the nonlinearity keeps its variance (He).
#[doc(alias("kaiming_normal_", "he_normal"))]
#[track_caller]
pub fn kaiming_normal(shape: impl Into<Shape>, fan: Fan, after: Nonlinearity, device: &Device) -> Tensor {
    let shape = shape.into();
    normal(shape, 0.0, deviation(shape, fan, after), device)
}

#[track_caller]
fn deviation(shape: Shape, fan: Fan, after: Nonlinearity) -> f64 {
    let (inputs, outputs) = fans(shape);
    let n = if fan == Fan::In { inputs } else { outputs };
    after.gain() / (n.max(1) as f64).sqrt()
}
