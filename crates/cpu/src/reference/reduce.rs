//! Reductions: the reduced axes are brought to the end, then each row gives one element.

use super::array::{Array, Element, Value, with_floats, with_numbers, with_plain};
use super::number::Number;
use super::order::{fold, order};
use super::view::View;
use crate::{memory, stop};
use kiln_ir::math::{Float, Num};
use kiln_ir::{AxisSet, DType, ReduceKind, Shape};

/// The elements of a reduction.
pub fn reduce(kind: ReduceKind, axes: AxisSet, x: &Value) -> Array {
    let rows = Rows { shape: x.shape, axes };
    match kind {
        ReduceKind::Sum => with_numbers!(&x.data, x => sum(&rows, x).into()),
        ReduceKind::Mean => with_floats!(&x.data, x => mean(&rows, x).into()),
        ReduceKind::Prod => with_numbers!(&x.data, x => prod(&rows, x).into()),
        ReduceKind::Max | ReduceKind::Any if x.data.dtype() == DType::Bool => {
            rows.map(x.data.typed(), |row: &[bool]| row.contains(&true)).into()
        }
        ReduceKind::Min | ReduceKind::All if x.data.dtype() == DType::Bool => {
            rows.map(x.data.typed(), |row: &[bool]| !row.contains(&false)).into()
        }
        ReduceKind::Max => with_numbers!(&x.data, x => rows.map(x, |row| extreme(row, Num::maximum)).into()),
        ReduceKind::Min => with_numbers!(&x.data, x => rows.map(x, |row| extreme(row, Num::minimum)).into()),
        ReduceKind::Any | ReduceKind::All => unreachable!("infer lets only bool come here"),
        ReduceKind::ArgMax => with_plain!(&x.data, x => rows.map(x, first_largest).into()),
        ReduceKind::ArgMin => with_plain!(&x.data, x => rows.map(x, first_smallest).into()),
    }
}

/// A shape seen as rows of the axes that go, in row-major order of those that stay.
struct Rows {
    shape: Shape,
    axes: AxisSet,
}

impl Rows {
    fn map<T: Copy, U>(&self, x: &[T], f: impl Fn(&[T]) -> U) -> Vec<U> {
        let (view, count, length) = self.arranged();
        let x = view.read(x);
        let mut out = memory::with_capacity(count);
        for i in 0..count {
            stop::check();
            out.push(f(&x[i * length..(i + 1) * length]));
        }
        out
    }

    /// The reduced axes last, how many rows that gives, and how long they are.
    fn arranged(&self) -> (View, usize, usize) {
        let kept = (0..self.shape.len()).filter(|&i| !self.axes.has(i));
        let count = kept.clone().map(|i| self.shape[i]).product();
        let length = self.axes.iter().map(|i| self.shape[i]).product();
        let order: Vec<usize> = kept.chain(self.axes.iter()).collect();
        (View::whole(&self.shape).permuted(order), count, length)
    }
}

fn sum<T: Number>(rows: &Rows, x: &[T]) -> Vec<T> {
    let order = order(&rows.shape, rows.axes);
    rows.map(x, |row| T::narrow(fold(row, order, T::Wide::ZERO, T::widen, Num::add)))
}

/// The mean of nothing is 0 / 0.
fn mean<T: Number<Wide: Float>>(rows: &Rows, x: &[T]) -> Vec<T> {
    let order = order(&rows.shape, rows.axes);
    rows.map(x, |row| {
        let sum = fold(row, order, T::Wide::ZERO, T::widen, Num::add);
        T::narrow(sum.div(Float::of(row.len() as f64)))
    })
}

fn prod<T: Number>(rows: &Rows, x: &[T]) -> Vec<T> {
    let order = order(&rows.shape, rows.axes);
    rows.map(x, |row| T::narrow(fold(row, order, T::Wide::ONE, T::widen, Num::mul)))
}

/// The largest or smallest in the sense of the elementwise operation, to which 0 is above -0; the order of elements does
/// not matter. Infer keeps empty rows away.
fn extreme<T: Number>(row: &[T], combine: impl Fn(T::Wide, T::Wide) -> T::Wide) -> T {
    T::narrow(row.iter().fold(row[0].widen(), |best, x| combine(best, x.widen())))
}

fn first_largest<T: Element>(row: &[T]) -> i64 {
    first(row, |v, best| v > best)
}

fn first_smallest<T: Element>(row: &[T]) -> i64 {
    first(row, |v, best| v < best)
}

/// The index of the first NaN, else of the first element that no other beats.
fn first<T: Element>(row: &[T], beats: impl Fn(T, T) -> bool) -> i64 {
    let mut best = 0;
    for (i, &v) in row.iter().enumerate() {
        if v.is_nan() {
            return i as i64;
        }
        if beats(v, row[best]) {
            best = i;
        }
    }
    best as i64
}
