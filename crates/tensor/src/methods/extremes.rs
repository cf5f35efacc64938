//! Largest, smallest and middle elements along an axis, with the places they come from.

use super::Axes;
use super::slice::slice;
use crate::{DType, Tensor};
use kiln_device::method;

/// How a quantile between two elements is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Quantile {
    /// On the line between them.
    #[default]
    Linear,
    /// The lower one.
    Lower,
    /// The higher one.
    Higher,
    /// The nearer one; of a tie the one at an even place.
    Nearest,
    /// Half-way between them.
    Midpoint,
}

/// # Largest, smallest and middle elements, with their places
impl Tensor {
    /// The largest elements along an axis, and their i64 indices: of ties the first, and NaN where there is one. The
    /// gradient goes to those elements.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::from_slice(&[1.0f32, 5.0, 3.0, 4.0, 0.0, 4.0], [2, 3], &Device::cpu());
    /// let (values, indices) = x.max_dim(1);
    /// assert_eq!(values.to_vec::<f32>().unwrap(), [5.0, 4.0]);
    /// assert_eq!(indices.to_vec::<i64>().unwrap(), [1, 0]);
    /// ```
    #[doc(alias("max"))]
    #[track_caller]
    pub fn max_dim(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("max_dim");
        dropped(self, axis, self.max_dim_keepdim(axis))
    }

    /// Like [`Tensor::max_dim`], with the axis kept as 1.
    #[track_caller]
    pub fn max_dim_keepdim(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("max_dim_keepdim");
        let at = self.detach().argmax_keepdim(axis);
        (self.gather(axis, &at), at)
    }

    /// The smallest elements along an axis, and their i64 indices: of ties the first, and NaN where there is one. The
    /// gradient goes to those elements.
    #[doc(alias("min"))]
    #[track_caller]
    pub fn min_dim(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("min_dim");
        dropped(self, axis, self.min_dim_keepdim(axis))
    }

    /// Like [`Tensor::min_dim`], with the axis kept as 1.
    #[track_caller]
    pub fn min_dim_keepdim(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("min_dim_keepdim");
        let at = self.detach().argmin_keepdim(axis);
        (self.gather(axis, &at), at)
    }

    /// The smallest and the largest element over axes.
    #[track_caller]
    pub fn aminmax(&self, axes: impl Into<Axes>) -> (Tensor, Tensor) {
        let _method = method("aminmax");
        let axes = axes.into();
        (self.amin(axes.clone()), self.amax(axes))
    }

    /// The element in the middle along an axis (the lower of two), and its i64 index; NaN where there is one.
    #[track_caller]
    pub fn median(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("median");
        dropped(self, axis, self.median_keepdim(axis))
    }

    /// Like [`Tensor::median`], with the axis kept as 1.
    #[track_caller]
    pub fn median_keepdim(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("median_keepdim");
        let (sorted, order, n) = in_order("median", self, axis);
        let middle = (n - 1) / 2;
        if !self.dtype().unpacked().is_float() {
            return picked(self, axis, &[&sorted, &order], middle);
        }
        // A NaN is the last of all.
        let last = narrowed(&sorted, axis, n - 1);
        let place = last.isnan().to_dtype(DType::I64) * (n - 1 - middle) + middle;
        (sorted.gather(axis, &place).reshape(place.shape()), order.gather(axis, &place))
    }

    /// The `k`-th smallest element along an axis (1 is the smallest), and its i64 index.
    #[track_caller]
    pub fn kthvalue(&self, k: usize, axis: isize) -> (Tensor, Tensor) {
        let _method = method("kthvalue");
        let (sorted, order, n) = in_order("kthvalue", self, axis);
        assert!((1..=n).contains(&k), "kthvalue: {k} of {n} elements of axis {axis} of {:?}", self.shape());
        dropped(self, axis, picked(self, axis, &[&sorted, &order], k - 1))
    }

    /// The value below which the part `q` of an axis lies, between 0 and 1; NaN where there is one.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::from_slice(&[4.0f32, 1.0, 3.0, 2.0], [4], &Device::cpu());
    /// assert_eq!(x.quantile(0.5, 0).item::<f32>().unwrap(), 2.5);
    /// ```
    #[track_caller]
    pub fn quantile(&self, q: f64, axis: isize) -> Tensor {
        let _method = method("quantile");
        self.quantiles(&[q], axis, Quantile::Linear).squeeze(0)
    }

    /// Several quantiles of an axis, along a new first axis.
    #[doc(alias("quantile"))]
    #[track_caller]
    pub fn quantiles(&self, q: &[f64], axis: isize, between: Quantile) -> Tensor {
        let _method = method("quantiles");
        assert!(self.dtype().unpacked().is_float(), "quantile: of floats only, not {}", self.dtype());
        for q in q {
            assert!((0.0..=1.0).contains(q), "quantile: {q} is not between 0 and 1");
        }
        let (sorted, _, n) = in_order("quantile", self, axis);
        let missing = narrowed(&sorted, axis, n - 1).detach().isnan();
        let mut rows = Vec::with_capacity(q.len());
        for q in q {
            let at = q * (n - 1) as f64;
            let (low, high) = (narrowed(&sorted, axis, at.floor() as usize), at.ceil() as usize);
            let high = narrowed(&sorted, axis, high.min(n - 1));
            let row = match between {
                Quantile::Linear => low.lerp(&high, at.fract()),
                Quantile::Lower => low,
                Quantile::Higher => high,
                Quantile::Nearest => narrowed(&sorted, axis, at.round_ties_even() as usize),
                Quantile::Midpoint if at.fract() == 0.0 => low,
                Quantile::Midpoint => low.lerp(&high, 0.5),
            };
            rows.push(without(self, axis, &row.masked_fill(&missing, f64::NAN)));
        }
        match rows.is_empty() {
            true => panic!("quantile: no quantiles"),
            false => Tensor::stack(&rows, 0),
        }
    }

