//! Normalisation by the root mean square.

use crate::layer::layers;
use crate::module::note;
use crate::{Module, init};
use kiln_tensor::{DType, Device, Scope, Shape, Tensor};

/// The last axes divided by the root of their mean square, then scaled.
///
/// ```
/// use kiln_nn::RmsNorm;
/// # use kiln_tensor::{Device, Tensor};
/// let norm = RmsNorm::new(4, &Device::cpu()).eps(1e-6);
/// let y = norm.forward(&Tensor::full([2, 4], 3.0, kiln_tensor::DType::F32, &Device::cpu()));
/// assert!(y.to_vec::<f32>()?.iter().all(|y| (y - 1.0).abs() < 1e-5));
/// # Ok::<(), kiln_tensor::Error>(())
/// ```
#[doc(alias("RMSNorm"))]
#[derive(Clone, Module)]
pub struct RmsNorm {
    /// Of the shape that is normalised.
    pub weight: Option<Tensor>,
    /// Added to the mean square; if missing, the distance from 1 to the next number of the input's dtype, as in PyTorch.
    #[module(skip)]
    pub eps: Option<f64>,
    #[module(skip)]
    shape: Shape,
}

layers!(RmsNorm);

impl RmsNorm {
    /// A layer that does not scale yet, for inputs whose last axes have this shape.
    #[track_caller]
    pub fn new(normalized_shape: impl Into<Shape>, device: &Device) -> RmsNorm {
        let shape = normalized_shape.into();
        RmsNorm { weight: Some(init::ones(shape, device)), eps: None, shape }
    }

    /// With this added to the mean square.
    pub fn eps(self, eps: f64) -> RmsNorm {
        RmsNorm { eps: Some(eps), ..self }
    }

    /// Without its weight.
    #[doc(alias("elementwise_affine"))]
    pub fn without_affine(self) -> RmsNorm {
        RmsNorm { weight: None, ..self }
    }

    /// The layer's result for `x`, whose last axes have the layer's shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("rms_norm");
        let eps = self.eps.unwrap_or(match x.dtype() {
            DType::F64 => f64::EPSILON,
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => f32::EPSILON as f64,
        });
        note(self, x.rms_norm(self.shape, self.weight.as_ref(), eps))
    }
}
