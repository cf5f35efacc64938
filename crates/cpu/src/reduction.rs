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
use crate::versions::versions;
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_ir::math::{Float, Num};
use kiln_ir::{AxisSet, Binary, DType, Dims, Meta, ReduceKind};
use std::sync::Mutex;

/// Results that walk down together.
const BLOCK: usize = 512;
/// Elements that make a share of work for a thread.
const SHARE: usize = 1 << 15;

/// Runs `$body` with `$fold` as the loops of a reduction of a dtype, whose Rust type is `$T`.
macro_rules! with_fold {
    ($kind:expr, $dtype:expr, $T:ident, $fold:ident => $body:expr) => {
        match $kind {
            ReduceKind::Sum => with_fold!(@one $dtype, number $T, $fold = Fold::of::<Sum>() => $body),
            ReduceKind::Prod => with_fold!(@one $dtype, number $T, $fold = Fold::of::<Prod>() => $body),
            ReduceKind::Max => with_fold!(@one $dtype, number $T, $fold = Fold::of::<Max>() => $body),
            ReduceKind::Min => with_fold!(@one $dtype, number $T, $fold = Fold::of::<Min>() => $body),
            ReduceKind::Mean => {
                with_fold!(@one $dtype, float $T, $fold = Fold { finish: averaged, ..Fold::of::<Sum>() } => $body)
            }
            ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => {
                unreachable!("has no kernel")
            }
        }
    };
    (@one $dtype:expr, $group:ident $T:ident, $fold:ident = $loops:expr => $body:expr) => {
        with_type!($dtype, $group $T => {
            let $fold: Fold<$T> = $loops;
            $body
        })
    };
}

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

/// The dtype that a reduction of `dtype` accumulates in.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// Accumulators of a chunk of a row: what [`lanes`] writes for each.
pub(crate) const LANES: usize = INNER.lanes;
/// Elements of a chunk of a row.
pub(crate) const CHUNK: usize = INNER.chunk;
/// Rows of a chunk where rows are reduced onto each other.
pub(crate) const STACK: usize = OUTER.chunk;

/// Neighbouring elements, for the functions below that take addresses.
///
/// # Safety
/// `x` holds `len` aligned elements.
unsafe fn slice<'a, T>(x: *const u8, len: usize) -> &'a [T] {
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(x.cast(), len) }
}

/// As [`slice`], to write.
///
/// # Safety
/// As for [`slice`], and nobody else uses the elements.
unsafe fn slice_mut<'a, T>(x: *mut u8, len: usize) -> &'a mut [T] {
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts_mut(x.cast(), len) }
}

/// Reduces each of the rows of `length` elements that lie one after another at `x` to an element at `out`.
///
/// # Safety
/// `x` holds `count * length` elements of `dtype`, `out` room for `count`, and they do not overlap.
pub(crate) unsafe fn rows(
    kind: ReduceKind,
    dtype: DType,
    x: *const u8,
    count: usize,
    length: usize,
    out: *mut u8,
) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (x, out) = unsafe { (slice::<T>(x, count * length), slice_mut::<T>(out, count)) };
        for (r, out) in out.iter_mut().enumerate() {
            let mut tree = Tree::new(fold.identity);
            for chunk in x[r * length..(r + 1) * length].chunks(CHUNK) {
                tree.push((fold.chunk)(chunk), fold.combine);
            }
            (fold.finish)(&[tree.finish(fold.combine)], length, std::slice::from_mut(out));
        }
    });
}

/// The accumulators of each chunk of `len` elements at `x`: [`LANES`] of the wide dtype a chunk.
///
/// # Safety
/// `x` holds `len` elements of `dtype`, `out` room for the accumulators, and they do not overlap.
pub(crate) unsafe fn lanes(kind: ReduceKind, dtype: DType, x: *const u8, len: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (x, out) = unsafe { (slice::<T>(x, len), slice_mut::<Wide<T>>(out, len.div_ceil(CHUNK) * LANES)) };
        for (x, out) in x.chunks(CHUNK).zip(out.as_chunks_mut::<LANES>().0) {
            *out = (fold.lanes)(x);
        }
    });
}

