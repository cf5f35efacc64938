//! Contributions combined in tree order, tile by tile.
//!
//! f16 and bf16 are added in f32 and rounded to their own type at every node of the tree: what crosses an edge between
//! ranks is then the same value as what stays on one, so the number of ranks changes no bit. A NaN result is always the
//! same NaN, because which operand's bits survive an addition is the compiler's choice. Integers wrap.

use crate::call::Reduce;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kiln_ir::DType;
use kiln_ir::math::Num;

/// Bytes of a tile: operands and results of a few levels stay in the first-level cache.
const TILE: usize = 8192;

/// The loops of one reduction on one dtype.
#[derive(Clone, Copy)]
pub(crate) struct Fold {
    combine: Combine,
    both: Both,
    finish: Option<Finish>,
    size: usize,
}

/// `out[i] = a[i] ∘ b[i]` for `n` elements; `out` may be `a` or `b`.
type Combine = unsafe fn(out: *mut u8, a: *const u8, b: *const u8, n: usize);
/// `a[i] = b[i] = a[i] ∘ b[i]`, over `k` if it is a mean.
type Both = unsafe fn(a: *mut u8, b: *mut u8, n: usize, k: usize);
/// `out[i] = a[i] / k`.
type Finish = unsafe fn(out: *mut u8, a: *const u8, n: usize, k: usize);

impl Fold {
    /// Nothing if the reduction has no meaning for the dtype.
    pub(crate) fn new(reduce: Reduce, dtype: DType) -> Option<Fold> {
        reduce.fits(dtype).ok()?;
        let (combine, both) = loops(reduce, dtype)?;
        Some(Fold {
            combine,
            both,
            finish: (reduce == Reduce::Mean).then(|| finish(dtype)).flatten(),
            size: dtype.size(),
        })
    }

    /// `left = left ∘ right`.
    pub(crate) fn pair(&self, left: &mut [u8], right: &[u8]) {
        assert!(left.len() == right.len() && left.len().is_multiple_of(self.size));
        let at = left.as_mut_ptr();
        // SAFETY: both hold that many elements; loads and stores need no alignment.
        unsafe { (self.combine)(at, at, right.as_ptr(), left.len() / self.size) };
    }

    /// Combines the leaves and writes the result to every target. `program` says how many merges follow each leaf;
    /// together they leave one value.
    ///
    /// # Safety
    /// Each leaf can be read and each target written for `n` elements. A target may be a leaf, otherwise they do not
    /// overlap. Nobody else writes the leaves or touches the targets meanwhile.
    pub(crate) unsafe fn tree(
        &self,
        program: &[usize],
        leaves: &[*const u8],
        targets: &[*mut u8],
        n: usize,
        k: usize,
    ) {
        debug_assert_eq!(program.len(), leaves.len());
        if let ([leaf], [target], None) = (leaves, targets, self.finish)
            && std::ptr::eq(*leaf, *target)
        {
            return;
        }
        if let ([a, b], [x, y]) = (leaves, targets)
            && (std::ptr::eq(*a, *x) && std::ptr::eq(*b, *y) || std::ptr::eq(*a, *y) && std::ptr::eq(*b, *x))
        {
            // SAFETY: both are leaves and targets.
            unsafe { (self.both)(a.cast_mut(), b.cast_mut(), n, k) };
            return;
        }
        let tile = (TILE / self.size).min(n);
        let words = (tile * self.size).div_ceil(8);
        let mut rooms: Vec<Vec<u64>> = Vec::new();
        let mut stack: Vec<*const u8> = Vec::new();
        let mut at = 0;
        while at < n {
            let (count, offset) = (tile.min(n - at), at * self.size);
            for (&leaf, &merges) in leaves.iter().zip(program) {
                // SAFETY: within the leaf.
                stack.push(unsafe { leaf.add(offset) });
                for _ in 0..merges {
                    let right = stack.pop().expect("two operands");
                    let left = stack.pop().expect("two operands");
                    let depth = stack.len();
                    if rooms.len() <= depth {
                        rooms.resize_with(depth + 1, || vec![0; words]);
                    }
                    let room = rooms[depth].as_mut_ptr().cast::<u8>();
                    // SAFETY: `count` elements fit a tile; operands are parts of leaves or tiles.
                    unsafe { (self.combine)(room, left, right, count) };
                    stack.push(room);
                }
            }
            let mut result = stack.pop().expect("one result");
            debug_assert!(stack.is_empty());
            if let Some(finish) = self.finish {
                if rooms.is_empty() {
                    rooms.push(vec![0; words]);
                }
                let room = rooms[0].as_mut_ptr().cast::<u8>();
                // SAFETY: as above; `result` is a leaf or this tile.
                unsafe { finish(room, result, count, k) };
                result = room;
            }
            for &target in targets {
                // SAFETY: within the target, which is no tile; where it is the leaf itself, the copy is onto itself.
                unsafe { std::ptr::copy(result, target.add(offset), count * self.size) };
            }
            at += count;
        }
    }
}

