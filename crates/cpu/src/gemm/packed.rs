//! The general path: operands are copied by strips (MR rows of A, NR columns of B), so that the tile kernel reads both
//! in sequence. One side is packed once for all, the other by whoever computes with it, so that it is in that core's
//! cache. A strip of A is in L1 while it goes over some strips of B in L2. What is in good order already is not packed,
//! and what only has to be brought together is packed by the first tile that reads it.

use super::kernel::{Kernel, MAX_TILE, Strip, Tile};
use super::parted::{MOST, parted};
use super::scalar::{Compute, Source};
use super::scratch::{OWN, SHARED, Shared, with_scratch};
use super::{After, Block, Mat, MatMut, PANEL, Problem, panels, put};
use crate::pool;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Strips of B that one strip of A goes over: half of a 2 MiB L2.
const BLOCK_BYTES: usize = 1 << 20;
/// The most that is packed once for all.
const SHARED_BYTES: usize = 16 << 20;
/// The most that is fetched for the next product.
const NEXT_BYTES: usize = 256 << 10;
/// Pieces a thread gets of a panel, and between how many multiplications they are (about 2 and 25 µs).
const PIECES: usize = 32;
const LEAST_PIECE: usize = 1 << 17;
const MOST_PIECE: usize = 1 << 21;
/// Multiplications in the time in which a number is packed.
const PACKING: usize = 16;
/// Columns for each thread that are worth reading all rows for.
const APART: usize = 128;
/// Columns of B that are few beside many rows of A.
const FEW: usize = 128;
/// A B of so few bytes stays in L1 as it is.
const L1_BYTES: usize = 32 << 10;

/// # Safety
/// As for `route`.
pub(super) unsafe fn packed<K: Kernel<T>, S: Source<T>, T: Compute>(p: Problem<S, T>, after: After<'_>) {
    // Columns of A that are neighbours are copied faster by the width of B's strips, and few of B are no loss as rows.
    if p.a.rs == 1 && p.a.cs != 1 && p.n <= FEW && p.m >= 4 * p.n {
        // SAFETY: the caller's promise.
        return unsafe { cut_up::<K, S, T>(p.swapped(), &|block| after(block.swapped())) };
    }
    // SAFETY: the caller's promise.
    unsafe { cut_up::<K, S, T>(p, after) }
}

/// # Safety
/// As for `route`.
unsafe fn cut_up<K: Kernel<T>, S: Source<T>, T: Compute>(p: Problem<S, T>, after: After<'_>) {
    let threads = if p.wide() { pool::threads().min(MOST) } else { 1 };
    let step = PANEL.min(p.k) * size_of::<T>();
    let (most_rows, block) = (SHARED_BYTES / (K::MR * step) * K::MR, (BLOCK_BYTES / (K::NR * step)).max(1));
    let call = PackedCall::<K, S, T>::new(p, threads);
    let few_columns = p.n <= p.m && call.b_strips <= block;
    // What one core packs and another reads travels between them; rows that are not packed do not.
    let apart = threads > 1 && p.n >= threads * APART && !call.a_packs();
    if few_columns && !apart {
        // SAFETY: the caller's promise.
        return unsafe { call.by_rows(after) };
    }
    for i in (0..p.m).step_by(most_rows) {
        let m = most_rows.min(p.m - i);
        // SAFETY: row i is in A and in C; the caller's promise.
        unsafe {
            let (a, c) = (Mat { ptr: p.a.at(i, 0), ..p.a }, MatMut { ptr: p.c.at(i, 0), ..p.c });
            let call = PackedCall::<K, S, T>::new(Problem { m, a, c, ..p }, threads);
            call.by_columns(block, &|block| after(Block { i: i + block.i, ..block }));
        }
    }
}

/// One product and how it is cut.
struct PackedCall<K, S, T> {
    p: Problem<S, T>,
    threads: usize,
    a: Side<S>,
    b: Side<S>,
    a_strips: usize,
    b_strips: usize,
    /// Whether whole strips are read where they are.
    a_plain: bool,
    b_plain: bool,
    /// Lines of the next product's operand that each tile fetches.
    lines: usize,
    kernel: PhantomData<fn(K)>,
}

