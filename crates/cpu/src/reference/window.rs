//! The geometry that convolution and pooling share: which places of the operand, the kernel and the result meet.
//!
//! Three spatial axes always; missing ones are put in front with extent 1, which changes no row-major order.

use kiln_ir::{Conv, Pool};

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
            let axis = self.0[i];
            (0..axis.kernel).filter_map(|k| Some((axis.x_at(y[i], k)?, k))).collect()
        };
        product([pairs(0), pairs(1), pairs(2)], self.0.map(|a| a.x), self.0.map(|a| a.kernel))
    }

    /// The (y, kernel) places that `x` goes into, by ascending kernel place.
    pub fn of_x(&self, x: usize) -> Vec<(usize, usize)> {
        let x = unflatten(x, self.0.map(|a| a.x));
        let pairs = |i: usize| {
            let axis = self.0[i];
            (0..axis.kernel).filter_map(|k| Some((axis.y_at(x[i], k)?, k))).collect()
        };
        product([pairs(0), pairs(1), pairs(2)], self.0.map(|a| a.y), self.0.map(|a| a.kernel))
    }

    /// The (x, y) places that meet kernel place `k`, by ascending y place; padding is left out.
    pub fn of_kernel(&self, k: usize) -> Vec<(usize, usize)> {
        let k = unflatten(k, self.0.map(|a| a.kernel));
        let pairs = |i: usize| {
            let axis = self.0[i];
            (0..axis.y).filter_map(|y| Some((axis.x_at(y, k[i])?, y))).collect()
        };
        product([pairs(0), pairs(1), pairs(2)], self.0.map(|a| a.x), self.0.map(|a| a.y))
    }
}

impl Axis {
    fn x_at(self, y: usize, k: usize) -> Option<usize> {
        (y * self.stride + k * self.dilation).checked_sub(self.low).filter(|&x| x < self.x)
    }

    fn y_at(self, x: usize, k: usize) -> Option<usize> {
        let from = (x + self.low).checked_sub(k * self.dilation)?;
        let y = from / self.stride;
        (from % self.stride == 0 && y < self.y).then_some(y)
    }
}

fn unflatten(at: usize, extents: [usize; 3]) -> [usize; 3] {
    let [_, b, c] = extents;
    [at / (b * c), at / c % b, at % c]
}

/// All combinations of three axes' pairs, the first axis slowest, as flat places.
fn product(pairs: [Vec<(usize, usize)>; 3], left: [usize; 3], right: [usize; 3]) -> Vec<(usize, usize)> {
    let [first, second, third] = pairs;
    let mut out = Vec::with_capacity(first.len() * second.len() * third.len());
    for &(l0, r0) in &first {
        for &(l1, r1) in &second {
            let (l, r) = ((l0 * left[1] + l1) * left[2], (r0 * right[1] + r1) * right[2]);
            out.extend(third.iter().map(|&(l2, r2)| (l + l2, r + r2)));
        }
    }
    out
}
