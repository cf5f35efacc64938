//! Values as a set: the different ones, how many of each, and where they belong in a sorted list.

use crate::{DType, Error, Meta, Tensor};
use kiln_device::method;

/// The different values of a tensor, see [`Tensor::unique`].
#[derive(Clone)]
pub struct Unique {
    /// Each value once.
    pub values: Tensor,
    /// For each element the place of its value, i64.
    pub inverse: Tensor,
    /// How often each value occurs, i64.
    pub counts: Tensor,
}

/// # Values as a set
impl Tensor {
    /// The different values in ascending order, with the place of each element's value and how often each occurs. Waits
    /// for their number. Every NaN is a value of its own.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::from_slice(&[3i64, 1, 3], [3], &Device::cpu());
    /// let u = x.unique()?;
    /// assert_eq!(u.values.to_vec::<i64>()?, [1, 3]);
    /// assert_eq!(u.inverse.to_vec::<i64>()?, [1, 0, 1]);
    /// assert_eq!(u.counts.to_vec::<i64>()?, [1, 2]);
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn unique(&self) -> Result<Unique, Error> {
        let _method = method("unique");
        let (sorted, order) = self.detach().reshape([self.numel()]).sort(0, false);
        let runs = runs(&sorted)?;
        let inverse = order.zeros_like().scatter(0, &order, &runs.inverse);
        Ok(Unique { inverse: inverse.reshape(self.shape()), ..runs })
    }

    /// The different slices along an axis in lexical order, and for each slice its place among them. Waits for their number. It
    /// sorts once for each element of a slice.
    #[doc(alias("unique"))]
    #[track_caller]
    pub fn unique_dim(&self, axis: isize) -> Result<Unique, Error> {
        let _method = method("unique_dim");
        let at = self.axis("unique_dim", axis) as isize;
        let slices = self.detach().movedim(at, 0);
        let shape = slices.shape();
        let (n, width) = (shape[0], shape[1..].iter().product::<usize>());
        let rows = slices.reshape([n, width]);
        let mut order = Tensor::index_along([n], 0, self.value.device());
        // Stable sorts, from the last element of a slice to the first.
        for column in (0..width).rev() {
            let keys = rows.select(1, column as isize).taken(0, &order);
            order = order.taken(0, &keys.argsort(0, false));
        }
        let runs = runs(&rows.taken(0, &order))?;
        let inverse = order.zeros_like().scatter(0, &order, &runs.inverse);
        let shape = [&[runs.values.shape()[0]], &shape[1..]].concat();
        Ok(Unique { values: runs.values.reshape(shape).movedim(0, at), inverse, ..runs })
    }

    /// The elements without repetitions of the one before, in their order. Waits for their number.
    #[track_caller]
    pub fn unique_consecutive(&self) -> Result<Unique, Error> {
        let _method = method("unique_consecutive");
        let runs = runs(&self.detach().reshape([self.numel()]))?;
        Ok(Unique { inverse: runs.inverse.reshape(self.shape()), ..runs })
    }

    /// How often each integer from 0 on occurs, at least `minlength` numbers, i64. Waits for the largest one. A negative
    /// integer fails where the result is read.
    #[track_caller]
    pub fn bincount(&self, minlength: usize) -> Result<Tensor, Error> {
        let _method = method("bincount");
        let ones = Tensor::full(self.shape(), 1, DType::I64, self.value.device());
        counted(self, &ones, minlength)
    }

    /// The sum of the weights of each integer from 0 on; see [`Tensor::bincount`].
    #[doc(alias("bincount"))]
    #[track_caller]
    pub fn bincount_weighted(&self, weights: &Tensor, minlength: usize) -> Result<Tensor, Error> {
        let _method = method("bincount_weighted");
        counted(self, weights, minlength)
    }

    /// Where values belong in this sorted list, i64: before the first element that is not below (`right`: above) each.
    /// A list of rank 1 serves values of any shape; otherwise all axes but the last are the same.
    #[track_caller]
    pub fn searchsorted(&self, values: &Tensor, right: bool) -> Tensor {
        let _method = method("searchsorted");
        let (list, shape) = (self.shape(), values.shape());
        let rank = list.len();
        let fits = rank == 1 || rank > 1 && shape.len() == rank && shape[..rank - 1] == list[..rank - 1];
        assert!(fits, "searchsorted: values of shape {shape:?} for lists of shape {list:?}");
        let extent = list[rank - 1];
        let dtype = self.meet_dtype(values);
        let (sorted, values) = (self.detach().to_dtype(dtype), values.detach().to_dtype(dtype));
        let values = if rank == 1 { values.reshape([values.numel()]) } else { values };
        let axis = rank as isize - 1;
        let mut low = Tensor::full(values.shape(), 0, DType::I64, self.value.device());
        let mut high = low.full_like(extent);
        // Halved until nothing is left: the answer stays between the two.
        for _ in 0..usize::BITS - extent.leading_zeros() {
            let open = low.lt(&high);
            let middle = (&low + &high).floor_divide(2);
            let element = sorted.gather(axis, &middle.minimum(extent - 1));
            let reached = if right { element.gt(&values) } else { element.ge(&values) };
            let up = open.bitwise_and(reached.logical_not());
            let down = open.bitwise_and(&reached);
            (low, high) = (up.where_(&(&middle + 1), &low), down.where_(&middle, &high));
        }
        low.reshape(shape)
    }

