//! Matrix products whose bits depend on the operands alone.
//!
//! C[i,j] has one order of additions, given by K: K is cut into panels of 512, inside a panel
//! `acc = fma(a[i,k], b[k,j], acc)` from 0 with k ascending, and panels are added up in order. Every path below
//! (direct, chains, rows, packed), every ISA, stride and split keeps that order, so it can be chosen by speed alone.
//! Called by the CPU device, one call a matrix; splits large products over `pool`. Products commute bit for bit
//! (except for which NaN comes out of two), so operands are exchanged where that suits the layout of C.
//! Deliberately absent: alpha, beta, epilogues, batches.

use crate::arena::{Arena, Buffer, Place};
use crate::pool;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};
use std::thread::LocalKey;

/// A matrix to read: element (i, j) is at `ptr + i * rs + j * cs`, counted in elements. Strides may be 0 or negative.
#[derive(Debug)]
pub struct Mat<T> {
    /// Element (0, 0).
    pub ptr: *const T,
    /// Distance between rows.
    pub rs: isize,
    /// Distance between columns.
    pub cs: isize,
}

/// A matrix to write; as [`Mat`], but its elements must not overlap.
#[derive(Debug)]
pub struct MatMut<T> {
    /// Element (0, 0).
    pub ptr: *mut T,
    /// Distance between rows.
    pub rs: isize,
    /// Distance between columns.
    pub cs: isize,
}

/// C = A B for floats, with A of m × k, B of k × n and C of m × n. With k = 0 it writes zeros.
///
/// # Safety
/// All elements of `a` and `b` are readable and all of `c` writable for the call; those of `c` are distinct, overlap
/// neither input, and nobody else accesses them meanwhile.
pub unsafe fn gemm<T: GemmScalar>(m: usize, n: usize, k: usize, a: Mat<T>, b: Mat<T>, c: MatMut<T>) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { T::run(isa(), Product { m, n, k, a, b, c }) }
}

/// C = A B for `f16` and `bf16`: the order of [`gemm`] in `f32` over the whole of K, rounded once at the end.
///
/// # Safety
/// As for [`gemm`].
pub unsafe fn gemm_half<H: Half>(m: usize, n: usize, k: usize, a: Mat<H>, b: Mat<H>, c: MatMut<H>) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { half_on(isa(), Product { m, n, k, a, b, c }) }
}

/// C = A B for integers, modulo 2 to the number of bits.
///
/// # Safety
/// As for [`gemm`].
pub unsafe fn gemm_int<T: GemmInt>(m: usize, n: usize, k: usize, a: Mat<T>, b: Mat<T>, c: MatMut<T>) {
    let mut p = Product { m, n, k, a, b, c };
    if p.c.cs != 1 && p.c.rs == 1 {
        p = p.swapped();
    }
    let rows = (p.work() >= PARALLEL_WORK).then(|| p.m.div_ceil(4 * pool::threads()).max(1));
    let rows = rows.unwrap_or(p.m.max(1));
    pool::parallel(p.m.div_ceil(rows), &|chunk| {
        for i in chunk * rows..p.m.min((chunk + 1) * rows) {
            // SAFETY: the caller's promise; chunks write distinct rows.
            unsafe { int_row(p, i) };
        }
    });
}

/// Instruction sets that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// 512-bit vectors.
    Avx512,
    /// 256-bit vectors with FMA.
    Avx2,
    /// What every machine has; slow on an x86 without FMA, which then is computed in software.
    Interp,
}

/// The instruction set in use: the best that is here, or what `KILN_ISA=avx512|avx2|interp` names if that is here.
pub fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        let asked = std::env::var("KILN_ISA").ok();
        let named = Isa::ALL.into_iter().find(|isa| Some(isa.name()) == asked.as_deref());
        let best = Isa::ALL.into_iter().find(|isa| isa.supported()).unwrap_or(Isa::Interp);
        named.filter(|isa| isa.supported()).unwrap_or(best)
    })
}

impl Isa {
    /// All of them, fastest first.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Interp];

    /// As in `KILN_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Interp => "interp",
        }
    }

    /// Whether this machine has it.
    pub fn supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => is_x86_feature_detected!("avx512f") && Isa::Avx2.supported(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
            Isa::Interp => true,
        }
    }
}

/// `f32` and `f64`.
pub trait GemmScalar: sealed::Compute {}

/// `f16` and `bf16`.
pub trait Half: sealed::Source<f32> + sealed::Narrow {}

/// All integers of 8 to 64 bits.
pub trait GemmInt: Copy + Default + Send + Sync + 'static {
    /// `acc + a * b`, wrapping.
    fn muladd(a: Self, b: Self, acc: Self) -> Self;
}

macro_rules! ints {
    ($($t:ty)*) => {$(
        impl GemmInt for $t {
            #[inline(always)]
            fn muladd(a: Self, b: Self, acc: Self) -> Self {
                acc.wrapping_add(a.wrapping_mul(b))
            }
        }
    )*};
}
ints!(i8 i16 i32 i64 u8 u16 u32 u64);

impl<T> Clone for Mat<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Mat<T> {}
impl<T> Clone for MatMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for MatMut<T> {}

// SAFETY: views are addresses and strides; the promise of whoever multiplies them holds for any thread of the call.
unsafe impl<T: Sync> Send for Mat<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mat<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for MatMut<T> {}
// SAFETY: as above; chunks of a call write distinct parts.
unsafe impl<T: Send> Sync for MatMut<T> {}

