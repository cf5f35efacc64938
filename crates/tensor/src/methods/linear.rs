//! Products of matrices. A quantised right operand goes into the product packed.

use super::Axes;
use crate::Tensor;
use kiln_device::method;
use kiln_ir::{Op, Shape, promote};

/// # Products of matrices and vectors
impl Tensor {
    /// The product of matrices `[.., M, K]` and `[.., K, N]`, leading axes broadcast. A vector on the left is a row, on
    /// the right a column, and that axis is dropped from the result.
    #[doc(alias("mm", "mv", "dot"))]
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

    /// The product of batches of matrices, `[B, M, K]` with `[B, K, N]`, without broadcasting.
    #[track_caller]
    pub fn bmm(&self, other: &Tensor) -> Tensor {
        let _method = method("bmm");
        let (a, b) = (self.shape(), other.shape());
        let fits = a.len() == 3 && b.len() == 3 && a[0] == b[0] && a[2] == b[1];
        assert!(fits, "bmm: shapes {a:?} and {b:?} are not [B, M, K] and [B, K, N]");
        self.matmul(other)
    }

    /// `beta * x + alpha * (a b)` with matrices a and b; x broadcasts. With a `beta` of 0, x does not count even where it
    /// is NaN.
    #[doc(alias("addmv"))]
    #[track_caller]
    pub fn addmm(&self, a: &Tensor, b: &Tensor, beta: f64, alpha: f64) -> Tensor {
        let _method = method("addmm");
        added(self, a.matmul(b), beta, alpha)
    }

    /// `beta * x + alpha * (a b)` with batches of matrices a and b; x broadcasts.
    #[track_caller]
    pub fn baddbmm(&self, a: &Tensor, b: &Tensor, beta: f64, alpha: f64) -> Tensor {
        let _method = method("baddbmm");
        added(self, a.bmm(b), beta, alpha)
    }

    /// Each element of this vector times each of another: a matrix.
    #[doc(alias("ger"))]
    #[track_caller]
    pub fn outer(&self, other: &Tensor) -> Tensor {
        let _method = method("outer");
        let (a, b) = (self.shape(), other.shape());
        assert!(a.len() == 1 && b.len() == 1, "outer: shapes {a:?} and {b:?} are not vectors");
        self.unsqueeze(1) * other.unsqueeze(0)
    }

    /// The sum of products over the last `axes` axes of this tensor and the first of another.
    #[track_caller]
    pub fn tensordot(&self, other: &Tensor, axes: usize) -> Tensor {
        let _method = method("tensordot");
        let n = self.rank().checked_sub(axes);
        let Some(first) = n.filter(|_| axes <= other.rank()) else {
            panic!("tensordot: {axes} axes of shapes {:?} and {:?}", self.shape(), other.shape())
        };
        let ours: Vec<isize> = (first..self.rank()).map(|axis| axis as isize).collect();
        let theirs: Vec<isize> = (0..axes as isize).collect();
        self.tensordot_axes(other, &ours, &theirs)
    }

    /// The sum of products over pairs of axes: one of this tensor with one of another each.
    #[doc(alias("tensordot"))]
    #[track_caller]
    pub fn tensordot_axes(&self, other: &Tensor, ours: &[isize], theirs: &[isize]) -> Tensor {
        let _method = method("tensordot_axes");
        let (a, b) = (Axes::new(ours).list("tensordot", self), Axes::new(theirs).list("tensordot", other));
        let (ours, theirs) = (self.shape(), other.shape());
        let fits = a.len() == b.len() && a.iter().zip(&b).all(|(&i, &j)| ours[i] == theirs[j]);
        assert!(fits, "tensordot: axes {a:?} of shape {ours:?} and {b:?} of {theirs:?} do not fit together");
        let kept = |shape: &Shape, axes: &[usize]| -> Vec<usize> {
            (0..shape.len()).filter(|axis| !axes.contains(axis)).map(|axis| shape[axis]).collect()
        };
        let (rows, columns) = (kept(&ours, &a), kept(&theirs, &b));
        let inner: usize = a.iter().map(|&axis| ours[axis]).product();
        let x = self.moved_last(&a).reshape([rows.iter().product(), inner]);
        let y = other.moved_last(&b).reshape([columns.iter().product(), inner]);
        x.matmul_t(&y).reshape([rows, columns].concat())
    }
}

/// `beta * x + alpha * y`, without factors of 1.
#[track_caller]
fn added(x: &Tensor, y: Tensor, beta: f64, alpha: f64) -> Tensor {
    let y = if alpha == 1.0 { y } else { y * alpha };
    match beta {
        0.0 => y,
        1.0 => x + y,
        beta => x * beta + y,
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
