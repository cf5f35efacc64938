//! The geometry that convolution and pooling share: which places of the operand, the kernel and the result meet.
//!
//! Three spatial axes always; missing ones are put in front with extent 1, which changes no row-major order.

use crate::memory::{STRETCH, collect, with_capacity};
use crate::stop;
use kiln_ir::{Conv, Pool};
use std::ops::Range;

/// Windows over three axes.
pub struct Window([Axis; 3]);

#[derive(Clone, Copy)]
struct Axis {
    x: usize,
    kernel: usize,
    y: usize,
    stride: usize,
    low: usize,
    dilation: usize,
}

impl Window {
    /// The windows of a convolution with these spatial extents of x, w and y.
    pub fn conv(conv: &Conv, x: &[usize], kernel: &[usize], y: &[usize]) -> Window {
        Window::of(x, kernel, y, &conv.stride, &conv.low, &conv.dilation)
    }

    /// The windows of pooling with these spatial extents of x and y.
    pub fn pool(pool: &Pool, x: &[usize], y: &[usize]) -> Window {
        let kernel = pool.kernel.map(|k| k as usize);
        Window::of(x, &kernel, y, &pool.stride, &pool.low, &pool.dilation)
    }

    fn of(
        x: &[usize],
        kernel: &[usize],
        y: &[usize],
        stride: &[u32],
        low: &[u32],
        dilation: &[u32],
    ) -> Window {
        let mut axes = [Axis { x: 1, kernel: 1, y: 1, stride: 1, low: 0, dilation: 1 }; 3];
        for (i, axis) in axes[3 - x.len()..].iter_mut().enumerate() {
            let (stride, low, dilation) = (stride[i] as usize, low[i] as usize, dilation[i] as usize);
            *axis = Axis { x: x[i], kernel: kernel[i], y: y[i], stride, low, dilation };
        }
        Window(axes)
    }

    /// Places of x's spatial plane.
    pub fn x(&self) -> usize {
        self.0.iter().map(|a| a.x).product()
    }

    /// Places of the kernel.
    pub fn kernel(&self) -> usize {
        self.0.iter().map(|a| a.kernel).product()
    }

    /// Places of y's spatial plane.
    pub fn y(&self) -> usize {
        self.0.iter().map(|a| a.y).product()
    }

    /// The (x, kernel) places that make `y`, by ascending kernel place; padding is left out.
    pub fn of_y(&self, y: usize) -> Vec<(usize, usize)> {
        let y = unflatten(y, self.0.map(|a| a.y));
        let pairs = |i: usize| {
            let (axis, y) = (self.0[i], y[i]);
            let taps = axis.taps_of_y(y);
            collect(taps.len(), taps.map(|k| (y * axis.stride + k * axis.dilation - axis.low, k)))
        };
        product([pairs(0), pairs(1), pairs(2)], self.0.map(|a| a.x), self.0.map(|a| a.kernel))
    }

    /// The (y, kernel) places that `x` goes into, by ascending kernel place.
    pub fn of_x(&self, x: usize) -> Vec<(usize, usize)> {
        let x = unflatten(x, self.0.map(|a| a.x));
        let pairs = |i: usize| {
            let (axis, x) = (self.0[i], x[i]);
            let taps = axis.taps_of_x(x);
            collect(taps.len(), taps.filter_map(|k| Some((axis.y_at(x, k)?, k))))
        };
        product([pairs(0), pairs(1), pairs(2)], self.0.map(|a| a.y), self.0.map(|a| a.kernel))
    }

    /// The (x, y) places that meet kernel place `k`, by ascending y place; padding is left out.
    pub fn of_kernel(&self, k: usize) -> Vec<(usize, usize)> {
        let k = unflatten(k, self.0.map(|a| a.kernel));
        let pairs = |i: usize| {
            let (axis, at) = (self.0[i], k[i] * self.0[i].dilation);
            let places = meeting(at, axis.stride, axis.low, axis.x, axis.y);
            collect(places.len(), places.map(|y| (at + y * axis.stride - axis.low, y)))
        };
        product([pairs(0), pairs(1), pairs(2)], self.0.map(|a| a.x), self.0.map(|a| a.y))
    }

    /// How many places of x all places of y meet together, if that is a number at all.
    pub fn meetings(&self) -> Option<usize> {
        let along = |axis: &Axis| {
            (0..axis.y).try_fold(0usize, |sum, y| {
                if y % STRETCH == 0 {
                    stop::check();
                }
                sum.checked_add(axis.taps_of_y(y).len())
            })
        };
        self.0.iter().try_fold(1usize, |product, axis| product.checked_mul(along(axis)?))
    }
}

impl Axis {
    /// Places of the kernel at which a place of y meets x.
    fn taps_of_y(self, y: usize) -> Range<usize> {
        meeting(y * self.stride, self.dilation, self.low, self.x, self.kernel)
    }

    /// Places of the kernel among which are those at which a place of x goes into y.
    fn taps_of_x(self, x: usize) -> Range<usize> {
        let last = x + self.low;
        let first = match last.checked_sub(self.y * self.stride) {
            Some(past) => past / self.dilation + 1,
            None => 0,
        };
        first..self.kernel.min(last / self.dilation + 1).max(first)
    }

    fn y_at(self, x: usize, k: usize) -> Option<usize> {
        let from = (x + self.low).checked_sub(k * self.dilation)?;
        let y = from / self.stride;
        (from % self.stride == 0 && y < self.y).then_some(y)
    }
}

/// The `i` below `n` for which `at + i * step - low` is a place of x.
fn meeting(at: usize, step: usize, low: usize, x: usize, n: usize) -> Range<usize> {
    let first = low.saturating_sub(at).div_ceil(step);
    let end = (x + low).saturating_sub(at).div_ceil(step).min(n);
    first..end.max(first)
}

fn unflatten(at: usize, extents: [usize; 3]) -> [usize; 3] {
    let [_, b, c] = extents;
    [at / (b * c), at / c % b, at % c]
}

/// All combinations of three axes' pairs, the first axis slowest, as flat places.
fn product(pairs: [Vec<(usize, usize)>; 3], left: [usize; 3], right: [usize; 3]) -> Vec<(usize, usize)> {
    let [first, second, third] = pairs;
    let mut out = with_capacity(first.len().saturating_mul(second.len()).saturating_mul(third.len()));
    for &(l0, r0) in &first {
        stop::check();
        for &(l1, r1) in &second {
            let (l, r) = ((l0 * left[1] + l1) * left[2], (r0 * right[1] + r1) * right[2]);
            out.extend(third.iter().map(|&(l2, r2)| (l + l2, r + r2)));
        }
    }
    out
}
