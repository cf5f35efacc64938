//! Pooling over windows of one to three spatial axes.

use super::Extents;
use crate::{Device, Shape, Tensor};
use kiln_device::method;
use kiln_ir::{Op, Pool, PoolKind};

/// Geometry of pooling. Stride, padding and dilation are one number, or one for each axis.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// Distance between windows; the kernel's extent if missing.
    pub stride: Option<Extents>,
    /// Added at both ends: 0 for means, less than everything for maxima.
    pub padding: Extents,
    /// Distance between the elements of a window; for maxima only.
    pub dilation: Extents,
    /// Whether a last window that is incomplete counts.
    pub ceil_mode: bool,
    /// For means: whether padding counts as elements.
    pub count_include_pad: bool,
    /// For means: what sums are divided by instead of the number of elements.
    pub divisor_override: Option<usize>,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        let (padding, dilation) = (Extents::from(0), Extents::from(1));
        PoolOptions {
            stride: None,
            padding,
            dilation,
            ceil_mode: false,
            count_include_pad: true,
            divisor_override: None,
        }
    }
}

impl PoolOptions {
    /// With this stride.
    pub fn stride(self, stride: impl Into<Extents>) -> PoolOptions {
        PoolOptions { stride: Some(stride.into()), ..self }
    }

    /// With this padding.
    pub fn padding(self, padding: impl Into<Extents>) -> PoolOptions {
        PoolOptions { padding: padding.into(), ..self }
    }

    /// With this dilation.
    pub fn dilation(self, dilation: impl Into<Extents>) -> PoolOptions {
        PoolOptions { dilation: dilation.into(), ..self }
    }

    /// With a last window that is incomplete, or without.
    pub fn ceil_mode(self, ceil_mode: bool) -> PoolOptions {
        PoolOptions { ceil_mode, ..self }
    }

    /// With padding counted as elements of a mean, or not.
    pub fn count_include_pad(self, count_include_pad: bool) -> PoolOptions {
        PoolOptions { count_include_pad, ..self }
    }

    /// With sums divided by this number.
    pub fn divisor_override(self, divisor: usize) -> PoolOptions {
        PoolOptions { divisor_override: Some(divisor), ..self }
    }
}

/// All that is told of a window: stride, padding and dilation.
impl std::fmt::Display for PoolOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.stride {
            Some(stride) => write!(f, "stride {stride}")?,
            None => f.write_str("stride as the kernel")?,
        }
        write!(f, ", padding {}", self.padding)?;
        if self.dilation != Extents::from(1) { write!(f, ", dilation {}", self.dilation) } else { Ok(()) }
    }
}

macro_rules! pools {
    ($($n:literal $max:ident $indices:ident $avg:ident $adaptive:ident $axes:literal;)*) => {
        /// # Pooling
        impl Tensor {
            $(
                #[doc = concat!("The largest element of each window over ", $axes, " of `[N, C, ..]` or `[C, ..]`.")]
                #[track_caller]
                pub fn $max(&self, kernel: impl Into<Extents>, options: PoolOptions) -> Tensor {
                    let _method = method(stringify!($max));
                    max(stringify!($max), $n, self, kernel.into(), &options).0
                }

                #[doc = concat!("Like [`Tensor::", stringify!($max), "`], and the i64 index of each in the flattened spatial plane.")]
                #[track_caller]
                pub fn $indices(&self, kernel: impl Into<Extents>, options: PoolOptions) -> (Tensor, Tensor) {
                    let _method = method(stringify!($indices));
                    max(stringify!($indices), $n, self, kernel.into(), &options)
                }

                #[doc = concat!("The mean of each window over ", $axes, " of `[N, C, ..]` or `[C, ..]`.")]
                #[track_caller]
                pub fn $avg(&self, kernel: impl Into<Extents>, options: PoolOptions) -> Tensor {
                    let _method = method(stringify!($avg));
                    average(stringify!($avg), $n, self, kernel.into(), &options)
                }

                #[doc = concat!("The means of windows that cover ", $axes, " of `[N, C, ..]` or `[C, ..]` so that the result has this size.")]
                #[track_caller]
                pub fn $adaptive(&self, size: impl Into<Extents>) -> Tensor {
                    let _method = method(stringify!($adaptive));
                    adaptive(stringify!($adaptive), $n, self, size.into())
                }
            )*
        }
    };
}
pools! {
    1 max_pool1d max_pool1d_with_indices avg_pool1d adaptive_avg_pool1d "one axis";
    2 max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d "two axes";
    3 max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d "three axes";
}

