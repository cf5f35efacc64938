//! Running reductions: one chain along the axis in the accumulation type; each output is rounded, the chain is not.

use super::array::{Array, Value, with_floats, with_numbers};
use super::number::Number;
use super::view::around;
use crate::{memory, stop};
use kiln_ir::ScanKind;
use kiln_ir::math::{Float, Num};

/// The elements of a running reduction.
pub fn scan(kind: ScanKind, axis: usize, reverse: bool, ins: &[&Value]) -> Array {
    let lines = Lines { extents: around(&ins[0].shape, axis), reverse };
    let x = &ins[0].data;
    match kind {
        ScanKind::Sum => with_numbers!(x, x => sum(&lines, x).into()),
        ScanKind::Prod => with_numbers!(x, x => prod(&lines, x).into()),
        ScanKind::LogSumExp => with_floats!(x, x => log_sum_exp(&lines, x).into()),
        ScanKind::Linear => with_numbers!(x, x => linear(&lines, x, ins[1].data.typed()).into()),
    }
}

fn sum<T: Number>(lines: &Lines, x: &[T]) -> Vec<T> {
    lines.run(x.len(), T::Wide::ZERO, |s: T::Wide, at| s.add(x[at].widen()))
}

fn prod<T: Number>(lines: &Lines, x: &[T]) -> Vec<T> {
    lines.run(x.len(), T::Wide::ONE, |s: T::Wide, at| s.mul(x[at].widen()))
}

/// From the larger of the two, so that nothing overflows; an infinite one is the sum.
fn log_sum_exp<T: Number<Wide: Float<Truth = bool>>>(lines: &Lines, x: &[T]) -> Vec<T> {
    lines.run(x.len(), T::Wide::of(f64::NEG_INFINITY), |s: T::Wide, at| {
        let (low, high) = (s.minimum(x[at].widen()), s.maximum(x[at].widen()));
        if high.inf() { high } else { high.add(low.sub(high).exp().ln_1p()) }
    })
}

fn linear<T: Number>(lines: &Lines, a: &[T], b: &[T]) -> Vec<T> {
    lines.run(a.len(), T::Wide::ZERO, |s, at| a[at].widen().mul(s).add(b[at].widen()))
}

struct Lines {
    extents: (usize, usize, usize),
    reverse: bool,
}

impl Lines {
    /// Every line starts from `start`; `step` gives the next state from the last one and an element's place.
    fn run<T: Number>(
        &self,
        size: usize,
        start: T::Wide,
        step: impl Fn(T::Wide, usize) -> T::Wide,
    ) -> Vec<T> {
        let (outer, length, inner) = self.extents;
        let mut out = memory::filled(size, T::default());
        for o in 0..outer {
            for i in 0..inner {
                stop::check();
                let mut state = start;
                for t in 0..length {
                    let t = if self.reverse { length - 1 - t } else { t };
                    let at = (o * length + t) * inner + i;
                    state = step(state, at);
                    out[at] = T::narrow(state);
                }
            }
        }
        out
    }
}
