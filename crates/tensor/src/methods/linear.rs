//! Products of matrices. A quantised right operand goes into the product packed.

use crate::Tensor;
use kiln_device::method;
use kiln_ir::{Op, Shape, promote};

impl Tensor {
    /// The product of matrices `[.., M, K]` and `[.., K, N]`, leading axes broadcast. A vector on the left is a row, on
    /// the right a column, and that axis is dropped from the result.
    #[doc(alias("mm", "bmm"))]
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        let _method = method("matmul");
        assert!(
            self.rank() > 0 && other.rank() > 0,
            "matmul: shapes {:?} and {:?}: a number is not a matrix",
            self.shape(),
            other.shape()
        );
        let inner = other.shape()[other.rank().saturating_sub(2)];
        fit("matmul", self, other, inner);
        let (a, b) = met(self, other);
        let column = b.rank() == 1;
        let b = if column { b.unsqueeze(-1) } else { b };
        product(&a, &b, false, column)
    }

    /// The product with the last two axes of `other` exchanged: `[.., M, K]` with `[.., N, K]`. A vector on the left is
    /// a row.
    #[doc(alias("mm", "matmul"))]
    #[track_caller]
    pub fn matmul_t(&self, other: &Tensor) -> Tensor {
        let _method = method("matmul_t");
        assert!(
            self.rank() > 0 && other.rank() > 1,
            "matmul_t: shapes {:?} and {:?}: both operands are matrices",
            self.shape(),
            other.shape()
        );
        fit("matmul_t", self, other, other.dim(-1));
        let (a, b) = met(self, other);
        product(&a, &b, true, false)
    }

    /// `x weightᵀ + bias` over the last axis: `[.., in]` with a weight `[out, in]` and a bias `[out]`. A weight `[in]`
    /// gives one number for each row.
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let _method = method("linear");
        let (rank, shape) = (weight.rank(), weight.shape());
        assert!(
            self.rank() > 0 && (rank == 1 || rank == 2),
            "linear: shapes {:?} and {shape:?}: the weight is [out, in]",
            self.shape()
        );
        let (given, inputs) = (self.dim(-1), shape[rank - 1]);
        assert!(
            given == inputs,
            "linear: {given} inputs where {inputs} are expected (input {:?}, weight {shape:?})",
            self.shape()
        );
        let y = if rank == 1 { self.matmul(weight) } else { self.matmul_t(weight) };
        match bias {
            Some(bias) => y + bias,
            None => y,
        }
    }
}

/// Whether the products' lengths fit: told here, with the shapes as they were given.
#[track_caller]
fn fit(name: &str, a: &Tensor, b: &Tensor, inner: usize) {
    let (lhs, rhs) = (a.shape(), b.shape());
    assert!(a.dim(-1) == inner, "{name}: shapes {lhs:?} and {rhs:?} do not fit together");
}

/// Both operands in the dtype they meet in; a quantised matrix on the right of floats stays packed.
#[track_caller]
fn met(a: &Tensor, b: &Tensor) -> (Tensor, Tensor) {
    if b.dtype().is_quantised() && b.rank() > 1 && a.dtype().is_float() {
        return (a.clone(), b.clone());
    }
    let dtype = promote(a.dtype(), b.dtype());
    (a.to_dtype(dtype), b.to_dtype(dtype))
}

/// The product, without the axis that a vector on the left or the column on the right stands for.
#[track_caller]
fn product(a: &Tensor, b: &Tensor, transpose: bool, column: bool) -> Tensor {
    let row = a.rank() == 1;
    let a = if row { a.unsqueeze(0) } else { a.clone() };
    let y = Tensor::one(Op::Dot { transpose }, &[&a, b]);
    let rank = y.rank();
    let shape = Shape::collect(
        (y.shape().iter().enumerate())
            .filter(|&(i, _)| !(row && i == rank - 2 || column && i == rank - 1))
            .map(|(_, &d)| d),
    );
    y.reshape(shape)
}
