//! Images read at any places: `grid_sample`, and the grids of affine maps.

use crate::{DType, Shape, Tensor};
use kiln_device::method;

/// How values between the points of an image are made, see [`Tensor::grid_sample`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GridMode {
    /// Linear in each axis.
    #[default]
    Bilinear,
    /// The nearest point; halves to even.
    Nearest,
    /// Cubic in each of two axes, with PyTorch's kernel (a = -0.75).
    Bicubic,
}

/// What is read outside of an image, see [`Tensor::grid_sample`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GridPadding {
    /// Zeros.
    #[default]
    Zeros,
    /// The nearest point of the edge.
    Border,
    /// The image mirrored at its edges.
    Reflection,
}

/// How [`Tensor::grid_sample`] reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GridOptions {
    /// Between points.
    pub mode: GridMode,
    /// Outside of the image.
    pub padding: GridPadding,
    /// Whether -1 and 1 are the centres of the first and last points, or the outer edges of those.
    pub align_corners: bool,
}

/// # Images read at any places
impl Tensor {
    /// An image `[N, C, H, W]` (or `[N, C, D, H, W]`) read at places `[N, .., 2]` (or 3): x first, from -1 to 1 over the image.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let device = Device::cpu();
    /// let image = Tensor::arange(0, 4, 1, &device).to_dtype(DType::F32).reshape([1, 1, 2, 2]);
    /// let middle = Tensor::zeros([1, 1, 1, 2], &device);
    /// assert_eq!(image.grid_sample(&middle, &GridOptions::default()).item::<f32>().unwrap(), 1.5);
    /// ```
    #[track_caller]
    pub fn grid_sample(&self, grid: &Tensor, options: &GridOptions) -> Tensor {
        let _method = method("grid_sample");
        let (shape, places) = (self.shape(), grid.shape());
        let n = shape.len().saturating_sub(2);
        let fits = (2..=3).contains(&n)
            && places.len() == n + 2
            && places[0] == shape[0]
            && places[n + 1] == n
            && !shape[2..].contains(&0);
        assert!(fits, "grid_sample: places of shape {places:?} for images of shape {shape:?}");
        let cubic = options.mode == GridMode::Bicubic;
        assert!(n == 2 || !cubic, "grid_sample: bicubic is for two axes, not for shape {shape:?}");
        let dtype = self.dtype().unpacked();
        let count: usize = places[1..=n].iter().product();
        let grid = grid.to_dtype(dtype).widened();
        let mut axes = Vec::with_capacity(n);
        for i in 0..n {
            let at = grid.select(-1, (n - 1 - i) as isize).reshape([shape[0], count]);
            axes.push(taps(&scaled(&at, shape[i + 2], options.align_corners), shape[i + 2], options));
        }
        // Channels last, so that a point is one row to read.
        let points: usize = shape[2..].iter().product();
        let image = self.widened().reshape([shape[0], shape[1], points]).transpose(1, 2);
        let image = image.reshape([shape[0] * points, shape[1]]);
        let y = sum(&image, &axes, &shape);
        let out = Shape::collect(shape[..2].iter().chain(&places[1..=n]).copied());
        y.reshape([shape[0], count, shape[1]]).transpose(1, 2).reshape(out).to_dtype(dtype)
    }

    /// The places that affine maps `[N, 2, 3]` (or `[N, 3, 4]`) send the points of an image of `size` `[N, C, H, W]` (or
    /// `[N, C, D, H, W]`) to: `[N, .., 2]` (or 3), for [`Tensor::grid_sample`].
    #[track_caller]
    pub fn affine_grid(&self, size: impl Into<Shape>, align_corners: bool) -> Tensor {
        let _method = method("affine_grid");
        let (size, shape) = (size.into(), self.shape());
        let n = size.len().saturating_sub(2);
        let fits = (2..=3).contains(&n) && shape[..] == [size[0], n, n + 1];
        assert!(fits, "affine_grid: maps of shape {shape:?} for images of shape {size:?}");
        let count: usize = size[2..].iter().product();
        let mut columns = Vec::with_capacity(n + 1);
        // x is the last axis.
        for axis in (0..n).rev() {
            let extent = size[axis + 2];
            let edge = match (align_corners, extent) {
                (_, 0 | 1) => 0.0,
                (true, _) => 1.0,
                (false, _) => (extent - 1) as f64 / extent as f64,
            };
            let line = Tensor::linspace(-edge, edge, extent, self.value.device());
            let mut own = Shape::repeat(1, n);
            own[axis] = extent;
            let line = line.to_dtype(self.dtype()).reshape(own);
            columns.push(line.broadcast_to(&size[2..]).reshape([count]));
        }
        columns.push(columns[0].ones_like());
        let points = Tensor::stack(&columns, 1);
        let places = points.matmul_t(self);
        places.reshape([&[size[0]], &size[2..], &[n]].concat())
    }
}

