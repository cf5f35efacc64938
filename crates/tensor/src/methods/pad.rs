//! Growing a tensor at its edges, and blanking parts of matrices.

use super::slice::slice;
use crate::{DType, Tensor};
use kiln_device::method;
use kiln_ir::{Binary, Op};

/// What stands outside the edges of a padded tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum PadMode {
    /// One value.
    Constant(f64),
    /// The tensor mirrored, without its edge.
    Reflect,
    /// The edge.
    Replicate,
    /// The other end of the tensor.
    Circular,
}

impl std::fmt::Display for PadMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PadMode::Constant(value) if *value == 0.0 => f.write_str("zeros"),
            PadMode::Constant(value) => write!(f, "constant {value}"),
            PadMode::Reflect => f.write_str("reflect"),
            PadMode::Replicate => f.write_str("replicate"),
            PadMode::Circular => f.write_str("circular"),
        }
    }
}

/// # Grown at the edges, triangles
impl Tensor {
    /// Grown at the edges by pairs of numbers (before, after), the first pair for the last axis, as in PyTorch. A
    /// negative number cuts elements off.
    #[track_caller]
    pub fn pad(&self, pads: &[isize], mode: PadMode) -> Tensor {
        let _method = method("pad");
        let pairs = pads.len() / 2;
        let fits = pads.len().is_multiple_of(2) && pairs <= self.rank();
        assert!(fits, "pad: {pads:?} does not give pairs for the last axes of shape {:?}", self.shape());
        let mut out = self.clone();
        for (i, pair) in pads.chunks_exact(2).enumerate() {
            let axis = self.rank() - 1 - i;
            let extent = self.shape()[axis];
            let off = |n: isize| n.min(0).unsigned_abs();
            let fits = off(pair[0]) + off(pair[1]) <= extent;
            assert!(
                fits,
                "pad: {pair:?} cuts more than there is off axis {axis} of shape {:?}",
                self.shape()
            );
            out = slice(&out, axis, off(pair[0]), extent - off(pair[1]), 1);
            let [low, high] = [pair[0], pair[1]].map(|n| n.max(0) as usize);
            if low + high > 0 {
                out = grown(&out, axis, low, high, mode);
            }
        }
        out
    }

    /// The lower triangle of each matrix: elements above the diagonal are 0. A positive `diagonal` moves it up.
    #[track_caller]
    pub fn tril(&self, diagonal: isize) -> Tensor {
        let _method = method("tril");
        triangle("tril", self, diagonal, Binary::Le)
    }

    /// The upper triangle of each matrix: elements below the diagonal are 0. A positive `diagonal` moves it up.
    #[track_caller]
    pub fn triu(&self, diagonal: isize) -> Tensor {
        let _method = method("triu");
        triangle("triu", self, diagonal, Binary::Ge)
    }
}

#[track_caller]
fn grown(x: &Tensor, axis: usize, low: usize, high: usize, mode: PadMode) -> Tensor {
    let extent = x.shape()[axis];
    let most = match mode {
        PadMode::Constant(_) => usize::MAX,
        PadMode::Reflect => extent.saturating_sub(1),
        PadMode::Replicate if extent > 0 => usize::MAX,
        PadMode::Replicate | PadMode::Circular => extent,
    };
    let fits = low.max(high) <= most;
    assert!(
        fits,
        "pad: {low} and {high} are too much for {mode:?} along axis {axis} of shape {:?}",
        x.shape()
    );
    let (before, after) = match mode {
        PadMode::Constant(value) => {
            let value = x.constant(value);
            (stretched(x, &value, axis, low), stretched(x, &value, axis, high))
        }
        PadMode::Reflect => (
            slice(x, axis, 1.min(extent), (low + 1).min(extent), 1).flip(axis),
            slice(x, axis, most - high, most, 1).flip(axis),
        ),
        PadMode::Replicate => {
            let (first, last) =
                (slice(x, axis, 0, 1.min(extent), 1), slice(x, axis, extent.saturating_sub(1), extent, 1));
            (stretched(x, &first, axis, low), stretched(x, &last, axis, high))
        }
        PadMode::Circular => (slice(x, axis, extent - low, extent, 1), slice(x, axis, 0, high, 1)),
    };
    match (low, high) {
        (0, _) => Tensor::cat(&[x, &after], axis as isize),
        (_, 0) => Tensor::cat(&[&before, x], axis as isize),
        (_, _) => Tensor::cat(&[&before, x, &after], axis as isize),
    }
}

/// `part` with the shape of x, but `n` long along an axis.
#[track_caller]
fn stretched(x: &Tensor, part: &Tensor, axis: usize, n: usize) -> Tensor {
    let mut shape = x.shape();
    shape[axis] = n;
    part.broadcast_to(shape)
}

#[track_caller]
fn triangle(name: &str, x: &Tensor, diagonal: isize, keep: Binary) -> Tensor {
    let rank = x.rank();
    assert!(rank >= 2, "{name}: shape {:?} has no matrices", x.shape());
    let (rows, columns) = (x.shape()[rank - 2], x.shape()[rank - 1]);
    let device = x.value.device();
    let row = Tensor::create(Op::Iota { shape: [rows, 1].into(), dtype: DType::I64, axis: 0 }, device);
    let column = Tensor::create(Op::Iota { shape: [1, columns].into(), dtype: DType::I64, axis: 1 }, device);
    let kept = Tensor::one(Op::Binary(keep), &[&column, &(row + diagonal as i64)]);
    kept.where_(x, &x.constant(0))
}
