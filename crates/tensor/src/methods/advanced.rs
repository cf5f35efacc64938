//! Reading and writing at places that tensors of indices name together, as `x[i, j]` in PyTorch.

use super::slice::{TensorIndex, TensorIndices};
use crate::{DType, Shape, Tensor, custom_grad, no_grad};
use kiln_device::method;
use kiln_ir::{Op, ScatterKind};

/// # Written and read at tensors of indices
impl Tensor {
    /// A copy with the places that [`Tensor::index`] would read replaced by `values`, which broadcast and take this
    /// tensor's dtype. Where places meet, the last value wins.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let device = Device::cpu();
    /// let rows = Tensor::from_slice(&[0i64, -1], [2], &device);
    /// let x = Tensor::zeros([3, 2], &device).index_put((&rows, 1), &Tensor::scalar(5.0f32, &device));
    /// assert_eq!(x.to_vec::<f32>().unwrap(), [0.0, 5.0, 0.0, 0.0, 0.0, 5.0]);
    /// ```
    #[doc(alias("__setitem__", "index_put_"))]
    #[track_caller]
    pub fn index_put(&self, indices: impl TensorIndices, values: &Tensor) -> Tensor {
        let _method = method("index_put");
        written(self, indices.list(), values, ScatterKind::Each)
    }

    /// A copy with `values` added at the places that [`Tensor::index`] would read, as often as each is named.
    #[doc(alias("index_put", "accumulate"))]
    #[track_caller]
    pub fn index_put_add(&self, indices: impl TensorIndices, values: &Tensor) -> Tensor {
        let _method = method("index_put_add");
        written(self, indices.list(), values, ScatterKind::EachAdd)
    }

    /// [`Tensor::gather`] whose operands broadcast along the other axes.
    #[track_caller]
    pub fn take_along_dim(&self, index: &Tensor, axis: isize) -> Tensor {
        let _method = method("take_along_dim");
        let at = self.axis("take_along_dim", axis);
        let (mut ours, mut theirs) = (self.shape(), index.shape());
        assert!(ours.len() == theirs.len(), "take_along_dim: indices of shape {theirs:?} for shape {ours:?}");
        let (extent, count) = (ours[at], theirs[at]);
        (ours[at], theirs[at]) = (1, 1);
        let Some(mut shape) = kiln_ir::broadcast(&ours, &theirs) else {
            panic!("take_along_dim: indices of shape {:?} for shape {:?}", index.shape(), self.shape())
        };
        shape[at] = count;
        let index = index.broadcast_to(shape);
        shape[at] = extent;
        self.broadcast_to(shape).gather(at as isize, &wrapped(&index, extent))
    }

    /// A copy with the elements where `mask` holds replaced by those of `source`, in order. Fewer than are needed fail where
    /// the result is read.
    #[track_caller]
    pub fn masked_scatter(&self, mask: &Tensor, source: &Tensor) -> Tensor {
        let _method = method("masked_scatter");
        let shape = self.shape();
        let mask = mask.truth().broadcast_to(shape);
        let n = self.numel();
        let place = (mask.reshape([n]).cumsum(0) - 1).reshape(shape);
        // What is not chosen reads the first element, and one is needed for that.
        let source = source.reshape([source.numel()]);
        let (source, shift) = match source.numel() {
            0 => (Tensor::full([1], 0, source.dtype().unpacked(), source.value.device()), 1),
            _ => (source, 0),
        };
        let place = (place + shift).masked_fill(&mask.logical_not(), 0);
        mask.where_(&source.taken(0, &place).to_dtype(self.dtype()), self)
    }
}

/// `x` read at tensors of indices, one for each of some axes. Their common shape stands in the place of the axes if these
/// are neighbours, else before all others.
#[track_caller]
pub(super) fn read(x: &Tensor, picks: &[(usize, Tensor)]) -> Tensor {
    if let [(axis, index)] = picks {
        return x.taken(*axis, &checked(index, x.shape()[*axis]));
    }
    let (index, extent) = joined("index", x, picks);
    let axes: Vec<usize> = picks.iter().map(|pick| pick.0).collect();
    let neighbours = axes.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    let (x, at) = match neighbours {
        true => (x.clone(), axes[0]),
        false => (moved_first(x, &axes), 0),
    };
    let shape = x.shape();
    let flat = [&shape[..at], &[extent], &shape[at + axes.len()..]].concat();
    x.reshape(flat).taken(at, &index)
}

/// These axes before all others.
#[track_caller]
fn moved_first(x: &Tensor, axes: &[usize]) -> Tensor {
    let rest = (0..x.rank()).filter(|axis| !axes.contains(axis));
    let order: Vec<isize> = axes.iter().copied().chain(rest).map(|axis| axis as isize).collect();
    x.permute(&order[..])
}

