//! What reductions give.

use super::{AxisSet, ReduceKind};
use crate::infer::Infer;
use crate::{DType, Meta, OpError};

impl Infer<'_> {
    pub(crate) fn reduce(&self, kind: ReduceKind, axes: AxisSet, keep: bool) -> Result<Meta, OpError> {
        let x = self.one()?;
        self.axes(axes, &x.shape)?;
        let finds = matches!(kind, ReduceKind::ArgMax | ReduceKind::ArgMin);
        if finds && axes.len() != 1 {
            return Err(OpError::Attribute { op: self.name(), reason: "it works along exactly one axis" });
        }
        let dtype = if finds { DType::I64 } else { x.dtype };
        let shape = x.shape.reduced(axes, keep);
        let needs_one = finds || matches!(kind, ReduceKind::Max | ReduceKind::Min);
        if needs_one && axes.iter().any(|i| x.shape[i] == 0) && !shape.contains(&0) {
            return Err(OpError::Empty { op: self.name(), shape: x.shape });
        }
        Ok(Meta { dtype, shape })
    }
}
