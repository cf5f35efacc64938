//! The fully connected layer.

use crate::Module;
use crate::init::uniform;
use crate::layer::{layers, misfit};
use crate::module::note;
use kiln_tensor::{Device, Scope, Tensor};

/// `x · weightᵀ + bias`, with a weight of shape `[outputs, inputs]`.
///
/// ```
/// use kiln_nn::Linear;
/// # use kiln_tensor::{Device, Tensor};
/// let layer = Linear::new(4, 2, &Device::cpu());
/// assert_eq!(layer.forward(&Tensor::ones([8, 3, 4], &Device::cpu())).shape()[..], [8, 3, 2]);
/// ```
#[derive(Clone, Module)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
}

layers!(Linear);

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
        let (given, inputs) = (x.shape().last().copied().unwrap_or(0), self.weight.dim(-1));
        if given != inputs {
            let (x, weight) = (x.shape(), self.weight.shape());
            misfit(
                "linear",
                format!(
                    "input has {given} features where {inputs} are expected ({x:?} for weight {weight:?})"
                ),
            );
        }
        note(self, x.linear(&self.weight, self.bias.as_ref()))
    }
}
