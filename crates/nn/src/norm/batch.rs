//! Normalisation by channel over a batch.

use super::running::{fresh, normalised, update};
use crate::layer::{channels, layers, misfit};
use crate::module::note;
use crate::{Buffer, Mode, Module, init};
use kiln_tensor::{Device, Scope, Tensor};

/// Each channel of `[batch, channels, ..]` brought to mean 0 and variance 1, then scaled and shifted; `N` is the number of
/// spatial axes. While training by the batch's own statistics, which running ones follow; in evaluation by those.
///
/// Where a batch is cut into shards, each is normalised by its own statistics, and the running ones follow the mean over
/// the shards by their samples, whoever computes them: `GradientSync` sees to that.
///
/// ```
/// use kiln_nn::{BatchNorm2d, Module};
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let mut norm = BatchNorm2d::new(3, &device);
/// norm.forward(&(Tensor::randn([8, 3, 4, 4], &device) + 1.0));
/// let mean = norm.running_mean.as_ref().unwrap().get().to_vec::<f32>()?; // a tenth of the way to 1
/// assert!(mean.iter().all(|m| (m - 0.1).abs() < 0.05));
/// let y = norm.eval(|norm| norm.forward(&Tensor::zeros([1, 3, 4, 4], &device)));
/// # y.to_vec::<f32>()?;
/// # Ok::<(), kiln_tensor::Error>(())
/// ```
#[derive(Clone, Module)]
pub struct BatchNorm<const N: usize> {
    /// `[channels]`: ones at first.
    pub weight: Option<Tensor>,
    /// `[channels]`: zeros at first.
    pub bias: Option<Tensor>,
    /// `[channels]`; without running statistics the batch's own are used in evaluation too.
    pub running_mean: Option<Buffer>,
    /// `[channels]`.
    pub running_var: Option<Buffer>,
    /// How many batches the running statistics have seen, i64.
    pub num_batches_tracked: Option<Buffer>,
    /// Added to the variance.
    pub eps: f64,
    /// How far the running statistics go towards a batch's; `None` for the mean over all batches.
    #[module(skip)]
    pub momentum: Option<f64>,
    /// Whether it trains.
    pub mode: Mode,
    features: usize,
}

/// Batch norm of `[N, C]` or `[N, C, L]`.
pub type BatchNorm1d = BatchNorm<1>;
/// Batch norm of `[N, C, H, W]`.
pub type BatchNorm2d = BatchNorm<2>;
/// Batch norm of `[N, C, D, H, W]`.
pub type BatchNorm3d = BatchNorm<3>;

layers!(BatchNorm<const N>);

impl<const N: usize> BatchNorm<N> {
    const NAME: &'static str = ["batch_norm1d", "batch_norm2d", "batch_norm3d"][N - 1];

    /// A layer for that many channels, with an `eps` of 1e-5 and a momentum of 0.1.
    #[track_caller]
    pub fn new(channels: usize, device: &Device) -> BatchNorm<N> {
        let [mean, var, batches] = fresh(channels, device).map(Some);
        BatchNorm {
            weight: Some(init::ones([channels], device)),
            bias: Some(init::zeros([channels], device)),
            running_mean: mean,
            running_var: var,
            num_batches_tracked: batches,
            eps: 1e-5,
            momentum: Some(0.1),
            mode: Mode::default(),
            features: channels,
        }
    }

    /// With this added to the variance.
    pub fn eps(self, eps: f64) -> BatchNorm<N> {
        BatchNorm { eps, ..self }
    }

    /// With running statistics that go this far towards each batch's, or with `None` are the mean over all batches.
    pub fn momentum(self, momentum: impl Into<Option<f64>>) -> BatchNorm<N> {
        BatchNorm { momentum: momentum.into(), ..self }
    }

    /// Without weight and bias.
    #[doc(alias("affine"))]
    pub fn without_affine(self) -> BatchNorm<N> {
        BatchNorm { weight: None, bias: None, ..self }
    }

    /// Without running statistics: also in evaluation the batch's own are used.
    #[doc(alias("track_running_stats"))]
    pub fn without_running_stats(self) -> BatchNorm<N> {
        BatchNorm { running_mean: None, running_var: None, num_batches_tracked: None, ..self }
    }

    /// The layer's result for `x`, of shape `[batch, channels, ..]`.
    ///
    /// # Panics
    /// While training, if a channel has one number only: it has no variance.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter(Self::NAME);
        if x.rank() != N + 2 && (N, x.rank()) != (1, 2) {
            misfit(Self::NAME, format!("shape {:?} is not [N, C, ..] with {N} spatial axes", x.shape()));
        }
        channels(Self::NAME, x, 1, self.features);
        let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
        let running = (&self.running_mean, &self.running_var, &self.num_batches_tracked);
        let y = match (self.mode.is_training(), running) {
            (false, (Some(mean), Some(var), _)) => {
                normalised(x, &mean.get(), &var.get(), weight, bias, self.eps)
            }
            (training, running) => {
                let elements = x.numel() / self.features.max(1);
                if training && elements == 1 {
                    misfit(Self::NAME, format!("shape {:?} has one number for each channel", x.shape()));
                }
                let (y, mean, var) = x.batch_norm_with_stats(weight, bias, self.eps);
                if let (true, (Some(means), Some(vars), Some(batches))) = (training, running) {
                    update([means, vars, batches], &mean, &var, elements, self.momentum);
                }
                y
            }
        };
        note(self, y)
    }
}