/// One index into several axes taken as one, and the extent of that.
#[track_caller]
fn joined(name: &str, x: &Tensor, picks: &[(usize, Tensor)]) -> (Tensor, usize) {
    let total: usize = picks.iter().map(|(axis, _)| x.shape()[*axis]).product();
    let mut flat: Option<Tensor> = None;
    for (axis, index) in picks {
        let extent = x.shape()[*axis];
        let index = checked(index, extent);
        // An index outside its own axis must be outside of all of them too.
        let index = index.ge(extent).where_(&(&index + total), &index);
        flat = Some(match flat {
            None => index,
            Some(before) => {
                let fits = kiln_ir::broadcast(&before.shape(), &index.shape()).is_some();
                let (a, b) = (before.shape(), index.shape());
                assert!(fits, "{name}: indices of shapes {a:?} and {b:?} do not fit together");
                let outside = before.lt(0).bitwise_or(index.lt(0));
                let place = before * extent + &index;
                outside.where_(&place.minimum(-1), &place)
            }
        });
    }
    match flat {
        Some(flat) => (flat, total),
        None => panic!("{name}: no indices"),
    }
}

/// Integers that count from the start; negative ones counted from the end.
#[track_caller]
fn checked(index: &Tensor, extent: usize) -> Tensor {
    let dtype = index.dtype();
    assert!(
        dtype != DType::Bool,
        "index: how many elements a mask has is not known before it is computed: see masked_select, masked_scatter and where_"
    );
    assert!(dtype.is_int(), "index: indices are integers, not {dtype}");
    wrapped(index, extent)
}

#[track_caller]
fn wrapped(index: &Tensor, extent: usize) -> Tensor {
    let index = index.to_dtype(DType::I64);
    index.lt(0).where_(&(&index + extent), &index)
}

/// A copy of `x` with values put or added at indices.
#[track_caller]
fn written(x: &Tensor, indices: Vec<TensorIndex>, values: &Tensor, kind: ScatterKind) -> Tensor {
    let values = values.to_dtype(x.dtype().unpacked());
    let shape = x.shape();
    let mut picks = Vec::new();
    for (axis, part) in indices.iter().enumerate().take(shape.len()) {
        match part {
            TensorIndex::Tensor(index) => picks.push((axis, index.clone())),
            TensorIndex::At(_) | TensorIndex::Slice { .. } => {}
        }
    }
    // Tensors for the leading axes name whole blocks; anything else is done place by place.
    if !picks.is_empty() && picks.len() == indices.len() && picks.len() <= shape.len() {
        return blocks(x, &picks, &values, kind);
    }
    let n = x.numel();
    let places = Tensor::index_along([n], 0, x.value.device()).reshape(shape).index(&indices[..]);
    let values = values.broadcast_to(places.shape());
    let (count, flat) = (places.numel(), x.reshape([n]));
    let ins = [&flat, &places.reshape([count]), &values.reshape([count])];
    Tensor::one(Op::Scatter { kind, axis: 0 }, &ins).reshape(shape)
}

#[track_caller]
fn blocks(x: &Tensor, picks: &[(usize, Tensor)], values: &Tensor, kind: ScatterKind) -> Tensor {
    let shape = x.shape();
    let (index, extent) = joined("index_put", x, picks);
    let rest = &shape[picks.len()..];
    let width: usize = rest.iter().product();
    let named = index.shape();
    let want = Shape::collect(named.iter().chain(rest).copied());
    let (count, flat) = (named.numel(), x.reshape([extent, width]));
    let values = values.broadcast_to(want).reshape([count, width]);
    let index = index.reshape([count]);
    let y = match kind {
        ScatterKind::EachAdd | ScatterKind::TakeAdd => {
            let op = Op::Scatter { kind: ScatterKind::TakeAdd, axis: 0 };
            Tensor::one(op, &[&flat, &index, &values])
        }
        ScatterKind::Each => replaced(&flat, &index, &values),
    };
    y.reshape(shape)
}

/// A copy of a matrix with rows put at a list of indices: of several for one place the last.
#[track_caller]
fn replaced(x: &Tensor, index: &Tensor, rows: &Tensor) -> Tensor {
    let (count, device) = (index.numel(), x.value.device());
    if count == 0 {
        return x.clone();
    }
    // Which row comes to each place is found out for places, not for elements.
    let number = Tensor::index_along([count], 0, device);
    let none = Tensor::full([x.dim(0)], -1, DType::I64, device);
    let winner = none.scatter(0, index, &number).unsqueeze(1);
    let y = no_grad(|| {
        let chosen = rows.detach().taken(0, &winner.reshape([x.dim(0)]).maximum(0));
        winner.ge(0).where_(&chosen, &x.detach())
    });
    let index = index.clone();
    custom_grad(&[x, rows], y, move |g| {
        let zeros = Tensor::full([count, g.dim(1)], 0, g.dtype(), g.value.device());
        vec![Some(replaced(g, &index, &zeros)), Some(g.taken(0, &index))]
    })
}