impl<K: Kernel<T>, S: Source<T>, T: Compute> PackedCall<K, S, T> {
    fn new(p: Problem<S, T>, threads: usize) -> Self {
        let (a_strips, b_strips) = (p.m.div_ceil(K::MR), p.n.div_ceil(K::NR));
        let few = p.share.bytes <= NEXT_BYTES;
        // What few strips of A read, and what stays in L1, is not worth packing.
        let read = if aliased::<S>(p.b.rs) { 3 } else { 7 };
        let small = p.n * p.k * size_of::<S>() <= L1_BYTES;
        PackedCall {
            p,
            threads,
            a: Side { lines: p.m, width: K::MR, ptr: p.a.ptr, ls: p.a.rs, ks: p.a.cs },
            b: Side { lines: p.n, width: K::NR, ptr: p.b.ptr, ls: p.b.cs, ks: p.b.rs },
            a_strips,
            b_strips,
            a_plain: S::PLAIN && p.a.cs == 1 && p.a.rs != 1,
            b_plain: S::PLAIN && p.b.cs == 1 && (a_strips < read || small),
            lines: if few { p.share.bytes.div_ceil(64 * a_strips * b_strips) } else { 0 },
            kernel: PhantomData,
        }
    }

    /// B is packed for all; a thread packs strips of A.
    ///
    /// # Safety
    /// As for `route`.
    unsafe fn by_rows(&self, after: After<'_>) {
        let parts = self.threads.min(self.a_strips);
        let depth = PANEL.min(self.p.k);
        let cuts = self.cuts(parts, self.a_strips, self.b_strips);
        with_scratch(&SHARED, self.b_strips * K::NR * depth, |shared: *mut T| {
            let shared = Shared(shared);
            for (k0, kc) in panels(self.p.k) {
                let b_at = |s: usize| shared.get().wrapping_add(s * K::NR * kc);
                parted(parts, self.b_strips, 0, |strips| {
                    // SAFETY: the scratch has a strip for each of B.
                    strips.for_each(|s| unsafe { self.b_pack(s, k0, kc, b_at(s)) })
                });
                // SAFETY: own has room for one strip.
                let own = |r, own| unsafe { self.a_pack(r, k0, kc, own) };
                self.pieces(parts, [self.a_strips, cuts, self.p.n], K::MR * kc, own, |r, piece, _, own| {
                    let columns = cut(self.b_strips, cuts, piece);
                    // SAFETY: strip r is packed, and all of B's.
                    unsafe { self.row(r, columns.clone(), (k0, kc), [own; 2], false, &b_at) };
                    self.finish(r..r + 1, columns, k0 + kc, after);
                });
            }
        });
    }

    /// A is packed for all; a thread packs up to `block` strips of B.
    ///
    /// # Safety
    /// As for `route`.
    unsafe fn by_columns(&self, block: usize, after: After<'_>) {
        let parts = self.threads.min(self.b_strips);
        let blocks = self.b_strips.div_ceil(block).next_multiple_of(parts).min(self.b_strips);
        let cuts = self.cuts(parts, blocks, self.a_strips);
        let depth = PANEL.min(self.p.k);
        let packs = self.a_packs();
        let scratch_len = if packs { self.a_strips * K::MR * depth } else { 0 };
        with_scratch(&SHARED, scratch_len, |shared: *mut T| {
            let shared = Shared(shared);
            for (k0, kc) in panels(self.p.k) {
                let a_at = |r: usize| shared.get().wrapping_add(r * K::MR * kc);
                if packs {
                    parted(parts, self.a_strips, 0, |strips| {
                        // SAFETY: the scratch has a strip for each of A.
                        strips.for_each(|r| unsafe { self.a_pack(r, k0, kc, a_at(r)) })
                    });
                }
                let columns = |b| cut(self.b_strips, blocks, b);
                // Own memory is for a block of B, and before it for the last rows of A if only they are packed.
                let last = if packs { 0 } else { K::MR * kc };
                let b_at =
                    |s: usize, first: usize, own: *mut T| own.wrapping_add(last + (s - first) * K::NR * kc);
                let own = |b, own| {
                    let columns = columns(b);
                    // SAFETY: own has room for the last strip of A and the strips of a block.
                    unsafe {
                        if !packs {
                            self.a_pack(self.a_strips - 1, k0, kc, own);
                        }
                        for s in columns.clone().filter(|&s| !self.b_in_passing(s)) {
                            self.b_pack(s, k0, kc, b_at(s, columns.start, own));
                        }
                    }
                };
                let scratch_len = last + self.b_strips.div_ceil(blocks) * K::NR * kc;
                self.pieces(parts, [blocks, cuts, self.p.m], scratch_len, own, |b, piece, first, own| {
                    let (rows, columns) = (cut(self.a_strips, cuts, piece), columns(b));
                    let b_at = |s: usize| b_at(s, columns.start, own);
                    for r in rows.clone() {
                        let a = if packs { [a_at(r), a_at(r + 1)] } else { [own; 2] };
                        let first = first && r == rows.start;
                        // SAFETY: the block is packed, or is by the first row, and all of A.
                        unsafe { self.row(r, columns.clone(), (k0, kc), a, first, &b_at) };
                    }
                    self.finish(rows, columns, k0 + kc, after);
                });
            }
        });
    }

