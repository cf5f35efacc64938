//! Shapes: up to eight extents held inline, so that a shape is copied, compared and hashed without touching the heap.

use crate::{DType, OpError};

/// The highest rank a tensor can have.
pub const MAX_RANK: usize = 8;

/// A short inline list of numbers, at most [`MAX_RANK`] long.
#[derive(Clone, Copy)]
pub struct Dims<T> {
    items: [T; MAX_RANK],
    len: u8,
}

impl<T: Copy + Default> Dims<T> {
    /// The list with these items, or `None` if there are more than [`MAX_RANK`].
    pub fn try_new(items: &[T]) -> Option<Dims<T>> {
        let mut all = [T::default(); MAX_RANK];
        all.get_mut(..items.len())?.copy_from_slice(items);
        Some(Dims { items: all, len: items.len() as u8 })
    }

    /// `n` copies of `item`; `n` is at most [`MAX_RANK`].
    pub fn repeat(item: T, n: usize) -> Dims<T> {
        let mut all = [T::default(); MAX_RANK];
        all[..n].fill(item);
        Dims { items: all, len: n as u8 }
    }

    /// Collects at most [`MAX_RANK`] items; more is a bug and panics.
    pub fn collect(items: impl IntoIterator<Item = T>) -> Dims<T> {
        let mut dims = Dims::default();
        for item in items {
            dims.items[dims.len as usize] = item;
            dims.len += 1;
        }
        dims
    }

    /// The list with `item` inserted at `at`, or `None` if it is full.
    pub fn inserted(mut self, at: usize, item: T) -> Option<Dims<T>> {
        let len = self.len();
        if len == MAX_RANK || at > len {
            return None;
        }
        self.items.copy_within(at..len, at + 1);
        self.items[at] = item;
        self.len += 1;
        Some(self)
    }

    /// The list without the item at `at`.
    pub fn removed(mut self, at: usize) -> Dims<T> {
        let len = self.len();
        assert!(at < len);
        self.items.copy_within(at + 1..len, at);
        self.items[len - 1] = T::default();
        self.len -= 1;
        self
    }
}

impl<T: PartialEq> PartialEq for Dims<T> {
    fn eq(&self, other: &Dims<T>) -> bool {
        // Short lists: a loop is quicker than a call that compares memory.
        self.len == other.len && self.iter().zip(other.iter()).all(|(a, b)| a == b)
    }
}

impl<T: Eq> Eq for Dims<T> {}

impl<T: std::hash::Hash> std::hash::Hash for Dims<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl<T: Copy + Default> Default for Dims<T> {
    fn default() -> Self {
        Dims { items: [T::default(); MAX_RANK], len: 0 }
    }
}

impl<T> std::ops::Deref for Dims<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.items[..self.len as usize]
    }
}

