//! Leaving numbers out at random while training.

use crate::layer::{layers, misfit};
use crate::{Mode, Module};
use kiln_tensor::{Scope, Tensor};

/// While training, each number is 0 with probability `p` and otherwise divided by `1 - p`; in evaluation nothing changes.
/// What is dropped comes from the thread's generator, see [`kiln_tensor::with_generator`]: where a batch is cut into
/// shards, a generator for each shard makes the result independent of who computes it.
#[derive(Clone, Module)]
pub struct Dropout {
    /// The probability to be dropped.
    pub p: f64,
    /// Whether it drops.
    pub mode: Mode,
}

/// Like [`Dropout`], for whole channels of `[N, C, L]` or `[C, L]`.
#[derive(Clone, Module)]
pub struct Dropout1d {
    /// The probability to be dropped.
    pub p: f64,
    /// Whether it drops.
    pub mode: Mode,
}

/// Like [`Dropout`], for whole channels of `[N, C, H, W]` or `[C, H, W]`.
#[derive(Clone, Module)]
pub struct Dropout2d {
    /// The probability to be dropped.
    pub p: f64,
    /// Whether it drops.
    pub mode: Mode,
}

layers!(Dropout Dropout1d Dropout2d);

impl Dropout {
    /// A layer that drops with probability `p`.
    ///
    /// # Panics
    /// If `p` is not within 0 and 1.
    #[track_caller]
    pub fn new(p: f64) -> Dropout {
        Dropout { p: probability("dropout", p), mode: Mode::default() }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("dropout");
        if self.mode.is_training() { x.dropout(self.p) } else { x.clone() }
    }
}

impl Dropout1d {
    /// A layer that drops with probability `p`.
    ///
    /// # Panics
    /// If `p` is not within 0 and 1.
    #[track_caller]
    pub fn new(p: f64) -> Dropout1d {
        Dropout1d { p: probability("dropout1d", p), mode: Mode::default() }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("dropout1d");
        channels("dropout1d", x, 1, self.p, self.mode)
    }
}

impl Dropout2d {
    /// A layer that drops with probability `p`.
    ///
    /// # Panics
    /// If `p` is not within 0 and 1.
    #[track_caller]
    pub fn new(p: f64) -> Dropout2d {
        Dropout2d { p: probability("dropout2d", p), mode: Mode::default() }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("dropout2d");
        channels("dropout2d", x, 2, self.p, self.mode)
    }
}

#[track_caller]
fn probability(layer: &str, p: f64) -> f64 {
    if !(0.0..=1.0).contains(&p) {
        misfit(layer, format!("a probability of {p} is not within 0 and 1"));
    }
    p
}

/// One decision for each channel, whose spatial axes are the last `n`.
#[track_caller]
fn channels(layer: &str, x: &Tensor, n: usize, p: f64, mode: Mode) -> Tensor {
    if x.rank() != n + 1 && x.rank() != n + 2 {
        misfit(layer, format!("shape {:?} does not have channels and {n} spatial axes", x.shape()));
    }
    if !mode.is_training() {
        return x.clone();
    }
    let mut shape = x.shape();
    let rank = shape.len();
    shape[rank - n..].fill(1);
    x * Tensor::full(shape, 1.0, x.dtype(), &x.device()).dropout(p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_tensor::Device;

    #[test]
    fn about_p_of_all_are_dropped_and_the_rest_is_scaled() {
        let mut layer = Dropout::new(0.25);
        let x = Tensor::ones([10_000], &Device::cpu());
        let y = layer.forward(&x).to_vec::<f32>().unwrap();
        let zeros = y.iter().filter(|&&y| y == 0.0).count();
        assert!((2300..2700).contains(&zeros), "{zeros}");
        assert!(y.iter().all(|&y| y == 0.0 || (y - 4.0 / 3.0).abs() < 1e-6));
        layer.train(false);
        assert_eq!(layer.forward(&x).to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
        assert_eq!(Dropout::new(1.0).forward(&x).to_vec::<f32>().unwrap(), vec![0.0; 10_000]);
    }

    #[test]
    fn whole_channels_are_dropped_together() {
        let x = Tensor::ones([8, 16, 3, 3], &Device::cpu());
        let y = Dropout2d::new(0.5).forward(&x).to_vec::<f32>().unwrap();
        assert!(y.chunks(9).all(|channel| channel.iter().all(|&v| v == channel[0])));
        assert!(y.contains(&0.0) && y.contains(&2.0));
    }

    #[test]
    #[should_panic = "a probability of 1.5 is not within 0 and 1"]
    fn a_probability_is_one() {
        let _ = Dropout::new(1.5);
    }
}
