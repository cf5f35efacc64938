//! Few rows of A, B contiguous along its rows: B is read once, so speed is that of memory.

use super::kernel::{Kernel, Vector};
use super::scalar::{Compute, Source};
use super::scratch::{OWN, with_scratch};
use super::{After, Block, PANEL, Problem, SKINNY, panels, put};
use crate::pool;
use crate::stop;

/// Streams B once, in blocks of columns whose sums stay in L1.
///
/// # Safety
/// As for `route`; m ≤ SKINNY and B's column stride is 1.
pub(super) unsafe fn rows<K: Kernel<T>, S: Source<T>, T: Compute>(p: Problem<S, T>, after: After<'_>) {
    let most = SUMS / size_of::<T>();
    let wide = p.wide();
    let even = if wide { p.n.div_ceil(2 * pool::threads()).next_multiple_of(64) } else { p.n };
    let width = even.min(most);
    let chunk = |chunk: usize| {
        let j0 = chunk * width;
        let w = width.min(p.n - j0);
        let stage_rows = if S::PLAIN { 0 } else { STAGED_ROWS };
        // Layout: coefficients [PANEL][m], sums [m][width], widened rows of B.
        let size = PANEL * SKINNY + SKINNY * width + stage_rows * width;
        with_scratch(&OWN, size, |coefs: *mut T| {
            // SAFETY: the three parts lie in the scratch; all indices are below m, n and k.
            unsafe {
                let sums = coefs.add(PANEL * SKINNY);
                let stage = sums.add(SKINNY * width);
                for (k0, kc) in panels(p.k) {
                    stop::check();
                    for k in 0..kc {
                        for i in 0..p.m {
                            *coefs.add(k * p.m + i) = S::widen(*p.a.at(i, k0 + k));
                        }
                    }
                    sums.write_bytes(0, p.m * width);
                    let b = p.b.at(k0, j0);
                    if let Some(b) = S::plain(b) {
                        K::rows(p.m, kc, coefs, b, p.b.rs, sums, width, w);
                    } else {
                        for k in (0..kc).step_by(STAGED_ROWS) {
                            let count = STAGED_ROWS.min(kc - k);
                            for r in 0..count {
                                S::widen_line(b.offset((k + r) as isize * p.b.rs), w, stage.add(r * width));
                            }
                            K::rows(p.m, count, coefs.add(k * p.m), stage, width as isize, sums, width, w);
                        }
                    }
                    for i in 0..p.m {
                        put(p.c.at(i, j0), p.c.cs, sums.add(i * width), w, k0 > 0);
                    }
                }
            }
        });
        after(Block { i: 0, m: p.m, j: j0, n: w });
    };
    let chunks = p.n.div_ceil(width);
    if wide { pool::parallel(chunks, &chunk) } else { (0..chunks).for_each(chunk) }
}

/// Bytes of sums for a row of A: four of them and four rows of B fill two thirds of a 48 KiB L1.
const SUMS: usize = 4096;
const STAGED_ROWS: usize = 8;

/// # Safety
/// As for `Kernel::rows`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn rows_body<V: Vector, const M: usize>(
    kc: usize,
    a: *const V::T,
    b: *const V::T,
    brs: isize,
    sums: *mut V::T,
    width: usize,
    w: usize,
) {
    let whole = kc / 4 * 4;
    // SAFETY: the caller's promise.
    unsafe {
        for k in (0..whole).step_by(4) {
            rows_step::<V, M, 4>(a.add(k * M), b.offset(k as isize * brs), brs, sums, width, w);
        }
        for k in whole..kc {
            rows_step::<V, M, 1>(a.add(k * M), b.offset(k as isize * brs), brs, sums, width, w);
        }
    }
}

/// U steps of K at once, so that the sums are loaded and stored once for them.
///
/// # Safety
/// As for `Kernel::rows`.
#[inline(always)]
unsafe fn rows_step<V: Vector, const M: usize, const U: usize>(
    a: *const V::T,
    b: *const V::T,
    brs: isize,
    sums: *mut V::T,
    width: usize,
    w: usize,
) {
    // SAFETY: the caller's promise; vectors are taken only while they fit in w.
    unsafe {
        let mut coefs = [[V::splat(V::T::default()); M]; U];
        for (u, coefs) in coefs.iter_mut().enumerate() {
            for (i, coef) in coefs.iter_mut().enumerate() {
                *coef = V::splat(*a.add(u * M + i));
            }
        }
        let vectors = w / V::LANES * V::LANES;
        for j in (0..vectors).step_by(V::LANES) {
            let mut acc = [V::splat(V::T::default()); M];
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(sums.add(i * width + j));
            }
            for (u, coefs) in coefs.iter().enumerate() {
                let x = V::load(b.offset(u as isize * brs).add(j));
                for (acc, coef) in acc.iter_mut().zip(coefs) {
                    *acc = coef.fma(x, *acc);
                }
            }
            for (i, acc) in acc.into_iter().enumerate() {
                acc.store(sums.add(i * width + j));
            }
        }
        for j in vectors..w {
            for i in 0..M {
                let sum = sums.add(i * width + j);
                for u in 0..U {
                    *sum = (*a.add(u * M + i)).fma(*b.offset(u as isize * brs).add(j), *sum);
                }
            }
        }
    }
}
