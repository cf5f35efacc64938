//! What indexed reads and writes give.

use super::{GatherKind, ScatterKind};
use crate::infer::Infer;
use crate::{Dims, MAX_RANK, Meta, OpError, Shape};

impl Infer<'_> {
    pub(crate) fn gather(&self, kind: GatherKind, axis: u8) -> Result<Meta, OpError> {
        let [x, index] = self.two()?;
        self.index(&index)?;
        let axis = self.axis(axis, &x.shape)?;
        match kind {
            GatherKind::Each => {
                self.fits_each(&x.shape, &index.shape, axis)?;
                Ok(Meta { dtype: x.dtype, shape: index.shape })
            }
            GatherKind::Take => Ok(Meta { dtype: x.dtype, shape: self.taken(&x.shape, &index.shape, axis)? }),
        }
    }

    pub(crate) fn scatter(&self, kind: ScatterKind, axis: u8) -> Result<Meta, OpError> {
        let [x, index, source] = self.three()?;
        self.same_plain(&x, &source)?;
        self.index(&index)?;
        let axis = self.axis(axis, &x.shape)?;
        match kind {
            ScatterKind::Each | ScatterKind::EachAdd => {
                self.fits_each(&x.shape, &index.shape, axis)?;
                self.same_shape(&index.shape, &source.shape)?;
            }
            ScatterKind::TakeAdd => {
                self.same_shape(&self.taken(&x.shape, &index.shape, axis)?, &source.shape)?;
            }
        }
        Ok(x)
    }

    /// Indices of `gather` and `scatter` cover at most x's extents off the axis.
    fn fits_each(&self, x: &Shape, index: &Shape, axis: usize) -> Result<(), OpError> {
        let fits = x.len() == index.len() && (0..x.len()).all(|i| i == axis || index[i] <= x[i]);
        if fits { Ok(()) } else { self.mismatch(x, index) }
    }

    fn taken(&self, x: &Shape, index: &Shape, axis: usize) -> Result<Shape, OpError> {
        let rank = x.len() - 1 + index.len();
        if rank > MAX_RANK {
            return Err(OpError::Rank { op: self.name(), rank });
        }
        Ok(Dims::collect(x[..axis].iter().chain(index.iter()).chain(&x[axis + 1..]).copied()))
    }
}
