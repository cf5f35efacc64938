//! Sums, means, products and extremes over axes of views, in the order of [`crate::reference::order`].
//!
//! Where the innermost axis is reduced, each result walks its own row; where it stays, a block of neighbouring results
//! walks down together. Either way each result's order depends on the logical shape alone.

mod fold;
mod raw;

pub(crate) use fold::{CHUNK, LANES, STACK};
pub(crate) use raw::*;

use crate::cpu::Context;
use crate::elementwise::with_type;
use crate::pool;
use crate::reference::Number;
use crate::reference::order::{self, INNER, OUTER};
use crate::stop;
use crate::tile::{Out, TileSource};
use crate::view::View;
use fold::*;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_ir::{AxisSet, DType, Dims, Meta, ReduceKind};
use std::sync::Mutex;

/// Results that walk down together.
const BLOCK: usize = 512;
/// Elements that make a share of work for a thread.
const SHARE: usize = 1 << 15;
/// Chunks of a long row whose results are held at a time; a power of two.
const STRETCH: usize = 1 << 14;

/// Whether [`reduce`] knows this reduction to this dtype.
pub(crate) fn has_kernel(kind: ReduceKind, dtype: DType) -> bool {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean | ReduceKind::Prod => true,
        ReduceKind::Max | ReduceKind::Min => dtype != DType::Bool,
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => false,
    }
}

pub(crate) fn reduce(
    cx: &Context<'_>,
    kind: ReduceKind,
    axes: AxisSet,
    x: &View,
    out: Meta,
) -> Result<View, Error> {
    let target = cx.fresh(out)?;
    with_fold!(kind, x.dtype, T, fold => run::<T>(x, axes, &target, &fold));
    Ok(target)
}

fn run<T: Number>(x: &View, axes: AxisSet, target: &View, fold: &Fold<T>) {
    // SAFETY: `target` is fresh.
    let out = unsafe { Out::<T>::new(target) };
    let kept: Vec<usize> = (0..x.shape.len()).filter(|&i| !axes.has(i)).collect();
    let reduced: Vec<usize> = axes.iter().collect();
    let count: usize = reduced.iter().map(|&i| x.shape[i]).product();
    let results = target.numel();
    if order::order(&x.shape, axes) == INNER {
        let rows = arranged(x, &kept, &reduced);
        let source = TileSource::<T>::new(&rows);
        // SAFETY: each result is written once, by the one thread that has its share.
        let put = |r: usize, sum: T::Wide| (fold.finish)(&[sum], count, unsafe { out.range(r, 1) });
        let share = (SHARE / count.max(1)).max(1);
        if results <= share && count > SHARE {
            return (0..results).for_each(|r| put(r, wide_row(&source, r * count, count, fold)));
        }
        pool::parallel(results.div_ceil(share), &|s| {
            for r in s * share..((s + 1) * share).min(results) {
                put(r, row(&source, r * count, count, fold));
            }
        });
    } else {
        let columns = arranged(x, &reduced, &kept);
        let source = TileSource::<T>::new(&columns);
        pool::parallel(results.div_ceil(BLOCK), &|b| {
            let len = BLOCK.min(results - b * BLOCK);
            // SAFETY: blocks are disjoint.
            let to = unsafe { out.range(b * BLOCK, len) };
            block(&source, b * BLOCK, len, results, count, fold, to);
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
fn row<T: Number>(source: &TileSource<'_, T>, from: usize, count: usize, fold: &Fold<T>) -> T::Wide {
    let mut scratch = [T::default(); INNER.chunk];
    if (1..=INNER.chunk).contains(&count) {
        return (fold.chunk)(source.tile(from, &mut scratch[..count]));
    }
    let mut tree = Tree::new(fold.identity);
    for at in (0..count).step_by(INNER.chunk) {
        if at % SHARE == 0 {
            stop::check();
        }
        let tile = source.tile(from + at, &mut scratch[..INNER.chunk.min(count - at)]);
        tree.push((fold.chunk)(tile), fold.combine);
    }
    tree.finish(fold.combine)
}

/// One long row, its chunks shared out among threads. What they give is kept for a stretch of the row only: stretches of
/// a power of two of chunks are parts of the tree.
fn wide_row<T: Number>(source: &TileSource<'_, T>, from: usize, count: usize, fold: &Fold<T>) -> T::Wide {
    let chunks = count.div_ceil(INNER.chunk);
    let mut partials = vec![fold.identity; chunks.min(STRETCH)];
    let mut tree = Tree::new(fold.identity);
    for first in (0..chunks).step_by(STRETCH) {
        let partials = &mut partials[..STRETCH.min(chunks - first)];
        let share = SHARE / INNER.chunk;
        let slots: Vec<Mutex<&mut [T::Wide]>> = partials.chunks_mut(share).map(Mutex::new).collect();
        pool::parallel(slots.len(), &|s| {
            let mut slots = slots[s].lock().unwrap_or_else(|e| e.into_inner());
            let mut scratch = [T::default(); INNER.chunk];
            for (i, slot) in slots.iter_mut().enumerate() {
                let at = (first + s * share + i) * INNER.chunk;
                *slot = (fold.chunk)(source.tile(from + at, &mut scratch[..INNER.chunk.min(count - at)]));
            }
        });
        drop(slots);
        tree.push(order::tree(partials, fold.combine).unwrap_or(fold.identity), fold.combine);
    }
    tree.finish(fold.combine)
}

/// `len` neighbouring results, from result `from` of `results` on, each over `count` elements.
fn block<T: Number>(
    source: &TileSource<'_, T>,
    from: usize,
    len: usize,
    results: usize,
    count: usize,
    fold: &Fold<T>,
    to: &mut [T],
) {
    let mut scratch = [T::default(); BLOCK];
    // The first sums hold what is finished of the tree, a part for each bit of the number of chunks; see `Tree`.
    let chunks = count.div_ceil(OUTER.chunk);
    let depth = (usize::BITS - chunks.leading_zeros()) as usize;
    let mut sums = vec![fold.identity; (depth + 1).max(2) * len];
    for chunk in 0..chunks {
        stop::check();
        let (parts, sum) = sums.split_at_mut(depth * len);
        sum.fill(fold.identity);
        let at = chunk * OUTER.chunk;
        for row in at..count.min(at + OUTER.chunk) {
            (fold.step)(sum, source.tile(row * results + from, &mut scratch[..len]));
        }
        let mut level = 0;
        while chunk >> level & 1 == 1 {
            let part = &mut parts[level * len..(level + 1) * len];
            (fold.join)(part, sum);
            sum.copy_from_slice(part);
            level += 1;
        }
        parts[level * len..(level + 1) * len].copy_from_slice(sum);
    }
    let mut levels = (0..depth).filter(|level| chunks >> level & 1 == 1);
    let (parts, sum) = sums.split_at_mut(depth * len);
    if let Some(first) = levels.next() {
        sum[..len].copy_from_slice(&parts[first * len..(first + 1) * len]);
    }
    for level in levels {
        let part = &mut parts[level * len..(level + 1) * len];
        (fold.join)(part, sum);
        sum[..len].copy_from_slice(part);
    }
    (fold.finish)(&sum[..len], count, to);
}
