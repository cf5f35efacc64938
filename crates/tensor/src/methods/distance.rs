//! Lengths of vectors and distances between them.

use crate::Tensor;
use kiln_device::method;

/// # Lengths and distances
impl Tensor {
    /// Divided by the p-norm along an axis, which counts as at least `eps`.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::from_slice(&[3.0f32, 4.0], [1, 2], &Device::cpu());
    /// assert_eq!(x.normalize(2.0, 1, 1e-12).to_vec::<f32>().unwrap(), [0.6, 0.8]);
    /// ```
    #[track_caller]
    pub fn normalize(&self, p: f64, axis: isize, eps: f64) -> Tensor {
        let _method = method("normalize");
        let dtype = self.dtype();
        let x = self.widened();
        (&x / x.norm_keepdim(axis, p).clamp_min(eps)).to_dtype(dtype)
    }

    /// The cosine of the angle between vectors along an axis, each length counting as at least `eps`. Operands broadcast.
    #[track_caller]
    pub fn cosine_similarity(&self, other: &Tensor, axis: isize, eps: f64) -> Tensor {
        let _method = method("cosine_similarity");
        let product = self * other;
        let shape = product.shape();
        let (a, b) = (self.broadcast_to(shape), other.broadcast_to(shape));
        let (a_size, b_size) = (a.norm(axis, 2.0).clamp_min(eps), b.norm(axis, 2.0).clamp_min(eps));
        product.sum(axis) / (a_size * b_size)
    }

    /// The p-norm of `x - other + eps` along the last axis. Operands broadcast.
    #[track_caller]
    pub fn pairwise_distance(&self, other: &Tensor, p: f64, eps: f64) -> Tensor {
        let _method = method("pairwise_distance");
        (self - other + eps).norm(-1, p)
    }

    /// The p-norms between each row of `[.., P, M]` and each of `[.., R, M]`: `[.., P, R]`. More than 25 rows have their
    /// Euclidean distances taken from a matrix product, as in PyTorch: faster, and less exact for rows that are close.
    #[track_caller]
    pub fn cdist(&self, other: &Tensor, p: f64) -> Tensor {
        let _method = method("cdist");
        let (a, b) = (self.shape(), other.shape());
        let fits = a.len() > 1 && b.len() > 1 && a.last() == b.last();
        assert!(fits, "cdist: shapes {a:?} and {b:?} are not [.., P, M] and [.., R, M]");
        assert!(p >= 0.0, "cdist: p {p} is negative");
        let many = a[a.len() - 2] > 25 || b[b.len() - 2] > 25;
        if p == 2.0 && many {
            let sizes = self.square().sum_keepdim(-1) + other.square().sum_keepdim(-1).t();
            return (sizes - self.matmul_t(other) * 2).relu().sqrt_flat_at_zero();
        }
        (self.unsqueeze(-2) - other.unsqueeze(-3)).norm(-1, p)
    }
}
