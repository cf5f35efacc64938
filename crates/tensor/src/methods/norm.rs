//! Normalisation and attention: the named composites of the IR, and what is made of them.

use super::Axes;
use crate::{DType, Shape, Tensor};
use kiln_device::method;
use kiln_ir::{AxisSet, Named, Op, Real, broadcast, promote};

/// # Normalisation and attention
impl Tensor {
    /// `exp(x)` over its sum along an axis.
    #[track_caller]
    pub fn softmax(&self, axis: isize) -> Tensor {
        let _method = method("softmax");
        let axis = self.any_axis("softmax", axis) as u8;
        Tensor::one(Op::Named(Named::Softmax { axis }), &[&self.lifted()]).reshape(self.shape())
    }

    /// `log(softmax(x))`, without overflow.
    #[track_caller]
    pub fn log_softmax(&self, axis: isize) -> Tensor {
        let _method = method("log_softmax");
        let axis = self.any_axis("log_softmax", axis) as u8;
        Tensor::one(Op::Named(Named::LogSoftmax { axis }), &[&self.lifted()]).reshape(self.shape())
    }

    /// Normalised over its last axes, which have the shape `normalized_shape`, to mean 0 and variance 1, then scaled and
    /// shifted by weights of that shape. `eps` is added to the variance.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::randn([2, 3, 4], &Device::cpu());
    /// let rows = x.layer_norm(4, None, None, 1e-5); // each row of 4
    /// let planes = x.layer_norm([3, 4], None, None, 1e-5); // each plane of 3 by 4
    /// ```
    #[track_caller]
    pub fn layer_norm(
        &self,
        normalized_shape: impl Into<Shape>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        let _method = method("layer_norm");
        let axes = last_axes("layer_norm", self, normalized_shape.into());
        let op = Op::Named(Named::LayerNorm { axes, eps: Real::new(eps) });
        let dtype = self.dtype();
        let (weight, bias) = (weight.map(|w| w.to_dtype(dtype)), bias.map(|b| b.to_dtype(dtype)));
        match (weight, bias) {
            (Some(weight), Some(bias)) => Tensor::one(op, &[self, &weight, &bias]),
            (Some(weight), None) => Tensor::one(op, &[self, &weight]),
            (None, None) => Tensor::one(op, &[self]),
            (None, Some(bias)) => Tensor::one(op, &[self, &bias.ones_like(), &bias]),
        }
    }

    /// Divided by the root mean square of its last axes, which have the shape `normalized_shape`, then scaled by a weight
    /// of that shape. `eps` is added to the mean square.
    #[track_caller]
    pub fn rms_norm(&self, normalized_shape: impl Into<Shape>, weight: Option<&Tensor>, eps: f64) -> Tensor {
        let _method = method("rms_norm");
        let axes = last_axes("rms_norm", self, normalized_shape.into());
        let op = Op::Named(Named::RmsNorm { axes, eps: Real::new(eps) });
        match weight {
            Some(weight) => Tensor::one(op, &[self, &weight.to_dtype(self.dtype())]),
            None => Tensor::one(op, &[self]),
        }
    }

    /// `[N, C, ..]` normalised over each of `groups` parts of the channels, then scaled and shifted by channel.
    #[track_caller]
    pub fn group_norm(
        &self,
        groups: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        let _method = method("group_norm");
        let shape = self.shape();
        let fits = self.rank() >= 2 && groups > 0 && shape[1].is_multiple_of(groups);
        assert!(fits, "group_norm: the channels of shape {shape:?} do not fall into {groups} groups");
        let part = shape[1..].iter().product::<usize>() / groups;
        let x = self.widened();
        let y = x.reshape([shape[0], groups, part]).layer_norm(part, None, None, eps).reshape(shape);
        by_channel("group_norm", y, weight, bias).to_dtype(self.dtype())
    }

