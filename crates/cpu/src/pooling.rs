//! Pooling of views, planes shared out among threads. Which places meet is found once for all planes.

use crate::cpu::Context;
use crate::elementwise::with_type;
use crate::pool;
use crate::reference::{Element, Number, Window};
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_ir::math::Num;
use kiln_ir::{DType, Meta, Pool, PoolKind};
use smallvec::{SmallVec, smallvec};

/// Places that a thread reads at a time.
const SHARE: usize = 1 << 14;

pub(crate) fn pool(
    cx: &Context<'_>,
    kind: PoolKind,
    pool: &Pool,
    x: &View,
    outs: &[Meta],
) -> Result<SmallVec<[View; 2]>, Error> {
    let x = cx.dense(x)?;
    let y = cx.fresh(outs[0])?;
    let (xs, ys) = (&x.shape[2..], &y.shape[2..]);
    match kind {
        PoolKind::Max => {
            let window = Window::pool(pool, xs, ys);
            let taps = Taps::new(window.y(), |p| window.of_y(p).into_iter().map(|(x, _)| x).collect());
            let indices = cx.fresh(outs[1])?;
            with_type!(x.dtype, number T => max::<T>(&taps, window.x(), &x, &y, &indices));
            Ok(smallvec![y, indices])
        }
        PoolKind::Sum => {
            let window = Window::pool(pool, xs, ys);
            let taps = Taps::new(window.y(), |p| window.of_y(p).into_iter().map(|(x, _)| x).collect());
            with_type!(x.dtype, number T => sum::<T>(&taps, window.x(), &x, &y));
            Ok(smallvec![y])
        }
        PoolKind::SumInput => {
            let window = Window::pool(pool, ys, xs);
            // A later place of the kernel belongs to an earlier window.
            let places = |q| window.of_x(q).into_iter().rev().map(|(y, _)| y).collect();
            let taps = Taps::new(window.x(), places);
            with_type!(x.dtype, number T => sum::<T>(&taps, window.y(), &x, &y));
            Ok(smallvec![y])
        }
    }
}

/// The places of an operand's plane that make each place of a result's.
struct Taps {
    places: Vec<u32>,
    /// Where those of each result begin, and the end.
    starts: Vec<u32>,
}

impl Taps {
    fn new(count: usize, of: impl Fn(usize) -> Vec<usize>) -> Taps {
        let (mut places, mut starts) = (Vec::new(), vec![0]);
        for p in 0..count {
            places.extend(of(p).into_iter().map(|at| at as u32));
            starts.push(places.len() as u32);
        }
        Taps { places, starts }
    }

    fn len(&self) -> usize {
        self.starts.len() - 1
    }

    fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.starts.windows(2).map(|w| &self.places[w[0] as usize..w[1] as usize])
    }
}

/// An address that threads share, each for planes of its own.
#[derive(Clone, Copy)]
struct Base<T>(*mut T);
// SAFETY: threads read operands and write disjoint planes of results.
unsafe impl<T> Sync for Base<T> {}

impl<T> Base<T> {
    /// # Safety
    /// The plane is in the buffer, and nobody writes it meanwhile.
    unsafe fn plane<'a>(self, plane: usize, len: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0.add(plane * len), len) }
    }

    /// # Safety
    /// The plane is in the buffer, and nobody else uses it meanwhile.
    #[allow(clippy::mut_from_ref)]
    unsafe fn plane_mut<'a>(self, plane: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(plane * len), len) }
    }
}

/// Calls `f` for each plane of a result.
fn planes(y: &View, taps: &Taps, f: impl Fn(usize) + Sync) {
    let count = y.numel() / taps.len().max(1);
    let share = (SHARE / taps.places.len().max(1)).max(1);
    pool::parallel(count.div_ceil(share), &|part| {
        (part * share..count.min((part + 1) * share)).for_each(&f);
    });
}

/// The first of the largest, but the last NaN; infer keeps windows of padding alone away.
fn max<T: Element>(taps: &Taps, xs: usize, x: &View, y: &View, indices: &View) {
    let (x, values, indices) = (Base(x.ptr::<T>()), Base(y.ptr::<T>()), Base(indices.ptr::<i64>()));
    planes(y, taps, |plane| {
        // SAFETY: operands and fresh results are dense and have this plane, which is this call's alone.
        let (x, values, indices) = unsafe {
            (x.plane(plane, xs), values.plane_mut(plane, taps.len()), indices.plane_mut(plane, taps.len()))
        };
        for ((value, index), places) in values.iter_mut().zip(indices).zip(taps.iter()) {
            let mut best = places[0];
            let mut largest = x[best as usize];
            for &at in &places[1..] {
                let here = x[at as usize];
                if here > largest || here.is_nan() {
                    (best, largest) = (at, here);
                }
            }
            (*value, *index) = (largest, best as i64);
        }
    });
}

fn sum<T: Number>(taps: &Taps, xs: usize, x: &View, y: &View) {
    let (x, sums) = (Base(x.ptr::<T>()), Base(y.ptr::<T>()));
    planes(y, taps, |plane| {
        // SAFETY: operands and fresh results are dense and have this plane, which is this call's alone.
        let (x, sums) = unsafe { (x.plane(plane, xs), sums.plane_mut(plane, taps.len())) };
        for (sum, places) in sums.iter_mut().zip(taps.iter()) {
            let total = places.iter().fold(T::Wide::ZERO, |sum, &at| sum.add(x[at as usize].widen()));
            *sum = T::narrow(total);
        }
    });
}