/// Each of `chunks` chunks as one element of the wide dtype.
///
/// # Safety
/// `lanes` holds the accumulators of that many chunks, `out` room for an element each, and they do not overlap.
pub(crate) unsafe fn partials(kind: ReduceKind, dtype: DType, lanes: *const u8, chunks: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (lanes, out) = unsafe { (slice::<Wide<T>>(lanes, chunks * LANES), slice_mut::<Wide<T>>(out, chunks)) };
        for (lanes, out) in lanes.as_chunks::<LANES>().0.iter().zip(out) {
            *out = (fold.close)(*lanes);
        }
    });
}

/// The result of a row of `length` elements from the accumulators that [`lanes`] writes.
///
/// # Safety
/// `lanes` holds the accumulators of the row's chunks, `out` room for an element of `dtype`.
pub(crate) unsafe fn close(kind: ReduceKind, dtype: DType, lanes: *const u8, length: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (lanes, out) =
            unsafe { (slice::<Wide<T>>(lanes, length.div_ceil(CHUNK) * LANES), slice_mut::<T>(out, 1)) };
        let mut tree = Tree::new(fold.identity);
        for lanes in lanes.as_chunks::<LANES>().0 {
            tree.push((fold.close)(*lanes), fold.combine);
        }
        (fold.finish)(&[tree.finish(fold.combine)], length, out);
    });
}

/// The result of a row of `length` elements from what [`partials`] writes, which is scratch afterwards.
///
/// # Safety
/// `parts` holds an element for each of the row's chunks, `out` room for an element of `dtype`.
pub(crate) unsafe fn total(kind: ReduceKind, dtype: DType, parts: *mut u8, length: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (parts, out) = unsafe { (slice_mut::<Wide<T>>(parts, length.div_ceil(CHUNK)), slice_mut::<T>(out, 1)) };
        let sum = order::tree(parts, fold.combine).unwrap_or(fold.identity);
        (fold.finish)(&[sum], length, out);
    });
}

/// Makes `len` accumulators ready for [`stack`].
///
/// # Safety
/// `sums` has room for `len` elements of the wide dtype.
pub(crate) unsafe fn clear(kind: ReduceKind, dtype: DType, sums: *mut u8, len: usize) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        unsafe { slice_mut::<Wide<T>>(sums, len) }.fill(fold.identity);
    });
}

/// One more element onto each of `len` accumulators.
///
/// # Safety
/// `sums` holds `len` elements of the wide dtype, `x` of `dtype`, and they do not overlap.
pub(crate) unsafe fn stack(kind: ReduceKind, dtype: DType, sums: *mut u8, x: *const u8, len: usize) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (sums, x) = unsafe { (slice_mut::<Wide<T>>(sums, len), slice::<T>(x, len)) };
        (fold.step)(sums, x);
    });
}

/// The elementwise operation that [`stack`] does on values of the wide dtype.
pub(crate) fn stacking(kind: ReduceKind) -> Binary {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => Binary::Add,
        ReduceKind::Prod => Binary::Mul,
        ReduceKind::Max => Binary::Maximum,
        ReduceKind::Min => Binary::Minimum,
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => {
            unreachable!("has no kernel")
        }
    }
}

/// `len` results from `chunks` rows of accumulators, `pitch` elements apart, each row the sum of [`STACK`] of `count`
/// rows. The accumulators are scratch afterwards.
///
/// # Safety
/// The rows lie at `sums`, `out` has room for `len` elements of `dtype`, and nothing overlaps.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn unstack(
    kind: ReduceKind,
    dtype: DType,
    sums: *mut u8,
    chunks: usize,
    pitch: usize,
    count: usize,
    out: *mut u8,
    len: usize,
) {
    with_fold!(kind, dtype, T, fold => {
        let row = |i: usize| sums.wrapping_add(i * pitch * size_of::<Wide<T>>());
        // The tree of `order::tree`, each sum in the place of its first part.
        let mut gap = 1;
        while gap < chunks {
            for left in (0..chunks - gap).step_by(2 * gap) {
                // SAFETY: promised by the caller; the rows are two.
                let (left, right) = unsafe { (slice_mut(row(left), len), slice(row(left + gap), len)) };
                (fold.join)(left, right);
            }
            gap *= 2;
        }
        // SAFETY: promised by the caller.
        unsafe { (fold.finish)(slice(row(0), len), count, slice_mut::<T>(out, len)) };
    });
}

