//! The loops of reductions, for each type and operation, in the order of [`crate::reference::order`].

use crate::reference::Number;
use crate::reference::order::{self, INNER, OUTER};
use crate::versions::versions;
use half::{bf16, f16};
use kiln_ir::math::{Float, Num};

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
pub(super) use with_fold;

/// Accumulators of a chunk of a row: what [`lanes`] writes for each.
pub(crate) const LANES: usize = INNER.lanes;
/// Elements of a chunk of a row.
pub(crate) const CHUNK: usize = INNER.chunk;
/// Rows of a chunk where rows are reduced onto each other.
pub(crate) const STACK: usize = OUTER.chunk;

/// The type that elements are reduced in.
pub(super) type Wide<T> = <T as Number>::Wide;

/// The loops of one reduction of elements T, chosen once: what finds its way through the axes is compiled for each T, and
/// only these for each T and operation.
pub(super) struct Fold<T: Number> {
    pub identity: T::Wide,
    pub combine: fn(T::Wide, T::Wide) -> T::Wide,
    /// A chunk of a row.
    pub chunk: fn(&[T]) -> T::Wide,
    /// The accumulators of a chunk of a row.
    pub lanes: fn(&[T]) -> [T::Wide; LANES],
    /// The accumulators of a chunk as one.
    pub close: fn([T::Wide; LANES]) -> T::Wide,
    /// The accumulators of all chunks of a row as one.
    pub row: fn(&[[T::Wide; LANES]]) -> T::Wide,
    /// One more element onto each of neighbouring results.
    pub step: fn(&mut [T::Wide], &[T]),
    /// The right half of a tree onto the left, for each of neighbouring results.
    pub join: fn(&mut [T::Wide], &[T::Wide]),
    /// Results of that many elements each, rounded.
    pub finish: fn(&[T::Wide], usize, &mut [T]),
}

impl<T: Folds> Fold<T> {
    pub fn of<C: Combine<T::Wide>>() -> Fold<T> {
        Fold {
            identity: C::IDENTITY,
            combine: C::combine,
            chunk: T::chunk::<C>,
            lanes: T::lanes::<C>,
            close: T::close::<C>,
            row: T::row::<C>,
            step: T::step::<C>,
            join: T::join::<C>,
            finish: rounded,
        }
    }
}

/// The loops of a type: f32 has them for each instruction set, in the same order of lanes.
pub(super) trait Folds: Number {
    fn chunk<C: Combine<Self::Wide>>(x: &[Self]) -> Self::Wide {
        close_one::<Self, C>(lanes_of::<Self, C>(x))
    }
    fn lanes<C: Combine<Self::Wide>>(x: &[Self]) -> [Self::Wide; LANES] {
        lanes_of::<Self, C>(x)
    }
    fn close<C: Combine<Self::Wide>>(lanes: [Self::Wide; LANES]) -> Self::Wide {
        close_one::<Self, C>(lanes)
    }
    fn row<C: Combine<Self::Wide>>(lanes: &[[Self::Wide; LANES]]) -> Self::Wide {
        row_of::<Self, C>(lanes)
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
    fn row<C: Combine<f32>>(lanes: &[[f32; LANES]]) -> f32 {
        row_f32::<C>(lanes)
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
    fn row_f32<C: Combine<f32>>(lanes: &[[f32; LANES]]) -> f32 = row_of::<f32, C>;
    fn step_f32<C: Combine<f32>>(sums: &mut [f32], x: &[f32]) = step::<f32, C>;
    fn join_f32<C: Combine<f32>>(left: &mut [f32], right: &[f32]) = join::<f32, C>;
}

#[inline(always)]
fn close_one<T: Number, C: Combine<T::Wide>>(mut lanes: [T::Wide; LANES]) -> T::Wide {
    order::combine_lanes(&mut lanes, C::combine)
}

#[inline(always)]
fn row_of<T: Number, C: Combine<T::Wide>>(lanes: &[[T::Wide; LANES]]) -> T::Wide {
    let mut tree = Tree::new(C::IDENTITY);
    for lanes in lanes {
        tree.push(close_one::<T, C>(*lanes), C::combine);
    }
    tree.finish(C::combine)
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

pub(super) fn averaged<T: Number<Wide: Float>>(sums: &[T::Wide], count: usize, to: &mut [T]) {
    let count = T::Wide::of(count as f64);
    for (to, &sum) in to.iter_mut().zip(sums) {
        *to = T::narrow(sum.div(count));
    }
}

/// How two partial results become one.
pub(super) trait Combine<A> {
    /// Changes nothing, whatever it is combined with.
    const IDENTITY: A;
    fn combine(a: A, b: A) -> A;
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Max;
pub(super) struct Min;

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
pub(super) trait Extremes {
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

/// The tree of [`order::tree`], fed one partial at a time: neighbours of equal depth are combined as soon as both are
/// there, what is left over from the right. Depth `i` holds a part where bit `i` of the number of partials is set.
pub(super) struct Tree<A> {
    parts: [A; usize::BITS as usize],
    count: usize,
}

impl<A: Copy> Tree<A> {
    /// An empty tree, whose result is `identity`.
    #[inline(always)]
    pub fn new(identity: A) -> Tree<A> {
        Tree { parts: [identity; usize::BITS as usize], count: 0 }
    }

    #[inline(always)]
    pub fn push(&mut self, mut part: A, combine: impl Fn(A, A) -> A) {
        let mut depth = 0;
        while self.count >> depth & 1 == 1 {
            part = combine(self.parts[depth], part);
            depth += 1;
        }
        self.parts[depth] = part;
        self.count += 1;
    }

    #[inline(always)]
    pub fn finish(self, combine: impl Fn(A, A) -> A) -> A {
        let mut left = self.count;
        let mut next = || {
            let depth = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            self.parts.get(depth).copied()
        };
        let mut sum = next().unwrap_or(self.parts[0]);
        while let Some(part) = next() {
            sum = combine(part, sum);
        }
        sum
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
