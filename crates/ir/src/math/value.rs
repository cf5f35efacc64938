//! The value of an operation on one element, or on what stands for one: `None` where the operation is of another domain.

use super::row::{self, One, Two, WithOne, WithTwo};
use super::{Bits, Compare, Float, Num};
use crate::{Binary, Unary};

/// Applies a row.
struct At<A>(A);

impl<T, R> WithOne<T, R> for At<T> {
    type Result = R;
    fn with<V: One<T, R>>(self) -> R {
        V::value(self.0)
    }
}

impl<T, R> WithTwo<T, R> for At<(T, T)> {
    type Result = R;
    fn with<V: Two<T, R>>(self) -> R {
        V::value(self.0.0, self.0.1)
    }
}

/// A float of a float.
pub fn unary_float<T: Float>(op: Unary, x: T) -> Option<T> {
    row::unary_float(op, At(x))
}

/// A number of a number.
pub fn unary_num<T: Num>(op: Unary, x: T) -> Option<T> {
    row::unary_num(op, At(x))
}

/// The answer to a question about a number.
pub fn unary_test<T: Num>(op: Unary, x: T) -> Option<T::Truth> {
    row::unary_test(op, At(x))
}

/// Bits of bits.
pub fn unary_bits<T: Bits>(op: Unary, x: T) -> Option<T> {
    row::unary_bits(op, At(x))
}

/// A float of two.
pub fn binary_float<T: Float>(op: Binary, a: T, b: T) -> Option<T> {
    row::binary_float(op, At((a, b)))
}

/// A number of two.
pub fn binary_num<T: Num>(op: Binary, a: T, b: T) -> Option<T> {
    row::binary_num(op, At((a, b)))
}

/// How two elements compare.
pub fn binary_compare<T: Compare>(op: Binary, a: T, b: T) -> Option<T::Truth> {
    row::binary_compare(op, At((a, b)))
}

/// Bits of two.
pub fn binary_bits<T: Bits>(op: Binary, a: T, b: T) -> Option<T> {
    row::binary_bits(op, At((a, b)))
}