type Wide<T> = <T as Number>::Wide;

/// The loops of one reduction of elements T, chosen once: what finds its way through the axes is compiled for each T, and
/// only these for each T and operation.
struct Fold<T: Number> {
    identity: T::Wide,
    combine: fn(T::Wide, T::Wide) -> T::Wide,
    /// A chunk of a row.
    chunk: fn(&[T]) -> T::Wide,
    /// The accumulators of a chunk of a row.
    lanes: fn(&[T]) -> [T::Wide; LANES],
    /// The accumulators of a chunk as one.
    close: fn([T::Wide; LANES]) -> T::Wide,
    /// One more element onto each of neighbouring results.
    step: fn(&mut [T::Wide], &[T]),
    /// The right half of a tree onto the left, for each of neighbouring results.
    join: fn(&mut [T::Wide], &[T::Wide]),
    /// Results of that many elements each, rounded.
    finish: fn(&[T::Wide], usize, &mut [T]),
}

impl<T: Folds> Fold<T> {
    fn of<C: Combine<T::Wide>>() -> Fold<T> {
        Fold {
            identity: C::IDENTITY,
            combine: C::combine,
            chunk: T::chunk::<C>,
            lanes: T::lanes::<C>,
            close: T::close::<C>,
            step: T::step::<C>,
            join: T::join::<C>,
            finish: rounded,
        }
    }
}

/// The loops of a type: f32 has them for each instruction set, in the same order of lanes.
trait Folds: Number {
    fn chunk<C: Combine<Self::Wide>>(x: &[Self]) -> Self::Wide {
        close_one::<Self, C>(lanes_of::<Self, C>(x))
    }
    fn lanes<C: Combine<Self::Wide>>(x: &[Self]) -> [Self::Wide; LANES] {
        lanes_of::<Self, C>(x)
    }
    fn close<C: Combine<Self::Wide>>(lanes: [Self::Wide; LANES]) -> Self::Wide {
        close_one::<Self, C>(lanes)
    }
    fn step<C: Combine<Self::Wide>>(sums: &mut [Self::Wide], x: &[Self]) {
        step::<Self, C>(sums, x);
    }
    fn join<C: Combine<Self::Wide>>(left: &mut [Self::Wide], right: &[Self::Wide]) {
        join::<Self, C>(left, right);
    }
}
macro_rules! portable {
    ($($t:ident)*) => { $(impl Folds for $t {})* };
}
portable!(f64 f16 bf16 i64 i32 i16 i8 u64 u32 u16 u8);

impl Folds for f32 {
    fn chunk<C: Combine<f32>>(x: &[f32]) -> f32 {
        chunk_f32::<C>(x)
    }
    fn lanes<C: Combine<f32>>(x: &[f32]) -> [f32; LANES] {
        lanes_f32::<C>(x)
    }
    fn close<C: Combine<f32>>(lanes: [f32; LANES]) -> f32 {
        close_f32::<C>(lanes)
    }
    fn step<C: Combine<f32>>(sums: &mut [f32], x: &[f32]) {
        step_f32::<C>(sums, x);
    }
    fn join<C: Combine<f32>>(left: &mut [f32], right: &[f32]) {
        join_f32::<C>(left, right);
    }
}
versions! {
    fn chunk_f32<C: Combine<f32>>(x: &[f32]) -> f32 = |x| close_one::<f32, C>(lanes_of::<f32, C>(x));
    fn lanes_f32<C: Combine<f32>>(x: &[f32]) -> [f32; LANES] = lanes_of::<f32, C>;
    fn close_f32<C: Combine<f32>>(lanes: [f32; LANES]) -> f32 = close_one::<f32, C>;
    fn step_f32<C: Combine<f32>>(sums: &mut [f32], x: &[f32]) = step::<f32, C>;
    fn join_f32<C: Combine<f32>>(left: &mut [f32], right: &[f32]) = join::<f32, C>;
}