fn loops(reduce: Reduce, dtype: DType) -> Option<(Combine, Both)> {
    macro_rules! by_op {
        ($t:ty) => {
            match reduce {
                Reduce::Sum => (zip::<$t, Add>(), zip_both::<$t, Add>()),
                Reduce::Mean => (zip::<$t, Add>(), zip_both::<$t, Mean>()),
                Reduce::Max => (zip::<$t, Max>(), zip_both::<$t, Max>()),
                Reduce::Min => (zip::<$t, Min>(), zip_both::<$t, Min>()),
                Reduce::Prod => (zip::<$t, Mul>(), zip_both::<$t, Mul>()),
            }
        };
    }
    Some(match dtype {
        DType::F64 => by_op!(f64),
        DType::F32 => by_op!(f32),
        DType::F16 => by_op!(f16),
        DType::BF16 => by_op!(bf16),
        DType::I64 => by_op!(i64),
        DType::I32 => by_op!(i32),
        DType::I16 => by_op!(i16),
        DType::I8 => by_op!(i8),
        DType::U64 => by_op!(u64),
        DType::U32 => by_op!(u32),
        DType::U16 => by_op!(u16),
        DType::U8 => by_op!(u8),
        // Bytes 0 and 1: the larger is "any", the smaller and the product are "all".
        DType::Bool => by_op!(u8),
        DType::Q8 | DType::Q4 => return None,
    })
}

fn finish(dtype: DType) -> Option<Finish> {
    unsafe fn divide<T: Element>(out: *mut u8, a: *const u8, n: usize, k: usize) {
        for i in 0..n {
            // SAFETY: promised by the caller.
            unsafe { out.cast::<T>().add(i).write(T::over(a.cast::<T>().add(i).read_unaligned(), k)) };
        }
    }
    match dtype {
        DType::F64 => Some(divide::<f64>),
        DType::F32 => Some(divide::<f32>),
        DType::F16 => Some(divide::<f16>),
        DType::BF16 => Some(divide::<bf16>),
        _ => None,
    }
}

/// How two numbers become one.
trait Rule {
    /// Whether the result is divided at the end.
    const MEAN: bool = false;
    fn of<T: Num>(a: T, b: T) -> T;
}
struct Add;
struct Mean;
struct Mul;
struct Max;
struct Min;
impl Rule for Add {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.add(b)
    }
}
impl Rule for Mean {
    const MEAN: bool = true;
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.add(b)
    }
}
impl Rule for Mul {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.mul(b)
    }
}
impl Rule for Max {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.maximum(b)
    }
}
impl Rule for Min {
    #[inline(always)]
    fn of<T: Num>(a: T, b: T) -> T {
        a.minimum(b)
    }
}

/// Elements at a time.
const LANES: usize = 32;

/// An element of a buffer.
trait Element: Copy {
    fn blank() -> Self;
    fn lanes<R: Rule>(a: &[Self; LANES], b: &[Self; LANES]) -> [Self; LANES];
    fn over(self, k: usize) -> Self;
}

macro_rules! floats {
    ($($t:ident)*) => {$(
        impl Element for $t {
            #[inline(always)]
            fn blank() -> $t { 0.0 }
            #[inline(always)]
            fn lanes<R: Rule>(a: &[$t; LANES], b: &[$t; LANES]) -> [$t; LANES] {
                std::array::from_fn(|i| {
                    let y = R::of(a[i], b[i]);
                    if y.is_nan() { $t::NAN } else { y }
                })
            }
            #[inline(always)]
            fn over(self, k: usize) -> $t {
                let y = self / k as $t;
                if y.is_nan() { $t::NAN } else { y }
            }
        }
    )*};
}
floats! { f32 f64 }

