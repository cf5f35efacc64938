//! `f16` and `bf16`: widened while they are packed, summed in `f32` over the whole of K, rounded once.

use super::isa::{Isa, isa};
use super::scalar::{Compute, Narrow, Source};
use super::scratch::{SUMMED, Shared, with_scratch};
use super::{After, Block, Mat, MatMut, Problem, Share};
use crate::versions::versions;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::slice;

/// C = A B for `f16` and `bf16`: the order of [`gemm`](super::gemm) in `f32` over the whole of K, rounded once at the end.
///
/// # Safety
/// As for [`gemm`](super::gemm).
pub unsafe fn gemm_half<H: Half>(m: usize, n: usize, k: usize, a: Mat<H>, b: Mat<H>, c: MatMut<H>) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { half_on(isa(), Problem { m, n, k, a, b, c, share: Share::WHOLE }, &|_| ()) }
}

/// As [`gemm_half`], and calls `after` as [`gemm_then`](super::gemm_then) does.
///
/// # Safety
/// As for [`gemm_then`](super::gemm_then).
#[allow(clippy::too_many_arguments)]
pub unsafe fn gemm_half_then<H: Half>(
    m: usize,
    n: usize,
    k: usize,
    a: Mat<H>,
    b: Mat<H>,
    c: MatMut<H>,
    share: Share,
    after: After<'_>,
) {
    // SAFETY: the caller's promise, and `isa()` is supported here.
    unsafe { half_on(isa(), Problem { m, n, k, a, b, c, share }, after) }
}

/// `f16` and `bf16`.
pub trait Half: Source<f32> + Narrow {}

/// # Safety
/// As for `gemm_then`, and `isa` is supported.
pub(super) unsafe fn half_on<H: Half>(isa: Isa, p: Problem<H, H>, after: After<'_>) {
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
                    <f32 as Compute>::run(isa, Problem { m, n, k: p.k, a, b, c, share: p.share }, &rounded);
                }
            });
        }
    }
}

/// Elements of C summed in `f32` at a time: 16 MiB. Operands are widened once for each such block.
const HALF_BLOCK: usize = 1 << 22;

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
                // SAFETY: both lines are in memory, and nobody else has them.
                let (from, to) =
                    (slice::from_raw_parts(from, block.n), slice::from_raw_parts_mut(line, block.n));
                narrowed(from, to);
            } else {
                for j in 0..block.n {
                    *line.offset(j as isize * c.cs) = H::narrow(*from.add(j));
                }
            }
        }
    }
}

versions! {
    /// A line of sums, rounded.
    fn narrowed<H: Half>(from: &[f32], to: &mut [H]) = narrow_line;
}

#[inline(always)]
fn narrow_line<H: Half>(from: &[f32], to: &mut [H]) {
    H::narrow_line(from, to)
}

impl Half for f16 {}
impl Half for bf16 {}

impl Source<f32> for f16 {
    const PLAIN: bool = false;

    #[inline(always)]
    fn plain(_: *const Self) -> Option<*const f32> {
        None
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn widen_line(from: *const Self, n: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        let from = unsafe { slice::from_raw_parts(from, n) };
        // SAFETY: the caller's promise; scratch memory is initialised.
        let to = unsafe { slice::from_raw_parts_mut(to, n) };
        from.convert_to_f32_slice(to);
    }
}

impl Source<f32> for bf16 {
    const PLAIN: bool = false;

    #[inline(always)]
    fn plain(_: *const Self) -> Option<*const f32> {
        None
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    unsafe fn widen_line(from: *const Self, n: usize, to: *mut f32) {
        for i in 0..n {
            // SAFETY: the caller's promise.
            unsafe { to.add(i).write((*from.add(i)).widen()) };
        }
    }
}

impl Narrow for f16 {
    fn narrow(x: f32) -> Self {
        f16::from_f32(x)
    }

    #[inline(always)]
    fn narrow_line(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Narrow for bf16 {
    /// To nearest, ties to even; without a branch, so that lines of them are vectors.
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        bf16::from_bits((if is_nan(bits) { bits | QUIET } else { near } >> 16) as u16)
    }

    #[inline(always)]
    fn narrow_line(from: &[f32], to: &mut [Self]) {
        for (to, &x) in to.iter_mut().zip(from) {
            *to = Self::narrow(x);
        }
    }
}

/// The bit that tells a quiet NaN.
const QUIET: u32 = 1 << 22;

#[inline(always)]
fn is_nan(bits: u32) -> bool {
    bits & 0x7fff_ffff > 0x7f80_0000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_widened_and_rounded_as_its_own_conversions_do() {
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            // A signalling NaN becomes quiet when it is multiplied.
            let quiet = if x.is_nan() { QUIET } else { 0 };
            assert_eq!(x.widen().to_bits() | quiet, x.to_f32().to_bits(), "{bits:#x}");
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let wide = f32::from_bits(u32::from(bits) << 16 | low);
                assert_eq!(
                    bf16::narrow(wide).to_bits(),
                    bf16::from_f32(wide).to_bits(),
                    "{bits:#x} {low:#x}"
                );
            }
        }
    }
}
