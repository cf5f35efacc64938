//! Attention with projections, in several heads.

use super::Rotary;
use super::attend::Attend;
use super::scores::{joined, weights};
use crate::init;
use crate::layer::{layers, misfit};
use crate::module::note;
use crate::{Linear, Mode, Module};
use kiln_tensor::{DType, Device, Scope, Shape, Tensor};

/// Attention of queries to keys and values, each projected, in several heads whose results are projected once more. Inputs
/// are `[batch, length, width]`. Parameters are called and begin as in PyTorch's layer.
///
/// ```
/// use kiln_nn::{Attend, MultiHeadAttention, Rotary};
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let (x, memory) = (Tensor::randn([2, 5, 16], &device), Tensor::randn([2, 7, 16], &device));
/// let layer = MultiHeadAttention::new(16, 4, &device);
/// let y = layer.forward(&x); // to itself
/// let y = layer.attend(&x, &memory, &memory, Attend::new()); // to another sequence
/// // As in Llama: fewer heads of keys and values, rotary positions.
/// let layer = MultiHeadAttention::new(16, 4, &device).kv_heads(2).rotary(Rotary::new()).causal().without_bias();
/// assert_eq!(layer.forward(&x).shape(), x.shape());
/// ```
#[doc(alias("MultiheadAttention"))]
#[derive(Clone, Module)]
pub struct MultiHeadAttention {
    /// Queries, keys and values one after another, `[width + 2 * kv_heads * head, width]`, if all inputs are of one width.
    pub in_proj_weight: Option<Tensor>,
    /// `[width, width]`, if keys or values are of another width.
    pub q_proj_weight: Option<Tensor>,
    /// `[kv_heads * head, key width]`.
    pub k_proj_weight: Option<Tensor>,
    /// `[kv_heads * head, value width]`.
    pub v_proj_weight: Option<Tensor>,
    /// `[width + 2 * kv_heads * head]`.
    pub in_proj_bias: Option<Tensor>,
    /// `width` to `width`.
    pub out_proj: Linear,
    /// How many parts the width falls into.
    pub heads: usize,
    /// How many heads keys and values have; each serves as many heads of queries.
    pub kv_heads: usize,
    /// The probability with which weights are dropped while training.
    pub dropout: f64,
    /// Whether a place sees only itself and what is before it.
    pub causal: bool,
    /// How places are told apart, if not by the inputs.
    pub rotary: Option<Rotary>,
    /// Whether it drops.
    pub mode: Mode,
    #[module(skip)]
    widths: [usize; 3],
}

layers!(MultiHeadAttention);

impl MultiHeadAttention {
    /// A layer in which every place sees every other. The projection of inputs is Xavier-uniform, biases are zeros.
    ///
    /// # Panics
    /// If the width does not fall into `heads` parts.
    #[track_caller]
    pub fn new(width: usize, heads: usize, device: &Device) -> MultiHeadAttention {
        if heads == 0 || !width.is_multiple_of(heads) {
            misfit("multi_head_attention", format!("a width of {width} does not fall into {heads} heads"));
        }
        let mut out_proj = Linear::new(width, width, device);
        out_proj.bias = Some(init::zeros([width], device));
        let layer = MultiHeadAttention {
            in_proj_weight: None,
            q_proj_weight: None,
            k_proj_weight: None,
            v_proj_weight: None,
            in_proj_bias: Some(init::zeros([3 * width], device)),
            out_proj,
            heads,
            kv_heads: heads,
            dropout: 0.0,
            causal: false,
            rotary: None,
            mode: Mode::default(),
            widths: [width; 3],
        };
        layer.drawn(device)
    }

    /// With keys and values of other widths. Weights are drawn anew.
    #[doc(alias("kdim", "vdim"))]
    #[track_caller]
    pub fn widths(mut self, key: usize, value: usize) -> MultiHeadAttention {
        let device = self.out_proj.weight.device();
        self.widths = [self.widths[0], key, value];
        self.drawn(&device)
    }

