//! Layers in which a sequence attends to itself and to another one.

use super::TransformerActivation;
use super::layer::settings;
use crate::module::note;
use crate::{Attend, Dropout, LayerNorm, Linear, Module, MultiHeadAttention};
use kiln_tensor::{Device, Scope, Tensor};

/// Self-attention, attention to a memory and a perceptron, each added to its input and normalised. A place sees every
/// other unless [`TransformerDecoderLayer::causal`] or a mask says otherwise.
///
/// ```
/// use kiln_nn::{TransformerDecoder, TransformerDecoderLayer};
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let layer = || TransformerDecoderLayer::new(16, 4, &device).feedforward(64).causal();
/// let decoder = TransformerDecoder::new((0..2).map(|_| layer()));
/// let (x, memory) = (Tensor::randn([2, 5, 16], &device), Tensor::randn([2, 7, 16], &device));
/// assert_eq!(decoder.forward(&x, &memory).shape(), x.shape());
/// ```
#[derive(Clone, Module)]
pub struct TransformerDecoderLayer {
    /// To itself.
    pub self_attn: MultiHeadAttention,
    /// To the memory.
    pub multihead_attn: MultiHeadAttention,
    /// `width` to `feedforward`.
    pub linear1: Linear,
    /// Between the products.
    pub dropout: Dropout,
    /// `feedforward` to `width`.
    pub linear2: Linear,
    /// Of the attention to itself.
    pub norm1: LayerNorm,
    /// Of the attention to the memory.
    pub norm2: LayerNorm,
    /// Of the perceptron.
    pub norm3: LayerNorm,
    /// Behind the attention to itself.
    pub dropout1: Dropout,
    /// Behind the attention to the memory.
    pub dropout2: Dropout,
    /// Behind the perceptron.
    pub dropout3: Dropout,
    /// Between the products.
    pub activation: TransformerActivation,
    /// Whether norms come before what they belong to.
    pub norm_first: bool,
}

settings!(
    TransformerDecoderLayer,
    attentions [self_attn multihead_attn],
    norms [norm1 norm2 norm3],
    dropouts [dropout dropout1 dropout2 dropout3]
);

/// How a decoder attends to itself and to its memory.
#[derive(Default)]
pub struct Memory<'a> {
    /// To itself.
    pub own: Attend<'a>,
    /// To the memory.
    pub memory: Attend<'a>,
}

impl TransformerDecoderLayer {
    /// A layer for inputs of that width: a perceptron of 2048, dropout of 0.1, relu, norms behind.
    ///
    /// # Panics
    /// If the width does not fall into `heads` parts.
    #[track_caller]
    pub fn new(width: usize, heads: usize, device: &Device) -> TransformerDecoderLayer {
        let dropout = || Dropout::new(0.1);
        let attention = || MultiHeadAttention::new(width, heads, device).dropout(0.1);
        TransformerDecoderLayer {
            self_attn: attention(),
            multihead_attn: attention(),
            linear1: Linear::new(width, 2048, device),
            dropout: dropout(),
            linear2: Linear::new(2048, width, device),
            norm1: LayerNorm::new(width, device),
            norm2: LayerNorm::new(width, device),
            norm3: LayerNorm::new(width, device),
            dropout1: dropout(),
            dropout2: dropout(),
            dropout3: dropout(),
            activation: TransformerActivation::Relu,
            norm_first: false,
        }
    }

    /// With each place kept from what comes behind it.
    #[doc(alias("tgt_is_causal"))]
    pub fn causal(mut self) -> TransformerDecoderLayer {
        self.self_attn.causal = true;
        self
    }

    /// The layer's result for `x` and a memory, both `[batch, length, width]`: it has the shape of `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, memory: &Tensor) -> Tensor {
        self.forward_with(x, memory, Memory::default())
    }

    /// Like [`TransformerDecoderLayer::forward`], with masks.
    #[doc(alias("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"))]
    #[track_caller]
    pub fn forward_with(&self, x: &Tensor, memory: &Tensor, with: Memory<'_>) -> Tensor {
        let _scope = Scope::enter("transformer_decoder_layer");
        let x = self.added(x, &self.norm1, &self.dropout1, |x| self.self_attn.attend(x, x, x, with.own));
        let x = self.added(&x, &self.norm2, &self.dropout2, |x| {
            self.multihead_attn.attend(x, memory, memory, with.memory)
        });
        note(self, self.added(&x, &self.norm3, &self.dropout3, |x| self.perceptron(x)))
    }
}

/// Decoder layers one after another.
#[derive(Clone, Module)]
pub struct TransformerDecoder {
    /// In order.
    pub layers: Vec<TransformerDecoderLayer>,
    /// Behind the last one.
    pub norm: Option<LayerNorm>,
}

impl TransformerDecoder {
    /// These layers, without a norm behind them.
    pub fn new(layers: impl IntoIterator<Item = TransformerDecoderLayer>) -> TransformerDecoder {
        TransformerDecoder { layers: layers.into_iter().collect(), norm: None }
    }

    /// With a norm behind the last layer.
    pub fn norm(self, norm: LayerNorm) -> TransformerDecoder {
        TransformerDecoder { norm: Some(norm), ..self }
    }

    /// The last layer's result for `x` and a memory, both `[batch, length, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, memory: &Tensor) -> Tensor {
        self.forward_with(x, memory, Memory::default)
    }

    /// Like [`TransformerDecoder::forward`], with masks, which are asked for by each layer.
    #[track_caller]
    pub fn forward_with<'a>(
        &self,
        x: &Tensor,
        memory: &Tensor,
        mut with: impl FnMut() -> Memory<'a>,
    ) -> Tensor {
        let _scope = Scope::enter("transformer_decoder");
        let mut y = x.clone();
        for layer in &self.layers {
            y = layer.forward_with(&y, memory, with());
        }
        match &self.norm {
            Some(norm) => note(self, norm.forward(&y)),
            None => note(self, y),
        }
    }
}
