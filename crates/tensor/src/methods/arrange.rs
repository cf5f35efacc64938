//! Axes and elements rearranged: moved, split, turned, repeated, and channels as pixels.

use super::Axes;
use crate::{DType, Error, Meta, Shape, Tensor};
use kiln_device::method;
use kiln_ir::Op;

/// # Axes and elements rearranged
impl Tensor {
    /// The parts at each index of an axis, without that axis.
    #[track_caller]
    pub fn unbind(&self, axis: isize) -> Vec<Tensor> {
        let _method = method("unbind");
        let extent = self.dim(axis);
        let mut parts = Vec::with_capacity(extent);
        for i in 0..extent {
            parts.push(self.select(axis, i as isize));
        }
        parts
    }

    /// Axes moved to other places; the rest keep their order.
    #[doc(alias("moveaxis"))]
    #[track_caller]
    pub fn movedim(&self, source: impl Into<Axes>, destination: impl Into<Axes>) -> Tensor {
        let _method = method("movedim");
        let from = source.into().list("movedim", self);
        let to = destination.into().list("movedim", self);
        let once = |axes: &[usize]| axes.iter().enumerate().all(|(i, axis)| !axes[..i].contains(axis));
        let fits = from.len() == to.len() && once(&from) && once(&to);
        assert!(fits, "movedim: axes {from:?} to {to:?} of shape {:?}", self.shape());
        let mut rest = (0..self.rank()).filter(|axis| !from.contains(axis));
        let mut order = Vec::with_capacity(self.rank());
        for place in 0..self.rank() {
            let axis = match to.iter().position(|&at| at == place) {
                Some(i) => Some(from[i]),
                None => rest.next(),
            };
            order.extend(axis.map(|axis| axis as isize));
        }
        self.permute(&order[..])
    }

    /// An axis split into several; one extent may be -1: what is left over.
    #[track_caller]
    pub fn unflatten(&self, axis: isize, sizes: &[isize]) -> Tensor {
        let _method = method("unflatten");
        let (at, shape) = (self.axis("unflatten", axis), self.shape());
        let known: usize = sizes.iter().filter(|&&d| d >= 0).map(|&d| d as usize).product();
        let open = sizes.iter().filter(|&&d| d < 0).count();
        let rest = if open == 1 && known > 0 { shape[at] / known } else { 1 };
        let fits = !sizes.is_empty() && open <= 1 && known * rest == shape[at];
        assert!(fits, "unflatten: axis {axis} of shape {shape:?} is not {sizes:?}");
        let parts = sizes.iter().map(|&d| if d < 0 { rest } else { d as usize });
        let all = shape[..at].iter().copied().chain(parts).chain(shape[at + 1..].iter().copied());
        self.reshape(all.collect::<Vec<usize>>())
    }

    /// Turned by quarters in the plane of two axes, from the first towards the second; negative `k` turns back.
    #[track_caller]
    pub fn rot90(&self, k: isize, axes: [isize; 2]) -> Tensor {
        let _method = method("rot90");
        let [a, b] = [self.axis("rot90", axes[0]) as isize, self.axis("rot90", axes[1]) as isize];
        assert!(a != b, "rot90: axes {axes:?} of shape {:?} are the same", self.shape());
        match k.rem_euclid(4) {
            0 => self.clone(),
            1 => self.flip(b).transpose(a, b),
            2 => self.flip([a, b]),
            _ => self.flip(a).transpose(a, b),
        }
    }

    /// Each element along an axis `times` times in a row.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::arange(0, 2, 1, &Device::cpu());
    /// assert_eq!(x.repeat_interleave(3, 0).to_vec::<i64>().unwrap(), [0, 0, 0, 1, 1, 1]);
    /// ```
    #[track_caller]
    pub fn repeat_interleave(&self, times: usize, axis: isize) -> Tensor {
        let _method = method("repeat_interleave");
        let x = self.lifted();
        let at = self.any_axis("repeat_interleave", axis);
        let mut shape = x.shape();
        let (before, rest) =
            (shape[..=at].iter().product::<usize>(), shape[at + 1..].iter().product::<usize>());
        shape[at] *= times;
        x.reshape([before, 1, rest]).broadcast_to([before, times, rest]).reshape(shape)
    }

    /// Each element along an axis as often as `times` (integers, one for each) says. Waits for them.
    #[doc(alias("repeat_interleave"))]
    #[track_caller]
    pub fn repeat_interleave_each(&self, times: &Tensor, axis: isize) -> Result<Tensor, Error> {
        let _method = method("repeat_interleave_each");
        let x = self.lifted();
        let at = self.any_axis("repeat_interleave", axis);
        let (extent, given) = (x.shape()[at], times.shape());
        assert!(
            given[..] == [extent] && times.dtype().is_int(),
            "repeat_interleave: {} for axis {axis} of shape {:?}",
            times.meta(),
            self.shape()
        );
        let times = times.to_dtype(DType::I64);
        let counts = times.to_vec::<i64>()?;
        let outside = |index| Error::Index { op: "repeat_interleave".into(), index, length: usize::MAX };
        let mut total = 0i64;
        for count in counts {
            let sum = total.checked_add(count).filter(|_| count >= 0);
            total = sum.ok_or_else(|| outside(count))?;
        }
        let mut shape = x.shape();
        shape[at] = usize::try_from(total).unwrap_or(usize::MAX);
        Meta { dtype: x.dtype(), shape }.check()?;
        Meta { dtype: DType::I64, shape: [shape[at]].into() }.check()?;
        let place = Tensor::index_along([shape[at]], 0, x.value.device());
        // The element at a place is the first whose end lies behind it.
        Ok(x.taken(at, &times.cumsum(0).searchsorted(&place, true)))
    }