    /// `[N, C, ..]` normalised by the mean and variance of each channel over the batch, then scaled and shifted by
    /// channel.
    #[doc(alias("BatchNorm"))]
    #[track_caller]
    pub fn batch_norm(&self, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Tensor {
        let _method = method("batch_norm");
        self.batch_norm_with_stats(weight, bias, eps).0
    }

    /// Like [`Tensor::batch_norm`], and the mean and variance (over the number of elements) of each channel, untracked
    /// and in f32 for half-precision inputs: what running statistics are made of.
    #[track_caller]
    pub fn batch_norm_with_stats(
        &self,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> (Tensor, Tensor, Tensor) {
        let _method = method("batch_norm_with_stats");
        assert!(self.rank() >= 2, "batch_norm: shape {:?} is not [N, C, ..]", self.shape());
        let x = self.widened();
        let axes: Vec<isize> = (0..self.rank() as isize).filter(|&axis| axis != 1).collect();
        let mean = x.mean_keepdim(Axes::new(&axes));
        let centred = &x - &mean;
        let variance = centred.square().mean_keepdim(Axes::new(&axes));
        let y = centred * (&variance + eps).rsqrt();
        let y = by_channel("batch_norm", y, weight, bias).to_dtype(self.dtype());
        let channels = self.shape()[1];
        (y, mean.detach().reshape([channels]), variance.detach().reshape([channels]))
    }

    /// `softmax(q kᵀ scale + mask) v` over `[.., length, width]`, with this tensor as q. Leading axes broadcast. A bool
    /// mask tells which keys take part, any other is added; `causal` keeps each query from the keys behind its own
    /// place; `scale` is `1 / sqrt(width)` if missing. A query that sees no key gives 0.
    #[doc(alias("attention"))]
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
        scale: Option<f64>,
    ) -> Tensor {
        let _method = method("scaled_dot_product_attention");
        let name = "scaled_dot_product_attention";
        let dtype = promote(promote(self.dtype(), key.dtype()), value.dtype());
        let fits = [self, key, value].iter().all(|t| t.rank() >= 2);
        assert!(
            fits,
            "{name}: shapes {:?}, {:?} and {:?} are [.., length, width]",
            self.shape(),
            key.shape(),
            value.shape()
        );
        let mask = match mask {
            Some(mask) if mask.dtype() == DType::Bool => {
                let device = mask.value.device();
                let (seen, hidden) =
                    (Tensor::full([], 0, dtype, device), Tensor::full([], f64::NEG_INFINITY, dtype, device));
                Some(mask.where_(&seen, &hidden))
            }
            Some(mask) => Some(mask.to_dtype(dtype)),
            None => None,
        };
        let batch = [Some(self), Some(key), Some(value), mask.as_ref()]
            .into_iter()
            .flatten()
            .try_fold(Shape::default(), |batch, t| broadcast(&batch, &lead(&t.shape())));
        let Some(batch) = batch else {
            panic!(
                "{name}: leading axes of {:?}, {:?} and {:?} do not fit together",
                self.shape(),
                key.shape(),
                value.shape()
            )
        };
        let q = spread(&self.to_dtype(dtype), &batch);
        let k = spread(&key.to_dtype(dtype), &batch);
        let v = spread(&value.to_dtype(dtype), &batch);
        let width = self.dim(-1) as f64;
        let op =
            Op::Named(Named::Attention { causal, scale: Real::new(scale.unwrap_or(width.sqrt().recip())) });
        match mask {
            Some(mask) => Tensor::one(op, &[&q, &k, &v, &mask]),
            None => Tensor::one(op, &[&q, &k, &v]),
        }
    }
}

/// How many last axes of `x` have this shape.
#[track_caller]
fn last_axes(name: &str, x: &Tensor, normalized: Shape) -> u8 {
    let shape = x.shape();
    let fits = !normalized.is_empty() && shape.ends_with(&normalized);
    assert!(fits, "{name}: shape {shape:?} does not end with the normalized shape {normalized:?}");
    normalized.len() as u8
}

/// `y * weight + bias` with one of each for a channel.
#[track_caller]
fn by_channel(name: &str, y: Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> Tensor {
    let mut shape = Shape::repeat(1, y.rank() - 1);
    shape[0] = y.shape()[1];
    let dtype = y.dtype();
    for t in [weight, bias].into_iter().flatten() {
        assert!(t.numel() == shape[0], "{name}: weights of shape {:?} for {} channels", t.shape(), shape[0]);
    }
    let y = match weight {
        Some(weight) => y * weight.to_dtype(dtype).reshape(shape),
        None => y,
    };
    match bias {
        Some(bias) => y + bias.to_dtype(dtype).reshape(shape),
        None => y,
    }
}

/// The axes before the last two.
fn lead(shape: &Shape) -> Shape {
    let kept = shape.len().saturating_sub(2);
    shape.reduced((kept..shape.len()).fold(AxisSet::default(), AxisSet::with), false)
}

/// `x` with its leading axes stretched to `batch`.
#[track_caller]
fn spread(x: &Tensor, batch: &Shape) -> Tensor {
    let rank = x.rank();
    x.broadcast_to(Shape::collect(batch.iter().chain(&x.shape()[rank - 2..]).copied()))
}
