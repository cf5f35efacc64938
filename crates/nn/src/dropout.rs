//! Leaving numbers out at random while training.

use crate::layer::{layers, misfit};
use crate::module::note;
use crate::{Mode, Module};
use kiln_tensor::{Scope, Shape, Tensor};

macro_rules! dropouts {
    ($($(#[$doc:meta])* $name:ident $scope:literal |$x:ident, $p:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// The probability to be dropped.
            pub p: f64,
            /// Whether it drops.
            pub mode: Mode,
        }

        impl $name {
            /// A layer that drops with probability `p`.
            ///
            /// # Panics
            /// If `p` is not within 0 and 1.
            #[track_caller]
            pub fn new(p: f64) -> $name {
                $name { p: probability($scope, p), mode: Mode::default() }
            }

            /// The layer's result for `x`.
            #[track_caller]
            pub fn forward(&self, $x: &Tensor) -> Tensor {
                let _scope = Scope::enter($scope);
                let $p = if self.mode.is_training() { self.p } else { 0.0 };
                note(self, $value)
            }
        }

        layers!($name);
    )*};
}
dropouts! {
    /// While training, each number is 0 with probability `p` and otherwise divided by `1 - p`; in evaluation nothing changes.
    /// What is dropped comes from the thread's generator, see [`kiln_tensor::with_generator`]: where a batch is cut into
    /// shards, a generator for each shard makes the result independent of who computes it.
    ///
    /// ```
    /// use kiln_nn::{Dropout, Module};
    /// # use kiln_tensor::{Device, Tensor};
    /// let (mut layer, x) = (Dropout::new(0.5), Tensor::ones([100], &Device::cpu()));
    /// assert!(layer.forward(&x).to_vec::<f32>()?.iter().all(|&y| y == 0.0 || y == 2.0));
    /// assert!(layer.eval(|layer| layer.forward(&x)).to_vec::<f32>()?.iter().all(|&y| y == 1.0));
    /// # Ok::<(), kiln_tensor::Error>(())
    /// ```
    Dropout "dropout" |x, p| x.dropout(p);
    /// Like [`Dropout`], for whole channels of `[N, C, L]` or `[C, L]`.
    Dropout1d "dropout1d" |x, p| channels("dropout1d", x, 1, p);
    /// Like [`Dropout`], for whole channels of `[N, C, H, W]` or `[C, H, W]`.
    Dropout2d "dropout2d" |x, p| channels("dropout2d", x, 2, p);
    /// Like [`Dropout`], for whole channels of `[N, C, D, H, W]` or `[C, D, H, W]`.
    Dropout3d "dropout3d" |x, p| channels("dropout3d", x, 3, p);
    /// Like [`Dropout`], but what is dropped becomes the value that a SELU goes to on the left, and the rest is scaled and
    /// shifted so that mean and variance stay.
    AlphaDropout "alpha_dropout" |x, p| alpha(x, &x.shape(), p);
    /// Like [`AlphaDropout`], for whole channels of `[N, C, ..]`.
    FeatureAlphaDropout "feature_alpha_dropout" |x, p| alpha(x, &by_channel(x), p);
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
fn channels(layer: &str, x: &Tensor, n: usize, p: f64) -> Tensor {
    if x.rank() != n + 1 && x.rank() != n + 2 {
        misfit(layer, format!("shape {:?} does not have channels and {n} spatial axes", x.shape()));
    }
    if p == 0.0 {
        return x.clone();
    }
    let mut shape = x.shape();
    let rank = shape.len();
    shape[rank - n..].fill(1);
    x * Tensor::full(shape, 1.0, x.dtype(), &x.device()).dropout(p)
}

/// Decisions of this shape: what is dropped is the limit of SELU, and a line brings mean and variance back.
#[track_caller]
fn alpha(x: &Tensor, shape: &Shape, p: f64) -> Tensor {
    const LIMIT: f64 = -1.758_099_340_847_376_6;
    if p == 0.0 {
        return x.clone();
    }
    if p == 1.0 {
        return x * 0.0;
    }
    let kept = Tensor::bernoulli(1.0 - p, *shape, &x.device());
    let scale = ((1.0 - p) * (1.0 + p * LIMIT * LIMIT)).sqrt().recip();
    let limit = Tensor::full([], LIMIT, x.dtype(), &x.device());
    kept.where_(x, &limit) * scale - scale * p * LIMIT
}

/// One for each channel of `[N, C, ..]`.
fn by_channel(x: &Tensor) -> Shape {
    let mut shape = x.shape();
    shape.iter_mut().skip(2).for_each(|extent| *extent = 1);
    shape
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
    fn alpha_dropout_keeps_mean_and_variance() {
        let x = Tensor::randn([100_000], &Device::cpu());
        let y = AlphaDropout::new(0.2).forward(&x);
        let (mean, var) = (y.mean(()), y.var((), 1));
        let (mean, var) = (mean.item::<f32>().unwrap(), var.item::<f32>().unwrap());
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.05, "{mean} {var}");
        let x = Tensor::randn([4, 3, 2, 2], &Device::cpu());
        let y = FeatureAlphaDropout::new(0.5).forward(&x).to_vec::<f32>().unwrap();
        let dropped = y.chunks(4).filter(|c| c.iter().all(|&v| v == c[0])).count();
        assert!(dropped > 0 && dropped < 12, "{dropped}");
    }

    #[test]
    #[should_panic = "a probability of 1.5 is not within 0 and 1"]
    fn a_probability_is_one() {
        let _ = Dropout::new(1.5);
    }
}
