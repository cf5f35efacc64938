//! Integers: sums are exact modulo the word, so they have no order to keep and need no packing.

use super::{Mat, MatMut, PARALLEL_WORK, Problem, Share};
use crate::pool;
use crate::stop;

/// C = A B for integers, modulo 2 to the number of bits.
///
/// # Safety
/// As for [`gemm`](super::gemm).
pub unsafe fn gemm_int<T: GemmInt>(m: usize, n: usize, k: usize, a: Mat<T>, b: Mat<T>, c: MatMut<T>) {
    let mut p = Problem { m, n, k, a, b, c, share: Share::WHOLE };
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

/// Row i of C. Integer sums are exact modulo the word, so any order will do.
///
/// # Safety
/// As for `gemm`; i is below m.
unsafe fn int_row<T: GemmInt>(p: Problem<T, T>, i: usize) {
    for j in (0..p.n).step_by(INT_COLUMNS) {
        let w = INT_COLUMNS.min(p.n - j);
        let mut sums = [T::default(); INT_COLUMNS];
        let sums = &mut sums[..w];
        for k in 0..p.k {
            if k % STRETCH == 0 {
                stop::check();
            }
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
/// Steps of K between looks at whether the device was stopped.
const STRETCH: usize = 4096;
