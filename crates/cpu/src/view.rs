//! Strided views of arena buffers: how the CPU holds values, so that rearrangements copy nothing.
//!
//! A buffer is written only while one view of it exists, or before it is handed out; afterwards it is read-only. Bool
//! elements are bytes that are 0 or 1. Quantised values are always whole and row-major.

use crate::arena::{Arena, Buffer};
use kiln_device::{Bytes, Host, UploadBuffer};
use kiln_ir::{DType, Dims, MAX_RANK, Meta, Shape};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A value: some elements of a buffer, in some order.
#[derive(Clone)]
pub struct View {
    /// Where the elements are.
    pub buffer: Held,
    /// Their type.
    pub dtype: DType,
    /// Extents.
    pub shape: Shape,
    /// Distances in elements.
    pub strides: Dims<isize>,
    /// Place of the first element.
    pub start: isize,
}

/// A buffer that views share. The last view gives it back to the arena together with the count, so that a recurring
/// step makes no heap call for its results.
#[derive(Clone)]
pub struct Held(Option<Arc<Buffer>>);

impl From<Arc<Buffer>> for Held {
    fn from(buffer: Arc<Buffer>) -> Held {
        Held(Some(buffer))
    }
}

impl Held {
    /// Whether this is the only view of it and it may be written.
    pub fn is_sole(&self) -> bool {
        let sole = Arc::strong_count(self) == 1 && !self.is_lent();
        if sole {
            // The count is read relaxed: what another thread read before it let go came before what is written now.
            fence(Ordering::Acquire);
        }
        sole
    }

    /// The buffer, for somebody who reads it.
    pub fn share(&self) -> Arc<dyn Host> {
        let buffer: Arc<Buffer> = Arc::clone(self);
        buffer
    }
}

impl std::ops::Deref for Held {
    type Target = Arc<Buffer>;
    fn deref(&self) -> &Arc<Buffer> {
        self.0.as_ref().expect("only a drop takes it")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Where two owners end at once neither may be the last here: then the buffer goes back without the count.
        if let Some(buffer) = self.0.take() {
            Arena::reclaim(buffer);
        }
    }
}

// SAFETY: a buffer's block stays where it is; it is written before it is handed out, or while one view alone holds it.
unsafe impl Host for Buffer {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }
}

impl UploadBuffer for Buffer {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }

    fn done(self: Box<Self>) -> Bytes {
        Bytes::new(*self)
    }
}

impl View {
    /// All of `buffer`, row-major.
    pub fn whole(buffer: impl Into<Held>, meta: Meta) -> View {
        View {
            buffer: buffer.into(),
            dtype: meta.dtype,
            shape: meta.shape,
            strides: meta.shape.contiguous_strides(),
            start: 0,
        }
    }

    /// Dtype and shape.
    pub fn meta(&self) -> Meta {
        Meta { dtype: self.dtype, shape: self.shape }
    }

    /// How many elements it shows.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Whether its elements lie one after another in row-major order.
    pub fn is_dense(&self) -> bool {
        let mut expected = 1isize;
        for i in (0..self.shape.len()).rev() {
            if self.shape[i] != 1 {
                if self.strides[i] != expected {
                    return self.shape.contains(&0);
                }
                expected *= self.shape[i] as isize;
            }
        }
        true
    }

    /// Whether every element is the same place.
    pub fn is_single(&self) -> bool {
        (0..self.shape.len()).all(|i| self.shape[i] == 1 || self.strides[i] == 0)
    }

    /// Where in the buffer its bytes are, if it is row-major. A view of nothing may start behind the buffer's end.
    pub fn range(&self) -> std::ops::Range<usize> {
        debug_assert!(self.is_dense());
        let start = if self.numel() == 0 { 0 } else { self.start as usize * self.dtype.size() };
        start..start + self.meta().bytes()
    }

