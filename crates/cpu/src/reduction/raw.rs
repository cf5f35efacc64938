//! Reductions by address, for fused programs, which know types only when they run.

use super::fold::*;
use crate::elementwise::with_type;
use crate::reference::order;
use half::{bf16, f16};
use kiln_ir::{Binary, DType, ReduceKind};

/// The dtype that a reduction of `dtype` accumulates in.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// Neighbouring elements, for the functions below that take addresses.
///
/// # Safety
/// `x` holds `len` aligned elements.
unsafe fn slice<'a, T>(x: *const u8, len: usize) -> &'a [T] {
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(x.cast(), len) }
}

/// As [`slice`], to write.
///
/// # Safety
/// As for [`slice`], and nobody else uses the elements.
unsafe fn slice_mut<'a, T>(x: *mut u8, len: usize) -> &'a mut [T] {
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts_mut(x.cast(), len) }
}

/// Reduces each of the rows of `length` elements that lie one after another at `x` to an element at `out`.
///
/// # Safety
/// `x` holds `count * length` elements of `dtype`, `out` room for `count`, and they do not overlap.
pub(crate) unsafe fn rows(
    kind: ReduceKind,
    dtype: DType,
    x: *const u8,
    count: usize,
    length: usize,
    out: *mut u8,
) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (x, out) = unsafe { (slice::<T>(x, count * length), slice_mut::<T>(out, count)) };
        for (r, out) in out.iter_mut().enumerate() {
            let mut tree = Tree::new(fold.identity);
            for chunk in x[r * length..(r + 1) * length].chunks(CHUNK) {
                tree.push((fold.chunk)(chunk), fold.combine);
            }
            (fold.finish)(&[tree.finish(fold.combine)], length, std::slice::from_mut(out));
        }
    });
}

/// The accumulators of each chunk of `len` elements at `x`: [`LANES`] of the wide dtype a chunk.
///
/// # Safety
/// `x` holds `len` elements of `dtype`, `out` room for the accumulators, and they do not overlap.
pub(crate) unsafe fn lanes(kind: ReduceKind, dtype: DType, x: *const u8, len: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (x, out) = unsafe { (slice::<T>(x, len), slice_mut::<Wide<T>>(out, len.div_ceil(CHUNK) * LANES)) };
        for (x, out) in x.chunks(CHUNK).zip(out.as_chunks_mut::<LANES>().0) {
            *out = (fold.lanes)(x);
        }
    });
}

/// Each of `chunks` chunks as one element of the wide dtype.
///
/// # Safety
/// `lanes` holds the accumulators of that many chunks, `out` room for an element each, and they do not overlap.
pub(crate) unsafe fn partials(kind: ReduceKind, dtype: DType, lanes: *const u8, chunks: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (lanes, out) = unsafe { (slice::<Wide<T>>(lanes, chunks * LANES), slice_mut::<Wide<T>>(out, chunks)) };
        for (lanes, out) in lanes.as_chunks::<LANES>().0.iter().zip(out) {
            *out = (fold.close)(*lanes);
        }
    });
}

/// The result of a row of `length` elements from the accumulators that [`lanes`] writes.
///
/// # Safety
/// `lanes` holds the accumulators of the row's chunks, `out` room for an element of `dtype`.
pub(crate) unsafe fn close(kind: ReduceKind, dtype: DType, lanes: *const u8, length: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (lanes, out) =
            unsafe { (slice::<Wide<T>>(lanes, length.div_ceil(CHUNK) * LANES), slice_mut::<T>(out, 1)) };
        (fold.finish)(&[(fold.row)(lanes.as_chunks::<LANES>().0)], length, out);
    });
}

/// The result of a row of `length` elements from what [`partials`] writes, which is scratch afterwards.
///
/// # Safety
/// `parts` holds an element for each of the row's chunks, `out` room for an element of `dtype`.
pub(crate) unsafe fn total(kind: ReduceKind, dtype: DType, parts: *mut u8, length: usize, out: *mut u8) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (parts, out) = unsafe { (slice_mut::<Wide<T>>(parts, length.div_ceil(CHUNK)), slice_mut::<T>(out, 1)) };
        let sum = order::tree(parts, fold.combine).unwrap_or(fold.identity);
        (fold.finish)(&[sum], length, out);
    });
}

/// Makes `len` accumulators ready for [`stack`].
///
/// # Safety
/// `sums` has room for `len` elements of the wide dtype.
pub(crate) unsafe fn clear(kind: ReduceKind, dtype: DType, sums: *mut u8, len: usize) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        unsafe { slice_mut::<Wide<T>>(sums, len) }.fill(fold.identity);
    });
}

/// One more element onto each of `len` accumulators.
///
/// # Safety
/// `sums` holds `len` elements of the wide dtype, `x` of `dtype`, and they do not overlap.
pub(crate) unsafe fn stack(kind: ReduceKind, dtype: DType, sums: *mut u8, x: *const u8, len: usize) {
    with_fold!(kind, dtype, T, fold => {
        // SAFETY: promised by the caller.
        let (sums, x) = unsafe { (slice_mut::<Wide<T>>(sums, len), slice::<T>(x, len)) };
        (fold.step)(sums, x);
    });
}

/// The elementwise operation that [`stack`] does on values of the wide dtype.
pub(crate) fn stacking(kind: ReduceKind) -> Binary {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => Binary::Add,
        ReduceKind::Prod => Binary::Mul,
        ReduceKind::Max => Binary::Maximum,
        ReduceKind::Min => Binary::Minimum,
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => {
            unreachable!("has no kernel")
        }
    }
}

/// `len` results from `chunks` rows of accumulators, `pitch` elements apart, each row the sum of [`STACK`] of `count`
/// rows. The accumulators are scratch afterwards.
///
/// # Safety
/// The rows lie at `sums`, `out` has room for `len` elements of `dtype`, and nothing overlaps.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn unstack(
    kind: ReduceKind,
    dtype: DType,
    sums: *mut u8,
    chunks: usize,
    pitch: usize,
    count: usize,
    out: *mut u8,
    len: usize,
) {
    with_fold!(kind, dtype, T, fold => {
        let row = |i: usize| sums.wrapping_add(i * pitch * size_of::<Wide<T>>());
        // The tree of `order::tree`, each sum in the place of its first part.
        let mut gap = 1;
        while gap < chunks {
            for left in (0..chunks - gap).step_by(2 * gap) {
                // SAFETY: promised by the caller; the rows are two.
                let (left, right) = unsafe { (slice_mut(row(left), len), slice(row(left + gap), len)) };
                (fold.join)(left, right);
            }
            gap *= 2;
        }
        // SAFETY: promised by the caller.
        unsafe { (fold.finish)(slice(row(0), len), count, slice_mut::<T>(out, len)) };
    });
}