    /// Into how many pieces each of `outer` lines of `strips` is cut: small ones beside the whole, so that nobody waits
    /// long for the last one.
    fn cuts(&self, parts: usize, outer: usize, strips: usize) -> usize {
        let work = self.p.m.saturating_mul(self.p.n).saturating_mul(PANEL.min(self.p.k));
        let piece = (work / (PIECES * parts)).clamp(LEAST_PIECE, MOST_PIECE);
        (work / outer / piece).clamp(1, strips)
    }

    /// Runs `piece(o, 0..cuts, first, own)` for each o of `outer`, where `own` is memory of `scratch_len` numbers that
    /// `pack(o, own)` has prepared: once for neighbouring pieces that one thread gets, before the `first` of them.
    /// Pieces of one o cover `lines`.
    fn pieces(
        &self,
        parts: usize,
        [outer, cuts, lines]: [usize; 3],
        scratch_len: usize,
        pack: impl Fn(usize, *mut T) + Sync,
        piece: impl Fn(usize, usize, bool, *mut T) + Sync,
    ) {
        // What is almost done is not worth packing for.
        let leave = PACKING * cuts / lines;
        parted(parts, outer * cuts, leave, |claims| {
            with_scratch(&OWN, scratch_len, |own: *mut T| {
                let mut packed = usize::MAX;
                for claim in claims {
                    let o = claim / cuts;
                    let first = packed != o;
                    if first {
                        pack(o, own);
                        packed = o;
                    }
                    piece(o, claim % cuts, first, own);
                }
            });
        });
    }

    /// Strip r of A goes over strips of B, while the next of A is fetched. The `first` to do so packs some of them.
    ///
    /// # Safety
    /// They are packed, where they are not direct, at `a` and `b_at`; the tiles are this thread's alone.
    unsafe fn row(
        &self,
        r: usize,
        columns: Range<usize>,
        (k0, kc): (usize, usize),
        [a, next]: [*mut T; 2],
        first: bool,
        b_at: &impl Fn(usize) -> *mut T,
    ) {
        let p = &self.p;
        let i = r * K::MR;
        // SAFETY: strips r and s begin in A, B and C.
        unsafe {
            let (a, ars, aks, next) = match S::plain(p.a.at(i, k0)) {
                // Rows that follow each other are one stretch too.
                Some(plain) if self.a_direct(r) => {
                    let follow = p.a.rs == kc as isize;
                    (plain, p.a.rs, 1, if follow { plain.wrapping_add(K::MR * kc) } else { plain })
                }
                _ => (a.cast_const(), 1, K::MR as isize, next.cast_const()),
            };
            // A tile fetches a line every four steps.
            let part = kc / 4 * (64 / size_of::<T>());
            for (t, s) in columns.enumerate() {
                if k0 == 0 && self.lines > 0 {
                    let first = (r * self.b_strips + s) * self.lines;
                    K::fetch(p.share.next.wrapping_add(64 * first), self.lines);
                }
                let soon = if t * part < K::MR * kc { next.wrapping_add(t * part) } else { a };
                let j = s * K::NR;
                let mut to = std::ptr::null_mut();
                let (b, bks) = match S::plain(p.b.at(k0, j)) {
                    Some(plain) if self.b_direct(s) => (plain, p.b.rs),
                    Some(plain) if first && self.b_in_passing(s) => {
                        to = b_at(s);
                        (plain, p.b.rs)
                    }
                    _ => (b_at(s).cast_const(), K::NR as isize),
                };
                let (rows, cols) = (K::MR.min(p.m - i), K::NR.min(p.n - j));
                let (c, crs, add) = (p.c.at(i, j), p.c.rs, k0 > 0);
                tile::<K, T>(Tile { rows, cols, kc, a, ars, aks, b, bks, c, crs, add, soon, to }, p.c.cs);
            }
        }
    }

