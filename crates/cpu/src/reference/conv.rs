//! Convolution and its adjoints: each output is one chain of fused multiply-adds from 0; padding takes no part in it.

use super::array::{Array, Value, with_numbers};
use super::number::{Number, widen};
use super::window::Window;
use kiln_ir::math::Num;
use kiln_ir::{Conv, ConvKind, Shape};

/// The elements of a convolution, or of an adjoint, of shape `out`.
pub fn conv(kind: ConvKind, conv: &Conv, a: &Value, b: &Value, out: &Shape) -> Array {
    let (x, w, y) = match kind {
        ConvKind::Forward => (&a.shape, &b.shape, out),
        ConvKind::Input => (out, &b.shape, &a.shape),
        ConvKind::Weight => (&a.shape, out, &b.shape),
    };
    let plan = Plan {
        batch: x[0],
        channels: x[1],
        outputs: w[0],
        inner: w[1],
        // Empty groups have no outputs, so that the 1 is never used.
        share: (w[0] / conv.groups as usize).max(1),
        window: Window::conv(conv, &x[2..], &w[2..], &y[2..]),
    };
    with_numbers!(&a.data, a => {
        let b = b.data.typed();
        match kind {
            ConvKind::Forward => plan.forward(a, b).into(),
            ConvKind::Input => plan.input(a, b).into(),
            ConvKind::Weight => plan.weight(a, b).into(),
        }
    })
}

struct Plan {
    batch: usize,
    /// Channels of x and of y.
    channels: usize,
    outputs: usize,
    /// Channels of x in a group, and of y.
    inner: usize,
    share: usize,
    window: Window,
}

impl Plan {
    /// Sums over the channels of the group, then the kernel.
    fn forward<T: Number>(&self, x: &[T], w: &[T]) -> Vec<T> {
        let (xs, ks, ys) = (self.window.x(), self.window.kernel(), self.window.y());
        let (x, w) = (widen(x), widen(w));
        let mut out = vec![T::default(); self.batch * self.outputs * ys];
        for p in 0..ys {
            let taps = self.window.of_y(p);
            for n in 0..self.batch {
                for o in 0..self.outputs {
                    let mut acc = T::Wide::ZERO;
                    for c in 0..self.inner {
                        let x = &x[(n * self.channels + o / self.share * self.inner + c) * xs..][..xs];
                        let w = &w[(o * self.inner + c) * ks..][..ks];
                        acc = chain::<T>(acc, &taps, x, w);
                    }
                    out[(n * self.outputs + o) * ys + p] = T::narrow(acc);
                }
            }
        }
        out
    }

    /// Sums over the outputs of the group, then the kernel.
    fn input<T: Number>(&self, y: &[T], w: &[T]) -> Vec<T> {
        let (xs, ks, ys) = (self.window.x(), self.window.kernel(), self.window.y());
        let (y, w) = (widen(y), widen(w));
        let mut out = vec![T::default(); self.batch * self.channels * xs];
        for q in 0..xs {
            let taps = self.window.of_x(q);
            for n in 0..self.batch {
                for channel in 0..self.channels {
                    let (group, c) = (channel / self.inner, channel % self.inner);
                    let mut acc = T::Wide::ZERO;
                    for o in group * self.share..((group + 1) * self.share).min(self.outputs) {
                        let y = &y[(n * self.outputs + o) * ys..][..ys];
                        let w = &w[(o * self.inner + c) * ks..][..ks];
                        acc = chain::<T>(acc, &taps, y, w);
                    }
                    out[(n * self.channels + channel) * xs + q] = T::narrow(acc);
                }
            }
        }
        out
    }

    /// Sums over the batch, then y's places.
    fn weight<T: Number>(&self, x: &[T], y: &[T]) -> Vec<T> {
        let (xs, ks, ys) = (self.window.x(), self.window.kernel(), self.window.y());
        let (x, y) = (widen(x), widen(y));
        let mut out = vec![T::default(); self.outputs * self.inner * ks];
        for k in 0..ks {
            let taps = self.window.of_kernel(k);
            for o in 0..self.outputs {
                for c in 0..self.inner {
                    let mut acc = T::Wide::ZERO;
                    for n in 0..self.batch {
                        let x = &x[(n * self.channels + o / self.share * self.inner + c) * xs..][..xs];
                        let y = &y[(n * self.outputs + o) * ys..][..ys];
                        acc = chain::<T>(acc, &taps, x, y);
                    }
                    out[(o * self.inner + c) * ks + k] = T::narrow(acc);
                }
            }
        }
        out
    }
}

fn chain<T: Number>(acc: T::Wide, taps: &[(usize, usize)], a: &[T::Wide], b: &[T::Wide]) -> T::Wide {
    taps.iter().fold(acc, |acc, &(i, j)| T::fma(a[i], b[j], acc))
}