#[track_caller]
fn max(name: &str, n: usize, x: &Tensor, kernel: Extents, options: &PoolOptions) -> (Tensor, Tensor) {
    let (x, single) = batched(name, n, x);
    let pool = geometry(name, n, &x, kernel, options);
    let mut outs = Tensor::apply(Op::Pool { kind: PoolKind::Max, pool }, &[&x]).into_iter();
    let (Some(values), Some(indices)) = (outs.next(), outs.next()) else { unreachable!() };
    if single { (values.squeeze(0), indices.squeeze(0)) } else { (values, indices) }
}

#[track_caller]
fn average(name: &str, n: usize, x: &Tensor, kernel: Extents, options: &PoolOptions) -> Tensor {
    let (x, single) = batched(name, n, x);
    let pool = geometry(name, n, &x, kernel, &PoolOptions { dilation: Extents::from(1), ..*options });
    let wide = x.widened();
    let sums = Tensor::one(Op::Pool { kind: PoolKind::Sum, pool }, &[&wide]);
    let means = match options.divisor_override {
        Some(divisor) => sums / divisor,
        None => {
            let counts: Vec<Vec<f64>> = (0..n)
                .map(|i| counts(&pool, i, x.shape()[i + 2], sums.shape()[i + 2], options.count_include_pad))
                .collect();
            divided(sums, &counts, x.value.device())
        }
    };
    let means = if x.dtype().is_float() { means.to_dtype(x.dtype()) } else { means };
    if single { means.squeeze(0) } else { means }
}

/// How many elements each window along an axis holds.
fn counts(pool: &Pool, axis: usize, length: usize, windows: usize, padding: bool) -> Vec<f64> {
    let (low, kernel) = (pool.low[axis] as i64, pool.kernel[axis] as i64);
    let length = length as i64;
    let held = |window: usize| {
        let start = window as i64 * pool.stride[axis] as i64 - low;
        // What the last window needs beyond the stated padding does not count.
        let end = (start + kernel).min(length + low);
        let (start, end) = if padding { (start, end) } else { (start.max(0), end.min(length)) };
        (end - start) as f64
    };
    (0..windows).map(held).collect()
}

/// Sums over the counts of their windows: one number where all windows are alike.
#[track_caller]
fn divided(sums: Tensor, counts: &[Vec<f64>], device: &Device) -> Tensor {
    if counts.iter().all(|axis| axis.windows(2).all(|pair| pair[0] == pair[1])) {
        return sums / counts.iter().map(|axis| axis.first().copied().unwrap_or(1.0)).product::<f64>();
    }
    let mut shape = Shape::default();
    let mut all = vec![1.0];
    for axis in counts {
        shape = shape.inserted(shape.len(), axis.len()).unwrap_or(shape);
        all = all.iter().flat_map(|a| axis.iter().map(move |b| a * b)).collect();
    }
    let dtype = sums.dtype();
    sums / Tensor::from_vec(all, shape, device).to_dtype(dtype)
}

/// Windows of an axis are a product of windows of each, so the mean is taken axis by axis.
#[track_caller]
fn adaptive(name: &str, n: usize, x: &Tensor, size: Extents) -> Tensor {
    let (batch, single) = batched(name, n, x);
    let size = size.resolve(name, "size", n, 1);
    let mut out = batch.widened();
    for (axis, &windows) in (2..).zip(&size[..n]) {
        out = means_along(&out, axis, windows as usize);
    }
    let out = if x.dtype().is_float() { out.to_dtype(x.dtype()) } else { out };
    if single { out.squeeze(0) } else { out }
}

