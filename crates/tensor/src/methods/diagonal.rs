//! Diagonals: read, written and summed.

use crate::{DType, Tensor};
use kiln_device::method;
use kiln_ir::Op;

/// # Diagonals
impl Tensor {
    /// The diagonal of the matrices that two axes make, as a last axis. A positive `offset` moves it up, a negative one
    /// down.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::arange(0, 9, 1, &Device::cpu()).reshape([3, 3]);
    /// assert_eq!(x.diagonal(1, 0, 1).to_vec::<i64>().unwrap(), [1, 5]);
    /// ```
    #[track_caller]
    pub fn diagonal(&self, offset: isize, axis1: isize, axis2: isize) -> Tensor {
        let _method = method("diagonal");
        let (a, b) = (self.axis("diagonal", axis1), self.axis("diagonal", axis2));
        assert!(a != b, "diagonal: axes {axis1} and {axis2} of shape {:?} are the same", self.shape());
        let last = self.moved_last(&[a, b]);
        let shape = last.shape();
        let [lead @ .., rows, columns] = &shape[..] else { unreachable!() };
        let (rows, columns) = (*rows, *columns);
        let (down, right) = (offset.min(0).unsigned_abs(), offset.max(0).unsigned_abs());
        let count = rows.saturating_sub(down).min(columns.saturating_sub(right));
        let flat: Vec<usize> = lead.iter().copied().chain([rows * columns]).collect();
        let axis = lead.len();
        let flat = last.reshape(flat);
        if count == 0 {
            return super::slice::slice(&flat, axis, 0, 0, 1);
        }
        let first = down * columns + right;
        super::slice::slice(&flat, axis, first, first + (count - 1) * (columns + 1) + 1, columns + 1)
    }

    /// Of a matrix its diagonal, of a vector the matrix with it on the diagonal and 0 elsewhere.
    #[track_caller]
    pub fn diag(&self, offset: isize) -> Tensor {
        let _method = method("diag");
        match self.rank() {
            1 => self.diag_embed(offset),
            2 => self.diagonal(offset, 0, 1),
            _ => panic!("diag: shape {:?} is neither a vector nor a matrix", self.shape()),
        }
    }

    /// The last axis on the diagonals of square matrices, which are 0 elsewhere.
    #[doc(alias("diagflat"))]
    #[track_caller]
    pub fn diag_embed(&self, offset: isize) -> Tensor {
        let _method = method("diag_embed");
        let count = self.dim(-1);
        let (down, right) = (offset.min(0).unsigned_abs(), offset.max(0).unsigned_abs());
        let side = count + down + right;
        let device = self.value.device();
        let place = Op::Iota { shape: [side].into(), dtype: DType::I64, axis: 0 };
        let column = Tensor::create(place, device);
        let row = column.reshape([side, 1]);
        let on = column.eq(&(row + offset as i64));
        // Each row holds the element of its own diagonal place.
        let rows = self.pad(&[down as isize, right as isize], super::PadMode::Constant(0.0)).unsqueeze(-1);
        on.where_(&rows, &self.constant(0))
    }

    /// The sum of a matrix's diagonal.
    #[track_caller]
    pub fn trace(&self) -> Tensor {
        let _method = method("trace");
        assert!(self.rank() == 2, "trace: shape {:?} is not a matrix", self.shape());
        self.diagonal(0, 0, 1).sum(())
    }

    /// With these axes moved behind all others, in this order.
    #[track_caller]
    pub(super) fn moved_last(&self, axes: &[usize]) -> Tensor {
        let kept = (0..self.rank()).filter(|axis| !axes.contains(axis));
        let order: Vec<isize> = kept.chain(axes.iter().copied()).map(|axis| axis as isize).collect();
        self.permute(&order[..])
    }
}