impl<T> Mat<T> {
    fn swapped(self) -> Self {
        Mat { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }

    /// # Safety
    /// (i, j) is in the matrix.
    #[inline(always)]
    unsafe fn at(self, i: usize, j: usize) -> *const T {
        // SAFETY: the caller's promise.
        unsafe { self.ptr.offset(i as isize * self.rs + j as isize * self.cs) }
    }
}

impl<T> MatMut<T> {
    fn swapped(self) -> Self {
        MatMut { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }

    /// # Safety
    /// (i, j) is in the matrix.
    #[inline(always)]
    unsafe fn at(self, i: usize, j: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.ptr.offset(i as isize * self.rs + j as isize * self.cs) }
    }
}

/// The terms of the order: also the most of K that a packed strip holds.
const PANEL: usize = 512;
/// Up to this many multiplications packing costs more than it saves.
const DIRECT_WORK: usize = 4096;
/// From this many on (about 6 µs on one core) waking a worker pays.
const PARALLEL_WORK: usize = 1 << 19;
/// Up to this many, each thread packs all it needs: packing twice is cheaper than fetching from another core's cache.
const APART_WORK: usize = 20 << 20;
/// An operand this thin is read once, so speed is that of memory.
const SKINNY: usize = 4;
/// Both packed sides of one chunk stay in a 2 MiB L2.
const OWN_BYTES: usize = 256 << 10;
const SHARED_BYTES: usize = 2 << 20;

/// One call: operands of S computed in T.
struct Product<S, T> {
    m: usize,
    n: usize,
    k: usize,
    a: Mat<S>,
    b: Mat<S>,
    c: MatMut<T>,
}

impl<S, T> Clone for Product<S, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S, T> Copy for Product<S, T> {}

impl<S, T> Product<S, T> {
    /// The same product as seen from the transposed C.
    fn swapped(self) -> Self {
        let Product { m, n, k, a, b, c } = self;
        Product { m: n, n: m, k, a: b.swapped(), b: a.swapped(), c: c.swapped() }
    }

    fn work(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    /// Worth splitting. Thin products count what they read: they wait for memory.
    fn wide(&self) -> bool {
        let read = (self.m.saturating_add(self.n)).saturating_mul(self.k);
        self.work().max(read.saturating_mul(4)) >= PARALLEL_WORK
    }
}

/// Panels of K as (start, length).
fn panels(k: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..k).step_by(PANEL).map(move |at| (at, PANEL.min(k - at)))
}

/// Picks the path.
///
/// # Safety
/// As for `gemm`, and the instruction set of `K` is supported.
unsafe fn route<K: Kernel<T>, S: sealed::Source<T>, T: sealed::Compute>(mut p: Product<S, T>) {
    if p.m == 0 || p.n == 0 {
        return;
    }
    if p.k == 0 {
        // SAFETY: the caller's promise.
        return unsafe { fill(p.m, p.n, p.c) };
    }
    let thin = p.m.min(p.n) <= SKINNY;
    if (thin && p.n < p.m) || (!thin && p.c.cs != 1 && p.c.rs == 1) {
        p = p.swapped();
    }
    // SAFETY: the caller's promise in all four.
    unsafe {
        if p.n <= SKINNY && p.k > 2 * PANEL {
            chains::<K, S, T>(p);
        } else if p.work() <= DIRECT_WORK {
            K::direct(p);
        } else if thin && p.b.cs == 1 {
            rows::<K, S, T>(p);
        } else {
            packed::<K, S, T>(p);
        }
    }
}

/// # Safety
/// As for `gemm`.
unsafe fn fill<T: Copy + Default>(m: usize, n: usize, c: MatMut<T>) {
    for i in 0..m {
        for j in 0..n {
            // SAFETY: the caller's promise.
            unsafe { c.at(i, j).write(T::default()) };
        }
    }
}

// ---- packed: the general path ----

/// Copies one operand by strips (MR rows of A, NR columns of B), so that the tile kernel reads both in sequence. The
/// side with more strips is cut into chunks, each packed by whoever computes it; the other is packed once for all.
///
/// # Safety
/// As for `route`.
unsafe fn packed<K: Kernel<T>, S: sealed::Source<T>, T: sealed::Compute>(p: Product<S, T>) {
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
unsafe fn packed_by<K: Kernel<T>, S: sealed::Source<T>, T: sealed::Compute>(
    p: Product<S, T>,
    threads: usize,
) {
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

/// A scratch pointer that chunks share, each for its own strips.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: chunks write disjoint strips, and read them only after all are written.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn get(self) -> *mut T {
        self.0
    }
}

/// Packs strip `strip` of panel (k0, kc): `to[k * width + line]`, zeros for lines past the end.
///
/// # Safety
/// The operand is readable and `to` has room for width · kc.
unsafe fn pack<K: Kernel<T>, S: sealed::Source<T>, T: sealed::Compute>(
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
unsafe fn tile<K: Kernel<T>, S, T: sealed::Compute>(
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

/// Writes one panel's sums of a row to C, or adds them to what the panels before gave.
///
/// # Safety
/// `c` is writable at n places `cs` apart, `from` readable.
#[inline(always)]
unsafe fn put<T: sealed::Compute>(c: *mut T, cs: isize, from: *const T, n: usize, add: bool) {
    for j in 0..n {
        // SAFETY: the caller's promise.
        unsafe {
            let (c, x) = (c.offset(j as isize * cs), *from.add(j));
            *c = if add { (*c).plus(x) } else { x };
        }
    }
}

// ---- rows: few rows of A, B contiguous along its rows ----

/// Streams B once, in blocks of columns whose sums stay in L1.
///
/// # Safety
/// As for `route`; m ≤ SKINNY and B's column stride is 1.
unsafe fn rows<K: Kernel<T>, S: sealed::Source<T>, T: sealed::Compute>(p: Product<S, T>) {
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
    };
    let chunks = p.n.div_ceil(width);
    if wide { pool::parallel(chunks, &chunk) } else { (0..chunks).for_each(chunk) }
}

/// Bytes of sums for a row of A: four of them and four rows of B fill two thirds of a 48 KiB L1.
const SUMS: usize = 4096;
const STAGED_ROWS: usize = 8;

// ---- chains: few outputs, long K ----

/// Panels are independent until they are added up, so eight of them hide the latency of the additions.
///
/// # Safety
/// As for `route`; m, n ≤ SKINNY.
unsafe fn chains<K: Kernel<T>, S: sealed::Source<T>, T: sealed::Compute>(p: Product<S, T>) {
    let (count, outputs) = (p.k.div_ceil(PANEL), p.m * p.n);
    let groups = count.div_ceil(CHAINS);
    with_scratch(&SHARED, groups * CHAINS * outputs, |sums: *mut T| {
        let at = Shared(sums);
        let group = |g: usize| {
            let k0 = g * CHAINS * PANEL;
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
                    put(p.c.at(out / p.n, out % p.n), 1, from, 1, panel > 0);
                }
            }
        }
    });
}

const CHAINS: usize = 8;