/// Window `i` of `count` covers `floor(i * length / count) .. ceil((i + 1) * length / count)`.
#[track_caller]
pub(super) fn means_along(x: &Tensor, axis: usize, count: usize) -> Tensor {
    let length = x.shape()[axis];
    if count == length {
        return x.clone();
    }
    let shape = x.shape();
    assert!(length > 0, "adaptive pooling: axis {axis} of shape {shape:?} is empty");
    if count > 0 && length.is_multiple_of(count) {
        let split = shape.removed(axis).inserted(axis, length / count).and_then(|s| s.inserted(axis, count));
        if let Some(split) = split {
            return x.reshape(split).mean(axis + 1);
        }
    }
    let bounds: Vec<(usize, usize)> =
        (0..count).map(|i| (i * length / count, ((i + 1) * length).div_ceil(count))).collect();
    let longest = bounds.iter().map(|(start, end)| end - start).max().unwrap_or(0);
    let grid = |f: &dyn Fn(usize, usize, usize) -> i64| -> Vec<i64> {
        bounds.iter().flat_map(|&(start, end)| (0..longest).map(move |k| f(start, end, k))).collect()
    };
    let device = x.value.device();
    let index = grid(&|start, end, k| (start + k).min(end - 1) as i64);
    let outside = grid(&|start, end, k| (start + k >= end) as i64);
    let index = Tensor::from_vec(index, [count, longest], device);
    // [count, longest, 1, ..] meets [.., count, longest, ..] at the end of its shape.
    let mut tail = Shape::repeat(1, 2 + shape.len() - 1 - axis);
    (tail[0], tail[1]) = (count, longest);
    let outside = Tensor::from_vec(outside, tail, device).truth();
    let sums = x.taken(axis, &index).masked_fill(&outside, 0).sum(axis + 1);
    tail[1] = 1;
    let sizes = bounds.iter().map(|(start, end)| (end - start) as f64).collect();
    let dtype = sums.dtype();
    sums / Tensor::from_vec(sizes, tail.removed(1), device).to_dtype(dtype)
}

/// The input with a batch axis, and whether it is new.
#[track_caller]
pub(super) fn batched(name: &str, n: usize, x: &Tensor) -> (Tensor, bool) {
    let single = x.rank() == n + 1;
    assert!(single || x.rank() == n + 2, "{name}: shape {:?} does not have {n} spatial axes", x.shape());
    (if single { x.unsqueeze(0) } else { x.clone() }, single)
}

#[track_caller]
fn geometry(name: &str, n: usize, x: &Tensor, kernel: Extents, options: &PoolOptions) -> Pool {
    let stride = options.stride.unwrap_or(kernel).resolve(name, "stride", n, 1);
    let kernel = kernel.resolve(name, "kernel", n, 1);
    let low = options.padding.resolve(name, "padding", n, 0);
    let dilation = options.dilation.resolve(name, "dilation", n, 1);
    let mut high = low;
    for i in (0..n).filter(|_| options.ceil_mode) {
        if kernel[i] == 0 || stride[i] == 0 {
            continue;
        }
        let (length, low, stride) = (x.shape()[i + 2] as i64, low[i] as i64, stride[i] as i64);
        let span = (kernel[i] as i64 - 1) * dilation[i] as i64 + 1;
        let mut windows = (length + 2 * low - span + stride - 1).div_euclid(stride) + 1;
        // A window that starts behind the last element, in the padding, does not count.
        if (windows - 1) * stride >= length + low {
            windows -= 1;
        }
        let needed = (windows - 1) * stride + span - length - low;
        high[i] = needed.max(low).try_into().unwrap_or(u32::MAX);
    }
    Pool { kernel, stride, low, high, dilation, extent: [0; 3] }
}
