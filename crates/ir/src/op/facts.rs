//! What passes ask about an operation without looking inside.

use super::{Move, Op};

impl Op {
    /// Whether a number, a random key or the place of a slice is all that may differ between it and operations that
    /// are [`Op::is_alike`]; other operations are only like themselves.
    pub fn is_open(&self) -> bool {
        matches!(
            self,
            Op::Full { .. } | Op::Random { .. } | Op::Move(Move::Slice { .. } | Move::Assign { .. })
        )
    }

    /// Whether it differs from `other` at most in what a plan reads anew at every run: the value of a number, a random
    /// key, or where a slice of the same length starts. Extents must be the same.
    pub fn is_alike(&self, other: &Op) -> bool {
        match (self, other) {
            (Op::Binary(a), Op::Binary(b)) => a == b,
            (Op::Unary(a), Op::Unary(b)) => a == b,
            (Op::Full { shape: a, value: x }, Op::Full { shape: b, value: y }) => {
                a == b && x.dtype() == y.dtype()
            }
            (
                Op::Random { kind, shape, dtype, key: _, offset: _ },
                Op::Random { kind: kind2, shape: shape2, dtype: dtype2, key: _, offset: _ },
            ) => kind == kind2 && shape == shape2 && dtype == dtype2,
            (
                Op::Move(Move::Slice { axis, start, end, step }),
                Op::Move(Move::Slice { axis: axis2, start: start2, end: end2, step: step2 }),
            )
            | (
                Op::Move(Move::Assign { axis, start, end, step }),
                Op::Move(Move::Assign { axis: axis2, start: start2, end: end2, step: step2 }),
            ) => {
                let length = |start: &usize, end: &usize| end.checked_sub(*start);
                axis == axis2 && step == step2 && length(start, end) == length(start2, end2)
            }
            _ => self == other,
        }
    }

    /// Whether it can fail on the values of its operands, not only on their shapes.
    pub fn is_fallible(&self) -> bool {
        match self {
            Op::Gather { .. } | Op::Scatter { .. } | Op::Custom(_) => true,
            Op::Binary(op) => op.divides(),
            Op::Full { .. }
            | Op::Iota { .. }
            | Op::Random { .. }
            | Op::Unary(_)
            | Op::Select
            | Op::Cast(_)
            | Op::Move(_)
            | Op::Reduce { .. }
            | Op::Scan { .. }
            | Op::Dot { .. }
            | Op::Conv { .. }
            | Op::Pool { .. }
            | Op::Sort { .. }
            | Op::Guard { .. }
            | Op::Commit
            | Op::Named(_) => false,
        }
    }
}
