//! Attention in several heads: of a sequence to itself here, with all that there is to it in `multihead.rs`.

mod attend;
mod cache;
mod multihead;
mod rotary;
mod scores;

pub use attend::Attend;
pub use cache::KvCache;
pub use multihead::MultiHeadAttention;
pub use rotary::Rotary;

use crate::{Linear, Module};
use kiln_tensor::{Device, Scope, Tensor};

/// Self-attention: queries, keys and values of all heads from one projection, their results into another.
#[derive(Clone, Module)]
pub struct Attention {
    /// `width` to queries, keys and values, one after another: `3 * width`.
    pub qkv: Linear,
    /// `width` to `width`.
    pub out: Linear,
    /// How many parts the width falls into.
    pub heads: usize,
    /// Whether a place sees only itself and what is before it.
    pub causal: bool,
}

impl Attention {
    /// A layer in which every place sees every other.
    ///
    /// # Panics
    /// If the width does not fall into `heads` parts.
    #[track_caller]
    pub fn new(width: usize, heads: usize, device: &Device) -> Attention {
        let fits = heads > 0 && width.is_multiple_of(heads);
        assert!(fits, "attention: a width of {width} does not fall into {heads} heads");
        let (qkv, out) = (Linear::new(width, 3 * width, device), Linear::new(width, width, device));
        Attention { qkv, out, heads, causal: false }
    }

    /// With each place kept from what comes behind it.
    pub fn causal(mut self) -> Attention {
        self.causal = true;
        self
    }

    /// The layer's result for `x`, of shape `[batch, length, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("attention");
        let own = self.qkv.weight.dim(-1);
        let fits = x.rank() == 3 && x.dim(2) == own;
        assert!(fits, "attention: shape {:?} is not [batch, length, {own}]", x.shape());
        let (batch, length) = (x.dim(0), x.dim(1));
        let parts = self.qkv.forward(x).reshape([batch, length, 3, self.heads, own / self.heads]);
        let parts = parts.permute([2, 0, 3, 1, 4]);
        let (q, k, v) = (parts.select(0, 0), parts.select(0, 1), parts.select(0, 2));
        let y = q.scaled_dot_product_attention(&k, &v, None, self.causal, None);
        self.out.forward(&y.transpose(1, 2).reshape([batch, length, own]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_attend_apart_as_the_formula_says() {
        let device = Device::cpu();
        let layer = Attention::new(6, 2, &device);
        let x = Tensor::randn([2, 5, 6], &device);
        let projected = layer.qkv.forward(&x);
        let part = |which: isize, head: isize| projected.narrow(2, which * 6 + head * 3, 3);
        let heads = [0, 1].map(|head| {
            let scores = part(0, head).matmul_t(&part(1, head)) / 3f64.sqrt();
            scores.softmax(-1).matmul(&part(2, head))
        });
        let want = layer.out.forward(&Tensor::cat(&heads, 2)).to_vec::<f32>().unwrap();
        let got = layer.forward(&x).to_vec::<f32>().unwrap();
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{got:?}, not {want:?}");
    }

    #[test]
    fn a_causal_layer_does_not_look_ahead() {
        let device = Device::cpu();
        let layer = Attention::new(4, 2, &device).causal();
        let x = Tensor::randn([1, 6, 4], &device);
        let changed = Tensor::cat(&[x.narrow(1, 0, 3), Tensor::randn([1, 3, 4], &device)], 1);
        let start = |x: &Tensor| layer.forward(x).narrow(1, 0, 3).to_vec::<f32>().unwrap();
        assert_eq!(start(&x), start(&changed));
    }

    #[test]
    fn every_parameter_gets_a_gradient() {
        let device = Device::cpu();
        let layer = Attention::new(4, 2, &device).causal();
        let gradients = layer.forward(&Tensor::randn([1, 3, 4], &device)).square().sum(()).backward();
        let paths: Vec<String> = layer.parameters().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]);
        assert!(layer.parameters().iter().all(|(_, p)| gradients.get(p).is_some()));
    }
}
