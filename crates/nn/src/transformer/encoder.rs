//! Layers in which a sequence attends to itself.

use super::TransformerActivation;
use super::layer::settings;
use crate::layer::layers;
use crate::module::note;
use crate::{Attend, Dropout, LayerNorm, Linear, Module, MultiHeadAttention};
use kiln_tensor::{Device, Scope, Tensor};

/// Self-attention and a perceptron, each added to its input and normalised.
///
/// ```
/// use kiln_nn::{TransformerActivation, TransformerEncoder, TransformerEncoderLayer};
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let layer = || TransformerEncoderLayer::new(16, 4, &device).feedforward(64).norm_first();
/// let encoder = TransformerEncoder::new((0..2).map(|_| layer()));
/// let x = Tensor::randn([2, 5, 16], &device);
/// assert_eq!(encoder.forward(&x).shape(), x.shape());
/// ```
#[derive(Clone, Module)]
pub struct TransformerEncoderLayer {
    /// To itself.
    pub self_attn: MultiHeadAttention,
    /// `width` to `feedforward`.
    pub linear1: Linear,
    /// Between the products.
    pub dropout: Dropout,
    /// `feedforward` to `width`.
    pub linear2: Linear,
    /// Of the attention.
    pub norm1: LayerNorm,
    /// Of the perceptron.
    pub norm2: LayerNorm,
    /// Behind the attention.
    pub dropout1: Dropout,
    /// Behind the perceptron.
    pub dropout2: Dropout,
    /// Between the products.
    pub activation: TransformerActivation,
    /// Whether norms come before what they belong to.
    pub norm_first: bool,
}

layers!(TransformerEncoderLayer TransformerEncoder);
settings!(TransformerEncoderLayer, attentions [self_attn], norms [norm1 norm2], dropouts [dropout dropout1 dropout2]);

impl TransformerEncoderLayer {
    /// A layer for inputs of that width: a perceptron of 2048, dropout of 0.1, relu, norms behind.
    ///
    /// # Panics
    /// If the width does not fall into `heads` parts.
    #[track_caller]
    pub fn new(width: usize, heads: usize, device: &Device) -> TransformerEncoderLayer {
        let dropout = || Dropout::new(0.1);
        TransformerEncoderLayer {
            self_attn: MultiHeadAttention::new(width, heads, device).dropout(0.1),
            linear1: Linear::new(width, 2048, device),
            dropout: dropout(),
            linear2: Linear::new(2048, width, device),
            norm1: LayerNorm::new(width, device),
            norm2: LayerNorm::new(width, device),
            dropout1: dropout(),
            dropout2: dropout(),
            activation: TransformerActivation::Relu,
            norm_first: false,
        }
    }

    /// The layer's result for `x`, of shape `[batch, length, width]`: it has the same shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.forward_with(x, Attend::new())
    }

    /// Like [`TransformerEncoderLayer::forward`], with masks.
    #[doc(alias("src_mask", "src_key_padding_mask"))]
    #[track_caller]
    pub fn forward_with(&self, x: &Tensor, with: Attend<'_>) -> Tensor {
        let _scope = Scope::enter("transformer_encoder_layer");
        let x = self.added(x, &self.norm1, &self.dropout1, |x| self.self_attn.attend(x, x, x, with));
        note(self, self.added(&x, &self.norm2, &self.dropout2, |x| self.perceptron(x)))
    }
}

/// Encoder layers one after another.
#[derive(Clone, Module)]
pub struct TransformerEncoder {
    /// In order.
    pub layers: Vec<TransformerEncoderLayer>,
    /// Behind the last one.
    pub norm: Option<LayerNorm>,
}

impl TransformerEncoder {
    /// These layers, without a norm behind them.
    pub fn new(layers: impl IntoIterator<Item = TransformerEncoderLayer>) -> TransformerEncoder {
        TransformerEncoder { layers: layers.into_iter().collect(), norm: None }
    }

    /// With a norm behind the last layer.
    pub fn norm(self, norm: LayerNorm) -> TransformerEncoder {
        TransformerEncoder { norm: Some(norm), ..self }
    }

    /// The last layer's result for `x`, of shape `[batch, length, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.forward_with(x, Attend::new)
    }

    /// Like [`TransformerEncoder::forward`], with masks, which are asked for by each layer.
    #[track_caller]
    pub fn forward_with<'a>(&self, x: &Tensor, mut with: impl FnMut() -> Attend<'a>) -> Tensor {
        let _scope = Scope::enter("transformer_encoder");
        let mut y = x.clone();
        for layer in &self.layers {
            y = layer.forward_with(&y, with());
        }
        match &self.norm {
            Some(norm) => note(self, norm.forward(&y)),
            None => note(self, y),
        }
    }
}
