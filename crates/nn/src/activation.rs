//! Activations as layers, under PyTorch's names; each is a method of the tensor too.
//!
//! ```
//! use kiln_nn::{Glu, LeakyRelu, Prelu, Relu};
//! # use kiln_tensor::{Device, Tensor};
//! let x = Tensor::from_vec(vec![-1.0f32, 2.0], [2], &Device::cpu());
//! assert_eq!(Relu.forward(&x).to_vec::<f32>()?, [0.0, 2.0]);
//! assert_eq!(LeakyRelu::new(0.5).forward(&x).to_vec::<f32>()?, [-0.5, 2.0]);
//! assert_eq!(Prelu::new(1, &Device::cpu()).forward(&x).to_vec::<f32>()?, [-0.25, 2.0]);
//! assert_eq!(Glu::default().forward(&x).shape()[..], [1]);
//! # Ok::<(), kiln_tensor::Error>(())
//! ```

use crate::layer::layers;
use crate::module::note;
use crate::{Mode, Module};
use kiln_tensor::{Device, Scope, Tensor};

macro_rules! plain {
    ($($name:ident $scope:literal |$x:ident| $value:expr, $doc:literal;)*) => {
        $(
            #[doc = $doc]
            #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Module)]
            pub struct $name;

            impl $name {
                /// The layer's result for `x`.
                #[track_caller]
                pub fn forward(&self, $x: &Tensor) -> Tensor {
                    let _scope = Scope::enter($scope);
                    $value
                }
            }
        )*
        layers!($($name)*);
    };
}
plain! {
    Identity "identity" |x| x.clone(), "What comes in goes out.";
    Relu "relu" |x| x.relu(), "max(x, 0).";
    Relu6 "relu6" |x| x.relu6(), "x held between 0 and 6.";
    Gelu "gelu" |x| x.gelu(), "x times the normal distribution at x.";
    GeluTanh "gelu_tanh" |x| x.gelu_tanh(), "GELU by its approximation with tanh.";
    Silu "silu" |x| x.silu(), "x times sigmoid(x).";
    Mish "mish" |x| x.mish(), "x times tanh(softplus(x)).";
    Sigmoid "sigmoid" |x| x.sigmoid(), "1 / (1 + exp(-x)).";
    LogSigmoid "log_sigmoid" |x| x.log_sigmoid(), "log(sigmoid(x)).";
    Tanh "tanh" |x| x.tanh(), "The hyperbolic tangent.";
    Tanhshrink "tanhshrink" |x| x.tanhshrink(), "x - tanh(x).";
    Hardsigmoid "hardsigmoid" |x| x.hardsigmoid(), "A piecewise linear sigmoid.";
    Hardswish "hardswish" |x| x.hardswish(), "x times hardsigmoid(x).";
    Selu "selu" |x| x.selu(), "The self-normalising ELU.";
    Softmax2d "softmax2d" |x| x.softmax(-3), "[`Softmax`] over the channels of `[N, C, H, W]` or `[C, H, W]`.";
    Softsign "softsign" |x| x / (x.abs() + 1.0), "x / (1 + |x|).";
}

