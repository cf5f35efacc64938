//! Sums, means, products and extremes over axes of views, in the order of [`crate::reference::order`].
//!
//! Where the innermost axis is reduced, each result walks its own row; where it stays, a block of neighbouring results
//! walks down together. Either way each result's order depends on the logical shape alone.

use crate::cpu::Context;
use crate::elementwise::with_type;
use crate::pool;
use crate::reference::Number;
use crate::reference::order::{self, INNER, OUTER};
use crate::tile::{Out, Source};
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_ir::math::{Float, Num};
use kiln_ir::{AxisSet, DType, Dims, Meta, ReduceKind};

/// Results that walk down together.
const BLOCK: usize = 512;
/// Elements that make a share of work for a thread.
const SHARE: usize = 1 << 15;

/// Whether [`reduce`] knows this reduction to this dtype.
pub(crate) fn has_kernel(kind: ReduceKind, dtype: DType) -> bool {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean | ReduceKind::Prod => true,
        ReduceKind::Max | ReduceKind::Min => dtype != DType::Bool,
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => false,
    }
}

pub(crate) fn reduce(cx: &Context<'_>, kind: ReduceKind, axes: AxisSet, x: &View, out: Meta) -> Result<View, Error> {
    let target = cx.fresh(out)?;
    let count = axes.iter().map(|i| x.shape[i]).product();
    match kind {
        ReduceKind::Sum => with_type!(x.dtype, number T => run::<T>(x, axes, count, &target, Num::ZERO, Num::add, |a| a)),
        ReduceKind::Prod => with_type!(x.dtype, number T => run::<T>(x, axes, count, &target, Num::ONE, Num::mul, |a| a)),
        ReduceKind::Mean => with_type!(x.dtype, float T => {
            run::<T>(x, axes, count, &target, Num::ZERO, Num::add, |a| a.div(Float::of(count as f64)))
        }),
        ReduceKind::Max => with_type!(x.dtype, number T => run::<T>(x, axes, count, &target, lowest::<T>(), Num::maximum, |a| a)),
        ReduceKind::Min => with_type!(x.dtype, number T => run::<T>(x, axes, count, &target, highest::<T>(), Num::minimum, |a| a)),
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => unreachable!("has no kernel"),
    }
    Ok(target)
}

/// The identity of the maximum: below or equal to every number.
fn lowest<T: Number>() -> T::Wide
where
    T::Wide: Extremes,
{
    T::Wide::LOWEST
}

/// The identity of the minimum.
fn highest<T: Number>() -> T::Wide
where
    T::Wide: Extremes,
{
    T::Wide::HIGHEST
}

trait Extremes {
    const LOWEST: Self;
    const HIGHEST: Self;
}
macro_rules! extremes {
    ($($t:ident $low:expr, $high:expr;)*) => {$(
        impl Extremes for $t {
            const LOWEST: $t = $low;
            const HIGHEST: $t = $high;
        }
    )*};
}
extremes! {
    f64 f64::NEG_INFINITY, f64::INFINITY; f32 f32::NEG_INFINITY, f32::INFINITY;
    i64 i64::MIN, i64::MAX; i32 i32::MIN, i32::MAX; i16 i16::MIN, i16::MAX; i8 i8::MIN, i8::MAX;
    u64 u64::MIN, u64::MAX; u32 u32::MIN, u32::MAX; u16 u16::MIN, u16::MAX; u8 u8::MIN, u8::MAX;
}

fn run<T: Number>(
    x: &View,
    axes: AxisSet,
    count: usize,
    target: &View,
    identity: T::Wide,
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Sync + Copy,
    finish: impl Fn(T::Wide) -> T::Wide + Sync,
) {
    // SAFETY: `target` is fresh.
    let out = unsafe { Out::<T>::new(target) };
    let kept: Vec<usize> = (0..x.shape.len()).filter(|&i| !axes.has(i)).collect();
    let reduced: Vec<usize> = axes.iter().collect();
    let results = target.numel();
    if order::order(&x.shape, axes) == INNER {
        let rows = arranged(x, &kept, &reduced);
        let source = Source::<T>::new(&rows);
        let row = |r: usize| inner(&source, r * count, count, identity, combine);
        let share = (SHARE / count.max(1)).max(1);
        if results <= share && count > SHARE {
            for r in 0..results {
                // SAFETY: each result is written once.
                unsafe { out.put(r, T::narrow(finish(wide_row(&source, r * count, count, identity, combine)))) };
            }
            return;
        }
        pool::parallel(results.div_ceil(share), &|s| {
            for r in s * share..((s + 1) * share).min(results) {
                // SAFETY: each result is written by the one thread that has its share.
                unsafe { out.put(r, T::narrow(finish(row(r)))) };
            }
        });
    } else {
        let columns = arranged(x, &reduced, &kept);
        let source = Source::<T>::new(&columns);
        pool::parallel(results.div_ceil(BLOCK), &|b| {
            let len = BLOCK.min(results - b * BLOCK);
            // SAFETY: blocks are disjoint.
            let to = unsafe { out.range(b * BLOCK, len) };
            let sums = outer(&source, b * BLOCK, len, results, count, identity, combine);
            to.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = T::narrow(finish(sum)));
        });
    }
}

