//! Growing a tensor at its edges, and blanking parts of matrices.

use super::cut::cut;
use crate::{DType, Tensor};
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

impl Tensor {
    /// Grown at the edges by pairs of numbers (before, after), the first pair for the last axis, as in PyTorch. A
    /// negative number cuts elements off.
    #[track_caller]
    pub fn pad(&self, pads: &[isize], mode: PadMode) -> Tensor {
        let pairs = pads.len() / 2;
        let fits = pads.len() % 2 == 0 && pairs <= self.rank();
        assert!(fits, "pad: {pads:?} does not give pairs for the last axes of shape {:?}", self.shape());
        let mut out = self.clone();
        for (i, pair) in pads.chunks_exact(2).enumerate() {
            let axis = self.rank() - 1 - i;
            let extent = self.shape()[axis];
            let off = |n: isize| n.min(0).unsigned_abs();
            let fits = off(pair[0]) + off(pair[1]) <= extent;
            assert!(fits, "pad: {pair:?} cuts more than there is off axis {axis} of shape {:?}", self.shape());
            out = cut(&out, axis, off(pair[0]), extent - off(pair[1]), 1);
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
        triangle("tril", self, diagonal, Binary::Le)
    }

    /// The upper triangle of each matrix: elements below the diagonal are 0. A positive `diagonal` moves it up.
    #[track_caller]
    pub fn triu(&self, diagonal: isize) -> Tensor {
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
    assert!(fits, "pad: {low} and {high} are too much for {mode:?} along axis {axis} of shape {:?}", x.shape());
    let part = |from: usize, to: usize| cut(x, axis, from, to, 1);
    let stretched = |part: Tensor, n: usize| {
        let mut shape = x.shape();
        shape[axis] = n;
        part.broadcast_to(shape)
    };
    let (before, after) = match mode {
        PadMode::Constant(value) => (stretched(x.constant(value), low), stretched(x.constant(value), high)),
        PadMode::Reflect => {
            let mirrored = |from: usize, to: usize| part(from, to).flip(axis);
            (mirrored(1.min(extent), (low + 1).min(extent)), mirrored(most - high, most))
        }
        PadMode::Replicate => {
            (stretched(part(0, 1.min(extent)), low), stretched(part(extent.saturating_sub(1), extent), high))
        }
        PadMode::Circular => (part(extent - low, extent), part(0, high)),
    };
    match (low, high) {
        (0, _) => Tensor::cat(&[x, &after], axis as isize),
        (_, 0) => Tensor::cat(&[&before, x], axis as isize),
        (_, _) => Tensor::cat(&[&before, x, &after], axis as isize),
    }
}

#[track_caller]
fn triangle(name: &str, x: &Tensor, diagonal: isize, keep: Binary) -> Tensor {
    let rank = x.rank();
    assert!(rank >= 2, "{name}: shape {:?} has no matrices", x.shape());
    let (rows, columns) = (x.shape()[rank - 2], x.shape()[rank - 1]);
    let count = |shape: [usize; 2], axis| {
        Tensor::create(Op::Iota { shape: shape.into(), dtype: DType::I64, axis }, x.value.device())
    };
    let diagonal = count([rows, 1], 0) + diagonal as i64;
    let kept = Tensor::one(Op::Binary(keep), &[&count([1, columns], 1), &diagonal]);
    kept.select(x, &x.constant(0))
}