macro_rules! with_numbers {
    ($($name:ident $scope:literal { $($field:ident: $type:ty = $default:expr, $field_doc:literal;)+ } |$layer:ident, $x:ident| $value:expr, $doc:literal;)*) => {
        $(
            #[doc = $doc]
            #[derive(Clone, Copy, PartialEq, Debug, Module)]
            pub struct $name {
                $(#[doc = $field_doc] pub $field: $type,)+
            }

            impl Default for $name {
                fn default() -> $name {
                    $name { $($field: $default),+ }
                }
            }

            impl $name {
                #[doc = concat!("The layer with these numbers; PyTorch's own are `", stringify!($name), "::default()`.")]
                pub fn new($($field: $type),+) -> $name {
                    $name { $($field),+ }
                }

                /// The layer's result for `x`.
                #[track_caller]
                pub fn forward(&self, $x: &Tensor) -> Tensor {
                    let _scope = Scope::enter($scope);
                    let $layer = self;
                    note(self, $value)
                }
            }
        )*
        layers!($($name)*);
    };
}
with_numbers! {
    LeakyRelu "leaky_relu" { negative_slope: f64 = 0.01, "The slope below 0."; } |l, x| x.leaky_relu(l.negative_slope), "x where it is positive, else a fraction of it.";
    Elu "elu" { alpha: f64 = 1.0, "Minus the limit to the left."; } |l, x| x.elu(l.alpha), "x where it is positive, else `alpha * (exp(x) - 1)`.";
    Celu "celu" { alpha: f64 = 1.0, "Minus the limit to the left."; } |l, x| x.celu(l.alpha), "x where it is positive, else `alpha * (exp(x / alpha) - 1)`.";
    Softplus "softplus" { beta: f64 = 1.0, "How sharp the bend is."; threshold: f64 = 20.0, "From where on it is linear."; } |l, x| x.softplus_with(l.beta, l.threshold), "`log(1 + exp(beta * x)) / beta`.";
    Hardtanh "hardtanh" { min: f64 = -1.0, "The least result."; max: f64 = 1.0, "The largest result."; } |l, x| x.hardtanh(l.min, l.max), "x held between two numbers.";
    Hardshrink "hardshrink" { lambda: f64 = 0.5, "How far from 0 numbers count."; } |l, x| x.hardshrink(l.lambda), "x where it is further from 0 than `lambda`, else 0.";
    Softshrink "softshrink" { lambda: f64 = 0.5, "How far numbers are moved."; } |l, x| x.softshrink(l.lambda), "x moved towards 0 by `lambda`, and 0 nearer than that.";
    Threshold "threshold" { threshold: f64 = 0.0, "What numbers must be above."; value: f64 = 0.0, "What others become."; } |l, x| x.threshold(l.threshold, l.value), "x where it is above a threshold, else a value.";
    Glu "glu" { dim: isize = -1, "The axis that is halved."; } |l, x| x.glu(l.dim), "The first half of an axis times the sigmoid of the second.";
    Softmax "softmax" { dim: isize = -1, "The axis."; } |l, x| x.softmax(l.dim), "`exp(x)` over its sum along an axis.";
    LogSoftmax "log_softmax" { dim: isize = -1, "The axis."; } |l, x| x.log_softmax(l.dim), "The logarithm of [`Softmax`].";
    Softmin "softmin" { dim: isize = -1, "The axis."; } |l, x| (-x).softmax(l.dim), "`exp(-x)` over its sum along an axis.";
    Flatten "flatten" { start: isize = 1, "The first axis."; end: isize = -1, "The last axis."; } |l, x| x.flatten(l.start, l.end), "The axes from one to another as one; by default all but the batch.";
}

/// x where it is positive, else a fraction of it that is learnt: one for all, or one for each channel.
#[derive(Clone, Module)]
pub struct Prelu {
    /// `[1]` or `[channels]`.
    pub weight: Tensor,
}

impl Prelu {
    /// With as many slopes as `channels` says, 1 for one for all; they begin at 0.25.
    #[track_caller]
    pub fn new(channels: usize, device: &Device) -> Prelu {
        Prelu { weight: crate::init::constant([channels], 0.25, device) }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("prelu");
        note(self, x.prelu(&self.weight))
    }
}

/// x where it is positive, else a fraction of it that is drawn for each number while training; in evaluation it is the mean.
#[derive(Clone, Module)]
pub struct Rrelu {
    /// The least slope.
    pub lower: f64,
    /// The largest slope.
    pub upper: f64,
    /// Whether slopes are drawn.
    pub mode: Mode,
}

impl Default for Rrelu {
    fn default() -> Rrelu {
        Rrelu { lower: 1.0 / 8.0, upper: 1.0 / 3.0, mode: Mode::default() }
    }
}

impl Rrelu {
    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("rrelu");
        if !self.mode.is_training() {
            return note(self, x.leaky_relu((self.lower + self.upper) / 2.0));
        }
        let slopes =
            Tensor::rand_as(x.shape(), x.dtype(), &x.device()) * (self.upper - self.lower) + self.lower;
        note(self, x.gt(0).where_(x, &(x * slopes)))
    }
}

layers!(Prelu Rrelu);
