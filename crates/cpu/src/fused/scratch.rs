//! Where the parts of a run's scratch and of its results are.

use super::bind::{Bound, Mode};
use super::layout::{Inner, Operand};
use super::program::Extent;
use super::schedule::Level;
use crate::reduction::{CHUNK, LANES, STACK};
use kiln_ir::DType;
use smallvec::SmallVec;

/// Where the scratch of a run lies: offsets in bytes from its start.
#[derive(Default)]
pub(super) struct Scratch {
    /// For each narrow value, load with one element a row, row, gathered load: its place.
    pub narrows: SmallVec<[usize; 8]>,
    pub narrow_loads: SmallVec<[usize; 12]>,
    pub rows: SmallVec<[usize; 8]>,
    pub tiles: SmallVec<[usize; 12]>,
    pub lanes: usize,
    /// Accumulators of one reduction, in bytes.
    pub lane_pitch: usize,
    /// Scratch of the loop that runs.
    pub looped: usize,
    /// What every thread has of its own begins here.
    pub own: usize,
    pub total: usize,
}

/// Addresses for a stretch of the grid.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    /// Scratch that levels share.
    pub shared: *mut u8,
    /// Scratch of this thread.
    pub own: *mut u8,
    /// The first row that `shared` is for.
    pub base: usize,
    /// The first row and how many.
    pub first: usize,
    pub count: usize,
    /// The first column and how many.
    pub column: usize,
    pub width: usize,
}

impl Frame {
    /// Some of its columns, with scratch of one's own.
    pub fn stretch(&self, own: *mut u8, column: usize, width: usize) -> Frame {
        Frame { own, column, width, ..*self }
    }
}

// SAFETY: threads use disjoint parts of what the addresses lead to.
unsafe impl Sync for Frame {}
// SAFETY: as above.
unsafe impl Send for Frame {}
impl Bound {
    pub fn narrow_at(
        &self,
        scratch: &Scratch,
        frame: &Frame,
        home: u32,
        row: usize,
        dtype: DType,
    ) -> *mut u8 {
        match self.schedule.narrows[home as usize].1 {
            Some(result) => self.results[result as usize].address().wrapping_add(row * dtype.size()),
            None => {
                let at = scratch.narrows[home as usize] + (row - frame.base) * dtype.size();
                frame.shared.wrapping_add(at)
            }
        }
    }

    /// Where a row of scratch is for the first row, and how far the next.
    pub fn row_at(&self, scratch: &Scratch, frame: &Frame, row: u32, dtype: DType) -> (*mut u8, isize) {
        let pitch = self.grid.length * dtype.size();
        let at = (frame.first - frame.base) * pitch + frame.column * dtype.size();
        (frame.shared.wrapping_add(scratch.rows[row as usize] + at), pitch as isize)
    }

    pub fn stack_at(&self, stack: u32, row: usize, column: usize) -> *mut u8 {
        let view = &self.stacks[stack as usize];
        let at = row / STACK * self.grid.length + column;
        view.address().wrapping_add(at * view.dtype.size())
    }

    pub fn tile(&self, scratch: &Scratch, frame: &Frame, load: u32) -> *mut u8 {
        frame.own.wrapping_add(scratch.tiles[load as usize] - scratch.own)
    }

    /// The scratch that a run needs, or a part of one; nothing if no machine has that much.
    pub fn lay_scratch(&self, parted: bool) -> Option<Scratch> {
        let length = self.grid.length;
        // How many rows at a time, and how many elements of them.
        let (count, width) = match self.mode {
            Mode::Short { block } => (block, block * length),
            Mode::Rows { .. } | Mode::Columns { .. } if parted => (1, length),
            Mode::Rows { block } => (block, length),
            Mode::Columns { width } => (self.grid.rows, width),
        };
        let mut total = 0usize;
        let mut take = |bytes: usize| {
            let at = total;
            // One that is too large is refused where it is taken.
            total = bytes.checked_next_multiple_of(64).map_or(usize::MAX, |bytes| bytes.saturating_add(at));
            at
        };
        let s = &self.schedule;
        let narrows = s.narrows.iter();
        let narrows = narrows.map(|(dtype, result)| {
            take(if result.is_some() { 0 } else { count.saturating_mul(dtype.size()) })
        });
        let narrows = narrows.collect();
        let rows = s
            .rows
            .iter()
            .map(|dtype| take(count.saturating_mul(length).saturating_mul(dtype.size())))
            .collect();
        let own = take(0);
        let gathered =
            |load: &Operand, wide: bool| load.inner == Inner::Gather && load.walk.is_some() == wide;
        let tiles = self.loads.iter();
        let tiles = tiles
            .map(|l| take(if gathered(l, true) { width.saturating_mul(l.dtype.size()) } else { 0 }))
            .collect();
        let narrow_loads = self.loads.iter().zip(&s.loads);
        let narrow_loads = narrow_loads.map(|(l, spec)| {
            let narrow = gathered(l, false) && spec.extent != Extent::Wide;
            take(if narrow { count.saturating_mul(l.dtype.size()) } else { 0 })
        });
        let narrow_loads = narrow_loads.collect();
        let outputs = |level: &Level| level.wide.as_ref().map_or(0, |line| line.outputs.len());
        let lane_pitch =
            if s.narrows.is_empty() { 0 } else { width.div_ceil(CHUNK).saturating_mul(LANES * 8) };
        let most = s.levels.iter().map(outputs).max().unwrap_or(0);
        let lanes = take(lane_pitch.saturating_mul(most));
        let looped = self.loops.iter().flatten().flatten().map(|l| l.scratch_bytes()).max().unwrap_or(0);
        let looped = take(looped);
        let fits = total <= isize::MAX as usize / 2;
        fits.then_some(Scratch { narrows, narrow_loads, rows, tiles, lanes, lane_pitch, looped, own, total })
    }
}
