//! The general path: both operands are copied by strips (MR rows of A, NR columns of B), so that the tile kernel reads
//! them in sequence.

use super::kernel::{Kernel, MAX_TILE, Strip};
use super::scalar::{Compute, Source};
use super::scratch::{OWN, SHARED, STAGE, Shared, with_scratch};
use super::{APART_WORK, Mat, MatMut, PANEL, Product, panels, put};
use crate::pool;
use std::mem::MaybeUninit;

/// Both packed sides of one chunk stay in a 2 MiB L2.
const OWN_BYTES: usize = 256 << 10;
const SHARED_BYTES: usize = 2 << 20;

/// Copies one operand by strips (MR rows of A, NR columns of B), so that the tile kernel reads both in sequence. The
/// side with more strips is cut into chunks, each packed by whoever computes it; the other is packed once for all.
///
/// # Safety
/// As for `route`.
pub(super) unsafe fn packed<K: Kernel<T>, S: Source<T>, T: Compute>(p: Product<S, T>) {
    let threads = if p.wide() { pool::threads() } else { 1 };
    if threads == 1 || p.work() > APART_WORK {
        // SAFETY: the caller's promise.
        return unsafe { packed_by::<K, S, T>(p, threads) };
    }
    let by_rows = p.m.div_ceil(K::MR) >= p.n.div_ceil(K::NR);
    let (lines, width) = if by_rows { (p.m, K::MR) } else { (p.n, K::NR) };
    let strips = lines.div_ceil(width);
    let parts = threads.min(strips);
    pool::parallel(parts, &|part| {
        let (lo, hi) = (part * strips / parts * width, lines.min((part + 1) * strips / parts * width));
        // SAFETY: lo..hi are rows, or columns, that are this part's alone.
        unsafe {
            let part = if by_rows {
                let (a, c) = (Mat { ptr: p.a.at(lo, 0), ..p.a }, MatMut { ptr: p.c.at(lo, 0), ..p.c });
                Product { m: hi - lo, a, c, ..p }
            } else {
                let (b, c) = (Mat { ptr: p.b.at(0, lo), ..p.b }, MatMut { ptr: p.c.at(0, lo), ..p.c });
                Product { n: hi - lo, b, c, ..p }
            };
            packed_by::<K, S, T>(part, 1);
        }
    });
}

/// `packed` over that many threads.
///
/// # Safety
/// As for `route`.
unsafe fn packed_by<K: Kernel<T>, S: Source<T>, T: Compute>(p: Product<S, T>, threads: usize) {
    let wide = threads > 1;
    let (a_strips, b_strips) = (p.m.div_ceil(K::MR), p.n.div_ceil(K::NR));
    let a = Side { lines: p.m, width: K::MR, ptr: p.a.ptr, ls: p.a.rs, ks: p.a.cs };
    let b = Side { lines: p.n, width: K::NR, ptr: p.b.ptr, ls: p.b.cs, ks: p.b.rs };
    let own_is_a = a_strips >= b_strips;
    let (own, shared) = if own_is_a { (a, b) } else { (b, a) };
    let (own_strips, shared_strips) = (own.lines.div_ceil(own.width), shared.lines.div_ceil(shared.width));
    let depth = PANEL.min(p.k);
    let own_size = own.width * depth;
    let shared_size = shared.width * depth;
    let most = |bytes: usize, size: usize| (bytes / (size * size_of::<T>())).max(1);
    let block = shared_strips.min(most(SHARED_BYTES, shared_size));
    // At least four chunks a thread, so that a preempted one is not waited for long; a multiple of the threads, so
    // that all end together.
    let even = own_strips.div_ceil(threads * most(OWN_BYTES, own_size));
    let chunks = own_strips.min(threads * if wide { even.max(4) } else { even });

    with_scratch(&SHARED, block * shared_size, |shared_at: *mut T| {
        let shared_at = Shared(shared_at);
        for first in (0..shared_strips).step_by(block) {
            let count = block.min(shared_strips - first);
            for (k0, kc) in panels(p.k) {
                let pack_shared = |s: usize| {
                    // SAFETY: strip s of the scratch block is this call's alone.
                    unsafe {
                        let to = shared_at.get().add(s * shared.width * kc);
                        pack::<K, S, T>(shared, first + s, k0, kc, to);
                    }
                };
                let compute = |chunk: usize| {
                    let (lo, hi) = (chunk * own_strips / chunks, (chunk + 1) * own_strips / chunks);
                    with_scratch(&OWN, (hi - lo) * own_size, |own_at: *mut T| {
                        for o in lo..hi {
                            // SAFETY: the scratch has a strip for each o.
                            unsafe { pack::<K, S, T>(own, o, k0, kc, own_at.add((o - lo) * own.width * kc)) };
                        }
                        for s in 0..count {
                            for o in lo..hi {
                                // SAFETY: both strips are packed, and only this chunk has strip o.
                                unsafe {
                                    let own_strip = own_at.add((o - lo) * own.width * kc).cast_const();
                                    let shared_strip =
                                        shared_at.get().add(s * shared.width * kc).cast_const();
                                    if own_is_a {
                                        tile::<K, S, T>(p, o, first + s, k0, kc, own_strip, shared_strip);
                                    } else {
                                        tile::<K, S, T>(p, first + s, o, k0, kc, shared_strip, own_strip);
                                    }
                                }
                            }
                        }
                    });
                };
                if wide {
                    pool::parallel(count, &pack_shared);
                    pool::parallel(chunks, &compute);
                } else {
                    (0..count).for_each(pack_shared);
                    (0..chunks).for_each(compute);
                }
            }
        }
    });
}

