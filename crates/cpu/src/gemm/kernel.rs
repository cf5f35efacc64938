//! The inner loops: the same bodies, compiled once for each instruction set.

use super::Problem;
use super::chains::chains_body;
use super::direct::direct_body;
use super::rows::rows_body;
use super::scalar::{Compute, Source};
use std::mem::MaybeUninit;

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

    /// Fetches lines of 64 bytes into L2; the memory need not be valid.
    fn fetch(at: *const u8, lines: usize);

    /// Computes one tile of C.
    ///
    /// # Safety
    /// As [`Tile`] says.
    unsafe fn tile(t: Tile<T>);

    /// # Safety
    /// The strip is readable and `to` has room for width · kc.
    unsafe fn pack(strip: Strip<T>, width: usize, to: *mut T);

    /// As `pack`, of numbers that are widened on the way.
    ///
    /// # Safety
    /// As for `pack`.
    unsafe fn widen<S: Source<T>>(strip: Strip<S>, width: usize, to: *mut T);

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
    unsafe fn direct<S: Source<T>>(p: Problem<S, T>);
}

/// A register of numbers. Unsafe to use where its instructions are missing.
pub(super) trait Vector: Copy {
    type T: Compute;
    const LANES: usize;
    unsafe fn splat(x: Self::T) -> Self;
    unsafe fn load(from: *const Self::T) -> Self;
    unsafe fn store(self, to: *mut Self::T);
    /// The first n < LANES, and zeros.
    unsafe fn load_part(from: *const Self::T, n: usize) -> Self;
    /// The first n < LANES.
    unsafe fn store_part(self, to: *mut Self::T, n: usize);
    unsafe fn fma(self, b: Self, acc: Self) -> Self;
    unsafe fn plus(self, other: Self) -> Self;
    /// The sums of a full tile of this register, where there is a loop by hand.
    ///
    /// # Safety
    /// As [`Tile`] says, for 12 rows and more than LANES columns.
    unsafe fn sums(_: &Tile<Self::T>) -> Option<[[Self; 2]; 12]> {
        None
    }
    /// Fetches the line of an address that need not be valid.
    fn ahead(at: *const Self::T);
    /// As `ahead`, for a line that will be written.
    fn ahead_of_write(at: *const Self::T);
    /// As `ahead`, into L2.
    fn later(at: *const u8);
    /// Packs as much of K as comes in whole blocks from lines contiguous along K, and returns how much that is.
    unsafe fn transpose(strip: &Strip<Self::T>, width: usize, to: *mut Self::T) -> usize;
}

/// The most numbers that a tile has.
pub(super) const MAX_TILE: usize = 12 * 32;

/// One tile: `c[r][..cols]` = or += the sums over `kc` of `a[r][k] * b[k][..cols]`, for r < rows.
///
/// Readable are MR rows of `a` (exactly MR = `rows` where `aks` is 1) and NR columns of `b`, for `kc` steps; writable
/// are `rows` × `cols` of `c`.
pub(super) struct Tile<T> {
    /// At most MR.
    pub(super) rows: usize,
    /// At most NR.
    pub(super) cols: usize,
    pub(super) kc: usize,
    pub(super) a: *const T,
    /// Distance of rows of A: 1 in a packed strip.
    pub(super) ars: isize,
    /// Distance of steps of A: 1 in rows that are not packed.
    pub(super) aks: isize,
    pub(super) b: *const T,
    /// Distance of steps of B.
    pub(super) bks: isize,
    pub(super) c: *mut T,
    /// Distance of rows of C, whose columns are neighbours.
    pub(super) crs: isize,
    /// Adds to what the panels before gave.
    pub(super) add: bool,
    /// What to fetch meanwhile, a line every four steps: part of the strip of A that comes next.
    pub(super) soon: *const T,
    /// Where to copy the full rows of `b` on the way, side by side; null for nowhere.
    pub(super) to: *mut T,
}

/// # Safety
/// As for `Kernel::tile`.
#[inline(always)]
pub(super) unsafe fn tile_body<V: Vector, const MR: usize>(t: Tile<V::T>) {
    // SAFETY: the caller's promise.
    unsafe {
        if !t.to.is_null() {
            return if t.ars == 1 {
                tile_rows::<V, MR, 2, false, true>(t)
            } else {
                tile_rows::<V, MR, 2, true, true>(t)
            };
        }
        if MR == 12
            && t.rows > 8
            && t.cols > V::LANES
            && let Some(sums) = V::sums(&t)
        {
            return put_tile::<V, 12, 2>(&t, sums);
        }
        match (t.cols <= V::LANES, t.ars == 1) {
            (false, false) => tile_rows::<V, MR, 2, true, false>(t),
            (true, false) => tile_rows::<V, MR, 1, true, false>(t),
            (false, true) if t.rows <= 4 && MR > 4 => tile_rows::<V, 4, 2, false, false>(t),
            (false, true) if t.rows <= 8 && MR > 8 => tile_rows::<V, 8, 2, false, false>(t),
            (false, true) => tile_rows::<V, MR, 2, false, false>(t),
            (true, true) if t.rows <= 4 && MR > 4 => tile_rows::<V, 4, 1, false, false>(t),
            (true, true) if t.rows <= 8 && MR > 8 => tile_rows::<V, 8, 1, false, false>(t),
            (true, true) => tile_rows::<V, MR, 1, false, false>(t),
        }
    }
}

