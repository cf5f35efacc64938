//! Convolution and its adjoints, as the matrix products they are.
//!
//! The order of additions is that of [`dot`](super::dot): products are chained by fused multiply-adds from 0 over
//! panels of K, and panels are added in order. What K is:
//! - forward: the channels of the group, then the places of the kernel;
//! - weight: the batch, then the places of y;
//! - input: the outputs of the group, for each place of the kernel that x meets; these sums are added to 0 in the
//!   kernel's order, which is what scattering the columns of wᵀ y gives.
//!
//! Padding takes part as zeros: 0 times infinity is NaN there too.

use super::array::{Array, Value, with_numbers};
use super::number::{Number, widen};
use super::order::PANEL;
use super::window::Window;
use crate::{memory, stop};
use kiln_ir::math::Num;
use kiln_ir::{Conv, ConvKind, Shape};

/// The elements of a convolution, or of an adjoint, of shape `out`.
pub fn conv(kind: ConvKind, conv: &Conv, a: &Value, b: &Value, out: &Shape) -> Array {
    let (x, w, y) = match kind {
        ConvKind::Forward => (&a.shape, &b.shape, out),
        ConvKind::Input => (out, &b.shape, &a.shape),
        ConvKind::Weight => (&a.shape, out, &b.shape),
    };
    let plan = ConvPlan {
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

struct ConvPlan {
    batch: usize,
    /// Channels of x and of y.
    channels: usize,
    outputs: usize,
    /// Channels of x in a group, and of y.
    inner: usize,
    share: usize,
    window: Window,
}

impl ConvPlan {
    /// Sums over the channels of the group, then the kernel.
    fn forward<T: Number>(&self, x: &[T], w: &[T]) -> Vec<T> {
        let (xs, ks, ys) = (self.window.x(), self.window.kernel(), self.window.y());
        let (x, w) = (widen(x), widen(w));
        let mut out = memory::filled(self.batch * self.outputs * ys, T::default());
        for p in 0..ys {
            let _mark = memory::mark();
            let taps = by_second(self.window.of_y(p), ks);
            for n in 0..self.batch {
                for o in 0..self.outputs {
                    stop::check();
                    let mut sum = Sum::<T>::default();
                    for c in 0..self.inner {
                        let x = &x[(n * self.channels + o / self.share * self.inner + c) * xs..][..xs];
                        let w = &w[(o * self.inner + c) * ks..][..ks];
                        taps.iter().zip(w).for_each(|(&i, &w)| sum.chain(padded(x, i), w));
                    }
                    out[(n * self.outputs + o) * ys + p] = T::narrow(sum.total());
                }
            }
        }
        out
    }

    /// Sums over the outputs of the group for each place of the kernel, then over the kernel.
    fn input<T: Number>(&self, y: &[T], w: &[T]) -> Vec<T> {
        let (xs, ks, ys) = (self.window.x(), self.window.kernel(), self.window.y());
        let (y, w) = (widen(y), widen(w));
        let mut out = memory::filled(self.batch * self.channels * xs, T::default());
        for q in 0..xs {
            let _mark = memory::mark();
            let taps = self.window.of_x(q);
            for n in 0..self.batch {
                for channel in 0..self.channels {
                    stop::check();
                    let (group, c) = (channel / self.inner, channel % self.inner);
                    let outputs = group * self.share..((group + 1) * self.share).min(self.outputs);
                    let column = |&(p, k): &(usize, usize)| {
                        let mut sum = Sum::<T>::default();
                        for o in outputs.clone() {
                            sum.chain(w[(o * self.inner + c) * ks + k], y[(n * self.outputs + o) * ys + p]);
                        }
                        sum.total()
                    };
                    let total = taps.iter().map(column).fold(T::Wide::ZERO, Num::add);
                    out[(n * self.channels + channel) * xs + q] = T::narrow(total);
                }
            }
        }
        out
    }

    /// Sums over the batch, then y's places.
    fn weight<T: Number>(&self, x: &[T], y: &[T]) -> Vec<T> {
        let (xs, ks, ys) = (self.window.x(), self.window.kernel(), self.window.y());
        let (x, y) = (widen(x), widen(y));
        let mut out = memory::filled(self.outputs * self.inner * ks, T::default());
        for k in 0..ks {
            let _mark = memory::mark();
            let taps = by_second(self.window.of_kernel(k), ys);
            for o in 0..self.outputs {
                for c in 0..self.inner {
                    stop::check();
                    let mut sum = Sum::<T>::default();
                    for n in 0..self.batch {
                        let x = &x[(n * self.channels + o / self.share * self.inner + c) * xs..][..xs];
                        let y = &y[(n * self.outputs + o) * ys..][..ys];
                        taps.iter().zip(y).for_each(|(&i, &y)| sum.chain(padded(x, i), y));
                    }
                    out[(o * self.inner + c) * ks + k] = T::narrow(sum.total());
                }
            }
        }
        out
    }
}

/// The first places of `pairs` by their second ones, of which there are `n`; `None` where the second meets padding.
fn by_second(pairs: Vec<(usize, usize)>, n: usize) -> Vec<Option<usize>> {
    let mut places = memory::filled(n, None);
    pairs.into_iter().for_each(|(first, second)| places[second] = Some(first));
    places
}

fn padded<A: Num>(x: &[A], at: Option<usize>) -> A {
    at.map_or(A::ZERO, |i| x[i])
}

/// A sum of products in the order of a matrix product.
struct Sum<T: Number> {
    /// The panels before this one.
    panels: Option<T::Wide>,
    panel: T::Wide,
    terms: usize,
}

impl<T: Number> Default for Sum<T> {
    fn default() -> Sum<T> {
        Sum { panels: None, panel: T::Wide::ZERO, terms: 0 }
    }
}

impl<T: Number> Sum<T> {
    fn chain(&mut self, a: T::Wide, b: T::Wide) {
        if self.terms == PANEL {
            *self = Sum { panels: Some(self.total()), ..Sum::default() };
        }
        self.panel = T::fma(a, b, self.panel);
        self.terms += 1;
    }

    fn total(&self) -> T::Wide {
        self.panels.map_or(self.panel, |panels| Num::add(panels, self.panel))
    }
}