macro_rules! ints {
    ($($t:ident)*) => {$(
        impl Element for $t {
            #[inline(always)]
            fn blank() -> $t { 0 }
            #[inline(always)]
            fn lanes<R: Rule>(a: &[$t; LANES], b: &[$t; LANES]) -> [$t; LANES] {
                std::array::from_fn(|i| R::of(a[i], b[i]))
            }
            fn over(self, _: usize) -> $t { unreachable!("integers have no mean") }
        }
    )*};
}
ints! { i64 i32 i16 i8 u64 u32 u16 u8 }

impl Element for bf16 {
    #[inline(always)]
    fn blank() -> bf16 {
        bf16::ZERO
    }
    #[inline(always)]
    fn lanes<R: Rule>(a: &[bf16; LANES], b: &[bf16; LANES]) -> [bf16; LANES] {
        std::array::from_fn(|i| narrow(R::of(widen(a[i]), widen(b[i]))))
    }
    #[inline(always)]
    fn over(self, k: usize) -> bf16 {
        narrow(self.to_f32() / k as f32)
    }
}

#[inline(always)]
fn widen(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// To the nearest, ties to even; without a branch, so that it becomes vectors.
#[inline(always)]
fn narrow(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded })
}

impl Element for f16 {
    #[inline(always)]
    fn blank() -> f16 {
        f16::ZERO
    }
    #[inline(always)]
    fn lanes<R: Rule>(a: &[f16; LANES], b: &[f16; LANES]) -> [f16; LANES] {
        let (mut x, mut y, mut out) = ([0f32; LANES], [0f32; LANES], [f16::ZERO; LANES]);
        a.convert_to_f32_slice(&mut x);
        b.convert_to_f32_slice(&mut y);
        let z: [f32; LANES] = <f32 as Element>::lanes::<R>(&x, &y);
        out.convert_from_f32_slice(&z);
        out.map(|h| if h.is_nan() { f16::NAN } else { h })
    }
    #[inline(always)]
    fn over(self, k: usize) -> f16 {
        let y = f16::from_f32(self.to_f32() / k as f32);
        if y.is_nan() { f16::NAN } else { y }
    }
}

/// The loop for this machine. The width of vectors changes no bit.
macro_rules! widest {
    ($name:ident($($arg:ident: $t:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512<T: Element, R: Rule>($($arg: $t),*) {
                // SAFETY: promised by the caller.
                unsafe { $name::<T, R>($($arg),*) }
            }
            #[target_feature(enable = "avx2")]
            unsafe fn avx2<T: Element, R: Rule>($($arg: $t),*) {
                // SAFETY: promised by the caller.
                unsafe { $name::<T, R>($($arg),*) }
            }
            if is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return avx512::<T, R>;
            }
            if is_x86_feature_detected!("avx2") {
                return avx2::<T, R>;
            }
        }
        $name::<T, R>
    }};
}

fn zip<T: Element, R: Rule>() -> Combine {
    widest!(each(out: *mut u8, a: *const u8, b: *const u8, n: usize))
}

fn zip_both<T: Element, R: Rule>() -> Both {
    widest!(each_both(a: *mut u8, b: *mut u8, n: usize, k: usize))
}

/// Bytes ahead of the loop whose lines are asked for.
const AHEAD: usize = 1024;

