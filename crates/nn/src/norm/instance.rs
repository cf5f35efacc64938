//! Normalisation by channel within each sample.

use super::running::{fresh, normalised, scaled, update};
use crate::layer::{channels, layers, misfit};
use crate::module::note;
use crate::{Buffer, Mode, Module, init};
use kiln_tensor::{Axes, Device, Scope, Tensor};

/// Each channel of each sample of `[batch, channels, ..]` brought to mean 0 and variance 1; `N` is the number of spatial
/// axes. As in PyTorch it neither scales nor keeps running statistics unless it is told to.
///
/// ```
/// use kiln_nn::InstanceNorm2d;
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let norm = InstanceNorm2d::new(3, &device).affine();
/// assert_eq!(norm.forward(&Tensor::randn([2, 3, 4, 4], &device)).shape()[..], [2, 3, 4, 4]);
/// ```
#[derive(Clone, Module)]
pub struct InstanceNorm<const N: usize> {
    /// `[channels]`.
    pub weight: Option<Tensor>,
    /// `[channels]`.
    pub bias: Option<Tensor>,
    /// `[channels]`: what evaluation uses, if it is there.
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
    #[module(skip)]
    device: Device,
}

/// Instance norm of `[N, C, L]`.
pub type InstanceNorm1d = InstanceNorm<1>;
/// Instance norm of `[N, C, H, W]`.
pub type InstanceNorm2d = InstanceNorm<2>;
/// Instance norm of `[N, C, D, H, W]`.
pub type InstanceNorm3d = InstanceNorm<3>;

layers!(InstanceNorm<const N>);

impl<const N: usize> InstanceNorm<N> {
    const NAME: &'static str = ["instance_norm1d", "instance_norm2d", "instance_norm3d"][N - 1];

    /// A layer for that many channels, with an `eps` of 1e-5.
    pub fn new(channels: usize, device: &Device) -> InstanceNorm<N> {
        InstanceNorm {
            weight: None,
            bias: None,
            running_mean: None,
            running_var: None,
            num_batches_tracked: None,
            eps: 1e-5,
            momentum: Some(0.1),
            mode: Mode::default(),
            features: channels,
            device: device.clone(),
        }
    }

    /// With this added to the variance.
    pub fn eps(self, eps: f64) -> InstanceNorm<N> {
        InstanceNorm { eps, ..self }
    }

    /// With running statistics that go this far towards each batch's, or with `None` are the mean over all batches.
    pub fn momentum(self, momentum: impl Into<Option<f64>>) -> InstanceNorm<N> {
        InstanceNorm { momentum: momentum.into(), ..self }
    }

    /// With a weight and a bias for each channel.
    #[track_caller]
    pub fn affine(mut self) -> InstanceNorm<N> {
        self.weight = Some(init::ones([self.features], &self.device));
        self.bias = Some(init::zeros([self.features], &self.device));
        self
    }

    /// With running statistics, which evaluation uses.
    #[doc(alias("track_running_stats"))]
    #[track_caller]
    pub fn running_stats(mut self) -> InstanceNorm<N> {
        let [mean, var, batches] = fresh(self.features, &self.device).map(Some);
        (self.running_mean, self.running_var, self.num_batches_tracked) = (mean, var, batches);
        self
    }

    /// The layer's result for `x`, of shape `[batch, channels, ..]` or `[channels, ..]`.
    ///
    /// # Panics
    /// While training, if a channel of a sample has one number only: it has no variance.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter(Self::NAME);
        if x.rank() == N + 1 {
            let y = self.batched(&x.unsqueeze(0)).squeeze(0);
            return note(self, y);
        }
        note(self, self.batched(x))
    }

    #[track_caller]
    fn batched(&self, x: &Tensor) -> Tensor {
        if x.rank() != N + 2 {
            misfit(Self::NAME, format!("shape {:?} does not have channels and {N} spatial axes", x.shape()));
        }
        channels(Self::NAME, x, 1, self.features);
        let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
        let running = (&self.running_mean, &self.running_var, &self.num_batches_tracked);
        let training = self.mode.is_training();
        if let (false, (Some(mean), Some(var), _)) = (training, running) {
            return normalised(x, &mean.get(), &var.get(), weight, bias, self.eps);
        }
        let elements = x.shape()[2..].iter().product();
        if training && elements == 1 {
            misfit(Self::NAME, format!("shape {:?} has one number for each channel", x.shape()));
        }
        if let (true, (Some(means), Some(vars), Some(batches))) = (training, running) {
            let space: Vec<isize> = (2..x.rank() as isize).collect();
            let x = x.detach().to_dtype(means.get().dtype());
            let mean = x.mean_keepdim(Axes::new(&space));
            let var = (&x - &mean).square().mean(Axes::new(&space)).mean(0);
            update(
                [means, vars, batches],
                &mean.reshape([x.dim(0), x.dim(1)]).mean(0),
                &var,
                elements,
                self.momentum,
            );
        }
        let y = x.group_norm(self.features, None, None, self.eps);
        scaled(y, weight, bias)
    }
}
