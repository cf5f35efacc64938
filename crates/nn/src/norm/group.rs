//! Normalisation over groups of channels.

use crate::layer::{channels, layers, misfit};
use crate::module::note;
use crate::{Module, init};
use kiln_tensor::{Device, Scope, Tensor};

/// Each of some groups of channels of each sample brought to mean 0 and variance 1, then scaled and shifted by channel.
///
/// ```
/// use kiln_nn::GroupNorm;
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let norm = GroupNorm::new(2, 6, &device);
/// assert_eq!(norm.forward(&Tensor::randn([4, 6, 5, 5], &device)).shape()[..], [4, 6, 5, 5]);
/// ```
#[derive(Clone, Module)]
pub struct GroupNorm {
    /// `[channels]`.
    pub weight: Option<Tensor>,
    /// `[channels]`.
    pub bias: Option<Tensor>,
    /// How many groups the channels fall into.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
    features: usize,
}

layers!(GroupNorm);

impl GroupNorm {
    /// A layer that neither scales nor shifts yet, with an `eps` of 1e-5.
    ///
    /// # Panics
    /// If the channels do not fall into that many groups.
    #[track_caller]
    pub fn new(groups: usize, channels: usize, device: &Device) -> GroupNorm {
        if groups == 0 || !channels.is_multiple_of(groups) {
            misfit("group_norm", format!("{channels} channels do not fall into {groups} groups"));
        }
        let (weight, bias) = (init::ones([channels], device), init::zeros([channels], device));
        GroupNorm { weight: Some(weight), bias: Some(bias), groups, eps: 1e-5, features: channels }
    }

    /// With this added to the variance.
    pub fn eps(self, eps: f64) -> GroupNorm {
        GroupNorm { eps, ..self }
    }

    /// Without weight and bias.
    #[doc(alias("affine"))]
    pub fn without_affine(self) -> GroupNorm {
        GroupNorm { weight: None, bias: None, ..self }
    }

    /// The layer's result for `x`, of shape `[batch, channels, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("group_norm");
        channels("group_norm", x, 1, self.features);
        note(self, x.group_norm(self.groups, self.weight.as_ref(), self.bias.as_ref(), self.eps))
    }
}
