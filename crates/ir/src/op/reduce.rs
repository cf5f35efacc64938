//! What reductions give.

use super::{AxisSet, ReduceKind};
use crate::infer::Infer;
use crate::{DType, Meta, OpError};

impl Infer<'_> {
    pub(crate) fn reduce(&self, kind: ReduceKind, axes: AxisSet, keep: bool) -> Result<Meta, OpError> {
        let x = self.one()?;
        self.axes(axes, &x.shape)?;
        let dtype = match kind {
            ReduceKind::Sum | ReduceKind::Prod => {
                self.number(x.dtype)?;
                x.dtype
            }
            ReduceKind::Mean if !x.dtype.is_float() => return self.dtype(x.dtype),
            ReduceKind::Mean => x.dtype,
            ReduceKind::Max | ReduceKind::Min => {
                self.plain(x.dtype)?;
                x.dtype
            }
            ReduceKind::Any | ReduceKind::All if x.dtype != DType::Bool => return self.dtype(x.dtype),
            ReduceKind::Any | ReduceKind::All => DType::Bool,
            ReduceKind::ArgMax | ReduceKind::ArgMin => {
                self.plain(x.dtype)?;
                if axes.len() != 1 {
                    return Err(OpError::Attribute {
                        op: self.name(),
                        reason: "it works along exactly one axis",
                    });
                }
                DType::I64
            }
        };
        let shape = x.shape.reduced(axes, keep);
        let needs_one =
            matches!(kind, ReduceKind::Max | ReduceKind::Min | ReduceKind::ArgMax | ReduceKind::ArgMin);
        if needs_one && axes.iter().any(|i| x.shape[i] == 0) && !shape.contains(&0) {
            return Err(OpError::Empty { op: self.name(), shape: x.shape });
        }
        Ok(Meta { dtype, shape })
    }
}
