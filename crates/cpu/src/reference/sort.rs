//! Stable sorting along an axis.

use super::array::{Array, Element, Value, with_plain};
use super::view::around;
use std::cmp::Ordering;

/// The first `take` elements of each sorted line, and their indices.
pub fn sort(axis: usize, descending: bool, take: usize, x: &Value) -> Vec<Array> {
    let extents = around(&x.shape, axis);
    with_plain!(&x.data, x => {
        let (values, indices) = match descending {
            false => lines(x, extents, take, rank),
            true => lines(x, extents, take, |a, b| rank(b, a)),
        };
        vec![values.into(), indices.into()]
    })
}

fn lines<T: Element>(
    x: &[T],
    (outer, length, inner): (usize, usize, usize),
    take: usize,
    rank: impl Fn(T, T) -> Ordering,
) -> (Vec<T>, Vec<i64>) {
    let mut values = vec![T::default(); outer * take * inner];
    let mut indices = vec![0; outer * take * inner];
    let mut line: Vec<(T, i64)> = Vec::with_capacity(length);
    for o in 0..outer {
        for i in 0..inner {
            line.clear();
            line.extend((0..length).map(|t| (x[(o * length + t) * inner + i], t as i64)));
            line.sort_by(|a, b| rank(a.0, b.0));
            for (t, &(value, index)) in line[..take].iter().enumerate() {
                let at = (o * take + t) * inner + i;
                values[at] = value;
                indices[at] = index;
            }
        }
    }
    (values, indices)
}

/// NaN is above everything and equal to itself.
fn rank<T: Element>(a: T, b: T) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
