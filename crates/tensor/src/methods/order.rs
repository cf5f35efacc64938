//! Sorting, and what needs it.

use crate::{DType, Error, Tensor};
use kiln_device::method;
use kiln_ir::Op;

/// # Sorted
impl Tensor {
    /// The elements along an axis in order, and the i64 indices they come from. Equal elements stay in their order;
    /// NaN is above everything.
    #[track_caller]
    pub fn sort(&self, axis: isize, descending: bool) -> (Tensor, Tensor) {
        let _method = method("sort");
        let at = self.any_axis("sort", axis);
        let take = self.shape().get(at).copied().unwrap_or(1);
        sorted(self, at, descending, take)
    }

    /// The i64 indices that sort an axis; see [`Tensor::sort`].
    #[track_caller]
    pub fn argsort(&self, axis: isize, descending: bool) -> Tensor {
        let _method = method("argsort");
        self.detach().sort(axis, descending).1
    }

    /// The `k` largest (or smallest) elements along an axis in order, and the i64 indices they come from. A tensor of
    /// rank 0 is given whole.
    #[track_caller]
    pub fn topk(&self, k: usize, axis: isize, largest: bool) -> (Tensor, Tensor) {
        let _method = method("topk");
        let at = self.any_axis("topk", axis);
        let extent = self.shape().get(at).copied().unwrap_or(1);
        assert!(k <= extent, "topk: {k} elements of axis {axis} of shape {:?}", self.shape());
        sorted(self, at, largest, if self.rank() == 0 { 1 } else { k })
    }

    /// The places of the elements that are not 0, in order: i64 `[count, rank]`. Waits for the count.
    #[doc(alias("argwhere", "where"))]
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor, Error> {
        let _method = method("nonzero");
        let places = places(&self.detach().truth())?;
        let shape = self.shape();
        let mut columns = Vec::with_capacity(shape.len());
        let mut inner = self.numel();
        for &extent in shape.iter() {
            // Where an extent is 0 there are no places, and nothing to divide.
            let extent = extent.max(1);
            inner = (inner / extent).max(1);
            columns.push(places.floor_divide(inner).remainder(extent));
        }
        Ok(match columns.is_empty() {
            true => Tensor::full([places.numel(), 0], 0, DType::I64, self.value.device()),
            false => Tensor::stack(&columns, 1),
        })
    }

    /// The elements where `mask` holds, in order, rank 1; the two broadcast. Waits for their count.
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor, Error> {
        let _method = method("masked_select");
        let shape = kiln_ir::broadcast(&self.shape(), &mask.shape());
        let Some(shape) = shape else {
            panic!("masked_select: shapes {:?} and {:?} do not fit together", self.shape(), mask.shape())
        };
        let places = places(&mask.detach().truth().broadcast_to(shape))?;
        Ok(self.broadcast_to(shape).reshape([shape.numel()]).taken(0, &places))
    }

    /// The parts where `mask` holds, in order, along one axis in the place of the leading axes that the mask covers. Waits for
    /// their count.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::arange(0, 6, 1, &Device::cpu()).reshape([3, 2]);
    /// let rows = x.index_where(&Tensor::from_slice(&[true, false, true], [3], &Device::cpu()))?;
    /// assert_eq!(rows.to_vec::<i64>()?, [0, 1, 4, 5]);
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias("masked_select", "__getitem__"))]
    #[track_caller]
    pub fn index_where(&self, mask: &Tensor) -> Result<Tensor, Error> {
        let _method = method("index_where");
        let (shape, covered) = (self.shape(), mask.shape());
        let fits = !covered.is_empty() && shape.starts_with(&covered);
        assert!(fits, "index_where: a mask of shape {covered:?} for shape {shape:?}");
        let places = places(&mask.detach().truth())?;
        let flat = [&[covered.numel()], &shape[covered.len()..]].concat();
        Ok(self.reshape(flat).taken(0, &places))
    }
}

#[track_caller]
fn sorted(x: &Tensor, axis: usize, descending: bool, take: usize) -> (Tensor, Tensor) {
    let mut outs = Tensor::apply(Op::Sort { axis: axis as u8, descending, take }, &[&x.lifted()]).into_iter();
    let (Some(mut values), Some(mut indices)) = (outs.next(), outs.next()) else { unreachable!() };
    if x.rank() == 0 {
        (values, indices) = (values.reshape(()), indices.reshape(()));
    }
    (values, indices)
}

/// The flat places where a bool tensor holds: a stable sort brings them to the front.
#[track_caller]
fn places(mask: &Tensor) -> Result<Tensor, Error> {
    let count = mask.sum(()).item::<i64>()? as usize;
    Ok(sorted(&mask.reshape([mask.numel()]), 0, true, count).1)
}
