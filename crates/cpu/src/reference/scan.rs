//! Running reductions: one chain along the axis in the accumulation type; each output is rounded, the chain is not.

use super::array::{Array, Value, with_numbers};
use super::number::Number;
use super::view::around;
use crate::{memory, stop};
use kiln_ir::ScanKind;
use kiln_ir::math::Num;

/// The elements of a running reduction.
pub fn scan(kind: ScanKind, axis: usize, reverse: bool, ins: &[&Value]) -> Array {
    let lines = Lines { extents: around(&ins[0].shape, axis), reverse };
    with_numbers!(&ins[0].data, x => match kind {
        ScanKind::Sum => sum(&lines, x).into(),
        ScanKind::Prod => prod(&lines, x).into(),
        ScanKind::Linear => linear(&lines, x, ins[1].data.typed()).into(),
    })
}

fn sum<T: Number>(lines: &Lines, x: &[T]) -> Vec<T> {
    lines.run(x.len(), T::Wide::ZERO, |s: T::Wide, at| s.add(x[at].widen()))
}

fn prod<T: Number>(lines: &Lines, x: &[T]) -> Vec<T> {
    lines.run(x.len(), T::Wide::ONE, |s: T::Wide, at| s.mul(x[at].widen()))
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
