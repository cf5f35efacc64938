//! The fully connected layer.

use crate::module;
use kiln_tensor::{Device, Scope, Tensor};

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
    #[track_caller]
    pub fn new(inputs: usize, outputs: usize, device: &Device) -> Linear {
        let weight = uniform(&[outputs, inputs], inputs, device);
        Linear { weight, bias: Some(uniform(&[outputs], inputs, device)) }
    }

    /// The layer without its bias.
    pub fn without_bias(mut self) -> Linear {
        self.bias = None;
        self
    }

    /// The layer's result for `x`, whose last axis has the layer's inputs.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("linear");
        x.linear(&self.weight, self.bias.as_ref())
    }
}

/// A parameter uniform within ±1/√n.
#[track_caller]
pub(crate) fn uniform(shape: &[usize], n: usize, device: &Device) -> Tensor {
    let bound = 1.0 / (n.max(1) as f64).sqrt();
    let _persistent = device.persistent_scope();
    (Tensor::rand(shape, device) * (2.0 * bound) - bound).requires_grad()
}