/// Lines are asked for with the right to write: one trip to the other core's cache, where a load and then a store take
/// two. Measured with two processes, 25 MiB: 1.1 ms, without 4.7 ms, with stores past the cache 3.8 ms.
///
/// # Safety
/// As [`Both`].
#[inline(always)]
unsafe fn each_both<T: Element, R: Rule>(a: *mut u8, b: *mut u8, n: usize, k: usize) {
    let (a, b) = (a.cast::<T>(), b.cast::<T>());
    let ended = |z: T| if R::MEAN { z.over(k) } else { z };
    let mut i = 0;
    while i + LANES <= n {
        // SAFETY: `LANES` elements from `i` are within both.
        unsafe {
            let (p, q) = (a.add(i).cast::<[T; LANES]>(), b.add(i).cast::<[T; LANES]>());
            own_soon(p.cast::<u8>().wrapping_add(AHEAD), size_of::<[T; LANES]>());
            own_soon(q.cast::<u8>().wrapping_add(AHEAD), size_of::<[T; LANES]>());
            let z = T::lanes::<R>(&p.read_unaligned(), &q.read_unaligned());
            let z: [T; LANES] = std::array::from_fn(|i| ended(z[i]));
            p.write_unaligned(z);
            q.write_unaligned(z);
        }
        i += LANES;
    }
    // SAFETY: the elements that remain.
    unsafe {
        let (a, b) = (a.add(i), b.add(i));
        each::<T, R>(a.cast(), a.cast(), b.cast(), n - i);
        (0..n - i).for_each(|i| a.add(i).write_unaligned(ended(a.add(i).read_unaligned())));
        std::ptr::copy_nonoverlapping(a.cast::<u8>(), b.cast(), (n - i) * size_of::<T>());
    }
}