#[inline(always)]
fn close_one<T: Number, C: Combine<T::Wide>>(mut lanes: [T::Wide; LANES]) -> T::Wide {
    order::combine_lanes(&mut lanes, C::combine)
}

#[inline(always)]
fn lanes_of<T: Number, C: Combine<T::Wide>>(x: &[T]) -> [T::Wide; LANES] {
    let mut lanes = [C::IDENTITY; LANES];
    let (groups, rest) = x.as_chunks::<LANES>();
    for group in groups {
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane = C::combine(*lane, x.widen());
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = C::combine(*lane, x.widen());
    }
    lanes
}

#[inline(always)]
fn step<T: Number, C: Combine<T::Wide>>(sums: &mut [T::Wide], x: &[T]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum = C::combine(*sum, x.widen());
    }
}

#[inline(always)]
fn join<T: Number, C: Combine<T::Wide>>(left: &mut [T::Wide], right: &[T::Wide]) {
    for (left, &right) in left.iter_mut().zip(right) {
        *left = C::combine(*left, right);
    }
}

fn rounded<T: Number>(sums: &[T::Wide], _: usize, to: &mut [T]) {
    for (to, &sum) in to.iter_mut().zip(sums) {
        *to = T::narrow(sum);
    }
}

fn averaged<T: Number<Wide: Float>>(sums: &[T::Wide], count: usize, to: &mut [T]) {
    let count = T::Wide::of(count as f64);
    for (to, &sum) in to.iter_mut().zip(sums) {
        *to = T::narrow(sum.div(count));
    }
}

/// How two partial results become one.
trait Combine<A> {
    /// Changes nothing, whatever it is combined with.
    const IDENTITY: A;
    fn combine(a: A, b: A) -> A;
}

struct Sum;
struct Prod;
struct Max;
struct Min;

macro_rules! combines {
    ($($name:ident $identity:ident $combine:ident;)*) => {$(
        impl<A: Num + Extremes> Combine<A> for $name {
            const IDENTITY: A = A::$identity;
            #[inline(always)]
            fn combine(a: A, b: A) -> A { a.$combine(b) }
        }
    )*};
}
combines! { Sum ZERO add; Prod ONE mul; Max LOWEST maximum; Min HIGHEST minimum; }

/// The bounds of a type: the identities of the maximum and the minimum.
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