    /// `[.., C * f * f, H, W]` as `[.., C, H * f, W * f]`: channels become finer pixels.
    #[track_caller]
    pub fn pixel_shuffle(&self, factor: usize) -> Tensor {
        let _method = method("pixel_shuffle");
        let (f, (lead, [c, h, w])) = (factor, image("pixel_shuffle", self));
        let fits = f > 0 && c.is_multiple_of(f * f);
        assert!(fits, "pixel_shuffle: {c} channels do not fall into squares of {f} by {f}");
        let n: usize = lead.iter().product();
        let y = self.reshape([n, c / (f * f), f, f, h, w]).permute([0, 1, 4, 2, 5, 3]);
        y.reshape([&lead[..], &[c / (f * f), h * f, w * f]].concat())
    }

    /// `[.., C, H * f, W * f]` as `[.., C * f * f, H, W]`: the inverse of [`Tensor::pixel_shuffle`].
    #[track_caller]
    pub fn pixel_unshuffle(&self, factor: usize) -> Tensor {
        let _method = method("pixel_unshuffle");
        let (f, (lead, [c, h, w])) = (factor, image("pixel_unshuffle", self));
        let fits = f > 0 && h.is_multiple_of(f) && w.is_multiple_of(f);
        assert!(fits, "pixel_unshuffle: {h} by {w} pixels do not fall into squares of {f} by {f}");
        let n: usize = lead.iter().product();
        let y = self.reshape([n, c, h / f, f, w / f, f]).permute([0, 1, 3, 5, 2, 4]);
        y.reshape([&lead[..], &[c * f * f, h / f, w / f]].concat())
    }

    /// Grids of coordinates from vectors: the i-th result has the i-th vector along axis i, and all have one shape. See
    /// [`Tensor::meshgrid_xy`] for columns first.
    #[track_caller]
    pub fn meshgrid(vectors: &[&Tensor]) -> Vec<Tensor> {
        let _method = method("meshgrid");
        for v in vectors {
            assert!(v.rank() <= 1, "meshgrid: shape {:?} is not a vector", v.shape());
        }
        let shape = Shape::collect(vectors.iter().map(|v| v.numel()));
        let mut grids = Vec::with_capacity(vectors.len());
        for (i, v) in vectors.iter().enumerate() {
            let mut own = Shape::repeat(1, vectors.len());
            own[i] = v.numel();
            grids.push(v.reshape(own).broadcast_to(shape));
        }
        grids
    }

    /// Like [`Tensor::meshgrid`] with the first two axes exchanged, for x and y.
    #[doc(alias("meshgrid"))]
    #[track_caller]
    pub fn meshgrid_xy(vectors: &[&Tensor]) -> Vec<Tensor> {
        let _method = method("meshgrid_xy");
        let mut grids = Tensor::meshgrid(vectors);
        if vectors.len() > 1 {
            for grid in &mut grids {
                *grid = grid.transpose(0, 1);
            }
        }
        grids
    }

    /// Tensors stretched to the shape they broadcast to.
    #[track_caller]
    pub fn broadcast_tensors(tensors: &[&Tensor]) -> Vec<Tensor> {
        let _method = method("broadcast_tensors");
        let mut shape = Shape::default();
        for t in tensors {
            match kiln_ir::broadcast(&shape, &t.shape()) {
                Some(wider) => shape = wider,
                None => panic!("broadcast_tensors: shapes {shape:?} and {:?} do not fit together", t.shape()),
            }
        }
        let mut out = Vec::with_capacity(tensors.len());
        for t in tensors {
            out.push(t.broadcast_to(shape));
        }
        out
    }

    /// The places of the lower triangle of a matrix, i64 `[2, count]`: rows and columns.
    #[track_caller]
    pub fn tril_indices(rows: usize, columns: usize, offset: isize, device: &crate::Device) -> Tensor {
        let _method = method("tril_indices");
        places(rows, columns, device, |row, column| column as i128 <= row as i128 + offset as i128)
    }

    /// The places of the upper triangle of a matrix, i64 `[2, count]`: rows and columns.
    #[track_caller]
    pub fn triu_indices(rows: usize, columns: usize, offset: isize, device: &crate::Device) -> Tensor {
        let _method = method("triu_indices");
        places(rows, columns, device, |row, column| column as i128 >= row as i128 + offset as i128)
    }

    /// The index along an axis at each element of `shape`, i64.
    #[track_caller]
    pub(super) fn index_along(shape: impl Into<Shape>, axis: usize, device: &crate::Device) -> Tensor {
        Tensor::create(Op::Iota { shape: shape.into(), dtype: DType::I64, axis: axis as u8 }, device)
    }
}

/// The places of a matrix that count, row by row.
#[track_caller]
fn places(
    rows: usize,
    columns: usize,
    device: &crate::Device,
    counts: impl Fn(usize, usize) -> bool,
) -> Tensor {
    let (mut at_row, mut at_column) = (Vec::new(), Vec::new());
    for row in 0..rows {
        for column in (0..columns).filter(|&column| counts(row, column)) {
            at_row.push(row as i64);
            at_column.push(column as i64);
        }
    }
    let count = at_row.len();
    at_row.extend(at_column);
    Tensor::from_vec(at_row, [2, count], device)
}

/// The axes before the last three, and those.
#[track_caller]
fn image(name: &str, x: &Tensor) -> (Vec<usize>, [usize; 3]) {
    let shape = x.shape();
    match shape[..] {
        [ref lead @ .., c, h, w] => (lead.to_vec(), [c, h, w]),
        _ => panic!("{name}: shape {shape:?} is not [.., C, H, W]"),
    }
}
