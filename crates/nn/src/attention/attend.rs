//! What a call of attention is given besides its inputs.

use super::KvCache;
use kiln_tensor::Tensor;

/// What a call of attention depends on besides queries, keys and values.
#[derive(Default)]
pub struct Attend<'a> {
    pub(super) mask: Option<&'a Tensor>,
    pub(super) padding: Option<&'a Tensor>,
    pub(super) places: Option<&'a Tensor>,
    pub(super) cache: Option<&'a mut KvCache>,
}

impl<'a> Attend<'a> {
    /// On nothing.
    pub fn new() -> Attend<'a> {
        Attend::default()
    }

    /// Which keys a query sees, where it is bool (true is seen, as in [`Tensor::scaled_dot_product_attention`]; PyTorch's layer
    /// has it the other way round), or what is added to scores: `[queries, keys]`, `[batch * heads, queries, keys]` or
    /// `[batch or 1, heads or 1, queries, keys]`.
    #[doc(alias("attn_mask"))]
    pub fn mask(mut self, mask: &'a Tensor) -> Attend<'a> {
        self.mask = Some(mask);
        self
    }

    /// Which keys are padding, bool `[batch, keys]`: true is not seen, as in PyTorch.
    pub fn key_padding_mask(mut self, padding: &'a Tensor) -> Attend<'a> {
        self.padding = Some(padding);
        self
    }

    /// The places of queries and keys for rotary positions, `[length]` or `[batch, length]`, if they do not just go on.
    pub fn places(mut self, places: &'a Tensor) -> Attend<'a> {
        self.places = Some(places);
        self
    }

    /// What earlier calls have seen: these keys and values are added to it, and queries see all.
    pub fn cache(mut self, cache: &'a mut KvCache) -> Attend<'a> {
        self.cache = Some(cache);
        self
    }
}
