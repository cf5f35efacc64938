//! Reductions composed of others: variance, norms, logarithms of sums.

use super::Axes;
use crate::{DType, Tensor};
use kiln_device::method;
use kiln_ir::AxisSet;

/// # Reductions: statistics and norms
impl Tensor {
    /// The variance over axes: squared distances from the mean, summed and divided by their number less `correction`
    /// (0 for the population, 1 for a sample).
    #[track_caller]
    pub fn var(&self, axes: impl Into<Axes>, correction: impl Into<f64>) -> Tensor {
        let _method = method("var");
        variance(self, axes.into().set("var", self), correction.into(), false)
    }

    /// Like [`Tensor::var`], with the reduced axes kept as 1.
    #[track_caller]
    pub fn var_keepdim(&self, axes: impl Into<Axes>, correction: impl Into<f64>) -> Tensor {
        let _method = method("var_keepdim");
        variance(self, axes.into().set("var_keepdim", self), correction.into(), true)
    }

    /// The square root of [`Tensor::var`]; its gradient is 0 where the variance is.
    #[track_caller]
    pub fn std(&self, axes: impl Into<Axes>, correction: impl Into<f64>) -> Tensor {
        let _method = method("std");
        deviation(self, axes.into().set("std", self), correction.into(), false)
    }

    /// Like [`Tensor::std`], with the reduced axes kept as 1.
    #[track_caller]
    pub fn std_keepdim(&self, axes: impl Into<Axes>, correction: impl Into<f64>) -> Tensor {
        let _method = method("std_keepdim");
        deviation(self, axes.into().set("std_keepdim", self), correction.into(), true)
    }

    /// The p-norm over axes: `sum(|x|^p)^(1/p)`, the number of elements that are not 0 for `p = 0`, and the largest or
    /// smallest magnitude for the infinities. Where the norm is 0, so is its gradient.
    #[track_caller]
    pub fn norm(&self, axes: impl Into<Axes>, p: f64) -> Tensor {
        let _method = method("norm");
        norm(self, axes.into().set("norm", self), p, false)
    }

    /// Like [`Tensor::norm`], with the reduced axes kept as 1.
    #[track_caller]
    pub fn norm_keepdim(&self, axes: impl Into<Axes>, p: f64) -> Tensor {
        let _method = method("norm_keepdim");
        norm(self, axes.into().set("norm_keepdim", self), p, true)
    }

    /// `log(sum(exp(x)))` over axes, without overflow.
    #[track_caller]
    pub fn logsumexp(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("logsumexp");
        logsumexp(self, axes.into().set("logsumexp", self), false)
    }

    /// Like [`Tensor::logsumexp`], with the reduced axes kept as 1.
    #[track_caller]
    pub fn logsumexp_keepdim(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("logsumexp_keepdim");
        logsumexp(self, axes.into().set("logsumexp_keepdim", self), true)
    }
}

#[track_caller]
fn variance(x: &Tensor, axes: AxisSet, correction: f64, keep: bool) -> Tensor {
    wide_variance(x, axes, correction, keep).to_dtype(x.dtype().unpacked())
}

#[track_caller]
fn deviation(x: &Tensor, axes: AxisSet, correction: f64, keep: bool) -> Tensor {
    wide_variance(x, axes, correction, keep).sqrt_flat_at_zero().to_dtype(x.dtype().unpacked())
}

/// Of half-precision operands, the variance in f32.
#[track_caller]
fn wide_variance(x: &Tensor, axes: AxisSet, correction: f64, keep: bool) -> Tensor {
    let x = x.widened();
    let count: usize = axes.iter().map(|axis| x.shape()[axis]).product();
    let centred = &x - x.mean_keepdim(axes_of(axes));
    reduce_sum(&centred.square(), axes, keep) / (count as f64 - correction).max(0.0)
}

#[track_caller]
fn norm(x: &Tensor, set: AxisSet, p: f64, keep: bool) -> Tensor {
    let dtype = x.dtype().unpacked();
    let x = x.widened();
    let out = if p == 0.0 {
        reduce_sum(&x.truth().to_dtype(x.dtype()), set, keep)
    } else if p == 1.0 {
        reduce_sum(&x.abs(), set, keep)
    } else if p == 2.0 {
        reduce_sum(&x.square(), set, keep).sqrt_flat_at_zero()
    } else if p.is_infinite() {
        let (axes, x) = (axes_of(set), x.abs());
        match (p > 0.0, keep) {
            (true, false) => x.amax(axes),
            (true, true) => x.amax_keepdim(axes),
            (false, false) => x.amin(axes),
            (false, true) => x.amin_keepdim(axes),
        }
    } else {
        // A power of 0 has no usable derivative: zeros are left out, and so is a sum that they make 0 or infinite.
        let size = x.abs();
        let zero = size.eq(0);
        let of_zero = if p > 0.0 { 0.0 } else { f64::INFINITY };
        let powers = size.masked_fill(&zero, 1).pow(p).masked_fill(&zero, of_zero);
        let total = reduce_sum(&powers, set, keep);
        let none = total.eq(of_zero);
        total.masked_fill(&none, 1).pow(1.0 / p).masked_fill(&none, 0)
    };
    out.to_dtype(dtype)
}

#[track_caller]
fn logsumexp(x: &Tensor, axes: AxisSet, keep: bool) -> Tensor {
    let dtype = if x.dtype().unpacked().is_float() { x.dtype().unpacked() } else { DType::F32 };
    let x = x.to_dtype(dtype).widened();
    // The shift cancels, so it takes no part in the derivative. An infinite one would make inf - inf.
    let largest = match x.numel() {
        0 => x.sum_keepdim(axes_of(axes)).detach(),
        _ => x.detach().amax_keepdim(axes_of(axes)),
    };
    let shift = largest.masked_fill(&largest.isinf(), 0);
    let total = reduce_sum(&(&x - &shift).exp(), axes, keep).log();
    let shift = shift.reshape(total.shape());
    (total + shift).to_dtype(dtype)
}

#[track_caller]
fn reduce_sum(x: &Tensor, axes: AxisSet, keep: bool) -> Tensor {
    if keep { x.sum_keepdim(axes_of(axes)) } else { x.sum(axes_of(axes)) }
}

/// A resolved set as an argument. It is empty only for rank 0, where all axes are none too.
fn axes_of(set: AxisSet) -> Axes {
    Axes::new(&set.iter().map(|axis| axis as isize).collect::<Vec<_>>())
}