/// R rows of H registers; A by rows or by steps.
///
/// # Safety
/// As for `Kernel::tile`; rows ≤ R ≤ MR, and R = MR by rows.
#[inline(always)]
unsafe fn tile_rows<V: Vector, const R: usize, const H: usize, const BY_ROWS: bool, const COPY: bool>(
    t: Tile<V::T>,
) {
    let Tile { kc, mut a, ars, aks, mut b, bks, mut to, .. } = t;
    fetch_c::<V>(&t);
    // SAFETY: the caller's promise; what is fetched ahead need not be there.
    unsafe {
        let mut from: [_; 4] = std::array::from_fn(|q| a.wrapping_offset(3 * q as isize * ars));
        let mut acc = [[V::splat(V::T::default()); H]; R];
        for _ in 0..kc {
            let soon = b.wrapping_offset(AHEAD * bks);
            let mut row = [V::splat(V::T::default()); H];
            for (h, x) in row.iter_mut().enumerate() {
                V::ahead(soon.wrapping_add(h * V::LANES));
                *x = V::load(b.add(h * V::LANES));
                if COPY {
                    x.store(to.add(h * V::LANES));
                }
            }
            if COPY {
                to = to.add(H * V::LANES);
            }
            if BY_ROWS {
                // Three rows from each of a few addresses: all fit in registers that way.
                for (first, acc) in from.iter_mut().zip(acc.as_chunks_mut::<3>().0) {
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let x = V::splat(*first.offset(r as isize * ars));
                        for (acc, b) in acc.iter_mut().zip(row) {
                            *acc = x.fma(b, *acc);
                        }
                    }
                    *first = first.wrapping_add(1);
                }
            } else {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = V::splat(*a.add(r));
                    for (acc, b) in acc.iter_mut().zip(row) {
                        *acc = x.fma(b, *acc);
                    }
                }
                a = a.offset(aks);
            }
            b = b.offset(bks);
        }
        put_tile::<V, R, H>(&t, acc);
    }
}

/// Rows of C are far apart, so no hardware prefetch finds them; measured 3 to 6 % from n = 1024 on.
#[inline(always)]
fn fetch_c<V: Vector>(t: &Tile<V::T>) {
    for r in 0..t.rows {
        let c = t.c.wrapping_offset(r as isize * t.crs);
        V::ahead_of_write(c);
        V::ahead_of_write(c.wrapping_add(t.cols - 1));
    }
}

/// Writes the sums to C, or adds them.
///
/// # Safety
/// As [`Tile`] says for C.
#[inline(always)]
unsafe fn put_tile<V: Vector, const R: usize, const H: usize>(t: &Tile<V::T>, sums: [[V; H]; R]) {
    if t.rows == R && t.cols == H * V::LANES {
        // Straight from the registers: with more to decide the compiler keeps the sums in memory.
        // SAFETY: the caller's promise.
        let put = |r: usize, h: usize, x: V| unsafe {
            let c = t.c.offset(r as isize * t.crs).add(h * V::LANES);
            if t.add { V::load(c).plus(x).store(c) } else { x.store(c) }
        };
        for (r, sums) in sums.iter().enumerate() {
            for (h, &x) in sums.iter().enumerate() {
                put(r, h, x);
            }
        }
        return;
    }
    for (r, sums) in sums.into_iter().enumerate().take(t.rows) {
        for (h, x) in sums.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let (c, n) = (t.c.offset(r as isize * t.crs).add(h * V::LANES), t.cols - h * V::LANES);
                if n >= V::LANES {
                    if t.add { V::load(c).plus(x).store(c) } else { x.store(c) }
                } else if t.add {
                    V::load_part(c, n).plus(x).store_part(c, n)
                } else {
                    x.store_part(c, n)
                }
            }
        }
    }
}

/// Steps of K that B is fetched ahead of its use.
const AHEAD: isize = 8;

