//! Contributions combined in tree order, tile by tile.
//!
//! f16 and bf16 are added in f32 and rounded to their own type at every node of the tree: what crosses an edge between
//! ranks is then the same value as what stays on one, so the number of ranks changes no bit. A NaN result is always the
//! same NaN, because which operand's bits survive an addition is the compiler's choice. Integers wrap.

mod element;
mod loops;

use crate::call::Reduce;
use kiln_ir::DType;
use loops::{finish, loops};

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
        let mut buffers: Vec<Vec<u64>> = Vec::new();
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
                    if buffers.len() <= depth {
                        buffers.resize_with(depth + 1, || vec![0; words]);
                    }
                    let buffer = buffers[depth].as_mut_ptr().cast::<u8>();
                    // SAFETY: `count` elements fit a tile; operands are parts of leaves or tiles.
                    unsafe { (self.combine)(buffer, left, right, count) };
                    stack.push(buffer);
                }
            }
            let mut result = stack.pop().expect("one result");
            debug_assert!(stack.is_empty());
            if let Some(finish) = self.finish {
                if buffers.is_empty() {
                    buffers.push(vec![0; words]);
                }
                let buffer = buffers[0].as_mut_ptr().cast::<u8>();
                // SAFETY: as above; `result` is a leaf or this tile.
                unsafe { finish(buffer, result, count, k) };
                result = buffer;
            }
            for &target in targets {
                // SAFETY: within the target, which is no tile; where it is the leaf itself, the copy is onto itself.
                unsafe { std::ptr::copy(result, target.add(offset), count * self.size) };
            }
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::element::narrow;
    use super::*;
    use crate::Layout;
    use half::{bf16, f16};

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