/// Asks for the cache lines from `at`, to be written. They need not exist.
#[inline(always)]
fn own_soon(at: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..bytes.div_ceil(64) {
        let at = at.wrapping_add(64 * line);
        // SAFETY: a hint: it reads and writes nothing and never faults.
        unsafe { std::arch::asm!("prefetchw [{at}]", at = in(reg) at, options(nostack, preserves_flags)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, bytes);
}

/// # Safety
/// As [`Combine`].
#[inline(always)]
unsafe fn each<T: Element, R: Rule>(out: *mut u8, a: *const u8, b: *const u8, n: usize) {
    let (out, a, b) = (out.cast::<T>(), a.cast::<T>(), b.cast::<T>());
    let mut i = 0;
    while i + LANES <= n {
        // SAFETY: `LANES` elements from `i` are within all three. Both operands are read before the result is
        // written, so that they may be one place.
        unsafe {
            let x = a.add(i).cast::<[T; LANES]>().read_unaligned();
            let y = b.add(i).cast::<[T; LANES]>().read_unaligned();
            out.add(i).cast::<[T; LANES]>().write_unaligned(T::lanes::<R>(&x, &y));
        }
        i += LANES;
    }
    if i < n {
        let (mut x, mut y) = ([T::blank(); LANES], [T::blank(); LANES]);
        // SAFETY: the `n - i` elements that remain are fewer than `LANES`.
        unsafe {
            let bytes = (n - i) * size_of::<T>();
            std::ptr::copy_nonoverlapping(a.add(i).cast::<u8>(), x.as_mut_ptr().cast(), bytes);
            std::ptr::copy_nonoverlapping(b.add(i).cast::<u8>(), y.as_mut_ptr().cast(), bytes);
            let z = T::lanes::<R>(&x, &y);
            std::ptr::copy_nonoverlapping(z.as_ptr().cast(), out.add(i).cast::<u8>(), bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    fn run<T: Copy + Default>(reduce: Reduce, dtype: DType, leaves: &[Vec<T>]) -> Vec<T> {
        let layout = Layout::new(leaves.len(), leaves.len()).unwrap();
        let n = leaves[0].len();
        let mut out = vec![T::default(); n];
        let at: Vec<*const u8> = leaves.iter().map(|l| l.as_ptr().cast()).collect();
        let fold = Fold::new(reduce, dtype).unwrap();
        // SAFETY: leaves and target have `n` elements.
        unsafe { fold.tree(&layout.program(), &at, &[out.as_mut_ptr().cast()], n, leaves.len()) };
        out
    }

    #[test]
    fn floats_are_added_in_tree_order() {
        let leaves: Vec<Vec<f32>> = (0..5)
            .map(|r| (0..5000).map(|i| ((r * 31 + i) as f32).sin() * 10f32.powi(r)).collect())
            .collect();
        let out = run(Reduce::Sum, DType::F32, &leaves);
        let mean = run(Reduce::Mean, DType::F32, &leaves);
        for i in 0..5000 {
            let x = |r: usize| leaves[r][i];
            let want = ((x(0) + x(1)) + (x(2) + x(3))) + x(4);
            assert_eq!(out[i].to_bits(), want.to_bits(), "{i}");
            assert_eq!(mean[i].to_bits(), (want / 5.0).to_bits(), "{i}");
        }
    }

    #[test]
    fn two_leaves_in_place_get_the_same_result() {
        let x: Vec<f32> = (0..5001).map(|i| (i as f32).sin()).collect();
        let y: Vec<f32> = (0..5001).map(|i| (i as f32).cos() * 1e3).collect();
        for (swap, reduce, k) in [
            (false, Reduce::Sum, 1),
            (true, Reduce::Sum, 1),
            (false, Reduce::Mean, 2),
            (true, Reduce::Mean, 7),
        ] {
            let (mut a, mut b) = (x.clone(), y.clone());
            let (p, q) = (a.as_mut_ptr().cast::<u8>(), b.as_mut_ptr().cast::<u8>());
            let targets = if swap { [q, p] } else { [p, q] };
            let fold = Fold::new(reduce, DType::F32).unwrap();
            // SAFETY: both have that many elements.
            unsafe { fold.tree(&[0, 1], &[p.cast_const(), q.cast_const()], &targets, 5001, k) };
            assert!((0..5001).all(|i| a[i] == (x[i] + y[i]) / k as f32 && b[i] == a[i]), "{reduce} {k}");
        }
    }

    #[test]
    fn half_floats_are_rounded_at_every_node() {
        let leaves: Vec<Vec<bf16>> =
            [1.0, 0.0017, 0.0017, 0.0017].map(|x| vec![bf16::from_f32(x); 70]).to_vec();
        let r = |x: f32| bf16::from_f32(x).to_f32();
        let x = r(0.0017);
        let want = r(r(1.0 + x) + r(x + x));
        assert_ne!(want, r(1.0 + x + x + x), "the case tells the two orders apart");
        assert!(run(Reduce::Sum, DType::BF16, &leaves).iter().all(|y| y.to_f32() == want));
        let leaves: Vec<Vec<f16>> =
            [1.0, 0.0002, 0.0002, 0.0002].map(|x| vec![f16::from_f32(x); 70]).to_vec();
        let r = |x: f32| f16::from_f32(x).to_f32();
        let x = r(0.0002);
        let want = r(r(1.0 + x) + r(x + x));
        assert!(run(Reduce::Sum, DType::F16, &leaves).iter().all(|y| y.to_f32() == want));
    }

    #[test]
    fn narrowing_is_the_nearest_bf16() {
        for i in 0..1_000_000u32 {
            let x = f32::from_bits(i.wrapping_mul(4294967));
            let want = if x.is_nan() { 0x7fc0 } else { bf16::from_f32(x).to_bits() };
            assert_eq!(narrow(x).to_bits(), want, "{x}");
        }
    }

    #[test]
    fn integers_wrap_and_bools_are_any_and_all() {
        assert_eq!(run(Reduce::Sum, DType::I32, &[vec![i32::MAX], vec![1]]), [i32::MIN]);
        assert_eq!(run(Reduce::Prod, DType::U8, &[vec![16u8], vec![17], vec![2]]), [32]);
        assert_eq!(run(Reduce::Max, DType::Bool, &[vec![0u8, 0], vec![1, 0]]), [1, 0]);
        assert_eq!(run(Reduce::Min, DType::Bool, &[vec![1u8, 1], vec![1, 0]]), [1, 0]);
        assert!(Fold::new(Reduce::Sum, DType::Bool).is_none());
        assert!(Fold::new(Reduce::Mean, DType::I64).is_none());
    }

    #[test]
    fn every_nan_is_the_same() {
        let odd = f32::from_bits(0xffc0_1234);
        let out = run(Reduce::Sum, DType::F32, &[vec![odd, 1.0], vec![1.0, odd]]);
        assert!(out.iter().all(|x| x.to_bits() == f32::NAN.to_bits()));
        let out = run(Reduce::Max, DType::F64, &[vec![f64::NAN], vec![1.0]]);
        assert_eq!(out[0].to_bits(), f64::NAN.to_bits());
    }
}
