//! Normalisation by layer.

use crate::Module;
use kiln_tensor::{Device, Scope, Tensor};

/// The last axis brought to mean 0 and variance 1, then scaled and shifted.
#[derive(Clone, Module)]
pub struct LayerNorm {
    /// `[width]`.
    pub weight: Tensor,
    /// `[width]`.
    pub bias: Tensor,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    /// A layer that neither scales nor shifts yet, with the usual `eps` of 1e-5.
    #[track_caller]
    pub fn new(width: usize, device: &Device) -> LayerNorm {
        let _persistent = device.persistent_scope();
        let (weight, bias) = (Tensor::ones([width], device), Tensor::zeros([width], device));
        LayerNorm { weight: weight.requires_grad(), bias: bias.requires_grad(), eps: 1e-5 }
    }

    /// The layer's result for `x`, whose last axis has the layer's width.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("layer_norm");
        x.layer_norm(self.weight.shape(), Some(&self.weight), Some(&self.bias), self.eps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_normalised_then_scaled_and_shifted() {
        let device = Device::cpu();
        let mut norm = LayerNorm::new(4, &device);
        norm.eps = 0.0;
        let x = Tensor::from_vec(vec![1.0f32, 1.0, 3.0, 3.0, -4.0, 0.0, 0.0, 4.0], [2, 4], &device);
        let root = 2f32.sqrt();
        let want = [-1.0, -1.0, 1.0, 1.0, -root, 0.0, 0.0, root];
        assert_near(&norm.forward(&x), &want);
        norm.weight = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [4], &device);
        norm.bias = Tensor::full([4], 0.5, kiln_tensor::DType::F32, &device);
        let scaled: Vec<f32> = want.iter().enumerate().map(|(i, y)| y * (i % 4 + 1) as f32 + 0.5).collect();
        assert_near(&norm.forward(&x), &scaled);
    }

    fn assert_near(got: &Tensor, want: &[f32]) {
        let got = got.to_vec::<f32>().unwrap();
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{got:?}, not {want:?}");
    }
}
