//! Reading and writing at indices that are themselves tensors. An index outside its axis fails where the result is read.

use crate::{DType, Tensor};
use kiln_device::method;
use kiln_ir::{GatherKind, Op, ScatterKind};

/// # Read and written along an axis
impl Tensor {
    /// One element for each index: `y[i][j] = x[index[i][j]][j]` along axis 0.
    #[track_caller]
    pub fn gather(&self, axis: isize, index: &Tensor) -> Tensor {
        let _method = method("gather");
        let axis = self.any_axis("gather", axis) as u8;
        let op = Op::Gather { kind: GatherKind::Each, axis };
        Tensor::one(op, &[&self.lifted(), &index.lifted()]).reshape(index.shape())
    }

    /// A copy with each element of `source` put at its index: `y[index[i][j]][j] = source[i][j]` along axis 0. Where
    /// indices meet, the last one wins. `source` may reach further than `index`.
    #[track_caller]
    pub fn scatter(&self, axis: isize, index: &Tensor, source: &Tensor) -> Tensor {
        let _method = method("scatter");
        scatter(ScatterKind::Each, "scatter", self, axis, index, source)
    }

    /// A copy with each element of `source` added at its index. `source` may reach further than `index`.
    #[track_caller]
    pub fn scatter_add(&self, axis: isize, index: &Tensor, source: &Tensor) -> Tensor {
        let _method = method("scatter_add");
        scatter(ScatterKind::EachAdd, "scatter_add", self, axis, index, source)
    }

    /// Whole slices along an axis, in the order of a list of indices.
    #[doc(alias("take"))]
    #[track_caller]
    pub fn index_select(&self, axis: isize, index: &Tensor) -> Tensor {
        let _method = method("index_select");
        assert!(index.rank() <= 1, "index_select: the indices are a list, not of shape {:?}", index.shape());
        let axis = self.any_axis("index_select", axis);
        let out = self.lifted().taken(axis, &index.lifted());
        match self.rank() {
            0 => out.reshape(()),
            _ => out,
        }
    }

    /// A copy with slices of `source` added at a list of indices along an axis.
    #[track_caller]
    pub fn index_add(&self, axis: isize, index: &Tensor, source: &Tensor) -> Tensor {
        let _method = method("index_add");
        assert!(index.rank() <= 1, "index_add: the indices are a list, not of shape {:?}", index.shape());
        let axis = self.any_axis("index_add", axis) as u8;
        let op = Op::Scatter { kind: ScatterKind::TakeAdd, axis };
        Tensor::one(op, &[&self.lifted(), &index.lifted(), &source.lifted()]).reshape(self.shape())
    }

    /// Rows of this table `[count, width]`, one for each id of a tensor of any shape.
    #[track_caller]
    pub fn embedding(&self, ids: &Tensor) -> Tensor {
        let _method = method("embedding");
        assert!(self.rank() == 2, "embedding: the table is a matrix, not of shape {:?}", self.shape());
        self.taken(0, ids)
    }

    /// For each of these integers a row of `classes` zeros with a 1 at its place, i64. An integer that is not a class
    /// gives zeros only.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Tensor {
        let _method = method("one_hot");
        let places = Op::Iota { shape: [classes].into(), dtype: DType::I64, axis: 0 };
        let places = Tensor::create(places, self.value.device());
        self.to_dtype(DType::I64).unsqueeze(-1).eq(&places).to_dtype(DType::I64)
    }

    /// An axis replaced by the axes of the indices.
    #[track_caller]
    pub(super) fn taken(&self, axis: usize, index: &Tensor) -> Tensor {
        Tensor::one(Op::Gather { kind: GatherKind::Take, axis: axis as u8 }, &[self, index])
    }
}

#[track_caller]
fn scatter(
    kind: ScatterKind,
    name: &str,
    x: &Tensor,
    axis: isize,
    index: &Tensor,
    source: &Tensor,
) -> Tensor {
    let axis = x.any_axis(name, axis) as u8;
    let (index, mut source) = (index.lifted(), source.lifted());
    let (want, have) = (index.shape(), source.shape());
    let fits = want.len() == have.len() && want.iter().zip(&have[..]).all(|(want, have)| want <= have);
    assert!(fits, "{name}: the source has shape {have:?}, the indices {want:?}");
    for (axis, &extent) in want.iter().enumerate() {
        source = super::slice::slice(&source, axis, 0, extent, 1);
    }
    Tensor::one(Op::Scatter { kind, axis }, &[&x.lifted(), &index, &source]).reshape(x.shape())
}
