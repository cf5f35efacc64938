//! Normalisation over neighbouring channels.

use crate::Module;
use crate::layer::{layers, misfit};
use crate::module::note;
use kiln_tensor::{PadMode, Scope, Tensor};

/// Each number over a power of the mean square of its neighbours in other channels: `x / (k + alpha * mean)^beta`.
///
/// ```
/// use kiln_nn::LocalResponseNorm;
/// # use kiln_tensor::{Device, Tensor};
/// let y = LocalResponseNorm::new(5).forward(&Tensor::ones([2, 8, 4, 4], &Device::cpu()));
/// assert_eq!(y.shape()[..], [2, 8, 4, 4]);
/// ```
#[derive(Clone, Module)]
pub struct LocalResponseNorm {
    /// How many channels count.
    pub size: usize,
    /// How much their mean square counts.
    pub alpha: f64,
    /// The power.
    pub beta: f64,
    /// Added to what the power is taken of.
    pub k: f64,
}

layers!(LocalResponseNorm);

impl LocalResponseNorm {
    /// A layer over that many channels, with PyTorch's numbers: alpha 1e-4, beta 0.75, k 1.
    ///
    /// # Panics
    /// If there are none.
    #[track_caller]
    pub fn new(size: usize) -> LocalResponseNorm {
        if size == 0 {
            misfit("local_response_norm", "a size of 0 has no channels".into());
        }
        LocalResponseNorm { size, alpha: 1e-4, beta: 0.75, k: 1.0 }
    }

    /// The layer's result for `x`, of shape `[batch, channels, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("local_response_norm");
        if x.rank() < 3 {
            misfit("local_response_norm", format!("shape {:?} is not [batch, channels, ..]", x.shape()));
        }
        let mut pads = vec![0; 2 * (x.rank() - 1)];
        let last = pads.len();
        (pads[last - 2], pads[last - 1]) = ((self.size / 2) as isize, ((self.size - 1) / 2) as isize);
        let squares = x.square().pad(&pads, PadMode::Constant(0.0));
        let mut sum = squares.narrow(1, 0, x.dim(1));
        for place in 1..self.size {
            sum = sum + squares.narrow(1, place as isize, x.dim(1));
        }
        note(self, x / (sum * (self.alpha / self.size as f64) + self.k).pow(self.beta))
    }
}
