//! Encoder and decoder together.

use super::{
    Memory, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer,
};
use crate::module::note;
use crate::{Attend, LayerNorm, Module, init};
use kiln_tensor::{Device, Scope, Tensor};

/// An encoder, and a decoder that attends to what it gives: each of some layers with a norm behind them.
///
/// ```
/// use kiln_nn::Transformer;
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let model = Transformer::new(16, 4, [2, 2], &device);
/// let (source, target) = (Tensor::randn([2, 7, 16], &device), Tensor::randn([2, 5, 16], &device));
/// assert_eq!(model.forward(&source, &target).shape(), target.shape());
/// ```
#[derive(Clone, Module)]
pub struct Transformer {
    /// Of the source.
    pub encoder: TransformerEncoder,
    /// Of the target.
    pub decoder: TransformerDecoder,
}

impl Transformer {
    /// With that many layers of encoder and decoder, all weights Xavier-uniform; other settings are those of the layers: [`Transformer::of`].
    ///
    /// # Panics
    /// If the width does not fall into `heads` parts.
    #[doc(alias("num_encoder_layers", "num_decoder_layers"))]
    #[track_caller]
    pub fn new(width: usize, heads: usize, layers: [usize; 2], device: &Device) -> Transformer {
        let (mut encoders, mut decoders) = (Vec::new(), Vec::new());
        for _ in 0..layers[0] {
            encoders.push(TransformerEncoderLayer::new(width, heads, device));
        }
        for _ in 0..layers[1] {
            decoders.push(TransformerDecoderLayer::new(width, heads, device));
        }
        let norm = || LayerNorm::new(width, device);
        let encoder = TransformerEncoder::new(encoders).norm(norm());
        let mut model = Transformer::of(encoder, TransformerDecoder::new(decoders).norm(norm()));
        let drawn = |t: &Tensor| (t.rank() > 1).then(|| init::xavier_uniform(t.shape(), 1.0, device));
        model.replace(&mut |_, weight| drawn(weight));
        model
    }

    /// Of an encoder and a decoder.
    pub fn of(encoder: TransformerEncoder, decoder: TransformerDecoder) -> Transformer {
        Transformer { encoder, decoder }
    }

    /// The decoder's result for a target and what the encoder makes of the source, both `[batch, length, width]`.
    #[track_caller]
    pub fn forward(&self, source: &Tensor, target: &Tensor) -> Tensor {
        self.forward_with(source, target, Attend::new, Memory::default)
    }

    /// Like [`Transformer::forward`], with masks, which are asked for by each layer.
    #[track_caller]
    pub fn forward_with<'a, 'b>(
        &self,
        source: &Tensor,
        target: &Tensor,
        encode: impl FnMut() -> Attend<'a>,
        decode: impl FnMut() -> Memory<'b>,
    ) -> Tensor {
        let _scope = Scope::enter("transformer");
        let memory = self.encoder.forward_with(source, encode);
        note(self, self.decoder.forward_with(target, &memory, decode))
    }
}