    /// With fewer heads of keys and values. Weights are drawn anew.
    ///
    /// # Panics
    /// If the heads do not fall into that many groups.
    #[doc(alias("enable_gqa", "grouped_query_attention"))]
    #[track_caller]
    pub fn kv_heads(mut self, kv_heads: usize) -> MultiHeadAttention {
        let heads = self.heads;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            misfit("multi_head_attention", format!("{heads} heads do not fall into {kv_heads} groups"));
        }
        let device = self.out_proj.weight.device();
        self.kv_heads = kv_heads;
        let rows = self.rows().iter().sum::<usize>();
        self.in_proj_bias = self.in_proj_bias.map(|_| init::zeros([rows], &device));
        self.drawn(&device)
    }

    /// With each place kept from what comes behind it.
    pub fn causal(self) -> MultiHeadAttention {
        MultiHeadAttention { causal: true, ..self }
    }

    /// With rotary positions.
    pub fn rotary(self, rotary: Rotary) -> MultiHeadAttention {
        MultiHeadAttention { rotary: Some(rotary), ..self }
    }

    /// With weights dropped with this probability while training.
    ///
    /// # Panics
    /// If `p` is not within 0 and 1.
    #[track_caller]
    pub fn dropout(self, p: f64) -> MultiHeadAttention {
        if !(0.0..=1.0).contains(&p) {
            misfit("multi_head_attention", format!("a probability of {p} is not within 0 and 1"));
        }
        MultiHeadAttention { dropout: p, ..self }
    }

    /// Without biases.
    pub fn without_bias(self) -> MultiHeadAttention {
        MultiHeadAttention { in_proj_bias: None, out_proj: self.out_proj.without_bias(), ..self }
    }

    /// Rows of the projections to queries, keys and values.
    fn rows(&self) -> [usize; 3] {
        let inner = self.kv_heads * (self.widths[0] / self.heads);
        [self.widths[0], inner, inner]
    }

    #[track_caller]
    fn drawn(mut self, device: &Device) -> MultiHeadAttention {
        let ([q, k, v], widths) = (self.rows(), self.widths);
        let draw = |rows: usize, width: usize| Some(init::xavier_uniform([rows, width], 1.0, device));
        if widths == [widths[0]; 3] {
            self.in_proj_weight = draw(q + k + v, widths[0]);
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) = (None, None, None);
        } else {
            self.in_proj_weight = None;
            self.q_proj_weight = draw(q, widths[0]);
            self.k_proj_weight = draw(k, widths[1]);
            self.v_proj_weight = draw(v, widths[2]);
        }
        self
    }

    /// The layer's result for `x` attending to itself, of shape `[batch, length, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.attend(x, x, x, Attend::new())
    }

    /// The layer's result for queries `[batch, length, width]` that attend to keys and values of another length.
    #[track_caller]
    pub fn attend(&self, query: &Tensor, key: &Tensor, value: &Tensor, with: Attend<'_>) -> Tensor {
        let _scope = Scope::enter("multi_head_attention");
        let (q, k, v, bias, causal) = self.prepared(query, key, value, with);
        let y = if self.mode.is_training() && self.dropout > 0.0 {
            weights(&q, &k, bias.as_ref(), causal).dropout(self.dropout).matmul(&v)
        } else {
            q.scaled_dot_product_attention(&k, &v, bias.as_ref(), causal, None)
        };
        note(self, self.out_proj.forward(&self.merged(&y)))
    }

    /// Like [`MultiHeadAttention::attend`], and the weights of all heads, `[batch, heads, queries, keys]`.
    #[doc(alias("need_weights", "average_attn_weights"))]
    #[track_caller]
    pub fn attend_with_weights(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        with: Attend<'_>,
    ) -> (Tensor, Tensor) {
        let _scope = Scope::enter("multi_head_attention");
        let (q, k, v, bias, causal) = self.prepared(query, key, value, with);
        let mut weights = weights(&q, &k, bias.as_ref(), causal);
        if self.mode.is_training() {
            weights = weights.dropout(self.dropout);
        }
        let y = self.out_proj.forward(&self.merged(&weights.matmul(&v)));
        (note(self, y), weights.flatten(1, 2))
    }

    /// Queries, keys and values by heads, `[batch, kv_heads, group, length, head]`; what is added to scores; and whether they
    /// are causal besides.
    #[track_caller]
    fn prepared(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        with: Attend<'_>,
    ) -> (Tensor, Tensor, Tensor, Option<Tensor>, bool) {
        self.checked(query, key, value);
        let [q, k, v] = self.projected(query, key, value);
        let (heads, groups) = (self.kv_heads, self.heads / self.kv_heads);
        let head = self.widths[0] / self.heads;
        let (batch, length) = (query.dim(0), query.dim(1));
        let mut q = q.reshape([batch, length, heads * groups, head]).transpose(1, 2);
        let split = |t: &Tensor| t.reshape([t.dim(0), t.dim(1), heads, head]).transpose(1, 2);
        let (mut k, mut v) = (split(&k), split(&v));
        let before = with.cache.as_ref().map_or(0, |cache| cache.len());
        if let Some(rotary) = self.rotary {
            (q, k) = match with.places {
                // Places by sample meet heads in between.
                Some(places) if places.rank() == 2 => {
                    let places = places.unsqueeze(1);
                    (rotary.at(&q, &places), rotary.at(&k, &places))
                }
                Some(places) => (rotary.at(&q, places), rotary.at(&k, places)),
                None => (rotary.forward(&q, before), rotary.forward(&k, before)),
            };
        }
        if let Some(cache) = with.cache {
            (k, v) = cache.append(&k, &v);
        }
        let q = q.reshape([batch, heads, groups, length, head]);
        let keys = k.dim(2);
        let mut bias = with.mask.map(|mask| self.mask(mask, batch, length, keys));
        if let Some(padding) = with.padding {
            if padding.dtype() != DType::Bool || padding.shape()[..] != [batch, keys] {
                let given = padding.meta();
                misfit(
                    "multi_head_attention",
                    format!("a key padding mask is bool[{batch},{keys}], not {given}"),
                );
            }
            bias = Some(joined(bias, &padding.logical_not().reshape([batch, 1, 1, 1, keys])));
        }
        // Places behind those of a cache are not counted from 0, and the last one sees all.
        let causal = self.causal && before == 0;
        if self.causal && before > 0 && length > 1 {
            let device = query.device();
            let of = |n: usize| Tensor::arange(0, n as i64, 1, &device);
            let seen = of(keys).le((of(length) + before as i64).unsqueeze(1));
            bias = Some(joined(bias, &seen.reshape([1, 1, 1, length, keys])));
        }
        (q, k.unsqueeze(2), v.unsqueeze(2), bias, causal)
    }

    #[track_caller]
    fn checked(&self, query: &Tensor, key: &Tensor, value: &Tensor) {
        let names = ["queries", "keys", "values"];
        for ((name, x), width) in names.iter().zip([query, key, value]).zip(self.widths) {
            let shape = x.shape();
            if shape.len() != 3 || shape[2] != width {
                misfit(
                    "multi_head_attention",
                    format!("{name} of shape {shape:?} are not [batch, length, {width}]"),
                );
            }
        }
        let fits = key.dim(1) == value.dim(1) && query.dim(0) == key.dim(0) && key.dim(0) == value.dim(0);
        if !fits {
            let (q, k, v) = (query.shape(), key.shape(), value.shape());
            misfit(
                "multi_head_attention",
                format!("queries {q:?}, keys {k:?} and values {v:?} do not fit together"),
            );
        }
    }

    #[track_caller]
    fn projected(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> [Tensor; 3] {
        let rows = self.rows();
        let (inputs, starts) = ([query, key, value], [0, rows[0], rows[0] + rows[1]]);
        let part = |t: &Tensor, from: usize, to: usize| {
            t.narrow(0, starts[from] as isize, starts[to - 1] + rows[to - 1] - starts[from])
        };
        let bias = |from: usize, to: usize| self.in_proj_bias.as_ref().map(|bias| part(bias, from, to));
        let Some(weight) = &self.in_proj_weight else {
            let weights = [&self.q_proj_weight, &self.k_proj_weight, &self.v_proj_weight];
            return [0, 1, 2].map(|i| match weights[i] {
                Some(weight) => inputs[i].linear(weight, bias(i, i + 1).as_ref()),
                None => misfit("multi_head_attention", "a projection has no weight".into()),
            });
        };
        // What comes from one input is one product.
        let cut =
            |y: &Tensor, first: usize, i: usize| y.narrow(2, (starts[i] - starts[first]) as isize, rows[i]);
        let same = |a: &Tensor, b: &Tensor| a.identity() == b.identity();
        if same(query, key) && same(key, value) {
            let y = query.linear(weight, self.in_proj_bias.as_ref());
            return [0, 1, 2].map(|i| cut(&y, 0, i));
        }
        let q = query.linear(&part(weight, 0, 1), bias(0, 1).as_ref());
        if same(key, value) {
            let y = key.linear(&part(weight, 1, 3), bias(1, 3).as_ref());
            return [q, cut(&y, 1, 1), cut(&y, 1, 2)];
        }
        let of = |i: usize| inputs[i].linear(&part(weight, i, i + 1), bias(i, i + 1).as_ref());
        [q, of(1), of(2)]
    }

    /// A mask as `[batch or 1, kv_heads or 1, group or 1, queries, keys]`.
    #[track_caller]
    fn mask(&self, mask: &Tensor, batch: usize, queries: usize, keys: usize) -> Tensor {
        let (shape, heads) = (mask.shape(), self.heads);
        let (samples, own) = match shape[..] {
            [_, _] => (1, 1),
            [n, _, _] if n == batch * heads => (batch, heads),
            [samples, own, _, _] if [1, batch].contains(&samples) && [1, heads].contains(&own) => {
                (samples, own)
            }
            _ => (0, 0),
        };
        if samples == 0 && batch > 0 || shape[shape.len().max(2) - 2..] != [queries, keys] {
            misfit(
                "multi_head_attention",
                format!(
                    "a mask of shape {shape:?} for {batch} samples, {heads} heads, {queries} queries and {keys} keys"
                ),
            );
        }
        let (outer, inner) = if own == 1 { (1, 1) } else { (self.kv_heads, heads / self.kv_heads) };
        mask.reshape([samples, outer, inner, queries, keys])
    }

    /// `[batch, kv_heads, group, length, head]` as `[batch, length, width]`.
    #[track_caller]
    fn merged(&self, y: &Tensor) -> Tensor {
        let (batch, length) = (y.dim(0), y.dim(3));
        let shape: Shape = [batch, length, self.widths[0]].into();
        y.reshape([batch, self.heads, length, y.dim(4)]).transpose(1, 2).reshape(shape)
    }
}