/// # Safety
/// As for `Kernel::pack`.
#[inline(always)]
pub(super) unsafe fn pack_body<V: Vector>(strip: Strip<V::T>, width: usize, to: *mut V::T) {
    let Strip { from, ls, ks, lines, kc } = strip;
    // SAFETY: the caller's promise; lines ≤ width.
    unsafe {
        if ls == 1 && lines == width {
            return match width {
                4 => copy_lines::<V, 4>(&strip, to),
                6 => copy_lines::<V, 6>(&strip, to),
                8 => copy_lines::<V, 8>(&strip, to),
                12 => copy_lines::<V, 12>(&strip, to),
                16 => copy_lines::<V, 16>(&strip, to),
                32 => copy_lines::<V, 32>(&strip, to),
                _ => unreachable!("a width that no kernel has"),
            };
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
/// As for `Kernel::widen`.
#[inline(always)]
pub(super) unsafe fn widen_body<V: Vector, S: Source<V::T>>(strip: Strip<S>, width: usize, to: *mut V::T) {
    let Strip { from, ls, ks, lines, kc } = strip;
    // SAFETY: the caller's promise; lines ≤ width ≤ MAX_WIDTH, and the stage holds STAGED steps of them.
    unsafe {
        if ks == 1 && ls != 1 {
            // Widened a few steps at a time, so that they are still in L1 when they are transposed.
            let mut stage = [const { MaybeUninit::<V::T>::uninit() }; STAGED * MAX_WIDTH];
            let stage = stage.as_mut_ptr().cast::<V::T>();
            for k in (0..kc).step_by(STAGED) {
                let steps = STAGED.min(kc - k);
                for line in 0..lines {
                    let from = from.offset(line as isize * ls).add(k);
                    V::ahead(from.wrapping_add(STAGED).cast());
                    S::widen_line(from, steps, stage.add(line * STAGED));
                }
                let part = Strip { from: stage.cast_const(), ls: STAGED as isize, ks: 1, lines, kc: steps };
                pack_body::<V>(part, width, to.add(k * width));
            }
            return;
        }
        for k in 0..kc {
            let (from, to) = (from.offset(k as isize * ks), to.add(k * width));
            if ls == 1 {
                V::ahead(from.wrapping_offset(2 * AHEAD * ks).cast());
                if lines == 32 { S::widen_line(from, 32, to) } else { S::widen_line(from, lines, to) }
            } else {
                for l in 0..lines {
                    *to.add(l) = S::widen(*from.offset(l as isize * ls));
                }
            }
            to.add(lines).write_bytes(0, width - lines);
        }
    }
}

/// Steps of K that are widened at a time, and the most lines that a strip has.
const STAGED: usize = 64;
const MAX_WIDTH: usize = 32;

/// Copies W neighbours a step; fetches ahead, since the rows they come from are far apart.
///
/// # Safety
/// As for `Kernel::pack`; lines = width = W and ls = 1.
#[inline(always)]
unsafe fn copy_lines<V: Vector, const W: usize>(strip: &Strip<V::T>, to: *mut V::T) {
    for k in 0..strip.kc {
        let from = strip.from.wrapping_offset(k as isize * strip.ks);
        let soon = from.wrapping_offset(2 * AHEAD * strip.ks);
        V::ahead(soon);
        V::ahead(soon.wrapping_add(W - 1));
        // SAFETY: the caller's promise.
        unsafe { to.add(k * W).cast::<[V::T; W]>().write(from.cast::<[V::T; W]>().read()) };
    }
}

/// Implements [`Kernel`] for an instruction set, a type and its register.
macro_rules! kernels {
    ($($isa:ident, $t:ty, $v:ty, $mr:literal $(, $feature:literal)?;)*) => {$(
        impl Kernel<$t> for $isa {
            const MR: usize = $mr;
            const NR: usize = 2 * <$v as Vector>::LANES;

            #[inline(always)]
            fn fetch(at: *const u8, lines: usize) {
                (0..lines).for_each(|line| <$v>::later(at.wrapping_add(64 * line)));
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn tile(t: Tile<$t>) {
                // SAFETY: the caller's promise.
                unsafe { tile_body::<$v, $mr>(t) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn pack(strip: Strip<$t>, width: usize, to: *mut $t) {
                // SAFETY: the caller's promise.
                unsafe { pack_body::<$v>(strip, width, to) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn widen<S: Source<$t>>(strip: Strip<S>, width: usize, to: *mut $t) {
                // SAFETY: the caller's promise.
                unsafe { widen_body::<$v, S>(strip, width, to) }
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
            unsafe fn direct<S: Source<$t>>(p: Problem<S, $t>) {
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
    Portable, f32, Lanes<f32>, 6;
    Portable, f64, Lanes<f64>, 6;
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
    unsafe fn load_part(from: *const T, n: usize) -> Self {
        let mut lanes = [T::default(); 4];
        // SAFETY: the caller's promise.
        unsafe { lanes.as_mut_ptr().copy_from_nonoverlapping(from, n) };
        Lanes(lanes)
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut T, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(self.0.as_ptr(), n) }
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
    fn ahead_of_write(_: *const T) {}

    #[inline(always)]
    fn later(_: *const u8) {}

    #[inline(always)]
    unsafe fn transpose(_: &Strip<T>, _: usize, _: *mut T) -> usize {
        0
    }
}
