//! Normalisation by layer.

use crate::layer::layers;
use crate::module::note;
use crate::{Module, init};
use kiln_tensor::{Device, Scope, Shape, Tensor};

/// The last axes brought to mean 0 and variance 1, then scaled and shifted.
///
/// ```
/// use kiln_nn::LayerNorm;
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let rows = LayerNorm::new(4, &device).forward(&Tensor::randn([2, 3, 4], &device));
/// let planes = LayerNorm::new([3, 4], &device).eps(1e-6).forward(&Tensor::randn([2, 3, 4], &device));
/// # assert_eq!(rows.shape(), planes.shape());
/// ```
#[derive(Clone, Module)]
pub struct LayerNorm {
    /// Of the shape that is normalised.
    pub weight: Option<Tensor>,
    /// Of the shape that is normalised.
    pub bias: Option<Tensor>,
    /// Added to the variance.
    pub eps: f64,
    #[module(skip)]
    shape: Shape,
}

layers!(LayerNorm);

impl LayerNorm {
    /// A layer that neither scales nor shifts yet, with an `eps` of 1e-5, for inputs whose last axes have this shape.
    #[track_caller]
    pub fn new(normalized_shape: impl Into<Shape>, device: &Device) -> LayerNorm {
        let shape = normalized_shape.into();
        let (weight, bias) = (init::ones(shape, device), init::zeros(shape, device));
        LayerNorm { weight: Some(weight), bias: Some(bias), eps: 1e-5, shape }
    }

    /// With this added to the variance.
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }

    /// The layer without its bias.
    pub fn without_bias(self) -> LayerNorm {
        LayerNorm { bias: None, ..self }
    }

    /// The layer without weight and bias.
    #[doc(alias("elementwise_affine"))]
    pub fn without_affine(self) -> LayerNorm {
        LayerNorm { weight: None, bias: None, ..self }
    }

    /// The layer's result for `x`, whose last axes have the layer's shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("layer_norm");
        note(self, x.layer_norm(self.shape, self.weight.as_ref(), self.bias.as_ref(), self.eps))
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
        norm.weight = Some(Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [4], &device));
        norm.bias = Some(Tensor::full([4], 0.5, kiln_tensor::DType::F32, &device));
        let scaled: Vec<f32> = want.iter().enumerate().map(|(i, y)| y * (i % 4 + 1) as f32 + 0.5).collect();
        assert_near(&norm.forward(&x), &scaled);
    }

    fn assert_near(got: &Tensor, want: &[f32]) {
        let got = got.to_vec::<f32>().unwrap();
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{got:?}, not {want:?}");
    }
}