/// One operand as the packing sees it: lines (rows of A, columns of B) along which K runs.
struct Side<S> {
    lines: usize,
    width: usize,
    ptr: *const S,
    ls: isize,
    ks: isize,
}

impl<S> Clone for Side<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Side<S> {}
// SAFETY: it is only read through, under the promise of the public functions.
unsafe impl<S: Sync> Sync for Side<S> {}

/// Packs strip `strip` of panel (k0, kc): `to[k * width + line]`, zeros for lines past the end.
///
/// # Safety
/// The operand is readable and `to` has room for width · kc.
unsafe fn pack<K: Kernel<T>, S: Source<T>, T: Compute>(
    side: Side<S>,
    strip: usize,
    k0: usize,
    kc: usize,
    to: *mut T,
) {
    let Side { width, ls, ks, .. } = side;
    let first = strip * width;
    let lines = width.min(side.lines - first);
    // SAFETY: `first` and `k0` are in the operand, and the caller's promise for the rest.
    unsafe {
        let from = side.ptr.offset(first as isize * ls + k0 as isize * ks);
        if let Some(from) = S::plain(from) {
            K::pack(Strip { from, ls, ks, lines, kc }, width, to);
        } else if ks == 1 && kc > 1 {
            with_scratch(&STAGE, lines * kc, |stage: *mut T| {
                for line in 0..lines {
                    S::widen_line(from.offset(line as isize * ls), kc, stage.add(line * kc));
                }
                K::pack(Strip { from: stage.cast_const(), ls: kc as isize, ks: 1, lines, kc }, width, to);
            });
        } else {
            for k in 0..kc {
                let (line, out) = (from.offset(k as isize * ks), to.add(k * width));
                if ls == 1 {
                    S::widen_line(line, lines, out);
                } else {
                    for l in 0..lines {
                        *out.add(l) = S::widen(*line.offset(l as isize * ls));
                    }
                }
                out.add(lines).write_bytes(0, width - lines);
            }
        }
    }
}

/// One MR × NR tile of C for one panel, through a local copy where C is cut off or strided.
///
/// # Safety
/// Both strips are packed with `kc` steps; this thread alone has the tile.
unsafe fn tile<K: Kernel<T>, S, T: Compute>(
    p: Product<S, T>,
    a_strip: usize,
    b_strip: usize,
    k0: usize,
    kc: usize,
    a: *const T,
    b: *const T,
) {
    let (i, j) = (a_strip * K::MR, b_strip * K::NR);
    let (rows, cols) = (K::MR.min(p.m - i), K::NR.min(p.n - j));
    // SAFETY: (i, j) is in C.
    let c = unsafe { p.c.at(i, j) };
    if rows == K::MR && cols == K::NR && p.c.cs == 1 {
        // SAFETY: the whole tile is in C.
        return unsafe { K::tile(rows, kc, a, b, c, p.c.rs, k0 > 0) };
    }
    let mut local = [const { MaybeUninit::<T>::uninit() }; MAX_TILE];
    let local = local.as_mut_ptr().cast::<T>();
    // SAFETY: the local tile has room for MR × NR, of which `rows` rows are written and then read; rows and columns
    // are cut to those of C.
    unsafe {
        K::tile(rows, kc, a, b, local, K::NR as isize, false);
        for r in 0..rows {
            let (c, from) = (c.offset(r as isize * p.c.rs), local.add(r * K::NR));
            put(c, p.c.cs, from, cols, k0 > 0);
        }
    }
}
