//! The block that a GPT is a stack of.

use crate::{Attention, LayerNorm, Linear, Module, cast};
use kiln_tensor::{DType, Device, Scope, Tensor};

/// Causal self-attention, then a perceptron of one hidden layer four times as wide. Each works on its normalised input
/// and is added to it: `x + attention(norm(x))`, then `x + down(gelu(up(norm(x))))`.
///
/// ```
/// use kiln_nn::{Embedding, GptBlock, Module};
/// use kiln_tensor::{Device, Tensor};
///
/// let device = Device::cpu();
/// let tokens = Embedding::new(100, 16, &device);
/// let blocks: Vec<GptBlock> = (0..2).map(|_| GptBlock::new(16, 4, &device)).collect();
/// let ids = Tensor::randint(0, 100, [8, 10], &device);
/// let x = blocks.iter().fold(tokens.forward(&ids), |x, block| block.forward(&x));
/// assert_eq!(x.shape()[..], [8, 10, 16]);
/// assert_eq!(blocks[0].parameters()[0].0, "first_norm.weight");
/// ```
#[derive(Clone, Module)]
pub struct GptBlock {
    /// Before the attention.
    pub first_norm: LayerNorm,
    /// Causal.
    pub attention: Attention,
    /// Before the perceptron.
    pub second_norm: LayerNorm,
    /// `width` to `4 * width`.
    pub up: Linear,
    /// `4 * width` to `width`.
    pub down: Linear,
    /// What attention and perceptron compute in, if not in their parameters' dtype. Norms and sums keep that of `x`.
    pub compute: Option<DType>,
}

impl GptBlock {
    /// A block for inputs of that width.
    ///
    /// # Panics
    /// If the width does not fall into `heads` parts.
    #[track_caller]
    pub fn new(width: usize, heads: usize, device: &Device) -> GptBlock {
        GptBlock {
            first_norm: LayerNorm::new(width, device),
            attention: Attention::new(width, heads, device).causal(),
            second_norm: LayerNorm::new(width, device),
            up: Linear::new(width, 4 * width, device),
            down: Linear::new(4 * width, width, device),
            compute: None,
        }
    }

    /// With attention and perceptron computed in `dtype`, while parameters and gradients keep theirs.
    pub fn compute_in(mut self, dtype: DType) -> GptBlock {
        self.compute = Some(dtype);
        self
    }

    /// The block's result for `x`, of shape `[batch, length, width]`: it has the same shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("gpt_block");
        match self.compute {
            None => self.layers(x, &self.attention, &self.up, &self.down),
            Some(dtype) => {
                let (attention, up, down) = (&self.attention, &self.up, &self.down);
                self.layers(x, &cast(attention, dtype), &cast(up, dtype), &cast(down, dtype))
            }
        }
    }

    #[track_caller]
    fn layers(&self, x: &Tensor, attention: &Attention, up: &Linear, down: &Linear) -> Tensor {
        let y = self.normed(&self.first_norm, x);
        let x = x + attention.forward(&y);
        let y = up.forward(&self.normed(&self.second_norm, &x)).gelu_tanh();
        &x + down.forward(&y)
    }

    #[track_caller]
    fn normed(&self, norm: &LayerNorm, x: &Tensor) -> Tensor {
        let y = norm.forward(x);
        match self.compute {
            Some(dtype) => y.to_dtype(dtype),
            None => y,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_is_what_the_layers_give_one_by_one() {
        let device = Device::cpu();
        let block = GptBlock::new(8, 2, &device);
        let x = Tensor::randn([2, 5, 8], &device);
        let y = &x + block.attention.forward(&block.first_norm.forward(&x));
        let want = &y + block.down.forward(&block.up.forward(&block.second_norm.forward(&y)).gelu_tanh());
        assert_eq!(block.forward(&x).to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap());
    }

    #[test]
    fn no_place_sees_what_comes_behind_it() {
        let device = Device::cpu();
        let block = GptBlock::new(8, 2, &device);
        let x = Tensor::randn([1, 6, 8], &device);
        let changed = Tensor::cat(&[x.narrow(1, 0, 3), Tensor::randn([1, 3, 8], &device)], 1);
        let start = |x: &Tensor| block.forward(x).narrow(1, 0, 3).to_vec::<f32>().unwrap();
        assert_eq!(start(&x), start(&changed));
    }

    #[test]
    fn every_parameter_gets_a_gradient_of_its_own_dtype_also_in_mixed_precision() {
        let device = Device::cpu();
        let x = Tensor::randn([2, 3, 8], &device);
        let block = GptBlock::new(8, 2, &device);
        let whole = block.forward(&x);
        let block = block.compute_in(DType::BF16);
        let mixed = block.forward(&x);
        assert_eq!(mixed.dtype(), DType::F32);
        let difference = (&mixed - &whole).abs().amax(()).item::<f32>().unwrap();
        assert!(difference > 0.0 && difference < 0.1, "{difference}");
        let gradients = mixed.square().sum(()).backward();
        let parameters = block.parameters();
        assert_eq!(parameters.len(), 12);
        assert!(parameters.iter().all(|(_, p)| gradients.get(p).is_some_and(|g| g.dtype() == DType::F32)));
    }
}
