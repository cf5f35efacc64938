//! Arguments that name axes and extents, in the forms that are handy to write.

use crate::tensor::resolve_axis;
use crate::{Shape, Tensor};
use kiln_ir::{AxisSet, Dims, MAX_RANK};
use smallvec::SmallVec;

/// Some axes of a tensor: `()` for all, `1`, `-1` or `[0, 2]`. Negative axes count from the end.
///
/// For reductions an empty list means all axes too, as in PyTorch.
#[derive(Clone, Debug)]
pub struct Axes(Option<SmallVec<[isize; 8]>>);

impl Axes {
    /// These axes.
    pub fn new(axes: &[isize]) -> Axes {
        Axes(Some(SmallVec::from_slice(axes)))
    }

    /// The axes as a set for a reduction of `x`.
    #[track_caller]
    pub(super) fn set(&self, op: &str, x: &Tensor) -> AxisSet {
        match &self.0 {
            Some(axes) if !axes.is_empty() => {
                let mut set = AxisSet::default();
                for axis in self.list(op, x) {
                    assert!(!set.has(axis), "{op}: axis {axis} is named twice in {axes:?}");
                    set = set.with(axis);
                }
                // A tensor of rank 0 has an axis to name, but none to reduce.
                if x.rank() == 0 { AxisSet::default() } else { set }
            }
            _ => AxisSet::all(x.rank()),
        }
    }

    /// The one axis of a reduction that knows no more, counted from the start; `None` for all of `x` as if it were flat.
    #[track_caller]
    pub(super) fn single(&self, op: &str, x: &Tensor) -> Option<usize> {
        match self.0.as_deref() {
            None | Some([]) => None,
            Some(&[axis]) => Some(x.any_axis(op, axis)),
            Some(axes) => panic!("{op}: axes {axes:?} of shape {:?}: one axis, or () for all", x.shape()),
        }
    }

    /// The axes in the order given, counted from the start.
    #[track_caller]
    pub(super) fn list(&self, op: &str, x: &Tensor) -> SmallVec<[usize; 8]> {
        let Some(axes) = &self.0 else { return (0..x.rank()).collect() };
        // Here and below loops, not closures: a closure panics at its own line instead of the caller's.
        let mut list = SmallVec::new();
        for &axis in axes {
            list.push(x.any_axis(op, axis));
        }
        list
    }
}

impl From<()> for Axes {
    fn from(_: ()) -> Axes {
        Axes(None)
    }
}

impl From<&[isize]> for Axes {
    fn from(axes: &[isize]) -> Axes {
        Axes::new(axes)
    }
}

/// Extents of a shape, of which one may be -1: in `reshape` what is left over, in `expand` the extent as it is.
#[derive(Clone, Debug)]
pub struct Dimensions(SmallVec<[isize; 8]>);

impl Dimensions {
    /// The extents as given.
    pub(super) fn items(&self) -> &[isize] {
        &self.0
    }

    /// The shape that `numel` elements take.
    #[track_caller]
    pub(super) fn fill(&self, op: &str, x: &Tensor) -> Shape {
        let mut known = Some(1usize);
        for &d in self.0.iter().filter(|&&d| d >= 0) {
            known = known.and_then(|product| product.checked_mul(d as usize));
        }
        let open = self.0.iter().filter(|&&d| d < 0).count();
        let whole = known.filter(|&known| open == 0 || known > 0 && x.numel().is_multiple_of(known));
        match whole {
            Some(known) if open <= 1 && self.0.iter().all(|&d| d >= -1) => {
                self.shape(op, |_| Some(x.numel() / known.max(1)))
            }
            _ => panic!("{op}: shape {:?} cannot be filled from shape {:?}", self.0, x.shape()),
        }
    }

    /// The shape with `rest(i)` in place of a negative extent.
    #[track_caller]
    pub(super) fn shape(&self, op: &str, rest: impl Fn(usize) -> Option<usize>) -> Shape {
        if self.0.len() > MAX_RANK {
            panic!("{op}: rank {} is above the highest supported, {MAX_RANK}", self.0.len());
        }
        let mut shape = Shape::repeat(0, self.0.len());
        for (i, &d) in self.0.iter().enumerate() {
            match (usize::try_from(d), rest(i)) {
                (Ok(d), _) | (Err(_), Some(d)) => shape[i] = d,
                (Err(_), None) => panic!("{op}: extent {d} at place {i} of {:?} has no meaning", self.0),
            }
        }
        shape
    }
}