    /// The bytes of a row-major view.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer.as_slice()[self.range()]
    }

    /// The first element's address; `T` has the size of an element.
    pub fn ptr<T>(&self) -> *mut T {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        self.address().cast()
    }

    /// The first element's address, as bytes.
    pub fn address(&self) -> *mut u8 {
        self.buffer.as_mut_ptr().wrapping_offset(self.start * self.dtype.size() as isize)
    }

    /// Broadcast to a larger shape.
    pub fn expanded(&self, shape: &Shape) -> View {
        View { shape: *shape, strides: expanded(&self.shape, &self.strides, shape), ..self.clone() }
    }

    /// The same elements under another shape without a copy, where strides can express it.
    pub fn reshaped(&self, shape: &Shape) -> Option<View> {
        if self.numel() == 0 || self.is_dense() {
            return Some(View { shape: *shape, strides: shape.contiguous_strides(), ..self.clone() });
        }
        // Axes of both shapes are matched in runs of equal size; a run must be evenly strided to be cut anew.
        let old: SmallVec<[(usize, isize); MAX_RANK]> =
            self.shape.iter().copied().zip(self.strides.iter().copied()).filter(|(d, _)| *d != 1).collect();
        let mut strides = Dims::repeat(0isize, shape.len());
        let (mut from, mut to) = (0, 0);
        while from < old.len() {
            let (mut end, mut size) = (from + 1, old[from].0);
            let (first, mut wanted) = (to, 1usize);
            while wanted < size || to == first {
                wanted *= *shape.get(to)?;
                to += 1;
                while wanted > size {
                    let (length, _) = *old.get(end)?;
                    if old[end - 1].1 != old[end].1 * length as isize {
                        return None;
                    }
                    size *= length;
                    end += 1;
                }
            }
            let mut stride = old[end - 1].1;
            for axis in (first..to).rev() {
                strides[axis] = stride;
                stride *= shape[axis] as isize;
            }
            from = end;
        }
        Some(View { shape: *shape, strides, ..self.clone() })
    }

    /// The view with axes merged that lie one after another, for short loops.
    pub fn walk(&self) -> Walk {
        let mut walk = Walk { shape: [1; MAX_RANK], strides: [0; MAX_RANK], rank: 0 };
        for i in 0..self.shape.len() {
            let (length, stride) = (self.shape[i], self.strides[i]);
            if length == 1 {
                continue;
            }
            if walk.rank > 0 && walk.strides[walk.rank - 1] == stride * length as isize {
                walk.shape[walk.rank - 1] *= length;
                walk.strides[walk.rank - 1] = stride;
                continue;
            }
            walk.shape[walk.rank] = length;
            walk.strides[walk.rank] = stride;
            walk.rank += 1;
        }
        walk
    }
}

/// The strides of elements of shape `from` broadcast to the larger shape `to`.
pub fn expanded(from: &Shape, strides: &Dims<isize>, to: &Shape) -> Dims<isize> {
    let lead = to.len() - from.len();
    let stride = |i: usize| match i.checked_sub(lead) {
        Some(own) if from[own] == to[i] => strides[own],
        _ => 0,
    };
    Dims::collect((0..to.len()).map(stride))
}

/// A merged order of elements.
#[derive(Clone, Copy)]
pub struct Walk {
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
    rank: usize,
}

impl Walk {
    /// Calls `f(at, offset, count, stride)` for the runs that make up the elements `from..from + len` in row-major
    /// order: `count` elements from place `at` of the range on, whose offsets are `offset + i * stride`.
    pub fn runs(&self, from: usize, len: usize, mut f: impl FnMut(usize, isize, usize, isize)) {
        if len == 0 {
            return;
        }
        if self.rank == 0 {
            return f(0, 0, len, 0);
        }
        let inner = self.rank - 1;
        let mut index = [0usize; MAX_RANK];
        let (mut rest, mut offset) = (from, 0isize);
        for axis in (0..self.rank).rev() {
            index[axis] = rest % self.shape[axis];
            rest /= self.shape[axis];
            offset += index[axis] as isize * self.strides[axis];
        }
        let mut at = 0;
        loop {
            let count = (self.shape[inner] - index[inner]).min(len - at);
            f(at, offset, count, self.strides[inner]);
            at += count;
            if at == len {
                return;
            }
            offset -= index[inner] as isize * self.strides[inner];
            index[inner] = 0;
            let mut axis = inner;
            while axis > 0 {
                axis -= 1;
                index[axis] += 1;
                offset += self.strides[axis];
                if index[axis] < self.shape[axis] {
                    break;
                }
                offset -= index[axis] as isize * self.strides[axis];
                index[axis] = 0;
            }
        }
    }
}
