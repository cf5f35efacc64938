//! Pooling of views, planes shared out among threads. Which places meet is found once for all planes.

use crate::cpu::Context;
use crate::elementwise::with_type;
use crate::memory;
use crate::pool;
use crate::reference::{Element, Number, Window};
use crate::stop;
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_ir::math::Num;
use kiln_ir::{DType, Meta, Pool, PoolKind};
use smallvec::{SmallVec, smallvec};
use std::hint::select_unpredictable;

/// Places that a thread reads at a time.
const SHARE: usize = 1 << 14;

/// `None` where there are more places than are numbered here.
pub(crate) fn pool(
    cx: &Context<'_>,
    kind: PoolKind,
    pool: &Pool,
    x: &View,
    outs: &[Meta],
) -> Result<Option<SmallVec<[View; 2]>>, Error> {
    let x = cx.dense(x)?;
    let y = cx.fresh(outs[0])?;
    let (xs, ys) = (&x.shape[2..], &y.shape[2..]);
    match kind {
        PoolKind::Max => {
            let window = Window::pool(pool, xs, ys);
            let Some(taps) = Taps::of_y(&window) else { return Ok(None) };
            let indices = cx.fresh(outs[1])?;
            with_type!(x.dtype, number T => max::<T>(&taps, window.x(), &x, &y, &indices));
            Ok(Some(smallvec![y, indices]))
        }
        PoolKind::Sum => {
            let window = Window::pool(pool, xs, ys);
            let Some(taps) = Taps::of_y(&window) else { return Ok(None) };
            with_type!(x.dtype, number T => sum::<T>(&taps, window.x(), &x, &y));
            Ok(Some(smallvec![y]))
        }
        PoolKind::SumInput => {
            let window = Window::pool(pool, ys, xs);
            let Some(taps) = Taps::of_x(&window) else { return Ok(None) };
            with_type!(x.dtype, number T => sum::<T>(&taps, window.y(), &x, &y));
            Ok(Some(smallvec![y]))
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
    /// The places of x that make each of y.
    fn of_y(window: &Window) -> Option<Taps> {
        Taps::new(window, window.x(), window.y(), |p, to| {
            to.extend(window.of_y(p).iter().map(|t| t.0 as u32))
        })
    }

    /// The places of y that each of x goes into. A later place of the kernel belongs to an earlier window.
    fn of_x(window: &Window) -> Option<Taps> {
        let of = |q: usize, to: &mut Vec<u32>| to.extend(window.of_x(q).iter().rev().map(|t| t.0 as u32));
        Taps::new(window, window.y(), window.x(), of)
    }

    fn new(window: &Window, from: usize, count: usize, of: impl Fn(usize, &mut Vec<u32>)) -> Option<Taps> {
        let numbered = |n: usize| u32::try_from(n).is_ok();
        let all = window.meetings().filter(|&n| numbered(n) && numbered(from))?;
        let (mut places, mut starts) =
            (memory::with_capacity(all), memory::with_capacity(count.saturating_add(1)));
        starts.push(0);
        for p in 0..count {
            stop::check();
            let _mark = memory::mark();
            of(p, &mut places);
            starts.push(places.len() as u32);
        }
        Some(Taps { places, starts })
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
            // Which is largest cannot be foretold: no branches.
            let mut best = places[0] as usize;
            for &at in &places[1..] {
                let here = x[at as usize];
                best = select_unpredictable((here > x[best]) | here.is_nan(), at as usize, best);
            }
            (*value, *index) = (x[best], best as i64);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::reference::{self, Value};
    use kiln_device::Place;
    use kiln_ir::Op;

    fn numbers(cx: &Context<'_>, dtype: DType, shape: &[usize]) -> View {
        let n: usize = shape.iter().product();
        let x = |i: usize| match i * 7919 % 101 {
            50 => f32::NAN,
            51 => -0.0,
            i => (i % 23) as f32 - 11.0,
        };
        let bytes: Vec<u8> = match dtype {
            DType::F32 => (0..n).flat_map(|i| x(i).to_le_bytes()).collect(),
            DType::BF16 => (0..n).flat_map(|i| bf16::from_f32(x(i)).to_le_bytes()).collect(),
            _ => (0..n).flat_map(|i| (x(i) as i32).to_le_bytes()).collect(),
        };
        cx.filled(Meta::new(dtype, shape), &bytes).unwrap()
    }

    #[test]
    fn all_kinds_have_the_bits_of_the_interpreter() {
        let arena = Arena::new(None);
        let cx = Context { arena: &arena, place: Place::Reuse };
        let unit = Pool {
            kernel: [2, 2, 1],
            stride: [2, 2, 1],
            low: [0; 3],
            high: [0; 3],
            dilation: [1; 3],
            extent: [0; 3],
        };
        let padded = Pool { kernel: [3, 2, 1], stride: [1, 3, 1], low: [1, 0, 0], high: [1, 1, 0], ..unit };
        let cases = [(unit, [3, 40, 24, 26]), (padded, [2, 5, 9, 11]), (unit, [0, 3, 4, 4])];
        for (geometry, shape) in cases {
            for dtype in [DType::F32, DType::BF16, DType::I32] {
                let x = numbers(&cx, dtype, &shape);
                for kind in [PoolKind::Max, PoolKind::Sum, PoolKind::SumInput] {
                    let op = |kind, extent| Op::Pool { kind, pool: Pool { extent, ..geometry } };
                    let down = kiln_ir::infer(&op(PoolKind::Sum, [0; 3]), &[x.meta()]).unwrap()[0];
                    let (op, x) = match kind {
                        PoolKind::SumInput => {
                            let extent = [shape[2] as u32, shape[3] as u32, 0];
                            (op(kind, extent), numbers(&cx, dtype, &down.shape[..]))
                        }
                        PoolKind::Max | PoolKind::Sum => (op(kind, [0; 3]), x.clone()),
                    };
                    let Op::Pool { pool: geometry, .. } = op else { unreachable!() };
                    let outs = kiln_ir::infer(&op, &[x.meta()]).unwrap();
                    let value = Value::from_bytes(x.meta(), x.bytes());
                    let want = reference::eval(&op, &[&value]).unwrap();
                    for threads in [1, 3] {
                        crate::pool::set_threads(threads);
                        let got = pool(&cx, kind, &geometry, &x, &outs).unwrap().unwrap();
                        assert_eq!(got.len(), want.len());
                        for (got, want) in got.iter().zip(&want) {
                            assert_eq!(got.bytes(), want.to_bytes(), "{op} of {}", x.meta());
                        }
                    }
                }
            }
        }
    }
}