    /// Into which of the ranges between sorted `boundaries` each element falls, i64. An element that is a boundary falls
    /// into the range below it, with `right` into that above.
    #[track_caller]
    pub fn bucketize(&self, boundaries: &Tensor, right: bool) -> Tensor {
        let _method = method("bucketize");
        boundaries.searchsorted(self, right)
    }

    /// Whether each element is one of `values`, of any shape.
    #[track_caller]
    pub fn isin(&self, values: &Tensor) -> Tensor {
        let _method = method("isin");
        if values.numel() == 0 {
            return Tensor::full(self.shape(), 0, DType::Bool, self.value.device());
        }
        let sorted = values.detach().reshape([values.numel()]).sort(0, false).0;
        let place = sorted.searchsorted(self, false).minimum(values.numel() - 1);
        sorted.taken(0, &place).eq(self.detach())
    }

    /// How many elements fall into each of `bins` equal ranges from `min` to `max`, in this dtype. Others do not count.
    #[track_caller]
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Tensor {
        let _method = method("histc");
        assert!(bins > 0 && min < max, "histc: {bins} ranges from {min} to {max}");
        let x = self.detach().reshape([self.numel()]).widened();
        let inside = x.ge(min).bitwise_and(x.le(max));
        let place = ((&x - min) * (bins as f64 / (max - min))).masked_fill(&inside.logical_not(), 0);
        let place = place.to_dtype(DType::I64).minimum(bins - 1);
        let zeros = Tensor::full([bins], 0, self.dtype().unpacked(), self.value.device());
        zeros.scatter_add(0, &place, &inside.to_dtype(zeros.dtype()))
    }

    #[track_caller]
    fn meet_dtype(&self, other: &Tensor) -> DType {
        kiln_ir::promote(self.dtype().unpacked(), other.dtype().unpacked())
    }
}

/// Each run of equal elements of a vector, or of equal rows of a matrix, once.
#[track_caller]
fn runs(x: &Tensor) -> Result<Unique, Error> {
    let (n, device) = (x.dim(0), x.value.device());
    if n == 0 {
        let none = Tensor::full([0], 0, DType::I64, device);
        return Ok(Unique { values: x.clone(), inverse: none.clone(), counts: none });
    }
    let differs = x.narrow(0, 1, n - 1).ne(x.narrow(0, 0, n - 1));
    let differs = if x.rank() > 1 { differs.any(1) } else { differs };
    let starts = Tensor::cat(&[Tensor::full([1], 1, DType::Bool, device), differs], 0);
    let inverse = starts.cumsum(0) - 1;
    let values = x.index_where(&starts)?;
    let zeros = Tensor::full([values.dim(0)], 0, DType::I64, device);
    let counts = zeros.scatter_add(0, &inverse, &inverse.full_like(1));
    Ok(Unique { values, inverse, counts })
}

#[track_caller]
fn counted(x: &Tensor, weights: &Tensor, minlength: usize) -> Result<Tensor, Error> {
    let dtype = x.dtype();
    assert!(dtype.is_int() && x.rank() == 1, "bincount: {} is not a list of integers", x.meta());
    let same = weights.shape() == x.shape();
    assert!(same, "bincount: weights of shape {:?} for {:?}", weights.shape(), x.shape());
    let index = x.to_dtype(DType::I64);
    let most = if x.numel() == 0 { -1 } else { index.amax(()).item::<i64>()? };
    let length = usize::try_from(most.saturating_add(1)).unwrap_or(0).max(minlength);
    let meta = Meta { dtype: weights.dtype().unpacked(), shape: [length].into() };
    // The largest number is data: it may be more than there can be places.
    meta.check()?;
    let zeros = Tensor::full(meta.shape, 0, meta.dtype, x.value.device());
    Ok(zeros.scatter_add(0, &index, weights))
}
