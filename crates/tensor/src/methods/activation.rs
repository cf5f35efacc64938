//! Activations with a formula of their own, and dropout.

use crate::Tensor;
use kiln_device::method;

/// # Activations with parameters
impl Tensor {
    /// x held between 0 and 6.
    #[track_caller]
    pub fn relu6(&self) -> Tensor {
        let _method = method("relu6");
        self.hardtanh(0.0, 6.0)
    }

    /// x held between two numbers.
    #[track_caller]
    pub fn hardtanh(&self, min: f64, max: f64) -> Tensor {
        let _method = method("hardtanh");
        self.clamp(Some(min), Some(max))
    }

    /// The ELU with the numbers that bring activations to mean 0 and variance 1.
    #[track_caller]
    pub fn selu(&self) -> Tensor {
        const ALPHA: f64 = 1.673_263_242_354_377_2;
        const SCALE: f64 = 1.050_700_987_355_480_5;
        let _method = method("selu");
        self.elu(ALPHA) * SCALE
    }

    /// x where it is positive, else `alpha * (exp(x / alpha) - 1)`.
    #[track_caller]
    pub fn celu(&self, alpha: f64) -> Tensor {
        let _method = method("celu");
        assert!(alpha != 0.0, "celu: alpha is 0");
        let positive = self.gt(0);
        // A large x would overflow in the branch that is not taken.
        let safe = self.masked_fill(&positive, 0);
        positive.where_(self, &((safe / alpha).expm1() * alpha))
    }

    /// x where it is further from 0 than `lambda`, else 0; NaN stays.
    #[track_caller]
    pub fn hardshrink(&self, lambda: f64) -> Tensor {
        let _method = method("hardshrink");
        self.masked_fill(&self.abs().le(lambda), 0)
    }

    /// x moved towards 0 by `lambda`, and 0 nearer than that; NaN stays.
    #[track_caller]
    pub fn softshrink(&self, lambda: f64) -> Tensor {
        let _method = method("softshrink");
        assert!(lambda >= 0.0, "softshrink: lambda {lambda} is negative");
        (self - self.sign() * lambda).masked_fill(&self.abs().le(lambda), 0)
    }

    /// `x - tanh(x)`.
    #[track_caller]
    pub fn tanhshrink(&self) -> Tensor {
        let _method = method("tanhshrink");
        self - self.tanh()
    }

    /// x where it is above a threshold, else a value; NaN stays.
    #[track_caller]
    pub fn threshold(&self, threshold: f64, value: f64) -> Tensor {
        let _method = method("threshold");
        self.masked_fill(&self.le(threshold), value)
    }

    /// `x / (1 + |x|)`.
    #[track_caller]
    pub fn softsign(&self) -> Tensor {
        let _method = method("softsign");
        self / (self.abs() + 1)
    }

    /// The first half of an axis times the sigmoid of the second.
    #[track_caller]
    pub fn glu(&self, axis: isize) -> Tensor {
        let _method = method("glu");
        let extent = self.dim(axis);
        let shape = self.shape();
        assert!(extent.is_multiple_of(2), "glu: axis {axis} of shape {shape:?} cannot be halved");
        let half = extent / 2;
        self.narrow(axis, 0, half) * self.narrow(axis, half as isize, half).sigmoid()
    }

    /// x where it is positive, else x times a slope: one for all, or one for each channel of `[N, C, ..]`.
    #[track_caller]
    pub fn prelu(&self, slopes: &Tensor) -> Tensor {
        let _method = method("prelu");
        let slopes = match slopes.numel() {
            1 => slopes.reshape(()),
            n => {
                let axis = 1.min(self.rank().saturating_sub(1));
                let fits = self.rank() > 0 && self.shape()[axis] == n && slopes.rank() == 1;
                assert!(fits, "prelu: slopes {:?} for shape {:?}", slopes.shape(), self.shape());
                let mut shape = vec![1; self.rank() - axis];
                shape[0] = n;
                slopes.reshape(shape)
            }
        };
        self.gt(0).where_(self, &(self * slopes))
    }

    /// Each number 0 with probability `p`, and otherwise divided by `1 - p`.
    ///
    /// # Panics
    /// If `p` is not within 0 and 1.
    #[track_caller]
    pub fn dropout(&self, p: f64) -> Tensor {
        let _method = method("dropout");
        assert!((0.0..=1.0).contains(&p), "dropout: a probability of {p} is not within 0 and 1");
        if p == 0.0 {
            return self.clone();
        }
        let kept = Tensor::bernoulli(1.0 - p, self.shape(), self.value.device());
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        self * (kept.to_dtype(self.dtype()) * scale)
    }
}
