//! `f16` and `bf16`: widened while they are packed, summed in `f32` over the whole of K, rounded once.

use super::isa::{Isa, isa};
use super::scalar::{Compute, Narrow, Source};
use super::scratch::{SUMMED, Shared, with_scratch};
use super::{After, Block, Mat, MatMut, Product};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// C = A B for `f16` and `bf16`: the order of [`gemm`](super::gemm) in `f32` over the whole of K, rounded once at the end.
///
/// # Safety
/// As for [`gemm`](super::gemm).
pub unsafe fn gemm_half<H: Half>(m: usize, n: usize, k: usize, a: Mat<H>, b: Mat<H>, c: MatMut<H>) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { half_on(isa(), Product { m, n, k, a, b, c }, &|_| ()) }
}

/// As [`gemm_half`], and calls `after` as [`gemm_then`](super::gemm_then) does.
///
/// # Safety
/// As for [`gemm_then`](super::gemm_then).
pub unsafe fn gemm_half_then<H: Half>(
    m: usize,
    n: usize,
    k: usize,
    a: Mat<H>,
    b: Mat<H>,
    c: MatMut<H>,
    after: After<'_>,
) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { half_on(isa(), Product { m, n, k, a, b, c }, after) }
}

/// `f16` and `bf16`.
pub trait Half: Source<f32> + Narrow {}

/// # Safety
/// As for `gemm_then`, and `isa` is supported.
pub(super) unsafe fn half_on<H: Half>(isa: Isa, p: Product<H, H>, after: After<'_>) {
    if p.m == 0 || p.n == 0 {
        return;
    }
    let (m_most, n_most) = (p.m.min((HALF_BLOCK / p.n).max(1024)), p.n.min((HALF_BLOCK / p.m).max(1024)));
    for i in (0..p.m).step_by(m_most) {
        for j in (0..p.n).step_by(n_most) {
            let (m, n) = (m_most.min(p.m - i), n_most.min(p.n - j));
            with_scratch(&SUMMED, m * n, |sums: *mut f32| {
                let from = Shared(sums);
                let rounded = |block: Block| {
                    let block = Block { i: i + block.i, j: j + block.j, ..block };
                    // SAFETY: the block is complete in the scratch and this thread's alone in C.
                    unsafe {
                        round(
                            block,
                            Mat {
                                ptr: from.get().add((block.i - i) * n + block.j - j),
                                rs: n as isize,
                                cs: 1,
                            },
                            p.c,
                        )
                    };
                    after(block);
                };
                // SAFETY: the block is in C, and the scratch holds one.
                unsafe {
                    let c = MatMut { ptr: sums, rs: n as isize, cs: 1 };
                    let a = Mat { ptr: p.a.at(i, 0), ..p.a };
                    let b = Mat { ptr: p.b.at(0, j), ..p.b };
                    <f32 as Compute>::run(isa, Product { m, n, k: p.k, a, b, c }, &rounded);
                }
            });
        }
    }
}

/// Elements of C summed in `f32` at a time: 4 MiB.
const HALF_BLOCK: usize = 1 << 20;

/// Rounds the sums of one block of `c`.
///
/// # Safety
/// `sums` holds the block, with columns that are neighbours; `c` as for `gemm`.
unsafe fn round<H: Half>(block: Block, sums: Mat<f32>, c: MatMut<H>) {
    for i in 0..block.m {
        // SAFETY: the caller's promise.
        unsafe {
            let (from, line) = (sums.at(i, 0), c.at(block.i + i, block.j));
            if c.cs == 1 {
                H::narrow_line(from, block.n, line);
            } else {
                for j in 0..block.n {
                    *line.offset(j as isize * c.cs) = H::narrow(*from.add(j));
                }
            }
        }
    }
}

macro_rules! halves {
    ($($t:ident)*) => {$(
        impl Half for $t {}

        impl Source<f32> for $t {
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

        impl Narrow for $t {
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
