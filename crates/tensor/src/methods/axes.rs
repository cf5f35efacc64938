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

    /// The axes in the order given, counted from the start.
    #[track_caller]
    pub(super) fn list(&self, op: &str, x: &Tensor) -> SmallVec<[usize; 8]> {
        match &self.0 {
            Some(axes) => axes.iter().map(|&axis| x.any_axis(op, axis)).collect(),
            None => (0..x.rank()).collect(),
        }
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
        let known: Option<usize> = (self.0.iter().filter(|&&d| d >= 0))
            .try_fold(1usize, |product, &d| product.checked_mul(d as usize));
        let known = known.unwrap_or_else(|| panic!("{op}: shape {:?} has too many elements to address", self.0));
        let open = self.0.iter().filter(|&&d| d < 0).count();
        let bad = || -> ! { panic!("{op}: shape {:?} cannot be filled from shape {:?}", self.0, x.shape()) };
        if open > 1 || self.0.iter().any(|&d| d < -1) {
            bad();
        }
        if open == 1 && (known == 0 || x.numel() % known != 0) {
            bad();
        }
        self.shape(op, |_| x.numel() / known.max(1))
    }

    /// The shape with `rest(i)` in place of -1.
    #[track_caller]
    pub(super) fn shape(&self, op: &str, rest: impl Fn(usize) -> usize) -> Shape {
        if self.0.len() > MAX_RANK {
            panic!("{op}: rank {} is above the highest supported, {MAX_RANK}", self.0.len());
        }
        Shape::collect(self.0.iter().enumerate().map(|(i, &d)| if d < 0 { rest(i) } else { d as usize }))
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
        let item = |i: usize| if i >= n { rest } else { self.0[if given == 1 { 0 } else { i }] };
        [0, 1, 2].map(|i| match u32::try_from(item(i)) {
            Ok(item) => item,
            Err(_) => panic!("{op}: {what} {} is too large", item(i)),
        })
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
