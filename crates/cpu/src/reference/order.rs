//! The order of additions, which decides the bits of a float result.
//!
//! It is a function of the operation and the logical shape alone. Every kernel of this crate keeps to it, so that
//! fusion, strides, threads and instruction sets never change a result. The constants are part of the CPU's numerics
//! version: changing one changes results everywhere.

use crate::{memory, stop};
use kiln_ir::{AxisSet, Shape};

/// Elements of K whose products form one chain in a matrix product; the chains' results are added in order.
pub const PANEL: usize = 512;

/// The order of a reduction: elements are taken in row-major order of the reduced axes and cut into chunks; in a
/// chunk, lane `i mod lanes` takes element `i`, ascending, starting from the identity; [`lanes`](combine_lanes) are
/// combined pairwise, and the chunks' results by a [`tree`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// How many elements apart those are that one lane takes; a power of two.
    pub lanes: usize,
    /// Elements of a chunk, a multiple of `lanes`.
    pub chunk: usize,
}

/// The order where the innermost axis is reduced: neighbours in memory fall in different lanes of a vector.
pub const INNER: Order = Order { lanes: 16, chunk: 512 };

/// The order where the innermost axis stays: a vector holds neighbouring results, each with a single lane.
pub const OUTER: Order = Order { lanes: 1, chunk: 64 };

/// The order of reducing `axes` of `shape`: inner if the last axis whose extent is not 1 is reduced.
pub fn order(shape: &Shape, axes: AxisSet) -> Order {
    match shape.iter().rposition(|&d| d != 1) {
        Some(last) if axes.has(last) => INNER,
        _ => OUTER,
    }
}

/// All elements of `row` combined in `order`; the identity if there are none.
pub fn fold<T: Copy, A: Copy>(
    row: &[T],
    order: Order,
    identity: A,
    widen: impl Fn(T) -> A,
    combine: impl Fn(A, A) -> A,
) -> A {
    let _mark = memory::mark();
    let mut partials = memory::with_capacity(row.len().div_ceil(order.chunk));
    let mut lanes = [identity; INNER.lanes];
    stop::check();
    for chunk in row.chunks(order.chunk) {
        let lanes = &mut lanes[..order.lanes];
        lanes.fill(identity);
        for group in chunk.chunks(order.lanes) {
            for (lane, &x) in lanes.iter_mut().zip(group) {
                *lane = combine(*lane, widen(x));
            }
        }
        partials.push(combine_lanes(lanes, &combine));
    }
    tree(&mut partials, combine).unwrap_or(identity)
}

/// The lanes of a chunk as one: the upper half onto the lower, until one remains. Their number is a power of two.
pub fn combine_lanes<A: Copy>(lanes: &mut [A], combine: impl Fn(A, A) -> A) -> A {
    let mut width = lanes.len();
    while width > 1 {
        width /= 2;
        for l in 0..width {
            lanes[l] = combine(lanes[l], lanes[l + width]);
        }
    }
    lanes[0]
}

/// The results of chunks as one: neighbours are combined, an odd last one is carried unchanged, until one remains.
/// `None` if there are none. `partials` is scratch afterwards.
pub fn tree<A: Copy>(partials: &mut [A], combine: impl Fn(A, A) -> A) -> Option<A> {
    let mut n = partials.len();
    while n > 1 {
        for i in 0..n / 2 {
            partials[i] = combine(partials[2 * i], partials[2 * i + 1]);
        }
        if n % 2 == 1 {
            partials[n / 2] = partials[n - 1];
        }
        n = n.div_ceil(2);
    }
    partials.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values whose sum depends on the order of additions.
    fn uneven(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 % 1013) as f32 - 500.0) * 10f32.powi((i * 31 % 9) as i32 - 4)).collect()
    }

    fn sum(row: &[f32], order: Order) -> f32 {
        fold(row, order, 0.0, |x| x, |a, b| a + b)
    }

    fn carried(mut level: Vec<f32>) -> f32 {
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| if let [a, b] = pair { a + b } else { pair[0] }).collect();
        }
        level[0]
    }

    #[test]
    fn inner_order_is_as_specified() {
        for n in [1, 2, 15, 16, 17, 511, 512, 513, 1025, 1536, 2560, 5000] {
            let row = uneven(n);
            let chunks = row.chunks(512).map(|chunk| {
                let mut lane = [0f32; 16];
                for (i, x) in chunk.iter().enumerate() {
                    lane[i % 16] += x;
                }
                for width in [8, 4, 2, 1] {
                    for l in 0..width {
                        lane[l] += lane[l + width];
                    }
                }
                lane[0]
            });
            assert_eq!(sum(&row, INNER).to_bits(), carried(chunks.collect()).to_bits(), "{n}");
        }
    }

    #[test]
    fn outer_order_is_as_specified() {
        for n in [1, 63, 64, 65, 129, 320, 1000] {
            let row = uneven(n);
            let chunks = row.chunks(64).map(|chunk| chunk.iter().fold(0f32, |sum, x| sum + x));
            assert_eq!(sum(&row, OUTER).to_bits(), carried(chunks.collect()).to_bits(), "{n}");
        }
    }

    #[test]
    fn order_follows_the_last_axis_that_is_not_one() {
        let of = |shape: &[usize], axes: &[usize]| {
            order(&shape.into(), axes.iter().fold(AxisSet::default(), |set, &a| set.with(a)))
        };
        assert_eq!(of(&[4, 5], &[1]), INNER);
        assert_eq!(of(&[4, 5], &[0]), OUTER);
        assert_eq!(of(&[4, 5, 1, 1], &[1]), INNER);
        assert_eq!(of(&[4, 5, 1], &[2]), OUTER);
        assert_eq!(of(&[4, 0], &[1]), INNER);
        assert_eq!(of(&[1, 1], &[0, 1]), OUTER);
        assert_eq!(of(&[], &[]), OUTER);
    }

    #[test]
    fn nothing_sums_to_the_identity() {
        assert_eq!(sum(&[], INNER), 0.0);
        assert_eq!(sum(&[-0.0], OUTER).to_bits(), 0);
    }
}
