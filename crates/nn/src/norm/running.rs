//! Running statistics of channels: what layers are evaluated with.

use crate::Buffer;
use kiln_tensor::{DType, Device, Shape, Tensor, no_grad};

/// Zeros for means, ones for variances, and no batches.
pub(super) fn fresh(channels: usize, device: &Device) -> [Buffer; 3] {
    let _persistent = device.persistent_scope();
    let batches = Tensor::full([], 0, DType::I64, device);
    [Tensor::zeros([channels], device), Tensor::ones([channels], device), batches].map(Buffer::new)
}

/// Moves the running statistics towards those of a batch: by `momentum`, or to the mean of all batches.
/// `elements` is how many numbers a channel's variance is of; the running one is that of their source.
#[track_caller]
pub(super) fn update(
    [means, variances, batches]: [&Buffer; 3],
    mean: &Tensor,
    variance: &Tensor,
    elements: usize,
    momentum: Option<f64>,
) {
    no_grad(|| {
        let count = batches.get() + 1;
        let toward = |running: &Buffer, new: Tensor| {
            let old = running.get();
            let new = new.to_dtype(old.dtype());
            running.set(match momentum {
                Some(momentum) => old * (1.0 - momentum) + new * momentum,
                None => &old + (new - &old) / count.to_dtype(old.dtype()),
            });
        };
        toward(means, mean.clone());
        toward(variances, variance * (elements as f64 / elements.saturating_sub(1).max(1) as f64));
        batches.set(count);
    });
}

/// `x` normalised by the given means and variances of its channels, then scaled and shifted.
#[track_caller]
pub(super) fn normalised(
    x: &Tensor,
    mean: &Tensor,
    variance: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Tensor {
    let y = (x.to_dtype(mean.dtype()) - by_channel(mean, x)) * (by_channel(variance, x) + eps).rsqrt();
    scaled(y, weight, bias).to_dtype(x.dtype())
}

/// Scaled and shifted by channel.
#[track_caller]
pub(super) fn scaled(mut y: Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> Tensor {
    if let Some(weight) = weight {
        y = &y * by_channel(weight, &y).to_dtype(y.dtype());
    }
    if let Some(bias) = bias {
        y = &y + by_channel(bias, &y).to_dtype(y.dtype());
    }
    y
}

/// `[channels]` as what meets axis 1 of `x`.
#[track_caller]
fn by_channel(t: &Tensor, x: &Tensor) -> Tensor {
    let mut shape = Shape::repeat(1, x.rank() - 1);
    shape[0] = t.numel();
    t.reshape(shape)
}
