//! The inner loops: the same bodies, compiled once for each instruction set.

use super::Product;
use super::chains::chains_body;
use super::direct::direct_body;
use super::rows::rows_body;
use super::scalar::{Compute, Source};

/// Part of one operand to pack.
pub(super) struct Strip<T> {
    pub(super) from: *const T,
    pub(super) ls: isize,
    pub(super) ks: isize,
    pub(super) lines: usize,
    pub(super) kc: usize,
}

/// The inner loops. All are unsafe to call where the instruction set is missing.
pub(super) trait Kernel<T: Compute>: 'static {
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
    unsafe fn chains<S: Source<T>>(length: usize, a: *const S, sa: isize, b: *const S, sb: isize, to: *mut T);

    /// # Safety
    /// As for `gemm`.
    unsafe fn direct<S: Source<T>>(p: Product<S, T>);
}

/// A register of numbers. Unsafe to use where its instructions are missing.
pub(super) trait Vector: Copy {
    type T: Compute;
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

pub(super) const MAX_TILE: usize = 12 * 32;

/// # Safety
/// As for `Kernel::tile`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn tile_body<V: Vector, const MR: usize>(
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
pub(super) unsafe fn pack_body<V: Vector>(strip: Strip<V::T>, width: usize, to: *mut V::T) {
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

/// Implements [`Kernel`] for an instruction set, a type and its register.
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
            unsafe fn chains<S: Source<$t>>(
                length: usize, a: *const S, sa: isize, b: *const S, sb: isize, to: *mut $t,
            ) {
                // SAFETY: the caller's promise.
                unsafe { chains_body(length, a, sa, b, sb, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn direct<S: Source<$t>>(p: Product<S, $t>) {
                // SAFETY: the caller's promise.
                unsafe { direct_body(p) }
            }
        }
    )*};
}

pub(super) use kernels;

/// Plain arrays, for the compiler to vectorise as it can.
pub(super) struct Portable;

kernels! {
    Portable, f32, Lanes<f32>, 4;
    Portable, f64, Lanes<f64>, 4;
}

#[derive(Clone, Copy)]
struct Lanes<T>([T; 4]);

impl<T: Compute> Vector for Lanes<T> {
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
