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
use kiln_ir::{AxisSet, DType, Dims, Meta, ReduceKind};
use std::sync::Mutex;

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

pub(crate) fn reduce(
    cx: &Context<'_>,
    kind: ReduceKind,
    axes: AxisSet,
    x: &View,
    out: Meta,
) -> Result<View, Error> {
    let target = cx.fresh(out)?;
    match kind {
        ReduceKind::Sum => with_type!(x.dtype, number T => run(x, axes, &target, &Fold::<T>::of::<Sum>())),
        ReduceKind::Prod => with_type!(x.dtype, number T => run(x, axes, &target, &Fold::<T>::of::<Prod>())),
        ReduceKind::Max => with_type!(x.dtype, number T => run(x, axes, &target, &Fold::<T>::of::<Max>())),
        ReduceKind::Min => with_type!(x.dtype, number T => run(x, axes, &target, &Fold::<T>::of::<Min>())),
        ReduceKind::Mean => with_type!(x.dtype, float T => {
            run(x, axes, &target, &Fold::<T> { finish: averaged, ..Fold::of::<Sum>() })
        }),
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => {
            unreachable!("has no kernel")
        }
    }
    Ok(target)
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
    macro_rules! run {
        ($group:ident, $fold:expr) => {
            with_type!(dtype, $group T => {
                // SAFETY: promised by the caller.
                let (x, out) = unsafe {
                    (std::slice::from_raw_parts(x.cast::<T>(), count * length), std::slice::from_raw_parts_mut(out.cast::<T>(), count))
                };
                let fold: Fold<T> = $fold;
                for (r, out) in out.iter_mut().enumerate() {
                    let mut tree = Tree::new();
                    for chunk in x[r * length..(r + 1) * length].chunks(INNER.chunk) {
                        tree.push((fold.chunk)(chunk), fold.combine);
                    }
                    let sum = tree.finish(fold.combine).unwrap_or(fold.identity);
                    (fold.finish)(&[sum], length, std::slice::from_mut(out));
                }
            })
        };
    }
    match kind {
        ReduceKind::Sum => run!(number, Fold::of::<Sum>()),
        ReduceKind::Prod => run!(number, Fold::of::<Prod>()),
        ReduceKind::Max => run!(number, Fold::of::<Max>()),
        ReduceKind::Min => run!(number, Fold::of::<Min>()),
        ReduceKind::Mean => run!(float, Fold { finish: averaged, ..Fold::of::<Sum>() }),
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => {
            unreachable!("has no kernel")
        }
    }
}

/// The loops of one reduction of elements T, chosen once: what finds its way through the axes is compiled for each T, and
/// only these for each T and operation.
struct Fold<T: Number> {
    identity: T::Wide,
    combine: fn(T::Wide, T::Wide) -> T::Wide,
    /// A chunk of a row, in lanes.
    chunk: fn(&[T]) -> T::Wide,
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
            step: T::step::<C>,
            join: T::join::<C>,
            finish: rounded,
        }
    }
}

/// The loops of a type: f32 has them for each instruction set, in the same order of lanes.
trait Folds: Number {
    fn chunk<C: Combine<Self::Wide>>(x: &[Self]) -> Self::Wide {
        chunk::<Self, C>(x)
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
    fn step<C: Combine<f32>>(sums: &mut [f32], x: &[f32]) {
        step_f32::<C>(sums, x);
    }
    fn join<C: Combine<f32>>(left: &mut [f32], right: &[f32]) {
        join_f32::<C>(left, right);
    }
}
versions! {
    fn chunk_f32<C: Combine<f32>>(x: &[f32]) -> f32 = chunk::<f32, C>;
    fn step_f32<C: Combine<f32>>(sums: &mut [f32], x: &[f32]) = step::<f32, C>;
    fn join_f32<C: Combine<f32>>(left: &mut [f32], right: &[f32]) = join::<f32, C>;
}

#[inline(always)]
fn chunk<T: Number, C: Combine<T::Wide>>(x: &[T]) -> T::Wide {
    let mut lanes = [C::IDENTITY; INNER.lanes];
    let (groups, rest) = x.as_chunks::<{ INNER.lanes }>();
    for group in groups {
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane = C::combine(*lane, x.widen());
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = C::combine(*lane, x.widen());
    }
    order::combine_lanes(&mut lanes, C::combine)
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
            (fold.finish)(&block(&source, b * BLOCK, len, results, count, fold), count, to);
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
    let mut tree = Tree::new();
    for at in (0..count).step_by(INNER.chunk) {
        let tile = source.tile(from + at, &mut scratch[..INNER.chunk.min(count - at)]);
        tree.push((fold.chunk)(tile), fold.combine);
    }
    tree.finish(fold.combine).unwrap_or(fold.identity)
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
) -> Vec<T::Wide> {
    let join = |mut left: Vec<T::Wide>, right: Vec<T::Wide>| {
        (fold.join)(&mut left, &right);
        left
    };
    let mut tree = Tree::new();
    let mut scratch = [T::default(); BLOCK];
    for at in (0..count).step_by(OUTER.chunk) {
        let mut sums = vec![fold.identity; len];
        for row in at..count.min(at + OUTER.chunk) {
            (fold.step)(&mut sums, source.tile(row * results + from, &mut scratch[..len]));
        }
        tree.push(sums, join);
    }
    tree.finish(join).unwrap_or_else(|| vec![fold.identity; len])
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
            let mut tree = Tree::new();
            let text = |a: String, b: String| format!("({a}{b})");
            (0..n).for_each(|i| tree.push(i.to_string(), text));
            let grown = tree.finish(text).unwrap();
            let mut level: Vec<String> = (0..n).map(|i| i.to_string()).collect();
            while level.len() > 1 {
                level = level
                    .chunks(2)
                    .map(|p| if p.len() == 2 { text(p[0].clone(), p[1].clone()) } else { p[0].clone() })
                    .collect();
            }
            assert_eq!(grown, level[0], "{n} parts");
        }
    }
}