/// # Safety
/// `length` ≤ CHAINS · PANEL elements are readable from `a` and `b`, and CHAINS writable at `to`.
#[inline(always)]
unsafe fn chains_body<S: sealed::Source<T>, T: sealed::Compute>(
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

// ---- direct: small products ----

/// Sixteen outputs of a row at a time, straight from the operands.
///
/// # Safety
/// As for `gemm`.
#[inline(always)]
unsafe fn direct_body<S: sealed::Source<T>, T: sealed::Compute>(p: Product<S, T>) {
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

// ---- half and integer ----

/// # Safety
/// As for `gemm`, and `isa` is supported.
unsafe fn half_on<H: Half>(isa: Isa, p: Product<H, H>) {
    if p.m == 0 || p.n == 0 {
        return;
    }
    let (m_most, n_most) = (p.m.min((HALF_BLOCK / p.n).max(1024)), p.n.min((HALF_BLOCK / p.m).max(1024)));
    for i in (0..p.m).step_by(m_most) {
        for j in (0..p.n).step_by(n_most) {
            let (m, n) = (m_most.min(p.m - i), n_most.min(p.n - j));
            with_scratch(&SUMMED, m * n, |sums: *mut f32| {
                // SAFETY: the block is in C, and the scratch holds one.
                unsafe {
                    let c = MatMut { ptr: sums, rs: n as isize, cs: 1 };
                    let a = Mat { ptr: p.a.at(i, 0), ..p.a };
                    let b = Mat { ptr: p.b.at(0, j), ..p.b };
                    let block = Product { m, n, k: p.k, a, b, c };
                    <f32 as sealed::Compute>::run(isa, block);
                    let wide = block.wide();
                    let out = MatMut { ptr: p.c.at(i, j), ..p.c };
                    round(wide, m, n, Shared(sums), out);
                }
            });
        }
    }
}

/// Elements of C summed in `f32` at a time: 4 MiB.
const HALF_BLOCK: usize = 1 << 20;

/// # Safety
/// `sums` holds m × n in row order; `c` as for `gemm`.
unsafe fn round<H: Half>(wide: bool, m: usize, n: usize, sums: Shared<f32>, c: MatMut<H>) {
    let rows = if wide { m.div_ceil(2 * pool::threads()) } else { m };
    let to = Shared(c.ptr);
    pool::parallel(m.div_ceil(rows), &|chunk| {
        for i in chunk * rows..m.min((chunk + 1) * rows) {
            // SAFETY: the caller's promise; chunks have distinct rows.
            unsafe {
                let (from, line) = (sums.get().add(i * n), to.get().offset(i as isize * c.rs));
                if c.cs == 1 {
                    H::narrow_line(from, n, line);
                } else {
                    for j in 0..n {
                        *line.offset(j as isize * c.cs) = H::narrow(*from.add(j));
                    }
                }
            }
        }
    });
}

/// Row i of C. Integer sums are exact modulo the word, so any order will do.
///
/// # Safety
/// As for `gemm`; i is below m.
unsafe fn int_row<T: GemmInt>(p: Product<T, T>, i: usize) {
    for j in (0..p.n).step_by(INT_COLUMNS) {
        let w = INT_COLUMNS.min(p.n - j);
        let mut sums = [T::default(); INT_COLUMNS];
        let sums = &mut sums[..w];
        for k in 0..p.k {
            // SAFETY: i, k and columns j..j + w are in the operands.
            unsafe {
                let (x, row) = (*p.a.at(i, k), p.b.at(k, j));
                if p.b.cs == 1 {
                    let row = std::slice::from_raw_parts(row, w);
                    for (sum, &y) in sums.iter_mut().zip(row) {
                        *sum = T::muladd(x, y, *sum);
                    }
                } else {
                    for (l, sum) in sums.iter_mut().enumerate() {
                        *sum = T::muladd(x, *row.offset(l as isize * p.b.cs), *sum);
                    }
                }
            }
        }
        for (l, &sum) in sums.iter().enumerate() {
            // SAFETY: (i, j + l) is in C.
            unsafe { *p.c.at(i, j + l) = sum };
        }
    }
}

const INT_COLUMNS: usize = 128;

// ---- scratch ----

thread_local! {
    static SHARED: Cell<Option<Buffer>> = const { Cell::new(None) };
    static OWN: Cell<Option<Buffer>> = const { Cell::new(None) };
    static STAGE: Cell<Option<Buffer>> = const { Cell::new(None) };
    static SUMMED: Cell<Option<Buffer>> = const { Cell::new(None) };
}

/// Memory for `n` numbers, kept by the thread for the next call. Taken out while in use, so that a nested use would
/// get memory of its own. T is a plain number.
fn with_scratch<T: Copy>(key: &'static LocalKey<Cell<Option<Buffer>>>, n: usize, f: impl FnOnce(*mut T)) {
    static ARENA: OnceLock<Arc<Arena>> = OnceLock::new();
    let bytes = n * size_of::<T>();
    let memory = key.take().filter(|memory| memory.len() >= bytes).unwrap_or_else(|| {
        // At least a huge page: packed strips are read in sequence, and page by page in small ones.
        let size = bytes.next_multiple_of(2 << 20);
        let memory = ARENA.get_or_init(|| Arena::new(None)).alloc(size, Place::Persistent);
        memory.unwrap_or_else(|exhausted| panic!("scratch of a matrix product: {exhausted}"))
    });
    f(memory.as_mut_ptr().cast());
    key.set(Some(memory));
}

// ---- element types ----

mod sealed {
    use super::{Isa, Product};

    /// A type to compute in.
    pub trait Compute: Copy + Default + Send + Sync + Source<Self> + 'static {
        /// `self * b + acc`, rounded once.
        fn fma(self, b: Self, acc: Self) -> Self;
        fn plus(self, other: Self) -> Self;
        /// # Safety
        /// As for `gemm`, and `isa` is supported.
        #[allow(private_interfaces)]
        unsafe fn run<S: Source<Self>>(isa: Isa, p: Product<S, Self>);
    }

    /// An operand's type, that widens to T exactly.
    pub trait Source<T>: Copy + Send + Sync + 'static {
        /// Whether it is T itself.
        const PLAIN: bool;
        fn plain(from: *const Self) -> Option<*const T>;
        fn widen(self) -> T;
        /// # Safety
        /// n are readable at `from` and writable at `to`.
        unsafe fn widen_line(from: *const Self, n: usize, to: *mut T);
    }

    /// A type to round to.
    pub trait Narrow: Copy + Send + Sync + 'static {
        fn narrow(x: f32) -> Self;
        /// # Safety
        /// n are readable at `from` and writable at `to`.
        unsafe fn narrow_line(from: *const f32, n: usize, to: *mut Self);
    }
}

