//! Changing the size of images and other grids by reading between their points.

use super::Extents;
use crate::{Shape, Tensor};
use kiln_device::method;

/// How values between grid points are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interpolate {
    /// The point at `floor(i * in / out)`.
    Nearest,
    /// The point whose centre is nearest.
    NearestExact,
    /// Linear in each axis, so bilinear in two. With aligned corners the first and last points stay where they are;
    /// otherwise the edges of the grid do.
    Linear {
        /// Whether corners are aligned.
        align_corners: bool,
    },
    /// Cubic in each axis, with the kernel of PyTorch (a = -0.75).
    Cubic {
        /// Whether corners are aligned.
        align_corners: bool,
    },
    /// The mean of the covered area: adaptive pooling.
    Area,
}

/// # Resized images
impl Tensor {
    /// The spatial axes of `[N, C, ..]`, one to three, changed to `size`.
    #[doc(alias("upsample", "resize"))]
    #[track_caller]
    pub fn interpolate(&self, size: impl Into<Extents>, mode: Interpolate) -> Tensor {
        let _method = method("interpolate");
        let n = spatial(self);
        let size = size.into().resolve("interpolate", "size", n, 1);
        let mut out = self.widened();
        for (axis, &size) in (2..).zip(&size[..n]) {
            out = along(&out, axis, size as usize, None, mode);
        }
        out.to_dtype(self.dtype().unpacked())
    }

    /// The spatial axes of `[N, C, ..]` changed by a factor each, or one for all. Points are read at the distance that
    /// the factor gives, not the rounded size.
    #[track_caller]
    pub fn interpolate_by(&self, factors: &[f64], mode: Interpolate) -> Tensor {
        let _method = method("interpolate_by");
        let n = spatial(self);
        let fits =
            (factors.len() == 1 || factors.len() == n) && factors.iter().all(|f| f.is_finite() && *f > 0.0);
        assert!(fits, "interpolate: factors {factors:?} for shape {:?}", self.shape());
        let mut out = self.widened();
        for i in 0..n {
            let factor = factors[if factors.len() == 1 { 0 } else { i }];
            let size = (self.shape()[i + 2] as f64 * factor).floor() as usize;
            out = along(&out, i + 2, size, Some(1.0 / factor), mode);
        }
        out.to_dtype(self.dtype().unpacked())
    }
}

#[track_caller]
fn spatial(x: &Tensor) -> usize {
    assert!(
        (3..=5).contains(&x.rank()),
        "interpolate: shape {:?} is not [N, C, ..] with one to three spatial axes",
        x.shape()
    );
    x.rank() - 2
}

/// One axis read at `size` points, `step` apart or so that they fill it.
#[track_caller]
fn along(x: &Tensor, axis: usize, size: usize, step: Option<f64>, mode: Interpolate) -> Tensor {
    let length = x.shape()[axis];
    assert!(length > 0 && size > 0, "interpolate: axis {axis} of shape {:?} to {size} points", x.shape());
    if size == length && step.is_none_or(|s| s == 1.0) {
        return x.clone();
    }
    if mode == Interpolate::Area {
        return super::pool::means_along(x, axis, size);
    }
    let taps = taps(length, size, step, mode);
    let mut tail = Shape::repeat(1, x.rank() - axis);
    tail[0] = size;
    let mut out: Option<Tensor> = None;
    for (index, weight) in taps {
        let part = x.taken(axis, &Tensor::from_vec(index, [size], x.value.device()));
        let part = match weight {
            Some(_) if !x.dtype().is_float() => {
                panic!("interpolate: {mode:?} is not defined for {}", x.dtype())
            }
            Some(weight) => part * Tensor::from_vec(weight, tail, x.value.device()).to_dtype(x.dtype()),
            None => part,
        };
        out = Some(match out {
            Some(sum) => sum + part,
            None => part,
        });
    }
    out.unwrap_or_else(|| x.clone())
}

/// The points that each result is made of: indices with their weights.
type Taps = Vec<(Vec<i64>, Option<Vec<f64>>)>;

fn taps(length: usize, size: usize, step: Option<f64>, mode: Interpolate) -> Taps {
    let ratio = step.unwrap_or(length as f64 / size as f64);
    let last = length as i64 - 1;
    let corners = if size > 1 { (length - 1) as f64 / (size - 1) as f64 } else { 0.0 };
    let source =
        |i: usize, align: bool| if align { i as f64 * corners } else { (i as f64 + 0.5) * ratio - 0.5 };
    let nearest = |f: &dyn Fn(usize) -> i64| vec![((0..size).map(|i| f(i).clamp(0, last)).collect(), None)];
    match mode {
        // Whole numbers where they can be: i * in / out may be one, and must not be rounded below it.
        Interpolate::Nearest => match step {
            None => nearest(&|i| (i as u128 * length as u128 / size as u128) as i64),
            Some(step) => nearest(&|i| (i as f64 * step) as f32 as i64),
        },
        Interpolate::NearestExact => nearest(&|i| ((i as f64 + 0.5) * ratio).floor() as i64),
        Interpolate::Linear { align_corners } => {
            let at: Vec<f64> = (0..size).map(|i| source(i, align_corners).max(0.0)).collect();
            let low = |x: f64| (x.floor() as i64).min(last);
            let rest = |x: f64| (x - low(x) as f64).clamp(0.0, 1.0);
            vec![
                (at.iter().map(|&x| low(x)).collect(), Some(at.iter().map(|&x| 1.0 - rest(x)).collect())),
                (
                    at.iter().map(|&x| (low(x) + 1).min(last)).collect(),
                    Some(at.iter().map(|&x| rest(x)).collect()),
                ),
            ]
        }
        Interpolate::Cubic { align_corners } => {
            let at: Vec<f64> = (0..size).map(|i| source(i, align_corners)).collect();
            let tap = |k: i64| {
                let index = at.iter().map(|x| (x.floor() as i64 + k).clamp(0, last)).collect();
                (index, Some(at.iter().map(|x| cubic(x - x.floor() - k as f64)).collect()))
            };
            (-1..=2).map(tap).collect()
        }
        // Not made of taps: means over windows.
        Interpolate::Area => Vec::new(),
    }
}

/// Keys' kernel with a = -0.75.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.75;
    let x = x.abs();
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    }
}
