//! Few outputs, long K: several panels at once.

use super::kernel::Kernel;
use super::scalar::{Compute, Source};
use super::scratch::{SHARED, Shared, with_scratch};
use super::{PANEL, Problem, put};
use crate::pool;

/// Panels are independent until they are added up, so eight of them hide the latency of the additions. What is added up
/// is kept for a stretch of K only, however long K is.
///
/// # Safety
/// As for `route`; m, n ≤ SKINNY.
pub(super) unsafe fn chains<K: Kernel<T>, S: Source<T>, T: Compute>(p: Problem<S, T>) {
    let (panels, outputs) = (p.k.div_ceil(PANEL), p.m * p.n);
    with_scratch(&SHARED, panels.div_ceil(CHAINS).min(STRETCH) * CHAINS * outputs, |sums: *mut T| {
        for first in (0..panels).step_by(STRETCH * CHAINS) {
            let count = (panels - first).min(STRETCH * CHAINS);
            // SAFETY: the caller's promise; the scratch has sums for that many panels.
            unsafe { stretch::<K, S, T>(p, first, count, sums) };
        }
    });
}

/// The panels `first..first + count`, added to C in order.
///
/// # Safety
/// As for `chains`; `sums` has room for CHAINS of each group of panels and output.
unsafe fn stretch<K: Kernel<T>, S: Source<T>, T: Compute>(
    p: Problem<S, T>,
    first: usize,
    count: usize,
    sums: *mut T,
) {
    let (groups, outputs) = (count.div_ceil(CHAINS), p.m * p.n);
    let at = Shared(sums);
    let group = |g: usize| {
        let k0 = (first + g * CHAINS) * PANEL;
        let length = p.k - k0;
        for out in 0..outputs {
            let (i, j) = (out / p.n, out % p.n);
            // SAFETY: k0 is below k, and each group has its own sums.
            unsafe {
                let to = at.get().add((g * outputs + out) * CHAINS);
                let (a, b) = (p.a.at(i, k0), p.b.at(k0, j));
                K::chains::<S>(length.min(CHAINS * PANEL), a, p.a.cs, b, p.b.rs, to);
            }
        }
    };
    if p.wide() {
        pool::parallel(groups, &group)
    } else {
        (0..groups).for_each(group)
    }
    for panel in 0..count {
        for out in 0..outputs {
            // SAFETY: all groups are done; (out / n, out % n) is in C.
            unsafe {
                let from = sums.add((panel / CHAINS * outputs + out) * CHAINS + panel % CHAINS);
                put(p.c.at(out / p.n, out % p.n), 1, from, 1, first + panel > 0);
            }
        }
    }
}

const CHAINS: usize = 8;
/// Groups of panels that are added up together: 4 Mi of K.
const STRETCH: usize = 1024;

/// # Safety
/// `length` ≤ CHAINS · PANEL elements are readable from `a` and `b`, and CHAINS writable at `to`.
#[inline(always)]
pub(super) unsafe fn chains_body<S: Source<T>, T: Compute>(
    length: usize,
    a: *const S,
    sa: isize,
    b: *const S,
    sb: isize,
    to: *mut T,
) {
    let mut sums = [T::default(); CHAINS];
    // SAFETY: indices stay below `length`, the caller's promise.
    unsafe {
        let product = |k: usize, acc: T| {
            let (x, y) = (*a.offset(k as isize * sa), *b.offset(k as isize * sb));
            S::widen(x).fma(S::widen(y), acc)
        };
        if length == CHAINS * PANEL {
            for k in 0..PANEL {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = product(c * PANEL + k, *sum);
                }
            }
        } else {
            for k in 0..length {
                sums[k / PANEL] = product(k, sums[k / PANEL]);
            }
        }
        to.cast::<[T; CHAINS]>().write_unaligned(sums);
    }
}