impl<T> std::ops::DerefMut for Dims<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..self.len as usize]
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Dims<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.iter().enumerate() {
            write!(f, "{}{d:?}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

/// The extents of a tensor, outermost first.
pub type Shape = Dims<usize>;

impl Shape {
    /// The number of elements; every tensor's shape has passed [`Shape::checked_numel`], so this cannot overflow.
    pub fn numel(&self) -> usize {
        self.iter().product()
    }

    /// The number of elements, or `None` where it, or the product of the non-zero extents, is more than any machine has.
    /// The bound leaves room for kernels that multiply it by the bytes of an element and a few more small numbers.
    pub fn checked_numel(&self) -> Option<usize> {
        const CAP: usize = 1 << 45;
        let mut product = 1usize;
        for &d in self.iter().filter(|&&d| d != 0) {
            product = product.checked_mul(d).filter(|&p| p <= CAP)?;
        }
        Some(if self.contains(&0) { 0 } else { product })
    }

    /// Strides, in elements, of the row-major layout.
    pub fn contiguous_strides(&self) -> Dims<isize> {
        let mut strides = Dims::repeat(1isize, self.len());
        for i in (0..self.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1].saturating_mul(self[i + 1] as isize);
        }
        strides
    }

    /// The shape without the axes in `axes`, or with them as 1.
    pub fn reduced(&self, axes: crate::AxisSet, keep: bool) -> Shape {
        let mut out = Shape::default();
        for (i, &d) in self.iter().enumerate() {
            match (axes.has(i), keep) {
                (false, _) => out = out.inserted(out.len(), d).unwrap_or(out),
                (true, true) => out = out.inserted(out.len(), 1).unwrap_or(out),
                (true, false) => {}
            }
        }
        out
    }
}

macro_rules! shape_from {
    ($($n:literal)*) => {$(
        impl From<[usize; $n]> for Shape {
            fn from(dims: [usize; $n]) -> Shape {
                Shape::collect(dims)
            }
        }
    )*};
}
shape_from!(0 1 2 3 4 5 6 7 8);

/// # Panics
/// If there are more than [`MAX_RANK`] extents.
impl From<&[usize]> for Shape {
    #[track_caller]
    fn from(dims: &[usize]) -> Shape {
        match Dims::try_new(dims) {
            Some(shape) => shape,
            None => panic!("rank {} is above the highest supported, {MAX_RANK}", dims.len()),
        }
    }
}

impl From<Vec<usize>> for Shape {
    #[track_caller]
    fn from(dims: Vec<usize>) -> Shape {
        Shape::from(&dims[..])
    }
}

impl From<usize> for Shape {
    fn from(n: usize) -> Shape {
        Shape::collect([n])
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Shape {
        *shape
    }
}

/// The dtype and shape of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Meta {
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Shape,
}

impl Meta {
    /// A meta of these parts.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Meta {
        Meta { dtype, shape: shape.into() }
    }

    /// Bytes of the row-major layout.
    pub fn bytes(&self) -> usize {
        self.dtype.bytes(self.shape.numel())
    }

    /// Checks that the size can be addressed and that quantised rows are whole blocks.
    pub fn check(&self) -> Result<(), OpError> {
        if self.shape.checked_numel().is_none() {
            return Err(OpError::TooLarge { shape: self.shape });
        }
        let (block, _) = self.dtype.block();
        if block > 1 && self.shape.last().is_none_or(|d| d % block != 0) {
            return Err(OpError::Quantised { dtype: self.dtype, shape: self.shape });
        }
        Ok(())
    }
}

impl std::fmt::Display for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { "," })?;
        }
        f.write_str("]")
    }
}

impl std::fmt::Debug for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// NumPy broadcasting: shapes are aligned at the last axis, and an extent of 1 stretches.
pub fn broadcast(a: &Shape, b: &Shape) -> Option<Shape> {
    if a == b {
        return Some(*a);
    }
    let rank = a.len().max(b.len());
    let mut out = Shape::repeat(1, rank);
    for i in 0..rank {
        let from = |s: &Shape| (i + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
        out[i] = match (from(a), from(b)) {
            (x, y) if x == y => x,
            (1, y) => y,
            (x, 1) => x,
            _ => return None,
        };
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_numpy() {
        let b = |a: &[usize], b: &[usize]| broadcast(&a.into(), &b.into()).map(|s| s.to_vec());
        assert_eq!(b(&[2, 1, 3], &[4, 1]), Some(vec![2, 4, 3]));
        assert_eq!(b(&[], &[0, 1]), Some(vec![0, 1]));
        assert_eq!(b(&[0], &[1]), Some(vec![0]));
        assert_eq!(b(&[2], &[3]), None);
        assert_eq!(b(&[0], &[3]), None);
    }

    #[test]
    fn overflowing_products_are_seen_even_behind_a_zero() {
        assert_eq!(Shape::from([usize::MAX, 2]).checked_numel(), None);
        assert_eq!(Shape::from([usize::MAX, 2, 0]).checked_numel(), None);
        assert_eq!(Shape::from([3, 0]).checked_numel(), Some(0));
        assert_eq!(Shape::default().checked_numel(), Some(1));
        assert_eq!(Shape::from([1 << 45]).checked_numel(), Some(1 << 45));
        assert_eq!(Shape::from([(1 << 45) + 1]).checked_numel(), None);
    }
}
