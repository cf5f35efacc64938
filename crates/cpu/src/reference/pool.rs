//! Pooling: each window's places in row-major order; padding is never looked at.

use super::array::{Array, Element, Value, with_numbers};
use super::number::Number;
use super::window::Window;
use crate::{memory, stop};
use kiln_ir::math::Num;
use kiln_ir::{Pool, PoolKind, Shape};

/// The elements of the results of pooling, the first of shape `out`.
pub fn pool(kind: PoolKind, pool: &Pool, x: &Value, out: &Shape) -> Vec<Array> {
    let planes = x.shape[0] * x.shape[1];
    match kind {
        PoolKind::Max => {
            let window = Window::pool(pool, &x.shape[2..], &out[2..]);
            with_numbers!(&x.data, x => {
                let (values, indices) = max(&window, planes, x);
                vec![values.into(), indices.into()]
            })
        }
        PoolKind::Sum => {
            let window = Window::pool(pool, &x.shape[2..], &out[2..]);
            with_numbers!(&x.data, x => vec![sum(&window, planes, x).into()])
        }
        PoolKind::SumInput => {
            let window = Window::pool(pool, &out[2..], &x.shape[2..]);
            with_numbers!(&x.data, y => vec![sum_input(&window, planes, y).into()])
        }
    }
}

/// The first of the largest, but the last NaN; infer keeps windows of padding alone away.
fn max<T: Element>(window: &Window, planes: usize, x: &[T]) -> (Vec<T>, Vec<i64>) {
    let (xs, ys) = (window.x(), window.y());
    let mut values = memory::filled(planes * ys, T::default());
    let mut indices = memory::filled(planes * ys, 0);
    for p in 0..ys {
        stop::check();
        let _mark = memory::mark();
        let taps = window.of_y(p);
        for plane in 0..planes {
            let x = &x[plane * xs..][..xs];
            let mut best = taps[0].0;
            for &(at, _) in &taps[1..] {
                if x[at] > x[best] || x[at].is_nan() {
                    best = at;
                }
            }
            values[plane * ys + p] = x[best];
            indices[plane * ys + p] = best as i64;
        }
    }
    (values, indices)
}

fn sum<T: Number>(window: &Window, planes: usize, x: &[T]) -> Vec<T> {
    let taps = |p| window.of_y(p).into_iter().map(|(x, _)| x).collect();
    totals(planes, window.x(), window.y(), x, taps)
}

/// Adds the windows that hold a place, by ascending place of the window.
fn sum_input<T: Number>(window: &Window, planes: usize, y: &[T]) -> Vec<T> {
    // A later place of the kernel belongs to an earlier window.
    let taps = |q| window.of_x(q).into_iter().rev().map(|(y, _)| y).collect();
    totals(planes, window.y(), window.x(), y, taps)
}

fn totals<T: Number>(
    planes: usize,
    from: usize,
    to: usize,
    x: &[T],
    taps: impl Fn(usize) -> Vec<usize>,
) -> Vec<T> {
    let mut out = memory::filled(planes * to, T::default());
    for p in 0..to {
        stop::check();
        let _mark = memory::mark();
        let taps = taps(p);
        for plane in 0..planes {
            let x = &x[plane * from..][..from];
            out[plane * to + p] =
                T::narrow(taps.iter().fold(T::Wide::ZERO, |sum, &at| sum.add(x[at].widen())));
        }
    }
    out
}