fn run<T: Number>(x: &View, axes: AxisSet, target: &View, fold: &Fold<T>) {
    // SAFETY: `target` is fresh.
    let out = unsafe { Out::<T>::new(target) };
    let kept: Vec<usize> = (0..x.shape.len()).filter(|&i| !axes.has(i)).collect();
    let reduced: Vec<usize> = axes.iter().collect();
    let count: usize = reduced.iter().map(|&i| x.shape[i]).product();
    let results = target.numel();
    if order::order(&x.shape, axes) == INNER {
        let rows = arranged(x, &kept, &reduced);
        let source = Source::<T>::new(&rows);
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
        let source = Source::<T>::new(&columns);
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
fn row<T: Number>(source: &Source<'_, T>, from: usize, count: usize, fold: &Fold<T>) -> T::Wide {
    let mut scratch = [T::default(); INNER.chunk];
    if (1..=INNER.chunk).contains(&count) {
        return (fold.chunk)(source.tile(from, &mut scratch[..count]));
    }
    let mut tree = Tree::new(fold.identity);
    for at in (0..count).step_by(INNER.chunk) {
        let tile = source.tile(from + at, &mut scratch[..INNER.chunk.min(count - at)]);
        tree.push((fold.chunk)(tile), fold.combine);
    }
    tree.finish(fold.combine)
}

/// One long row, its chunks shared out among threads.
fn wide_row<T: Number>(source: &Source<'_, T>, from: usize, count: usize, fold: &Fold<T>) -> T::Wide {
    let mut partials = vec![fold.identity; count.div_ceil(INNER.chunk)];
    let share = SHARE / INNER.chunk;
    let slots: Vec<Mutex<&mut [T::Wide]>> = partials.chunks_mut(share).map(Mutex::new).collect();
    pool::parallel(slots.len(), &|s| {
        let mut slots = slots[s].lock().unwrap_or_else(|e| e.into_inner());
        let mut scratch = [T::default(); INNER.chunk];
        for (i, slot) in slots.iter_mut().enumerate() {
            let at = (s * share + i) * INNER.chunk;
            *slot = (fold.chunk)(source.tile(from + at, &mut scratch[..INNER.chunk.min(count - at)]));
        }
    });
    drop(slots);
    order::tree(&mut partials, fold.combine).unwrap_or(fold.identity)
}

/// `len` neighbouring results, from result `from` of `results` on, each over `count` elements.
fn block<T: Number>(
    source: &Source<'_, T>,
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

/// The tree of [`order::tree`], fed one partial at a time: neighbours of equal depth are combined as soon as both are
/// there, what is left over from the right. Depth `i` holds a part where bit `i` of the number of partials is set.
struct Tree<A> {
    parts: [A; usize::BITS as usize],
    count: usize,
}

impl<A: Copy> Tree<A> {
    /// An empty tree, whose result is `identity`.
    fn new(identity: A) -> Tree<A> {
        Tree { parts: [identity; usize::BITS as usize], count: 0 }
    }

    fn push(&mut self, mut part: A, combine: impl Fn(A, A) -> A) {
        let mut depth = 0;
        while self.count >> depth & 1 == 1 {
            part = combine(self.parts[depth], part);
            depth += 1;
        }
        self.parts[depth] = part;
        self.count += 1;
    }

    fn finish(self, combine: impl Fn(A, A) -> A) -> A {
        let mut depths = (0..usize::BITS as usize).filter(|depth| self.count >> depth & 1 == 1);
        let first = depths.next().map_or(self.parts[0], |depth| self.parts[depth]);
        depths.fold(first, |sum, depth| combine(self.parts[depth], sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Isa;

    /// Bits of each loop on each instruction set, on values whose sum depends on its order, and on NaN and zeros.
    fn same_everywhere<C: Combine<f32>>() {
        let mut x: Vec<f32> =
            (0..777).map(|i| ((i * 7919 % 1013) as f32 - 500.0) * 10f32.powi(i * 31 % 9 - 4)).collect();
        x.extend([0.0, -0.0, f32::INFINITY, 1.0, -0.0, f32::NAN, 3.0]);
        let bits = |x: &[f32]| x.iter().map(|x| if x.is_nan() { 1 } else { x.to_bits() }).collect::<Vec<_>>();
        for len in [0, 1, 15, 16, 17, 100, 512, 777, 778, 784] {
            let x = &x[..len];
            let run = |isa: Isa| {
                let (mut sums, mut joined) = (vec![0.5; len], vec![-0.0; len]);
                // SAFETY: only what this machine has is tried.
                let chunk = unsafe {
                    step_f32::on::<C>(isa, &mut sums, x);
                    join_f32::on::<C>(isa, &mut joined, x);
                    chunk_f32::on::<C>(isa, x)
                };
                [bits(&[chunk]), bits(&sums), bits(&joined)]
            };
            for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
                assert_eq!(run(isa), run(Isa::Interp), "{len} on {}", isa.name());
            }
        }
    }

    #[test]
    fn every_instruction_set_reduces_to_the_same_bits() {
        same_everywhere::<Sum>();
        same_everywhere::<Prod>();
        same_everywhere::<Max>();
        same_everywhere::<Min>();
    }

    #[test]
    fn the_growing_tree_is_the_tree() {
        for n in 1..200usize {
            // Tells every order and every pairing from every other.
            let pair = |a: u64, b: u64| (a.rotate_left(7) ^ 0x9e37).wrapping_mul(31).wrapping_add(b);
            let mut tree = Tree::new(0);
            (0..n as u64).for_each(|i| tree.push(i, pair));
            let grown = tree.finish(pair);
            let mut level: Vec<u64> = (0..n as u64).collect();
            while level.len() > 1 {
                level = level.chunks(2).map(|p| if p.len() == 2 { pair(p[0], p[1]) } else { p[0] }).collect();
            }
            assert_eq!(grown, level[0], "{n} parts");
        }
    }
}
