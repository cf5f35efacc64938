//! Pooling over windows that a stride does not describe. Each window is a list of places in the flattened spatial plane,
//! and its largest element is gathered: so the gradient goes to one element, the first of equal ones.

use super::Extents;
use super::pool::{PoolOptions, batched};
use crate::{Shape, Tensor};
use kiln_device::method;

macro_rules! pools {
    ($($n:literal $adaptive:ident $indices:ident $avg:ident $lp:ident $unpool:ident $axes:literal;)*) => {
        impl Tensor {
            $(
                #[doc = concat!("The largest elements of windows that cover ", $axes, " of `[N, C, ..]` or `[C, ..]` so that the result has this size.")]
                #[track_caller]
                pub fn $adaptive(&self, size: impl Into<Extents>) -> Tensor {
                    let _method = method(stringify!($adaptive));
                    adaptive(stringify!($adaptive), $n, self, size.into()).0
                }

                #[doc = concat!("Like [`Tensor::", stringify!($adaptive), "`], and the i64 index of each in the flattened spatial plane.")]
                #[track_caller]
                pub fn $indices(&self, size: impl Into<Extents>) -> (Tensor, Tensor) {
                    let _method = method(stringify!($indices));
                    adaptive(stringify!($indices), $n, self, size.into())
                }

                #[doc = concat!("The `p`-norm of each window over ", $axes, " of `[N, C, ..]` or `[C, ..]`: the root of the sum of powers; where that is 0 the gradient is 0.")]
                #[track_caller]
                pub fn $lp(&self, p: f64, kernel: impl Into<Extents>, options: PoolOptions) -> Tensor {
                    let _method = method(stringify!($lp));
                    let kernel = kernel.into();
                    let sizes = kernel.resolve(stringify!($lp), "kernel", $n, 1);
                    let count: f64 = sizes[..$n].iter().map(|&k| k as f64).product();
                    let options = PoolOptions { padding: Extents::from(0), ..options };
                    root(&(self.pow_scalar(p).$avg(kernel, options) * count), p)
                }

                #[doc = concat!("Zeros of this size with the elements at the places that pooling with indices over ", $axes, " took them from.")]
                #[track_caller]
                pub fn $unpool(&self, indices: &Tensor, size: impl Into<Extents>) -> Tensor {
                    let _method = method(stringify!($unpool));
                    unpool(stringify!($unpool), $n, self, indices, size.into())
                }
            )*
        }
    };
}
pools! {
    1 adaptive_max_pool1d adaptive_max_pool1d_with_indices avg_pool1d lp_pool1d max_unpool1d "one axis";
    2 adaptive_max_pool2d adaptive_max_pool2d_with_indices avg_pool2d lp_pool2d max_unpool2d "two axes";
    3 adaptive_max_pool3d adaptive_max_pool3d_with_indices avg_pool3d lp_pool3d max_unpool3d "three axes";
}

impl Tensor {
    /// The largest elements of windows that lie at random over two axes of `[N, C, ..]` or `[C, ..]`, so that the result has
    /// this size, and the i64 index of each in the flattened spatial plane.
    #[track_caller]
    pub fn fractional_max_pool2d(
        &self,
        kernel: impl Into<Extents>,
        size: impl Into<Extents>,
    ) -> (Tensor, Tensor) {
        let _method = method("fractional_max_pool2d");
        fractional("fractional_max_pool2d", 2, self, kernel.into(), size.into())
    }

    /// Like [`Tensor::fractional_max_pool2d`], over three axes.
    #[track_caller]
    pub fn fractional_max_pool3d(
        &self,
        kernel: impl Into<Extents>,
        size: impl Into<Extents>,
    ) -> (Tensor, Tensor) {
        let _method = method("fractional_max_pool3d");
        fractional("fractional_max_pool3d", 3, self, kernel.into(), size.into())
    }
}

/// Window `i` of `count` along an axis covers `floor(i * length / count) .. ceil((i + 1) * length / count)`.
#[track_caller]
fn adaptive(name: &str, n: usize, x: &Tensor, size: Extents) -> (Tensor, Tensor) {
    let (x, single) = batched(name, n, x);
    let size = size.resolve(name, "size", n, 1).map(|s| s as usize);
    let (shape, size) = (x.shape(), &size[..n]);
    let (mut starts, mut kernel) = (Vec::new(), Vec::new());
    for (&length, &count) in shape[2..].iter().zip(size) {
        assert!(length > 0 || count == 0, "{name}: shape {shape:?} has an empty axis");
        let start = |i: usize| i * length / count;
        let longest = (0..count).map(|i| ((i + 1) * length).div_ceil(count) - start(i)).max().unwrap_or(0);
        // A window that is shorter than the longest names its last place again, which is never a first maximum.
        let along = |i: usize, k: usize| (start(i) + k).min(((i + 1) * length).div_ceil(count) - 1) as i64;
        let places: Vec<i64> = (0..count).flat_map(|i| (0..longest).map(move |k| along(i, k))).collect();
        starts.push(Tensor::from_vec(places, [1, 1, count, longest], x.value.device()));
        kernel.push(longest);
    }
    finished(single, largest(&x, &starts, size, &kernel))
}

