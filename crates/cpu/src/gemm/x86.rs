//! Registers of AVX2 and AVX-512, and the transposition of strips that are contiguous along K.

use super::Problem;
use super::chains::chains_body;
use super::direct::direct_body;
use super::kernel::{Kernel, Strip, Tile, Vector, kernels, pack_body, tile_body, widen_body};
use super::rows::rows_body;
use super::scalar::Source;
use super::wide::{Sums, sums_f32, sums_f64};
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
    ($($v:ty, $t:ty, $n:literal, $splat:ident $load:ident $store:ident $fma:ident $add:ident $flip:ident,
        |$from:ident, $some:ident| $load_part:expr, $store_part:ident $low:ident $(, $sums:ident)?;)*) => {$(
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
            unsafe fn load_part($from: *const $t, $some: usize) -> Self {
                // SAFETY: the caller's promise.
                unsafe { $load_part }
            }

            #[inline(always)]
            unsafe fn store_part(self, to: *mut $t, n: usize) {
                // SAFETY: the caller's promise.
                unsafe { $store_part(to, $low(n), self) }
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

            $(
                #[inline(always)]
                unsafe fn sums(t: &Tile<$t>) -> Option<Sums<Self>> {
                    // SAFETY: the caller's promise.
                    Some(unsafe { $sums(t) })
                }
            )?

            #[inline(always)]
            fn ahead(at: *const $t) {
                // SAFETY: a prefetch reads nothing, and every x86-64 has it.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
            }

            #[inline(always)]
            fn ahead_of_write(at: *const $t) {
                // SAFETY: as above.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast()) };
            }

            #[inline(always)]
            fn later(at: *const u8) {
                // SAFETY: as above.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
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
    __m512, f32, 16, _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_fmadd_ps _mm512_add_ps flip_f32,
        |from, n| _mm512_maskz_loadu_ps(low16(n), from), _mm512_mask_storeu_ps low16, sums_f32;
    __m512d, f64, 8, _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_fmadd_pd _mm512_add_pd flip_f64,
        |from, n| _mm512_maskz_loadu_pd(low8(n), from), _mm512_mask_storeu_pd low8, sums_f64;
    __m256, f32, 8, _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps flip_f32,
        |from, n| _mm256_maskload_ps(from, low_f32(n)), _mm256_maskstore_ps low_f32;
    __m256d, f64, 4, _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_fmadd_pd _mm256_add_pd flip_f64,
        |from, n| _mm256_maskload_pd(from, low_f64(n)), _mm256_maskstore_pd low_f64;
}

/// Masks of the first n lanes, for each register.
#[inline(always)]
fn low16(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

#[inline(always)]
fn low8(n: usize) -> __mmask8 {
    ((1u32 << n) - 1) as __mmask8
}

/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn low_f32(n: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn low_f64(n: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cmpgt_epi64(_mm256_set1_epi64x(n as i64), _mm256_setr_epi64x(0, 1, 2, 3)) }
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
        let at = strip.from.wrapping_offset((group + line) as isize * strip.ls).wrapping_add(k).cast::<i8>();
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
            let mask = low_f32(keep);
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
            let mask = low_f64(keep);
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
