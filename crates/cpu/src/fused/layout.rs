//! How a program's operands lie over the grid that it runs on: rows of neighbouring elements.
//!
//! A row is the longest run of last axes along which every operand is either neighbours or one element, or, where the
//! program reduces, the axes it reduces. The axes before are merged where all operands allow it; stepping through them
//! only moves addresses.

use crate::view::{View, Walk};
use kiln_ir::{DType, Dims, MAX_RANK, Shape};
use smallvec::SmallVec;

/// Rows of elements.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub rows: usize,
    pub length: usize,
    /// Extents of the merged axes that count the rows, the first outermost.
    extents: [usize; MAX_RANK],
    rank: usize,
}

/// An operand on the grid.
pub(super) struct Operand {
    pub base: *mut u8,
    pub dtype: DType,
    /// Bytes from row to row, along each merged axis.
    steps: [isize; MAX_RANK],
    pub inner: Inner,
    /// Its elements in the order of the grid, for those that must be gathered.
    pub walk: Option<Box<Walk>>,
}

/// How an operand lies along a row, or down the rows if there is one element for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Inner {
    /// Neighbours.
    Stream,
    /// One element for all.
    Splat,
    /// Anything else.
    Gather,
}

/// An operand's distances along the axes of the grid's shape, those of a row zero if it has one element for each.
pub(super) struct Strides {
    pub wide: bool,
    pub strides: Dims<isize>,
}

impl Grid {
    /// The grid over `shape` in which `operands` lie; the last `inner` axes make a row, if that is said.
    pub fn new(shape: &Shape, inner: Option<usize>, operands: &[Strides]) -> Grid {
        let rank = shape.len();
        let inner =
            inner.unwrap_or_else(|| operands.iter().map(|o| run(shape, &o.strides)).min().unwrap_or(rank));
        let cut = rank - inner;
        let mut grid = Grid {
            rows: shape[..cut].iter().product(),
            length: shape[cut..].iter().product(),
            extents: [1; MAX_RANK],
            rank: 0,
        };
        let mut before: Option<usize> = None;
        for axis in (0..cut).filter(|&axis| shape[axis] != 1) {
            let merges = before.is_some_and(|before| {
                operands.iter().all(|o| o.strides[before] == o.strides[axis] * shape[axis] as isize)
            });
            if merges {
                grid.extents[grid.rank - 1] *= shape[axis];
            } else {
                grid.extents[grid.rank] = shape[axis];
                grid.rank += 1;
            }
            before = Some(axis);
        }
        grid
    }

    /// An operand given by its view, expanded to `shape` with these strides.
    pub fn operand(&self, shape: &Shape, view: &View, strides: &Strides) -> Operand {
        let (mut steps, size) = ([0; MAX_RANK], view.dtype.size() as isize);
        // The axes from the last before a row outwards; of merged ones the innermost counts.
        let (mut axis, mut length) = (shape.len(), 1);
        while length < self.length {
            axis -= 1;
            length *= shape[axis];
        }
        let cut = axis;
        for merged in (0..self.rank).rev() {
            let mut extent = 1;
            let mut first = None;
            while extent < self.extents[merged] {
                axis -= 1;
                if shape[axis] != 1 {
                    first.get_or_insert(strides.strides[axis] * size);
                    extent *= shape[axis];
                }
            }
            steps[merged] = first.unwrap_or(0);
        }
        let inner = match strides.wide {
            true => inner(&shape[cut..], &strides.strides[cut..]),
            false if self.rank == 0 || steps[..self.rank].iter().all(|&s| s == 0) => Inner::Splat,
            false if self.rank == 1 && steps[0] == size => Inner::Stream,
            false => Inner::Gather,
        };
        Operand { base: view.address(), dtype: view.dtype, steps, inner, walk: None }
    }

    /// Whether rows follow each other at one distance.
    pub fn is_even(&self) -> bool {
        self.rank <= 1
    }

    /// The place of a row along each merged axis.
    pub fn index(&self, mut row: usize) -> SmallVec<[usize; MAX_RANK]> {
        let mut index: SmallVec<[usize; MAX_RANK]> = SmallVec::from_elem(0, self.rank);
        for axis in (0..self.rank).rev() {
            index[axis] = row % self.extents[axis];
            row /= self.extents[axis];
        }
        index
    }
}

impl Operand {
    /// Where a row starts.
    pub fn row(&self, grid: &Grid, row: usize) -> *mut u8 {
        if grid.is_even() {
            return self.base.wrapping_offset(row as isize * self.steps[0]);
        }
        self.at(&grid.index(row))
    }

    /// Where the row at this index starts.
    pub fn at(&self, index: &[usize]) -> *mut u8 {
        let offset: isize = index.iter().zip(&self.steps).map(|(&i, &step)| i as isize * step).sum();
        self.base.wrapping_offset(offset)
    }

    /// Takes all rows as one: neighbours, one element, or to be gathered.
    pub fn flatten(&mut self, grid: &Grid) {
        let size = self.dtype.size() as isize;
        let splat = self.inner == Inner::Splat || grid.length == 1;
        let still = self.steps[..grid.rank].iter().all(|&s| s == 0);
        let dense = grid.rank == 1 && self.steps[0] == size * grid.length as isize;
        self.inner = match self.inner {
            Inner::Stream | Inner::Splat if splat && still => Inner::Splat,
            Inner::Stream if dense => Inner::Stream,
            _ if grid.length == 1 && dense => Inner::Stream,
            _ => Inner::Gather,
        };
    }

    /// Bytes from one row to the next, where the grid is even.
    pub fn step(&self) -> isize {
        self.steps[0]
    }
}

/// How elements lie along these axes.
fn inner(shape: &[usize], strides: &[isize]) -> Inner {
    let mut expected = 1;
    let mut found = None;
    for (&extent, &stride) in shape.iter().zip(strides).rev().filter(|(extent, _)| **extent != 1) {
        let here = if stride == expected {
            Inner::Stream
        } else if stride == 0 {
            Inner::Splat
        } else {
            return Inner::Gather;
        };
        if *found.get_or_insert(here) != here {
            return Inner::Gather;
        }
        expected *= extent as isize;
    }
    found.unwrap_or(Inner::Splat)
}

/// How many last axes an operand runs along without a break. One that must be gathered anyway never breaks.
fn run(shape: &Shape, strides: &[isize]) -> usize {
    let rank = shape.len();
    let ones = shape.iter().rev().take_while(|&&extent| extent == 1).count();
    for axes in ones + 1..=rank {
        if inner(&shape[rank - axes..], &strides[rank - axes..]) == Inner::Gather {
            return if axes == ones + 1 { rank } else { axes - 1 };
        }
    }
    rank
}