/// From -1..1 to places of an axis.
#[track_caller]
fn scaled(at: &Tensor, extent: usize, align_corners: bool) -> Tensor {
    match align_corners {
        true => (at + 1.0) * ((extent - 1) as f64 / 2.0),
        false => ((at + 1.0) * extent as f64 - 1.0) / 2.0,
    }
}

/// The points of an axis that a value is made of: indices, weights, and where they lie inside.
struct Tap {
    index: Tensor,
    weight: Option<Tensor>,
    inside: Option<Tensor>,
}

#[track_caller]
fn taps(at: &Tensor, extent: usize, options: &GridOptions) -> Vec<Tap> {
    let tap = |place: Tensor, weight: Option<Tensor>| {
        let inside = match options.padding {
            GridPadding::Zeros => Some(place.ge(0).bitwise_and(place.le(extent - 1))),
            GridPadding::Border | GridPadding::Reflection => None,
        };
        let index = place.detach().clamp(Some(0), Some(extent as i64 - 1)).to_dtype(DType::I64);
        Tap { index, weight, inside }
    };
    match options.mode {
        GridMode::Nearest => {
            vec![tap(held(&at.detach(), extent, options).round(), None)]
        }
        GridMode::Bilinear => {
            let at = held(at, extent, options);
            let low = at.detach().floor();
            let part = &at - &low;
            vec![tap(low.clone(), Some(1.0 - &part)), tap(low + 1, Some(part))]
        }
        GridMode::Bicubic => {
            let low = at.detach().floor();
            let part = at - &low;
            let weights = [outer(&(&part + 1)), inner(&part), inner(&(1.0 - &part)), outer(&(2.0 - &part))];
            let place = |k: i64| held(&(&low + (k - 1)), extent, options);
            (0..).zip(weights).map(|(k, weight)| tap(place(k), Some(weight))).collect()
        }
    }
}

/// Keys' kernel with a = -0.75, up to a distance of 1.
#[track_caller]
fn inner(d: &Tensor) -> Tensor {
    (d * 1.25 - 2.25) * d * d + 1.0
}

/// The same between distances of 1 and 2.
#[track_caller]
fn outer(d: &Tensor) -> Tensor {
    ((d * -0.75 + 3.75) * d - 6.0) * d + 3.0
}

/// Places brought inside an axis, where that is asked for.
#[track_caller]
fn held(at: &Tensor, extent: usize, options: &GridOptions) -> Tensor {
    let last = (extent - 1) as f64;
    match options.padding {
        GridPadding::Zeros => at.clone(),
        GridPadding::Border => at.clamp(Some(0.0), Some(last)),
        GridPadding::Reflection => {
            let (first, span) = if options.align_corners { (0.0, last) } else { (-0.5, extent as f64) };
            if span == 0.0 {
                return at.zeros_like();
            }
            let way = (at - first).abs();
            let rest = way.fmod(span);
            let even = (way.detach() / span).floor().remainder(2.0).eq(0);
            let mirrored = even.where_(&(&rest + first), &(span + first - &rest));
            mirrored.clamp(Some(0.0), Some(last))
        }
    }
}

/// The weighted sum over every combination of taps, of rows of `image`.
#[track_caller]
fn sum(image: &Tensor, axes: &[Vec<Tap>], shape: &Shape) -> Tensor {
    let combinations: usize = axes.iter().map(Vec::len).product();
    let mut total: Option<Tensor> = None;
    for combination in 0..combinations {
        let mut rest = combination;
        let (mut index, mut weight): (Option<Tensor>, Option<Tensor>) = (None, None);
        let mut inside: Option<Tensor> = None;
        for (axis, taps) in axes.iter().enumerate() {
            let tap = &taps[rest % taps.len()];
            rest /= taps.len();
            let extent = shape[axis + 2];
            index = Some(index.map_or_else(|| tap.index.clone(), |i| i * extent + &tap.index));
            weight = both(weight, &tap.weight, |a, b| a * b);
            inside = both(inside, &tap.inside, |a, b| a.bitwise_and(b));
        }
        let Some(index) = index else { continue };
        let first = Tensor::index_along([shape[0], 1], 0, image.value.device());
        let rows = index.numel();
        let index = index + first * shape[2..].iter().product::<usize>();
        let mut part = image.taken(0, &index.reshape([rows]));
        if let Some(weight) = weight {
            part = part * weight.reshape([rows, 1]);
        }
        if let Some(inside) = inside {
            part = part.masked_fill(&inside.logical_not().reshape([rows, 1]), 0);
        }
        total = both(total, &Some(part), |a, b| a + b);
    }
    total.unwrap_or_else(|| image.clone())
}

/// What there is of two, combined if both are.
#[track_caller]
fn both(a: Option<Tensor>, b: &Option<Tensor>, f: fn(&Tensor, &Tensor) -> Tensor) -> Option<Tensor> {
    match (a, b) {
        (Some(a), Some(b)) => Some(f(&a, b)),
        (a, b) => a.or_else(|| b.clone()),
    }
}