    /// How many elements over axes are not 0, i64.
    #[track_caller]
    pub fn count_nonzero(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("count_nonzero");
        self.detach().truth().sum(axes)
    }

    /// The largest of each element and all before it along an axis, and its i64 index: of ties the last. NaN stays from
    /// where it comes.
    #[track_caller]
    pub fn cummax(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("cummax");
        running(self, axis, |a, b| a.maximum(b))
    }

    /// The smallest of each element and all before it along an axis, and its i64 index: of ties the last. NaN stays from
    /// where it comes.
    #[track_caller]
    pub fn cummin(&self, axis: isize) -> (Tensor, Tensor) {
        let _method = method("cummin");
        running(self, axis, |a, b| a.minimum(b))
    }

    /// The sum over axes, with NaN as 0.
    #[track_caller]
    pub fn nansum(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("nansum");
        self.masked_fill(&self.isnan(), 0).sum(axes)
    }

    /// The mean over axes of what is not NaN.
    #[track_caller]
    pub fn nanmean(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("nanmean");
        let (axes, missing) = (axes.into(), self.isnan());
        let count = missing.logical_not().sum(axes.clone());
        self.masked_fill(&missing, 0).sum(axes) / count.to_dtype(self.dtype().unpacked())
    }

    /// Differences of neighbours along an axis.
    #[track_caller]
    pub fn diff(&self, axis: isize) -> Tensor {
        let _method = method("diff");
        let at = self.axis("diff", axis);
        let n = self.shape()[at];
        slice(self, at, 1.min(n), n, 1) - slice(self, at, 0, n.saturating_sub(1), 1)
    }
}

/// An axis in order, where each element comes from, and how many there are.
#[track_caller]
fn in_order(name: &str, x: &Tensor, axis: isize) -> (Tensor, Tensor, usize) {
    let at = x.any_axis(name, axis);
    let n = x.shape().get(at).copied().unwrap_or(1);
    assert!(n > 0, "{name}: axis {axis} of shape {:?} is empty", x.shape());
    let (sorted, order) = x.sort(axis, false);
    (sorted, order, n)
}

/// The element at one place of an axis, which stays as 1.
#[track_caller]
fn narrowed(x: &Tensor, axis: isize, place: usize) -> Tensor {
    if x.rank() == 0 { x.clone() } else { x.narrow(axis, place as isize, 1) }
}

#[track_caller]
fn picked(x: &Tensor, axis: isize, [values, order]: &[&Tensor; 2], place: usize) -> (Tensor, Tensor) {
    debug_assert_eq!(values.shape(), x.shape());
    (narrowed(values, axis, place), narrowed(order, axis, place))
}

/// Both results without an axis of `x`.
#[track_caller]
fn dropped(x: &Tensor, axis: isize, (values, indices): (Tensor, Tensor)) -> (Tensor, Tensor) {
    (without(x, axis, &values), without(x, axis, &indices))
}

#[track_caller]
fn without(x: &Tensor, axis: isize, y: &Tensor) -> Tensor {
    if x.rank() == 0 { y.clone() } else { y.squeeze(axis) }
}

/// A running extreme, by doubling: after each pass a place knows of twice as many before it.
#[track_caller]
fn running(x: &Tensor, axis: isize, better: fn(&Tensor, &Tensor) -> Tensor) -> (Tensor, Tensor) {
    let at = x.any_axis("cummax", axis);
    let shape = x.shape();
    if x.numel() == 0 || x.rank() == 0 {
        return (x.clone(), Tensor::full(shape, 0, DType::I64, x.value.device()));
    }
    let plain = x.detach();
    let most = doubled(&plain, at, better);
    // An element that reaches the extreme up to its place holds it from there on.
    let place = kiln_ir::Op::Iota { shape, dtype: DType::I64, axis: at as u8 };
    let place = Tensor::create(place, x.value.device());
    let holds = plain.eq(&most).bitwise_or(plain.isnan());
    let indices = doubled(&place.masked_fill(&holds.logical_not(), 0), at, |a, b| a.maximum(b));
    (x.gather(axis, &indices), indices)
}

#[track_caller]
fn doubled(x: &Tensor, axis: usize, better: fn(&Tensor, &Tensor) -> Tensor) -> Tensor {
    let n = x.shape()[axis];
    let (mut sum, mut reach) = (x.clone(), 1);
    while reach < n {
        let first = slice(&sum, axis, 0, reach, 1);
        let rest = better(&slice(&sum, axis, reach, n, 1), &slice(&sum, axis, 0, n - reach, 1));
        sum = Tensor::cat(&[first, rest], axis as isize);
        reach *= 2;
    }
    sum
}
