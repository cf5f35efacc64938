//! Small products, for which packing costs more than it saves.

use super::scalar::{Compute, Source};
use super::{Problem, panels, put};

/// Sixteen outputs of a row at a time, straight from the operands.
///
/// # Safety
/// As for `gemm`.
#[inline(always)]
pub(super) unsafe fn direct_body<S: Source<T>, T: Compute>(p: Problem<S, T>) {
    let p = if p.b.cs != 1 && p.a.rs == 1 { p.swapped() } else { p };
    for i in 0..p.m {
        for j in (0..p.n).step_by(GROUP) {
            let w = GROUP.min(p.n - j);
            let mut total = [T::default(); GROUP];
            for (k0, kc) in panels(p.k) {
                let mut sums = [T::default(); GROUP];
                for k in k0..k0 + kc {
                    // SAFETY: i, k and columns j..j + w are in the operands.
                    unsafe {
                        let (x, row) = (S::widen(*p.a.at(i, k)), p.b.at(k, j));
                        if w == GROUP && p.b.cs == 1 {
                            let row = &*row.cast::<[S; GROUP]>();
                            for (sum, &y) in sums.iter_mut().zip(row) {
                                *sum = x.fma(S::widen(y), *sum);
                            }
                        } else {
                            for (l, sum) in sums[..w].iter_mut().enumerate() {
                                *sum = x.fma(S::widen(*row.offset(l as isize * p.b.cs)), *sum);
                            }
                        }
                    }
                }
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total = if k0 > 0 { total.plus(sum) } else { sum };
                }
            }
            // SAFETY: columns j..j + w are in C.
            unsafe { put(p.c.at(i, j), p.c.cs, total.as_ptr(), w, false) };
        }
    }
}

const GROUP: usize = 16;