macro_rules! floats {
    ($($t:ty)*) => {$(
        impl GemmScalar for $t {}

        impl sealed::Compute for $t {
            #[inline(always)]
            fn fma(self, b: Self, acc: Self) -> Self {
                self.mul_add(b, acc)
            }

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[allow(private_interfaces)]
            unsafe fn run<S: sealed::Source<Self>>(isa: Isa, p: Product<S, Self>) {
                // SAFETY: the caller's promise.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 => route::<x86::Avx512, S, Self>(p),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => route::<x86::Avx2, S, Self>(p),
                        #[cfg(not(target_arch = "x86_64"))]
                        Isa::Avx512 | Isa::Avx2 => route::<Portable, S, Self>(p),
                        Isa::Interp => route::<Portable, S, Self>(p),
                    }
                }
            }
        }

        impl sealed::Source<$t> for $t {
            const PLAIN: bool = true;

            #[inline(always)]
            fn plain(from: *const Self) -> Option<*const $t> {
                Some(from)
            }

            #[inline(always)]
            fn widen(self) -> $t {
                self
            }

            unsafe fn widen_line(from: *const Self, n: usize, to: *mut $t) {
                // SAFETY: the caller's promise.
                unsafe { to.copy_from_nonoverlapping(from, n) }
            }
        }
    )*};
}
floats!(f32 f64);

macro_rules! halves {
    ($($t:ident)*) => {$(
        impl Half for $t {}

        impl sealed::Source<f32> for $t {
            const PLAIN: bool = false;

            #[inline(always)]
            fn plain(_: *const Self) -> Option<*const f32> {
                None
            }

            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }

            unsafe fn widen_line(from: *const Self, n: usize, to: *mut f32) {
                // SAFETY: the caller's promise.
                let from = unsafe { std::slice::from_raw_parts(from, n) };
                // SAFETY: the caller's promise; scratch memory is initialised.
                let to = unsafe { std::slice::from_raw_parts_mut(to, n) };
                from.convert_to_f32_slice(to);
            }
        }

        impl sealed::Narrow for $t {
            fn narrow(x: f32) -> Self {
                $t::from_f32(x)
            }

            unsafe fn narrow_line(from: *const f32, n: usize, to: *mut Self) {
                for j in 0..n {
                    // SAFETY: the caller's promise.
                    unsafe { to.add(j).write($t::from_f32(*from.add(j))) };
                }
            }
        }
    )*};
}
halves!(f16 bf16);

// ---- kernels: the same bodies, compiled once for each instruction set ----

/// Part of one operand to pack.
struct Strip<T> {
    from: *const T,
    ls: isize,
    ks: isize,
    lines: usize,
    kc: usize,
}

/// The inner loops. All are unsafe to call where the instruction set is missing.
trait Kernel<T: sealed::Compute>: 'static {
    /// Rows and columns of a tile.
    const MR: usize;
    const NR: usize;

    /// `c[r][..NR]` = or += the sums over `kc` of strips `a` and `b`, for r < rows.
    ///
    /// # Safety
    /// Strips as `pack` lays them out; the rows of `c` are writable.
    unsafe fn tile(rows: usize, kc: usize, a: *const T, b: *const T, c: *mut T, crs: isize, add: bool);

    /// # Safety
    /// The strip is readable and `to` has room for width · kc.
    unsafe fn pack(strip: Strip<T>, width: usize, to: *mut T);

    /// `sums[i][..w] += a[k][i] * b[k][..w]` for k ascending; rows of `sums` are `width` apart.
    ///
    /// # Safety
    /// All of that is in memory.
    #[allow(clippy::too_many_arguments)]
    unsafe fn rows(
        m: usize,
        kc: usize,
        a: *const T,
        b: *const T,
        brs: isize,
        sums: *mut T,
        width: usize,
        w: usize,
    );

    /// # Safety
    /// As for `chains_body`.
    unsafe fn chains<S: sealed::Source<T>>(
        length: usize,
        a: *const S,
        sa: isize,
        b: *const S,
        sb: isize,
        to: *mut T,
    );

    /// # Safety
    /// As for `gemm`.
    unsafe fn direct<S: sealed::Source<T>>(p: Product<S, T>);
}

/// A register of numbers. Unsafe to use where its instructions are missing.
trait Vector: Copy {
    type T: sealed::Compute;
    const LANES: usize;
    unsafe fn splat(x: Self::T) -> Self;
    unsafe fn load(from: *const Self::T) -> Self;
    unsafe fn store(self, to: *mut Self::T);
    unsafe fn fma(self, b: Self, acc: Self) -> Self;
    unsafe fn plus(self, other: Self) -> Self;
    /// Fetches the line of an address that need not be valid.
    fn ahead(at: *const Self::T);
    /// Packs as much of K as comes in whole blocks from lines contiguous along K, and returns how much that is.
    unsafe fn transpose(strip: &Strip<Self::T>, width: usize, to: *mut Self::T) -> usize;
}

const MAX_TILE: usize = 12 * 32;

/// # Safety
/// As for `Kernel::tile`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_body<V: Vector, const MR: usize>(
    rows: usize,
    kc: usize,
    a: *const V::T,
    b: *const V::T,
    c: *mut V::T,
    crs: isize,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows <= 4 && MR > 4 {
            tile_rows::<V, 4>(MR, rows, kc, a, b, c, crs, add);
        } else if rows <= 8 && MR > 8 {
            tile_rows::<V, 8>(MR, rows, kc, a, b, c, crs, add);
        } else {
            tile_rows::<V, MR>(MR, rows, kc, a, b, c, crs, add);
        }
    }
}