/// As Graham's paper has it: distances between windows are drawn once for each channel of each sample.
#[track_caller]
fn fractional(name: &str, n: usize, x: &Tensor, kernel: Extents, size: Extents) -> (Tensor, Tensor) {
    let (x, single) = batched(name, n, x);
    let kernel = kernel.resolve(name, "kernel", n, 1).map(|k| k as usize);
    let size = size.resolve(name, "size", n, 1).map(|s| s as usize);
    let (shape, device) = (x.shape(), x.value.device());
    let mut places = Vec::new();
    for axis in 0..n {
        let (length, count, kernel) = (shape[axis + 2], size[axis], kernel[axis]);
        let fits = count > 0 && kernel > 0 && count + kernel <= length + 1;
        assert!(
            fits,
            "{name}: {count} windows of {kernel} do not lie apart in axis {} of {shape:?}",
            axis + 2
        );
        let room = (length - kernel) as f64;
        let step = if count > 1 { room / (count - 1) as f64 } else { 0.0 };
        let draw = Tensor::rand([shape[0], shape[1], 1, 1], device);
        let number = Tensor::arange(0, count as i64, 1, device).reshape([1, 1, count, 1]);
        let start = ((number.to_dtype(draw.dtype()) + &draw) * step).floor() - (&draw * step).floor();
        // The last one ends where the axis does.
        let start =
            number.eq(count as i64 - 1).where_(&start.full_like(room), &start.clamp(None, Some(room)));
        let within = Tensor::arange(0, kernel as i64, 1, device).reshape([1, 1, 1, kernel]);
        places.push(start.to_dtype(within.dtype()) + within);
    }
    finished(single, largest(&x, &places, &size[..n], &kernel[..n]))
}

/// The largest element of each window and its index. `places` has the places along each axis, `[.., count, kernel]`.
#[track_caller]
fn largest(x: &Tensor, places: &[Tensor], size: &[usize], kernel: &[usize]) -> (Tensor, Tensor) {
    let n = size.len();
    let (shape, mut stride) = (x.shape(), 1usize);
    let mut index: Option<Tensor> = None;
    for axis in (0..n).rev() {
        // Axis `a` of windows is axis 2 + a, that of places in them 2 + n + a.
        let along = &places[axis];
        let mut to = Shape::repeat(1, 2 + 2 * n);
        (to[0], to[1]) = (along.dim(0), along.dim(1));
        (to[2 + axis], to[2 + n + axis]) = (size[axis], kernel[axis]);
        let part = along.reshape(to) * stride as i64;
        index = Some(match index {
            Some(sum) => sum + part,
            None => part,
        });
        stride *= shape[2 + axis];
    }
    let Some(index) = index else { unreachable!() };
    let (windows, held) = (size.iter().product::<usize>(), kernel.iter().product::<usize>());
    let (batch, channels) = (shape[0], shape[1]);
    let index = index
        .reshape([index.dim(0), index.dim(1), windows, held])
        .broadcast_to([batch, channels, windows, held]);
    let flat = x.reshape([batch, channels, stride]);
    let held =
        flat.detach().gather(2, &index.reshape([batch, channels, windows * held])).reshape(index.shape());
    let indices = index.gather(3, &held.argmax_keepdim(3)).squeeze(3);
    let values = flat.gather(2, &indices);
    let out = Shape::collect([batch, channels].iter().chain(size).copied());
    (values.reshape(out), indices.reshape(out))
}

/// The root has no slope at 0: there it is a constant.
#[track_caller]
fn root(x: &Tensor, p: f64) -> Tensor {
    let zero = x.eq(0);
    x.masked_fill(&zero, 1).pow_scalar(1.0 / p).masked_fill(&zero, 0)
}

#[track_caller]
fn unpool(name: &str, n: usize, x: &Tensor, indices: &Tensor, size: Extents) -> Tensor {
    let fits = x.shape() == indices.shape();
    assert!(fits, "{name}: indices {:?} for elements {:?}", indices.shape(), x.shape());
    let ((x, single), (indices, _)) = (batched(name, n, x), batched(name, n, indices));
    let size = size.resolve(name, "size", n, 1).map(|s| s as usize);
    let (batch, channels) = (x.dim(0), x.dim(1));
    let plane = size[..n].iter().product::<usize>();
    let count = x.shape()[2..].iter().product::<usize>();
    let zeros = Tensor::full([batch, channels, plane], 0, x.dtype(), x.value.device());
    let flat = |t: &Tensor| t.reshape([batch, channels, count]);
    let out = zeros.scatter(2, &flat(&indices), &flat(&x));
    let out = out.reshape(Shape::collect([batch, channels].iter().chain(&size[..n]).copied()));
    if single { out.squeeze(0) } else { out }
}

#[track_caller]
fn finished(single: bool, (values, indices): (Tensor, Tensor)) -> (Tensor, Tensor) {
    if single { (values.squeeze(0), indices.squeeze(0)) } else { (values, indices) }
}
