//! Elementwise execution in tiles: a tile of each operand is brought into a row of scratch (or read in place where it
//! lies row-major), one loop of the chosen operation runs over it, and tiles are shared out among threads.

use crate::pool;
use crate::view::{View, Walk};

/// Elements of a tile: small enough that a few tiles stay in the first-level cache.
pub const TILE: usize = 1024;
/// Elements that one thread takes at a time.
const SHARE: usize = 32 * TILE;

/// Where results go: a row-major run of elements that nobody else reads or writes meanwhile.
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Out<T> {
        *self
    }
}
impl<T> Copy for Out<T> {}

// SAFETY: an `Out` is only used to hand disjoint ranges to threads within one call.
unsafe impl<T: Send> Send for Out<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Out<T> {}

impl<T> Out<T> {
    /// # Safety
    /// `view` must be row-major, hold elements of `T`'s size, and be the only view of its elements in use, except for
    /// operands read through [`TileSource::copied`].
    pub unsafe fn new(view: &View) -> Out<T> {
        Out(view.ptr())
    }

    /// # Safety
    /// The range lies within the view, and no other thread uses it.
    pub unsafe fn range<'a>(self, from: usize, len: usize) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(from), len) }
    }
}

/// An operand, element by element in the order of the result.
pub struct TileSource<'a, T> {
    base: *const T,
    walk: Walk,
    /// Its tiles can be lent out without a copy.
    direct: bool,
    _life: std::marker::PhantomData<&'a T>,
}

// SAFETY: a source only reads a buffer that nobody writes, except tile by tile after it was copied out.
unsafe impl<T: Sync> Sync for TileSource<'_, T> {}

impl<'a, T: Copy + Default> TileSource<'a, T> {
    /// An operand that nobody writes.
    pub fn new(view: &'a View) -> TileSource<'a, T> {
        debug_assert_eq!(view.dtype.size(), size_of::<T>());
        TileSource {
            base: view.ptr(),
            walk: view.walk(),
            direct: view.is_dense(),
            _life: std::marker::PhantomData,
        }
    }

    /// An operand whose place the result takes: each tile is copied out before it is overwritten.
    pub fn copied(view: &'a View) -> TileSource<'a, T> {
        TileSource { direct: false, ..TileSource::new(view) }
    }

    /// The elements `from..from + scratch.len()`.
    pub fn tile<'s>(&self, from: usize, scratch: &'s mut [T]) -> &'s [T]
    where
        'a: 's,
    {
        let len = scratch.len();
        if self.direct {
            // SAFETY: the view is row-major and holds at least `from + len` elements of T; its buffer outlives 'a.
            return unsafe { std::slice::from_raw_parts(self.base.add(from), len) };
        }
        self.walk.runs(from, len, |at, offset, count, stride| {
            let to = &mut scratch[at..at + count];
            let base = self.base.wrapping_offset(offset);
            match stride {
                // SAFETY: every offset of a view lies within its buffer.
                0 => to.fill(unsafe { *base }),
                // SAFETY: as above, for `count` neighbours.
                1 => to.copy_from_slice(unsafe { std::slice::from_raw_parts(base, count) }),
                _ => {
                    for (i, x) in to.iter_mut().enumerate() {
                        // SAFETY: as above.
                        *x = unsafe { *base.wrapping_offset(i as isize * stride) };
                    }
                }
            }
        });
        scratch
    }
}

/// Calls `f(from, len)` for tiles that cover `0..n`, in parallel where that pays.
pub fn tiles(n: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    let run = |from: usize, to: usize| {
        for at in (from..to).step_by(TILE) {
            f(at, TILE.min(to - at));
        }
    };
    pool::parallel(n.div_ceil(SHARE), &|share| run(share * SHARE, ((share + 1) * SHARE).min(n)));
}
