//! The fully connected layer.

use crate::module;
use kiln_tensor::{Device, Tensor, scope};

/// `x · weightᵀ + bias`, with a weight of shape `[outputs, inputs]`.
#[derive(Clone)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
}

module!(Linear { weight, bias });

impl Linear {
    /// A layer with weight and bias uniform within ±1/√inputs.
    pub fn new(inputs: usize, outputs: usize, device: &Device) -> Linear {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let uniform = |shape: &[usize]| {
            device.persistent(|| Tensor::rand(shape, device) * (2.0 * bound) - bound).requires_grad()
        };
        Linear { weight: uniform(&[outputs, inputs]), bias: Some(uniform(&[outputs])) }
    }

    /// The layer without its bias.
    pub fn without_bias(mut self) -> Linear {
        self.bias = None;
        self
    }

    /// The layer's result for `x`, whose last axis has the layer's inputs.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        scope("linear", || x.linear(&self.weight, self.bias.as_ref()))
    }
}