/// The view with its axes in another order.
fn arranged(x: &View, first: &[usize], then: &[usize]) -> View {
    let order = || first.iter().chain(then);
    View {
        shape: Dims::collect(order().map(|&i| x.shape[i])),
        strides: Dims::collect(order().map(|&i| x.strides[i])),
        ..x.clone()
    }
}

/// One row of `count` elements.
fn inner<T: Number, A: Copy>(source: &Source<'_, T>, from: usize, count: usize, identity: A, combine: impl Fn(A, A) -> A + Copy) -> A
where
    T: Number<Wide = A>,
{
    let mut tree = Tree::new();
    for at in (0..count).step_by(INNER.chunk) {
        tree.push(chunk(source, from + at, INNER.chunk.min(count - at), identity, combine), combine);
    }
    tree.finish(combine).unwrap_or(identity)
}

/// One long row, its chunks shared out among threads.
fn wide_row<T, A: Copy + Send + Sync>(source: &Source<'_, T>, from: usize, count: usize, identity: A, combine: impl Fn(A, A) -> A + Copy + Sync) -> A
where
    T: Number<Wide = A>,
{
    let mut partials = vec![identity; count.div_ceil(INNER.chunk)];
    let share = SHARE / INNER.chunk;
    let slots: Vec<std::sync::Mutex<&mut [A]>> = partials.chunks_mut(share).map(std::sync::Mutex::new).collect();
    pool::parallel(slots.len(), &|s| {
        let mut slots = slots[s].lock().unwrap_or_else(|e| e.into_inner());
        for (i, slot) in slots.iter_mut().enumerate() {
            let at = (s * share + i) * INNER.chunk;
            *slot = chunk(source, from + at, INNER.chunk.min(count - at), identity, combine);
        }
    });
    drop(slots);
    order::tree(&mut partials, combine).unwrap_or(identity)
}

fn chunk<T, A: Copy>(source: &Source<'_, T>, from: usize, len: usize, identity: A, combine: impl Fn(A, A) -> A + Copy) -> A
where
    T: Number<Wide = A>,
{
    let mut scratch = [T::default(); INNER.chunk];
    let tile = source.tile(from, &mut scratch[..len]);
    let mut lanes = [identity; INNER.lanes];
    let (groups, rest) = tile.as_chunks::<{ INNER.lanes }>();
    for group in groups {
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane = combine(*lane, x.widen());
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = combine(*lane, x.widen());
    }
    order::combine_lanes(&mut lanes, combine)
}

/// `len` neighbouring results, from result `from` of `results` on, each over `count` elements.
fn outer<T, A: Copy>(source: &Source<'_, T>, from: usize, len: usize, results: usize, count: usize, identity: A, combine: impl Fn(A, A) -> A + Copy) -> Vec<A>
where
    T: Number<Wide = A>,
{
    let each = |mut a: Vec<A>, b: Vec<A>| {
        a.iter_mut().zip(b).for_each(|(a, b)| *a = combine(*a, b));
        a
    };
    let mut tree = Tree::new();
    let mut scratch = [T::default(); BLOCK];
    for at in (0..count).step_by(OUTER.chunk) {
        let mut sums = vec![identity; len];
        for row in at..count.min(at + OUTER.chunk) {
            let tile = source.tile(row * results + from, &mut scratch[..len]);
            sums.iter_mut().zip(tile).for_each(|(sum, x)| *sum = combine(*sum, x.widen()));
        }
        tree.push(sums, each);
    }
    tree.finish(each).unwrap_or_else(|| vec![identity; len])
}

/// The tree of [`order::tree`], fed one partial at a time: neighbours of equal depth are combined as soon as both are
/// there, what is left over from the right.
struct Tree<A> {
    parts: Vec<(u32, A)>,
}

impl<A> Tree<A> {
    fn new() -> Tree<A> {
        Tree { parts: Vec::new() }
    }

    fn push(&mut self, part: A, combine: impl Fn(A, A) -> A) {
        let (mut depth, mut part) = (0, part);
        while self.parts.last().is_some_and(|(d, _)| *d == depth) {
            if let Some((_, left)) = self.parts.pop() {
                part = combine(left, part);
            }
            depth += 1;
        }
        self.parts.push((depth, part));
    }

    fn finish(mut self, combine: impl Fn(A, A) -> A) -> Option<A> {
        let mut sum = self.parts.pop()?.1;
        while let Some((_, left)) = self.parts.pop() {
            sum = combine(left, sum);
        }
        Some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_growing_tree_is_the_tree() {
        for n in 1..200usize {
            let mut tree = Tree::new();
            let text = |a: String, b: String| format!("({a}{b})");
            (0..n).for_each(|i| tree.push(i.to_string(), text));
            let grown = tree.finish(text).unwrap();
            let mut level: Vec<String> = (0..n).map(|i| i.to_string()).collect();
            while level.len() > 1 {
                level = level.chunks(2).map(|p| if p.len() == 2 { text(p[0].clone(), p[1].clone()) } else { p[0].clone() }).collect();
            }
            assert_eq!(grown, level[0], "{n} parts");
        }
    }
}
