//! Matrix products whose bits depend on the operands alone.
//!
//! `C[i,j]` has one order of additions, given by K: K is cut into panels of 512, inside a panel
//! `acc = fma(a[i,k], b[k,j], acc)` from 0 with k ascending, and panels are added up in order. `route` picks a path by
//! shape and strides (`direct`, `chains`, `rows`, `packed`); every path, ISA, stride and split keeps that order, so it
//! can be chosen by speed alone. A path reads operands through `scalar`, keeps what it packs in `scratch` and loops in
//! `kernel`, over the registers of `x86` where there are any. Called by the CPU device, one call per matrix; splits large
//! products over `pool`. Products commute bit for bit (except for which NaN comes out of two), so operands are exchanged
//! where that suits the layout of C. `gemm_then` calls back for each block of C when it is done, for an epilogue while it
//! is in cache. Deliberately absent: alpha, beta, and loops
//! over batches, of which one product knows only how it shares the pool ([`Share`]).

mod isa;

mod packed;
mod rows;
mod chains;
mod direct;
mod half;
mod integer;

mod parted;
mod scratch;
mod scalar;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

pub use half::{Half, gemm_half, gemm_half_then};
pub use integer::{GemmInt, gemm_int};
pub use isa::{Isa, isa};
pub use scalar::GemmScalar;

use chains::chains;
use kernel::{Kernel, Strip};
use packed::packed;
use rows::rows;
use scalar::{Compute, Source};

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
    unsafe { T::run(isa(), Problem { m, n, k, a, b, c, share: Share::WHOLE }, &|_| ()) }
}

/// As [`gemm`], and calls `after` once for each block of C as soon as that is complete, on the thread that computed it.
/// Where it is one of a batch, `share` says so.
///
/// # Safety
/// As for [`gemm`]; `after` may read and write its own block of C.
#[allow(clippy::too_many_arguments)]
pub unsafe fn gemm_then<T: GemmScalar>(
    m: usize,
    n: usize,
    k: usize,
    a: Mat<T>,
    b: Mat<T>,
    c: MatMut<T>,
    share: Share,
    after: After<'_>,
) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { T::run(isa(), Problem { m, n, k, a, b, c, share }, after) }
}

/// What a product of a batch knows of the others.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Others run on the other threads, so this one stays on its own.
    pub alone: bool,
    /// What this thread's next product reads all over, to be fetched meanwhile. It need not be valid.
    pub next: *const u8,
    /// How many bytes that is.
    pub bytes: usize,
}

impl Share {
    /// A product that is no part of a batch.
    pub const WHOLE: Share = Share { alone: false, next: std::ptr::null(), bytes: 0 };
}

// SAFETY: the address is never read through.
unsafe impl Sync for Share {}
// SAFETY: as above.
unsafe impl Send for Share {}

/// Lines side by side: `to[i * width + l]` is element i of line l, of which `strides` tells the distance of lines and of
/// elements; 0 for lines past the last. `width` is 4, 6, 8, 12, 16 or 32.
///
/// # Safety
/// `lines` ≤ `width` lines of n elements are readable, and `to` has room for width · n.
pub(crate) unsafe fn interleave<T: GemmScalar>(
    from: *const T,
    [ls, ks]: [isize; 2],
    lines: usize,
    width: usize,
    n: usize,
    to: *mut T,
) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { T::pack(isa(), Strip { from, ls, ks, lines, kc: n }, width, to) }
}

/// What is called for each complete block of C. Blocks cover C and do not overlap.
pub type After<'a> = &'a (dyn Fn(Block) + Sync);

/// Rows `i..i + m` and columns `j..j + n`, never empty.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// First row.
    pub i: usize,
    /// Rows.
    pub m: usize,
    /// First column.
    pub j: usize,
    /// Columns.
    pub n: usize,
}

impl Block {
    fn swapped(self) -> Block {
        Block { i: self.j, m: self.n, j: self.i, n: self.m }
    }
}

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
/// An operand this thin is read once, so speed is that of memory.
const SKINNY: usize = 4;

/// One call: operands of S computed in T.
struct Problem<S, T> {
    m: usize,
    n: usize,
    k: usize,
    a: Mat<S>,
    b: Mat<S>,
    c: MatMut<T>,
    share: Share,
}

impl<S, T> Clone for Problem<S, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S, T> Copy for Problem<S, T> {}

impl<S, T> Problem<S, T> {
    /// The same product as seen from the transposed C.
    fn swapped(self) -> Self {
        let Problem { m, n, k, a, b, c, share } = self;
        Problem { m: n, n: m, k, a: b.swapped(), b: a.swapped(), c: c.swapped(), share }
    }

    fn work(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    /// Worth splitting. Thin products count what they read: they wait for memory.
    fn wide(&self) -> bool {
        let read = (self.m.saturating_add(self.n)).saturating_mul(self.k);
        !self.share.alone && self.work().max(read.saturating_mul(4)) >= PARALLEL_WORK
    }
}

/// Panels of K as (start, length).
fn panels(k: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..k).step_by(PANEL).map(move |at| (at, PANEL.min(k - at)))
}

/// Picks the path.
///
/// # Safety
/// As for `gemm_then`, and the instruction set of `K` is supported.
unsafe fn route<K: Kernel<T>, S: Source<T>, T: Compute>(p: Problem<S, T>, after: After<'_>) {
    if p.m == 0 || p.n == 0 {
        return;
    }
    let thin = p.m.min(p.n) <= SKINNY;
    // SAFETY: the caller's promise in both.
    unsafe {
        if (thin && p.n < p.m) || (!thin && p.c.cs != 1 && p.c.rs == 1) {
            path::<K, S, T>(p.swapped(), &|block| after(block.swapped()));
        } else {
            path::<K, S, T>(p, after);
        }
    }
}

/// # Safety
/// As for `route`.
unsafe fn path<K: Kernel<T>, S: Source<T>, T: Compute>(p: Problem<S, T>, after: After<'_>) {
    let whole = Block { i: 0, m: p.m, j: 0, n: p.n };
    // SAFETY: the caller's promise in all.
    unsafe {
        if p.k == 0 {
            fill(p.m, p.n, p.c);
        } else if p.n <= SKINNY && p.k > 2 * PANEL {
            chains::<K, S, T>(p);
        } else if p.work() <= DIRECT_WORK {
            K::direct(p);
        } else if p.m <= SKINNY && p.b.cs == 1 {
            return rows::<K, S, T>(p, after);
        } else {
            return packed::<K, S, T>(p, after);
        }
    }
    after(whole);
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

/// Writes one panel's sums of a row to C, or adds them to what the panels before gave.
///
/// # Safety
/// `c` is writable at n places `cs` apart, `from` readable.
#[inline(always)]
unsafe fn put<T: Compute>(c: *mut T, cs: isize, from: *const T, n: usize, add: bool) {
    for j in 0..n {
        // SAFETY: the caller's promise.
        unsafe {
            let (c, x) = (c.offset(j as isize * cs), *from.add(j));
            *c = if add { (*c).plus(x) } else { x };
        }
    }
}