/// # Safety
/// As for `Kernel::tile`; rows ≤ R ≤ mr.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_rows<V: Vector, const R: usize>(
    mr: usize,
    rows: usize,
    kc: usize,
    mut a: *const V::T,
    mut b: *const V::T,
    c: *mut V::T,
    crs: isize,
    add: bool,
) {
    // SAFETY: strips have kc steps of mr and 2 · LANES numbers, and rows of `c` have 2 · LANES.
    unsafe {
        let zero = V::splat(V::T::default());
        // Rows of C are far apart, so no hardware prefetch finds them; measured 3 to 6 % from n = 1024 on.
        for r in 0..rows {
            let c = c.wrapping_offset(r as isize * crs);
            V::ahead(c);
            V::ahead(c.wrapping_add(2 * V::LANES - 1));
        }
        let mut acc = [[zero; 2]; R];
        for _ in 0..kc {
            let (b0, b1) = (V::load(b), V::load(b.add(V::LANES)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = V::splat(*a.add(r));
                acc[0] = x.fma(b0, acc[0]);
                acc[1] = x.fma(b1, acc[1]);
            }
            a = a.add(mr);
            b = b.add(2 * V::LANES);
        }
        for (r, acc) in acc.into_iter().enumerate() {
            if r < rows {
                let c = c.offset(r as isize * crs);
                for (h, x) in acc.into_iter().enumerate() {
                    let c = c.add(h * V::LANES);
                    if add { V::load(c).plus(x).store(c) } else { x.store(c) }
                }
            }
        }
    }
}

/// # Safety
/// As for `Kernel::pack`.
#[inline(always)]
unsafe fn pack_body<V: Vector>(strip: Strip<V::T>, width: usize, to: *mut V::T) {
    let Strip { from, ls, ks, lines, kc } = strip;
    // SAFETY: the caller's promise; lines ≤ width.
    unsafe {
        if ls == 1 && lines == width && width.is_multiple_of(V::LANES) {
            for k in 0..kc {
                let from = from.offset(k as isize * ks);
                for l in (0..width).step_by(V::LANES) {
                    V::load(from.add(l)).store(to.add(k * width + l));
                }
            }
            return;
        }
        let done = if ks == 1 { V::transpose(&strip, width, to) } else { 0 };
        for k in done..kc {
            let (from, to) = (from.offset(k as isize * ks), to.add(k * width));
            if ls == 1 {
                to.copy_from_nonoverlapping(from, lines);
            } else {
                for l in 0..lines {
                    *to.add(l) = *from.offset(l as isize * ls);
                }
            }
            to.add(lines).write_bytes(0, width - lines);
        }
    }
}

/// # Safety
/// As for `Kernel::rows`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn rows_body<V: Vector, const M: usize>(
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
    use sealed::Compute;
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

macro_rules! kernels {
    ($($isa:ident, $t:ty, $v:ty, $mr:literal $(, $feature:literal)?;)*) => {$(
        impl Kernel<$t> for $isa {
            const MR: usize = $mr;
            const NR: usize = 2 * <$v as Vector>::LANES;

            $(#[target_feature(enable = $feature)])?
            unsafe fn tile(
                rows: usize, kc: usize, a: *const $t, b: *const $t, c: *mut $t, crs: isize, add: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe { tile_body::<$v, $mr>(rows, kc, a, b, c, crs, add) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack(strip: Strip<$t>, width: usize, to: *mut $t) {
                // SAFETY: the caller's promise.
                unsafe { pack_body::<$v>(strip, width, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn rows(
                m: usize, kc: usize, a: *const $t, b: *const $t, brs: isize, sums: *mut $t, width: usize, w: usize,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    match m {
                        1 => rows_body::<$v, 1>(kc, a, b, brs, sums, width, w),
                        2 => rows_body::<$v, 2>(kc, a, b, brs, sums, width, w),
                        3 => rows_body::<$v, 3>(kc, a, b, brs, sums, width, w),
                        4 => rows_body::<$v, 4>(kc, a, b, brs, sums, width, w),
                        _ => unreachable!("more rows than SKINNY"),
                    }
                }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn chains<S: sealed::Source<$t>>(
                length: usize, a: *const S, sa: isize, b: *const S, sb: isize, to: *mut $t,
            ) {
                // SAFETY: the caller's promise.
                unsafe { chains_body(length, a, sa, b, sb, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn direct<S: sealed::Source<$t>>(p: Product<S, $t>) {
                // SAFETY: the caller's promise.
                unsafe { direct_body(p) }
            }
        }
    )*};
}

/// Plain arrays, for the compiler to vectorise as it can.
struct Portable;

kernels! {
    Portable, f32, Lanes<f32>, 4;
    Portable, f64, Lanes<f64>, 4;
}

#[derive(Clone, Copy)]
struct Lanes<T>([T; 4]);

impl<T: sealed::Compute> Vector for Lanes<T> {
    type T = T;
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        Lanes([x; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller's promise.
        Lanes(unsafe { from.cast::<[T; 4]>().read() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[T; 4]>().write(self.0) }
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, acc: Self) -> Self {
        Lanes(std::array::from_fn(|i| self.0[i].fma(b.0[i], acc.0[i])))
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        Lanes(std::array::from_fn(|i| self.0[i].plus(other.0[i])))
    }

    #[inline(always)]
    fn ahead(_: *const T) {}

    #[inline(always)]
    unsafe fn transpose(_: &Strip<T>, _: usize, _: *mut T) -> usize {
        0
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    pub struct Avx512;
    pub struct Avx2;

    // 12 × 2 sums leave 8 of 32 registers for B and the broadcast of A; 6 × 2 leave 4 of 16.
    kernels! {
        Avx512, f32, __m512, 12, "avx512f";
        Avx512, f64, __m512d, 12, "avx512f";
        Avx2, f32, __m256, 6, "avx2,fma";
        Avx2, f64, __m256d, 6, "avx2,fma";
    }

    macro_rules! vectors {
        ($($v:ty, $t:ty, $n:literal, $splat:ident $load:ident $store:ident $fma:ident $add:ident $flip:ident;)*) => {$(
            impl Vector for $v {
                type T = $t;
                const LANES: usize = $n;

                #[inline(always)]
                unsafe fn splat(x: $t) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $splat(x) }
                }

                #[inline(always)]
                unsafe fn load(from: *const $t) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $load(from) }
                }

                #[inline(always)]
                unsafe fn store(self, to: *mut $t) {
                    // SAFETY: the caller's promise.
                    unsafe { $store(to, self) }
                }

                #[inline(always)]
                unsafe fn fma(self, b: Self, acc: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $fma(self, b, acc) }
                }

                #[inline(always)]
                unsafe fn plus(self, other: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $add(self, other) }
                }

                #[inline(always)]
                fn ahead(at: *const $t) {
                    // SAFETY: a prefetch reads nothing, and every x86-64 has it.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
                }

                #[inline(always)]
                unsafe fn transpose(strip: &Strip<$t>, width: usize, to: *mut $t) -> usize {
                    // SAFETY: the caller's promise.
                    unsafe { $flip(strip, width, to) }
                }
            }
        )*};
    }

    vectors! {
        __m512, f32, 16, _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_fmadd_ps _mm512_add_ps flip_f32;
        __m512d, f64, 8, _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_fmadd_pd _mm512_add_pd flip_f64;
        __m256, f32, 8, _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps flip_f32;
        __m256d, f64, 4, _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_fmadd_pd _mm256_add_pd flip_f64;
    }

    /// (step, line) of blocks to transpose one after the other: the part of the strip they write stays in L1.
    #[inline(always)]
    fn blocks(kc: usize, steps: usize, width: usize, lines: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..kc).step_by(steps).flat_map(move |k| (0..width).step_by(lines).map(move |line| (k, line)))
    }

    /// Fetches the next 256 bytes of each line: a block is too short for the hardware to see a stream.
    ///
    /// # Safety
    /// SSE is there; the addresses need not be.
    #[inline(always)]
    unsafe fn ahead<T>(strip: &Strip<T>, group: usize, lines: usize, k: usize) {
        for line in 0..lines {
            let at =
                strip.from.wrapping_offset((group + line) as isize * strip.ls).wrapping_add(k).cast::<i8>();
            for part in 0..4 {
                // SAFETY: a prefetch reads nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(64 * part)) };
            }
        }
    }

    /// Transposes by 8 × 8.
    ///
    /// # Safety
    /// As for `Vector::transpose`.
    #[inline(always)]
    unsafe fn flip_f32(strip: &Strip<f32>, width: usize, to: *mut f32) -> usize {
        let done = strip.kc / 8 * 8;
        for (start, group) in blocks(done, 64, width, 8) {
            let lines = strip.lines.saturating_sub(group).min(8);
            let keep = (width - group).min(8);
            // SAFETY: lines below `strip.lines` and steps below kc are readable; the mask cuts stores to the strip.
            unsafe {
                ahead(strip, group, lines, start + 64);
                let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(keep as i32), lane);
                for k in (start..done.min(start + 64)).step_by(8) {
                    let line = |l: usize| strip.from.offset((group + l) as isize * strip.ls).add(k);
                    if lines == 8 {
                        let x = flip8(std::array::from_fn(|l| _mm256_loadu_ps(line(l))));
                        for (s, x) in x.into_iter().enumerate() {
                            _mm256_storeu_ps(to.add((k + s) * width + group), x);
                        }
                        continue;
                    }
                    let mut x = [_mm256_setzero_ps(); 8];
                    for (l, x) in x.iter_mut().enumerate().take(lines) {
                        *x = _mm256_loadu_ps(line(l));
                    }
                    for (s, x) in flip8(x).into_iter().enumerate() {
                        _mm256_maskstore_ps(to.add((k + s) * width + group), mask, x);
                    }
                }
            }
        }
        done
    }

    /// # Safety
    /// AVX is there.
    #[inline(always)]
    unsafe fn flip8(x: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: the caller's promise.
        unsafe {
            let lo = |i: usize| _mm256_unpacklo_ps(x[i], x[i + 1]);
            let hi = |i: usize| _mm256_unpackhi_ps(x[i], x[i + 1]);
            let quads = |i: usize| {
                let (l0, h0, l1, h1) = (lo(i), hi(i), lo(i + 2), hi(i + 2));
                [
                    _mm256_shuffle_ps::<0x44>(l0, l1),
                    _mm256_shuffle_ps::<0xee>(l0, l1),
                    _mm256_shuffle_ps::<0x44>(h0, h1),
                    _mm256_shuffle_ps::<0xee>(h0, h1),
                ]
            };
            let (p, q) = (quads(0), quads(4));
            [
                _mm256_permute2f128_ps::<0x20>(p[0], q[0]),
                _mm256_permute2f128_ps::<0x20>(p[1], q[1]),
                _mm256_permute2f128_ps::<0x20>(p[2], q[2]),
                _mm256_permute2f128_ps::<0x20>(p[3], q[3]),
                _mm256_permute2f128_ps::<0x31>(p[0], q[0]),
                _mm256_permute2f128_ps::<0x31>(p[1], q[1]),
                _mm256_permute2f128_ps::<0x31>(p[2], q[2]),
                _mm256_permute2f128_ps::<0x31>(p[3], q[3]),
            ]
        }
    }

    /// Transposes by 4 × 4.
    ///
    /// # Safety
    /// As for `Vector::transpose`.
    #[inline(always)]
    unsafe fn flip_f64(strip: &Strip<f64>, width: usize, to: *mut f64) -> usize {
        let done = strip.kc / 4 * 4;
        for (start, group) in blocks(done, 32, width, 4) {
            let lines = strip.lines.saturating_sub(group).min(4);
            let keep = (width - group).min(4);
            // SAFETY: lines below `strip.lines` and steps below kc are readable; the mask cuts stores to the strip.
            unsafe {
                ahead(strip, group, lines, start + 32);
                let lane = _mm256_setr_epi64x(0, 1, 2, 3);
                let mask = _mm256_cmpgt_epi64(_mm256_set1_epi64x(keep as i64), lane);
                for k in (start..done.min(start + 32)).step_by(4) {
                    let mut x = [_mm256_setzero_pd(); 4];
                    for (l, x) in x.iter_mut().enumerate() {
                        if l < lines {
                            *x = _mm256_loadu_pd(strip.from.offset((group + l) as isize * strip.ls).add(k));
                        }
                    }
                    let (l0, h0) = (_mm256_unpacklo_pd(x[0], x[1]), _mm256_unpackhi_pd(x[0], x[1]));
                    let (l1, h1) = (_mm256_unpacklo_pd(x[2], x[3]), _mm256_unpackhi_pd(x[2], x[3]));
                    let y = [
                        _mm256_permute2f128_pd::<0x20>(l0, l1),
                        _mm256_permute2f128_pd::<0x20>(h0, h1),
                        _mm256_permute2f128_pd::<0x31>(l0, l1),
                        _mm256_permute2f128_pd::<0x31>(h0, h1),
                    ];
                    for (s, y) in y.into_iter().enumerate() {
                        let to = to.add((k + s) * width + group);
                        if keep == 4 { _mm256_storeu_pd(to, y) } else { _mm256_maskstore_pd(to, mask, y) }
                    }
                }
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    /// What a test needs to know of an element type.
    trait Number: Copy + Default + Debug + 'static {
        fn from_f64(x: f64) -> Self;
        fn bits(self) -> u64;
        /// The product by its definition.
        fn dot(k: usize, a: impl Fn(usize) -> Self, b: impl Fn(usize) -> Self) -> Self;
        unsafe fn run(isa: Isa, p: Product<Self, Self>);
    }

    macro_rules! float_numbers {
        ($($t:ident, $w:ident, $widen:expr, $narrow:expr, $run:expr;)*) => {$(
            impl Number for $t {
                fn from_f64(x: f64) -> Self {
                    $narrow(x as $w)
                }
                fn bits(self) -> u64 {
                    self.to_bits() as u64
                }
                fn dot(k: usize, a: impl Fn(usize) -> Self, b: impl Fn(usize) -> Self) -> Self {
                    let mut total = 0.0;
                    for (k0, kc) in panels(k) {
                        let sum = (k0..k0 + kc).fold(0.0, |acc, k| $widen(a(k)).mul_add($widen(b(k)), acc));
                        total = if k0 == 0 { sum } else { total + sum };
                    }
                    $narrow(total)
                }
                unsafe fn run(isa: Isa, p: Product<Self, Self>) {
                    // SAFETY: the caller's promise.
                    unsafe { $run(isa, p) }
                }
            }
        )*};
    }

    float_numbers! {
        f32, f32, |x: f32| x, |x: f32| x, <f32 as sealed::Compute>::run;
        f64, f64, |x: f64| x, |x: f64| x, <f64 as sealed::Compute>::run;
        f16, f32, f16::to_f32, f16::from_f32, half_on;
        bf16, f32, bf16::to_f32, bf16::from_f32, half_on;
    }

    macro_rules! int_numbers {
        ($($t:ident)*) => {$(
            impl Number for $t {
                fn from_f64(x: f64) -> Self {
                    (x * 1e18) as i64 as $t
                }
                fn bits(self) -> u64 {
                    self as u64
                }
                fn dot(k: usize, a: impl Fn(usize) -> Self, b: impl Fn(usize) -> Self) -> Self {
                    (0..k).fold(0, |acc: $t, k| acc.wrapping_add(a(k).wrapping_mul(b(k))))
                }
                unsafe fn run(_: Isa, p: Product<Self, Self>) {
                    // SAFETY: the caller's promise.
                    unsafe { gemm_int(p.m, p.n, p.k, p.a, p.b, p.c) }
                }
            }
        )*};
    }
    int_numbers!(i8 i16 i32 i64 u8 u16 u32 u64);

    struct Rng(u64);

    impl Rng {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        }

        /// Of mixed sign and size, so that every change of order shows.
        fn number(&mut self) -> f64 {
            let x = (self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
            x * [1.0, 0.01, 4.0, 1.0][self.next() as usize % 4]
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Layout {
        Rows,
        Columns,
        /// Rows apart by more than their length.
        Padded,
        /// Neither stride is 1.
        Spread,
        Reversed,
        /// All rows are the same memory.
        SameRow,
        SameColumn,
    }

    const LAYOUTS: [Layout; 7] = [
        Layout::Rows,
        Layout::Columns,
        Layout::Padded,
        Layout::Spread,
        Layout::Reversed,
        Layout::SameRow,
        Layout::SameColumn,
    ];

    /// (length of memory, offset of (0, 0), row stride, column stride)
    fn lay(layout: Layout, rows: usize, cols: usize) -> (usize, isize, isize, isize) {
        let (r, c) = (rows as isize, cols as isize);
        match layout {
            Layout::Rows => (rows * cols, 0, c, 1),
            Layout::Columns => (rows * cols, 0, 1, r),
            Layout::Padded => (rows * (cols + 3), 2, c + 3, 1),
            Layout::Spread => (rows * (2 * cols + 1), 0, 2 * c + 1, 2),
            Layout::Reversed => (rows * cols, (r * c - 1).max(0), -c, -1),
            Layout::SameRow => (cols, 0, 0, 1),
            Layout::SameColumn => (rows, 0, 1, 0),
        }
    }

    fn check<T: Number>(isa: Isa, (m, n, k): (usize, usize, usize), layouts: [Layout; 3]) {
        let mut rng = Rng((m * 1_000_003 + n * 1009 + k) as u64);
        let mut data = |len: usize| -> Vec<T> { (0..len + 8).map(|_| T::from_f64(rng.number())).collect() };
        let (a_len, a_at, a_rs, a_cs) = lay(layouts[0], m, k);
        let (b_len, b_at, b_rs, b_cs) = lay(layouts[1], k, n);
        let (c_len, c_at, c_rs, c_cs) = lay(layouts[2], m, n);
        let (a, b, mut c) = (data(a_len), data(b_len), data(c_len));
        let before = c.clone();
        let product = Product {
            m,
            n,
            k,
            a: Mat { ptr: a.as_ptr().wrapping_offset(a_at), rs: a_rs, cs: a_cs },
            b: Mat { ptr: b.as_ptr().wrapping_offset(b_at), rs: b_rs, cs: b_cs },
            c: MatMut { ptr: c.as_mut_ptr().wrapping_offset(c_at), rs: c_rs, cs: c_cs },
        };
        // SAFETY: `lay` gives strides that stay in the memory, and callers no overlapping layout for C.
        unsafe { T::run(isa, product) };
        let place = |at: isize, rs: isize, cs: isize, i: usize, j: usize| {
            (at + i as isize * rs + j as isize * cs) as usize
        };
        let mut written = vec![false; c.len()];
        for i in 0..m {
            for j in 0..n {
                let row = |k: usize| a[place(a_at, a_rs, a_cs, i, k)];
                let column = |k: usize| b[place(b_at, b_rs, b_cs, k, j)];
                let (want, at) = (T::dot(k, row, column), place(c_at, c_rs, c_cs, i, j));
                written[at] = true;
                let name = std::any::type_name::<T>();
                assert_eq!(
                    c[at].bits(),
                    want.bits(),
                    "{name} {isa:?} {m}x{n}x{k} {layouts:?} at ({i}, {j}): {:?}, not {want:?}",
                    c[at]
                );
            }
        }
        for (at, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
            assert_eq!(c[at].bits(), before[at].bits(), "{isa:?} {m}x{n}x{k} {layouts:?} wrote outside of C");
        }
    }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.supported())
    }

    fn all_layouts<T: Number>(shapes: &[(usize, usize, usize)]) {
        for isa in isas() {
            for &shape in shapes {
                for a in LAYOUTS {
                    for b in LAYOUTS {
                        for c in &LAYOUTS[..5] {
                            check::<T>(isa, shape, [a, b, *c]);
                        }
                    }
                }
            }
        }
    }

    const SHAPES: [(usize, usize, usize); 12] = [
        (0, 3, 4),
        (3, 0, 4),
        (3, 4, 0),
        (1, 1, 1),
        (2, 3, 5),
        (17, 16, 9),
        (13, 33, 20),
        (25, 37, 19),
        (1, 70, 90),
        (70, 3, 41),
        (4, 129, 33),
        (5, 31, 64),
    ];

    #[test]
    fn layouts_f32() {
        all_layouts::<f32>(&SHAPES);
    }

    #[test]
    fn layouts_f64() {
        all_layouts::<f64>(&SHAPES);
    }

    #[test]
    fn layouts_half() {
        all_layouts::<f16>(&SHAPES);
        all_layouts::<bf16>(&SHAPES);
    }

    #[test]
    fn layouts_int() {
        all_layouts::<i8>(&SHAPES[..8]);
        all_layouts::<u8>(&SHAPES[..5]);
        all_layouts::<i16>(&SHAPES[..5]);
        all_layouts::<u16>(&SHAPES[..5]);
        all_layouts::<i32>(&SHAPES);
        all_layouts::<u32>(&SHAPES[..5]);
        all_layouts::<i64>(&SHAPES[..8]);
        all_layouts::<u64>(&SHAPES[..5]);
    }

    #[test]
    fn panel_edges() {
        for isa in isas() {
            for k in [511, 512, 513, 1024, 1025, 1100, 1537] {
                for (m, n) in [(1, 1), (2, 3), (1, 40), (40, 2), (13, 35), (30, 6)] {
                    for a in [Layout::Rows, Layout::Columns, Layout::Spread] {
                        for b in [Layout::Rows, Layout::Columns, Layout::Spread] {
                            check::<f32>(isa, (m, n, k), [a, b, Layout::Rows]);
                        }
                        check::<f64>(isa, (m, n, k), [a, Layout::Rows, Layout::Columns]);
                        check::<f16>(isa, (m, n, k), [a, Layout::Rows, Layout::Rows]);
                        check::<bf16>(isa, (m, n, k), [a, Layout::Columns, Layout::Padded]);
                    }
                }
            }
        }
    }

    #[test]
    fn long_dots() {
        for isa in isas() {
            for k in [4095, 4096, 4097, 9000, 140_000] {
                check::<f32>(isa, (1, 1, k), [Layout::Rows, Layout::Columns, Layout::Rows]);
                check::<f64>(isa, (2, 3, k), [Layout::Columns, Layout::Rows, Layout::Columns]);
                check::<f16>(isa, (3, 1, k), [Layout::Reversed, Layout::Rows, Layout::Rows]);
            }
        }
    }

    #[test]
    fn random_shapes() {
        let mut rng = Rng(7);
        let mut below = |n: usize| rng.next() as usize % n;
        for _ in 0..150 {
            let shape = (1 + below(70), 1 + below(90), 1 + below(120));
            let layouts = [LAYOUTS[below(7)], LAYOUTS[below(7)], LAYOUTS[below(5)]];
            for isa in isas() {
                check::<f32>(isa, shape, layouts);
                check::<f64>(isa, shape, layouts);
            }
        }
    }

    /// Larger than a chunk in each direction, so that splits differ by thread count.
    #[test]
    fn threads_change_no_bit() {
        let shapes =
            [(90, 130, 530), (310, 40, 530), (40, 400, 150), (300, 280, 260), (3, 2100, 70), (2100, 2, 70)];
        for threads in [1, 2, 3] {
            pool::set_threads(threads);
            for isa in isas().filter(|&isa| isa != Isa::Interp || cfg!(not(target_arch = "x86_64"))) {
                for shape in shapes {
                    for layouts in [
                        [Layout::Rows, Layout::Rows, Layout::Rows],
                        [Layout::Rows, Layout::Columns, Layout::Rows],
                        [Layout::Columns, Layout::Rows, Layout::Columns],
                        [Layout::Spread, Layout::Reversed, Layout::Spread],
                    ] {
                        check::<f32>(isa, shape, layouts);
                        check::<f64>(isa, shape, layouts);
                    }
                    check::<f16>(isa, shape, [Layout::Rows; 3]);
                    check::<bf16>(isa, shape, [Layout::Columns; 3]);
                }
            }
            check::<f32>(Isa::Interp, (90, 130, 530), [Layout::Rows; 3]);
            check::<i32>(Isa::Interp, (150, 200, 530), [Layout::Rows; 3]);
        }
    }

    /// More than one block of the shared side, and of the sums of halves.
    #[test]
    fn several_blocks() {
        let isa = isa();
        check::<f32>(isa, (1400, 1100, 17), [Layout::Rows; 3]);
        check::<f64>(isa, (520, 600, 40), [Layout::Rows; 3]);
        check::<bf16>(isa, (1030, 1050, 9), [Layout::Rows; 3]);
    }

    #[test]
    fn public_functions_multiply() {
        let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0, 7.0, 8.0]);
        let mut c = [0.0f32; 4];
        let view = |x: &[f32; 4]| Mat { ptr: x.as_ptr(), rs: 2, cs: 1 };
        // SAFETY: 2 × 2 matrices in arrays of 4.
        unsafe { gemm(2, 2, 2, view(&a), view(&b), MatMut { ptr: c.as_mut_ptr(), rs: 2, cs: 1 }) };
        assert_eq!(c, [19.0, 22.0, 43.0, 50.0]);
    }
}