impl From<Shape> for Dimensions {
    fn from(shape: Shape) -> Dimensions {
        Dimensions::from(&shape[..])
    }
}

impl From<&Shape> for Dimensions {
    fn from(shape: &Shape) -> Dimensions {
        Dimensions::from(&shape[..])
    }
}

impl From<()> for Dimensions {
    fn from(_: ()) -> Dimensions {
        Dimensions(SmallVec::new())
    }
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl From<$t> for Axes {
            fn from(axis: $t) -> Axes {
                Axes::new(&[axis as isize])
            }
        }
        impl<const N: usize> From<[$t; N]> for Axes {
            fn from(axes: [$t; N]) -> Axes {
                Axes(Some(axes.iter().map(|&axis| axis as isize).collect()))
            }
        }
        impl From<$t> for Dimensions {
            fn from(extent: $t) -> Dimensions {
                Dimensions(SmallVec::from_slice(&[extent as isize]))
            }
        }
        impl<const N: usize> From<[$t; N]> for Dimensions {
            fn from(extents: [$t; N]) -> Dimensions {
                Dimensions::from(&extents[..])
            }
        }
        impl From<Vec<$t>> for Dimensions {
            fn from(extents: Vec<$t>) -> Dimensions {
                Dimensions::from(&extents[..])
            }
        }
        impl From<&[$t]> for Dimensions {
            fn from(extents: &[$t]) -> Dimensions {
                Dimensions(extents.iter().map(|&d| d as isize).collect())
            }
        }
    )*};
}
integers!(isize i32 usize);

/// One number for each spatial axis, or one for all of them: a kernel, a stride, a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents(Dims<usize>);

impl Extents {
    /// The numbers for `n` spatial axes, at most three; places beyond hold `rest`.
    #[track_caller]
    pub(super) fn resolve(&self, op: &str, what: &str, n: usize, rest: usize) -> [u32; 3] {
        let given = self.0.len();
        assert!(given == 1 || given == n, "{op}: {what} {:?} does not fit {n} spatial axes", self.0);
        let mut all = [0; 3];
        for (i, place) in all.iter_mut().enumerate() {
            let item = if i >= n { rest } else { self.0[if given == 1 { 0 } else { i }] };
            match u32::try_from(item) {
                Ok(item) => *place = item,
                Err(_) => panic!("{op}: {what} {item} is too large"),
            }
        }
        all
    }
}

impl Extents {
    /// The numbers for `n` axes; `None` if there are neither one nor `n`.
    pub fn over(&self, n: usize) -> Option<Vec<usize>> {
        let given = self.0.len();
        (given == 1 || given == n).then(|| (0..n).map(|i| self.0[if given == 1 { 0 } else { i }]).collect())
    }
}

/// One number, or as in `2x3`.
impl std::fmt::Display for Extents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, extent) in self.0.iter().enumerate() {
            write!(f, "{}{extent}", if i == 0 { "" } else { "x" })?;
        }
        Ok(())
    }
}

impl From<usize> for Extents {
    fn from(extent: usize) -> Extents {
        Extents(Dims::repeat(extent, 1))
    }
}

impl From<&[usize]> for Extents {
    #[track_caller]
    fn from(extents: &[usize]) -> Extents {
        Extents(Shape::from(extents))
    }
}

macro_rules! extents {
    ($($n:literal)*) => {$(
        impl From<[usize; $n]> for Extents {
            fn from(extents: [usize; $n]) -> Extents {
                Extents(Dims::from(extents))
            }
        }
    )*};
}
extents!(1 2 3);

impl Tensor {
    /// Like [`Tensor::axis`], and rank 0 has an axis 0, as in PyTorch.
    #[track_caller]
    pub(super) fn any_axis(&self, op: &str, axis: isize) -> usize {
        resolve_axis(op, axis, self.rank().max(1), &self.shape())
    }

    /// Rank 0 as rank 1.
    #[track_caller]
    pub(super) fn lifted(&self) -> Tensor {
        if self.rank() == 0 { self.reshape([1]) } else { self.clone() }
    }
}