    /// Tells of a block of C that the panels up to `k` have made complete.
    fn finish(&self, rows: Range<usize>, columns: Range<usize>, k: usize, after: After<'_>) {
        if k == self.p.k {
            let (i, j) = (rows.start * K::MR, columns.start * K::NR);
            let (m, n) = (self.p.m.min(rows.end * K::MR) - i, self.p.n.min(columns.end * K::NR) - j);
            after(Block { i, m, j, n });
        }
    }

    /// Whether the rows of strip r of A are read where they are.
    fn a_direct(&self, r: usize) -> bool {
        self.a_plain && (r + 1) * K::MR <= self.p.m
    }

    /// Whether more of A is packed than the last strip.
    fn a_packs(&self) -> bool {
        self.a_strips > 1 && !self.a_direct(0)
    }

    /// Whether the columns of strip s of B are read where they are.
    fn b_direct(&self, s: usize) -> bool {
        self.b_plain && (s + 1) * K::NR <= self.p.n
    }

    /// Whether the first tile that reads strip s of B packs it.
    fn b_in_passing(&self, s: usize) -> bool {
        S::PLAIN && (s + 1) * K::NR <= self.p.n && self.p.b.cs == 1 && !self.b_direct(s)
    }

    /// # Safety
    /// `to` has room for a strip of A.
    unsafe fn a_pack(&self, r: usize, k0: usize, kc: usize, to: *mut T) {
        if !self.a_direct(r) {
            // SAFETY: the caller's promise.
            unsafe { pack::<K, S, T>(self.a, r, k0, kc, to) }
        }
    }

    /// # Safety
    /// `to` has room for a strip of B.
    unsafe fn b_pack(&self, s: usize, k0: usize, kc: usize, to: *mut T) {
        if !self.b_direct(s) {
            // SAFETY: the caller's promise.
            unsafe { pack::<K, S, T>(self.b, s, k0, kc, to) }
        }
    }
}

/// Whether rows this far apart fall into the same sets of a cache, so that not many of them stay there.
fn aliased<S>(rs: isize) -> bool {
    (rs.unsigned_abs() * size_of::<S>()).is_multiple_of(4096)
}

/// One of `parts` even parts of `0..n`.
fn cut(n: usize, parts: usize, part: usize) -> Range<usize> {
    part * n / parts..(part + 1) * n / parts
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
        } else {
            K::widen(Strip { from, ls, ks, lines, kc }, width, to);
        }
    }
}

/// One tile, through a local copy where C is strided.
///
/// # Safety
/// As [`Tile`] says, with columns of C `ccs` apart.
unsafe fn tile<K: Kernel<T>, T: Compute>(t: Tile<T>, ccs: isize) {
    if ccs == 1 {
        // SAFETY: the caller's promise.
        return unsafe { K::tile(t) };
    }
    let mut local = [const { MaybeUninit::<T>::uninit() }; MAX_TILE];
    let local = local.as_mut_ptr().cast::<T>();
    let Tile { rows, cols, c, crs, add, .. } = t;
    // SAFETY: the local tiles have room for MR × NR, of which rows × cols are written and then read.
    unsafe {
        K::tile(Tile { c: local, crs: K::NR as isize, add: false, ..t });
        if crs == 1 {
            let mut flipped = [const { MaybeUninit::<T>::uninit() }; MAX_TILE];
            let flipped = flipped.as_mut_ptr().cast::<T>();
            let strip = Strip { from: local.cast_const(), ls: K::NR as isize, ks: 1, lines: rows, kc: cols };
            K::pack(strip, K::MR, flipped);
            for j in 0..cols {
                put(c.offset(j as isize * ccs), 1, flipped.add(j * K::MR), rows, add);
            }
            return;
        }
        for r in 0..rows {
            put(c.offset(r as isize * crs), ccs, local.add(r * K::NR), cols, add);
        }
    }
}
