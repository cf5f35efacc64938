//! Bound programs, run: the grid is cut into blocks of rows or stretches of columns, which threads take in turn.

use super::bind::{Bound, Mode};
use super::kernel::{Base, KEPT, gather, splat, with_scratch, with_shared};
use super::layout::{Inner, Operand};
use super::line::{Line, Place, Target};
use super::looped::Loop;
use super::schedule::{Goal, Level};
use super::scratch::{Frame, Scratch};
use crate::arena::Reserved;
use crate::cpu::Context;
use crate::pool;
use crate::reduction::{self, CHUNK, STACK};
use kiln_device::Error;
use kiln_ir::DType;
use smallvec::SmallVec;

/// Columns that one thread adds up at a time at the end of a reduction of rows.
const COLUMNS: usize = 512;

// SAFETY: operands are read, results written in disjoint parts, by whoever runs a part of the grid.
unsafe impl Sync for Bound {}
// SAFETY: addresses of operands are noted anew before each run.
unsafe impl Send for Bound {}

impl Bound {
    /// Counts the scratch that running it takes, where that is more than threads keep anyway.
    pub fn reserve(&self, cx: &Context<'_>) -> Result<Option<Reserved>, Error> {
        let own = match self.mode {
            Mode::Short { .. } | Mode::Rows { .. } => self.scratch.total,
            Mode::Columns { .. } => self.scratch.total - self.scratch.own,
        };
        let shared = if matches!(self.mode, Mode::Columns { .. }) { self.shared_room() } else { 0 };
        if own.max(shared) <= KEPT {
            return Ok(None);
        }
        Ok(Some(cx.arena.reserve(own.saturating_mul(pool::threads()).saturating_add(shared))?))
    }

    /// Computes all results.
    pub fn run(&self) {
        match self.mode {
            Mode::Short { block } | Mode::Rows { block } => self.blocks(block),
            Mode::Columns { width } => self.columns(width),
        }
        self.unstack();
    }

    /// Computes some columns of some rows, on this thread. The program reduces nothing, and its rows are not short.
    pub fn part(&self, first: usize, count: usize, column: usize, width: usize) {
        let scratch = &self.scratch;
        with_scratch(scratch.total, |memory| {
            let own = memory.wrapping_add(scratch.own);
            let frame = Frame { shared: memory, own, base: first, first, count, column, width };
            for (at, level) in self.schedule.levels.iter().enumerate() {
                if let (Some(line), Some(looped)) = (&level.wide, &self.loops[at][1]) {
                    // SAFETY: the scratch is laid out for a row; the caller's parts are disjoint.
                    unsafe { self.wide(scratch, &frame, line, looped, |_, _, _, _| ()) };
                }
            }
        });
        fence();
    }

    fn blocks(&self, block: usize) {
        let (rows, length) = (self.grid.rows, self.grid.length);
        let scratch = &self.scratch;
        // Rows that are reduced onto each other stay with one thread.
        let share = match self.stacks.is_empty() {
            true => block * (2 * super::bind::SHARE / (block * length)).max(1),
            false => STACK,
        };
        pool::parallel(rows.div_ceil(share), &|s| {
            with_scratch(scratch.total, |memory| {
                let end = ((s + 1) * share).min(rows);
                for first in (s * share..end).step_by(block) {
                    let frame = Frame {
                        shared: memory,
                        own: memory.wrapping_add(scratch.own),
                        base: first,
                        first,
                        count: block.min(end - first),
                        column: 0,
                        width: length,
                    };
                    // SAFETY: the scratch is laid out for a block; blocks are disjoint.
                    unsafe { self.block(scratch, &frame) };
                }
            });
            fence();
        });
    }

    /// # Safety
    /// The frame lies within the grid, its scratch is as `scratch` says, and nobody else writes its rows.
    unsafe fn block(&self, scratch: &Scratch, frame: &Frame) {
        self.picks(scratch, frame);
        for (at, level) in self.schedule.levels.iter().enumerate() {
            // SAFETY: promised by the caller.
            unsafe {
                self.narrow(scratch, frame, at, level);
                match self.mode {
                    Mode::Short { .. } => self.flat(scratch, frame, at, level),
                    Mode::Rows { .. } | Mode::Columns { .. } => {
                        if let (Some(line), Some(looped)) = (&level.wide, &self.loops[at][1]) {
                            self.wide(
                                scratch,
                                frame,
                                line,
                                looped,
                                |row, fold, (kind, dtype, home), lanes| {
                                    let out = self.narrow_at(scratch, frame, home, row, dtype);
                                    debug_assert!(fold < line.outputs.len());
                                    reduction::close(kind, dtype, lanes, self.grid.length, out);
                                },
                            );
                        }
                    }
                }
            }
        }
        self.pokes(scratch, frame);
    }

    /// Level by level, each in stretches of all rows.
    fn columns(&self, width: usize) {
        let chunks = self.grid.length.div_ceil(CHUNK);
        with_shared(self.shared_room(), |memory| self.levels(width, memory, chunks));
    }

    /// Bytes that levels share where stretches of all rows are run: what is laid out for them comes first, then a partial
    /// result for each chunk of each row, for the reductions of a level.
    fn shared_room(&self) -> usize {
        let outputs = |level: &Level| level.wide.as_ref().map_or(0, |line| line.outputs.len());
        let folds = match self.schedule.narrows.is_empty() {
            true => 0,
            false => self.schedule.levels.iter().map(outputs).max().unwrap_or(0),
        };
        let partials = [self.grid.rows, self.grid.length.div_ceil(CHUNK), 8];
        partials.into_iter().fold(folds, usize::saturating_mul).saturating_add(self.scratch.own)
    }

    /// As [`Bound::columns`], with memory for what levels share and for the partial results.
    fn levels(&self, width: usize, memory: *mut u8, chunks: usize) {
        let (rows, length) = (self.grid.rows, self.grid.length);
        let scratch = &self.scratch;
        let own = scratch.total - scratch.own;
        let partials = Base(memory.wrapping_add(scratch.own));
        let partial = |fold: usize, row: usize, chunk: usize, size: usize| {
            partials.plus((fold * rows + row) * chunks * 8 + chunk * size)
        };
        let whole = Frame {
            shared: memory,
            own: std::ptr::null_mut(),
            base: 0,
            first: 0,
            count: rows,
            column: 0,
            width: length,
        };
        self.picks(scratch, &whole);
        for (at, level) in self.schedule.levels.iter().enumerate() {
            with_scratch(own, |memory| {
                // SAFETY: the scratch is laid out for all rows, and this is the only thread here.
                unsafe { self.narrow(scratch, &Frame { own: memory, ..whole }, at, level) };
            });
            let (Some(line), Some(looped)) = (&level.wide, &self.loops[at][1]) else { continue };
            pool::parallel(length.div_ceil(width), &|s| {
                with_scratch(own, |memory| {
                    let column = s * width;
                    let frame = whole.stretch(memory, column, width.min(length - column));
                    // SAFETY: stretches are disjoint, each is a whole number of chunks, and partial results have a
                    // place for each chunk of each row.
                    unsafe {
                        self.wide(scratch, &frame, line, looped, |row, fold, (kind, dtype, _), lanes| {
                            let size = reduction::wide(dtype).size();
                            let out = partial(fold, row, column / CHUNK, size);
                            reduction::partials(kind, dtype, lanes, frame.width.div_ceil(CHUNK), out);
                        });
                    }
                });
                fence();
            });
            for (fold, target) in line.outputs.iter().enumerate() {
                let Target::Fold(kind, dtype, home) = *target else { continue };
                for row in 0..rows {
                    let out = self.narrow_at(scratch, &whole, home, row, dtype);
                    // SAFETY: all chunks' partial results are there.
                    unsafe { reduction::total(kind, dtype, partial(fold, row, 0, 0), length, out) };
                }
            }
        }
        self.pokes(scratch, &whole);
    }

    /// Runs the line over rows.
    ///
    /// # Safety
    /// As for [`Bound::block`].
    unsafe fn narrow(&self, scratch: &Scratch, frame: &Frame, at: usize, level: &Level) {
        let (Some(line), Some(looped)) = (&level.narrow, &self.loops[at][0]) else { return };
        let mut addresses: SmallVec<[*mut u8; 24]> = SmallVec::new();
        for &(place, dtype) in &line.inputs {
            addresses.push(match place {
                Place::Load(load) => {
                    let (i, load) = (load as usize, &self.loads[load as usize]);
                    match load.inner {
                        Inner::Splat => load.base,
                        Inner::Stream => load.row(&self.grid, frame.first),
                        Inner::Gather => {
                            let to = frame.own.wrapping_add(scratch.narrow_loads[i] - scratch.own);
                            for row in 0..frame.count {
                                let from = load.row(&self.grid, frame.first + row);
                                let size = dtype.size();
                                // SAFETY: the operand has an element for each row, the scratch room for it.
                                unsafe { std::ptr::copy_nonoverlapping(from, to.add(row * size), size) };
                            }
                            to
                        }
                    }
                }
                Place::Number(n) => self.numbers[n as usize].as_ptr().cast_mut(),
                Place::Narrow(home) => self.narrow_at(scratch, frame, home, frame.first, dtype),
                Place::Row(_) | Place::Stack(_) => unreachable!("rows are wide"),
            });
        }
        for target in &line.outputs {
            addresses.push(match *target {
                Target::Narrow(home) => {
                    let (dtype, _) = self.schedule.narrows[home as usize];
                    self.narrow_at(scratch, frame, home, frame.first, dtype)
                }
                Target::Result(_) | Target::Row(_) | Target::Stack(_) | Target::Fold(..) => {
                    unreachable!("a line over rows gives narrow values")
                }
            });
        }
        // SAFETY: every address holds `count` elements or one, and results are fresh or scratch.
        unsafe { looped.run(&addresses, frame.count, frame.own.wrapping_add(scratch.looped - scratch.own)) };
    }

    /// Runs the line over the elements of each row; `close` takes the accumulators of each reduction of a row.
    ///
    /// # Safety
    /// As for [`Bound::block`].
    unsafe fn wide(
        &self,
        scratch: &Scratch,
        frame: &Frame,
        line: &Line,
        looped: &Loop,
        close: impl Fn(usize, usize, (kiln_ir::ReduceKind, DType, u32), *const u8),
    ) {
        let own = frame.own.wrapping_add(scratch.looped - scratch.own);
        let lanes = |k: usize| frame.own.wrapping_add(scratch.lanes - scratch.own + k * scratch.lane_pitch);
        let folds = line.outputs.iter().any(|t| matches!(t, Target::Fold(..)));
        // Where the first row is, and how far the next.
        let mut addresses: SmallVec<[*mut u8; 24]> = SmallVec::new();
        let mut steps: SmallVec<[isize; 24]> = SmallVec::new();
        let (first, column) = (frame.first, frame.column);
        for &(place, dtype) in &line.inputs {
            let size = dtype.size();
            let (address, step) = match place {
                Place::Load(i) => {
                    let load = &self.loads[i as usize];
                    match load.inner {
                        Inner::Splat => (load.row(&self.grid, first), load.step()),
                        Inner::Stream => {
                            (load.row(&self.grid, first).wrapping_add(column * size), load.step())
                        }
                        Inner::Gather => (self.tile(scratch, frame, i), 0),
                    }
                }
                Place::Number(n) => (self.numbers[n as usize].as_ptr().cast_mut(), 0),
                Place::Narrow(home) => (self.narrow_at(scratch, frame, home, first, dtype), size as isize),
                Place::Row(row) => self.row_at(scratch, frame, row, dtype),
                Place::Stack(stack) => (self.stack_at(stack, first, column), 0),
            };
            addresses.push(address);
            steps.push(step);
        }
        for (k, target) in line.outputs.iter().enumerate() {
            let (address, step) = match *target {
                Target::Result(r) => {
                    let view = &self.results[r as usize];
                    let size = view.dtype.size();
                    let at = (first * self.grid.length + column) * size;
                    (view.address().wrapping_add(at), (self.grid.length * size) as isize)
                }
                Target::Row(row) => self.row_at(scratch, frame, row, self.schedule.rows[row as usize]),
                Target::Stack(stack) => (self.stack_at(stack, first, column), 0),
                Target::Fold(..) => (lanes(k), 0),
                Target::Narrow(_) => unreachable!("a line over elements gives wide values"),
            };
            addresses.push(address);
            steps.push(step);
        }
        for row in first..first + frame.count {
            self.gathers(scratch, frame, line, row);
            if row.is_multiple_of(STACK) {
                self.start_stacks(line, row, frame, &mut addresses);
            }
            // SAFETY: every address holds the row's elements from `column` on, or one; an output is scratch, fresh, or
            // takes the place of an operand that lies in the same way and is not read afterwards.
            unsafe { looped.run(&addresses, frame.width, own) };
            if folds {
                for (k, target) in line.outputs.iter().enumerate() {
                    if let Target::Fold(kind, dtype, home) = *target {
                        close(row, k, (kind, dtype, home), lanes(k));
                    }
                }
            }
            for (address, &step) in addresses.iter_mut().zip(&steps) {
                *address = address.wrapping_offset(step);
            }
            if !self.grid.is_even() && row + 1 < first + frame.count {
                self.move_loads(line, row + 1, column, &mut addresses);
            }
        }
    }

    /// Where uneven operands have that row.
    fn move_loads(&self, line: &Line, row: usize, column: usize, addresses: &mut [*mut u8]) {
        let index = self.grid.index(row);
        for (&(place, dtype), address) in line.inputs.iter().zip(addresses) {
            if let Place::Load(i) = place {
                let load = &self.loads[i as usize];
                match load.inner {
                    Inner::Splat => *address = load.at(&index),
                    Inner::Stream => *address = load.at(&index).wrapping_add(column * dtype.size()),
                    Inner::Gather => {}
                }
            }
        }
    }

    /// Brings the operands of a line that do not lie along rows into scratch.
    fn gathers(&self, scratch: &Scratch, frame: &Frame, line: &Line, row: usize) {
        for &(place, dtype) in &line.inputs {
            let Place::Load(i) = place else { continue };
            let load = &self.loads[i as usize];
            if let (Inner::Gather, Some(walk)) = (load.inner, &load.walk) {
                let from = row * self.grid.length + frame.column;
                // SAFETY: the tile is as wide as the frame, and the operand is overwritten only by later levels, or
                // never, since it does not lie as results do.
                unsafe { gather(dtype, walk, load.base, self.tile(scratch, frame, i), from, frame.width) };
            }
        }
    }

    /// Rows from here on are reduced onto fresh accumulators.
    fn start_stacks(&self, line: &Line, row: usize, frame: &Frame, addresses: &mut [*mut u8]) {
        let (inputs, outputs) = addresses.split_at_mut(line.inputs.len());
        for (&(place, _), address) in line.inputs.iter().zip(inputs) {
            if let Place::Stack(stack) = place {
                *address = self.stack_at(stack, row, frame.column);
                let spec = &self.schedule.stacks[stack as usize];
                // SAFETY: the accumulators of this stretch belong to whoever runs these rows and columns.
                unsafe { reduction::clear(spec.kind, spec.dtype, *address, frame.width) };
            }
        }
        for (target, address) in line.outputs.iter().zip(outputs) {
            if let Target::Stack(stack) = *target {
                *address = self.stack_at(stack, row, frame.column);
            }
        }
    }

    /// Runs the line over all elements of a block of short rows at once, and then the reductions.
    ///
    /// # Safety
    /// As for [`Bound::block`].
    unsafe fn flat(&self, scratch: &Scratch, frame: &Frame, at: usize, level: &Level) {
        let (Some(line), Some(looped)) = (&level.wide, &self.loops[at][1]) else { return };
        let length = self.grid.length;
        let (from, len) = (frame.first * length, frame.count * length);
        let row_at = |row: u32| frame.shared.wrapping_add(scratch.rows[row as usize]);
        for &(narrow, row) in &level.spreads {
            let (dtype, _) = self.schedule.narrows[narrow as usize];
            let size = dtype.size();
            let x = self.narrow_at(scratch, frame, narrow, frame.first, dtype);
            for r in 0..frame.count {
                // SAFETY: there is an element for each row.
                let bytes = unsafe { std::slice::from_raw_parts(x.add(r * size), size) };
                splat(row_at(row).wrapping_add(r * length * size), bytes, length);
            }
        }
        let mut addresses: SmallVec<[*mut u8; 24]> = SmallVec::new();
        for &(place, dtype) in &line.inputs {
            addresses.push(match place {
                Place::Load(i) => {
                    let load: &Operand = &self.loads[i as usize];
                    match (load.inner, &load.walk) {
                        (Inner::Gather, Some(walk)) => {
                            let to = self.tile(scratch, frame, i);
                            // SAFETY: the tile has room for a block, and the operand is not overwritten.
                            unsafe { gather(dtype, walk, load.base, to, from, len) };
                            to
                        }
                        (Inner::Splat, _) => load.base,
                        (Inner::Stream | Inner::Gather, _) => load.base.wrapping_add(from * dtype.size()),
                    }
                }
                Place::Number(n) => self.numbers[n as usize].as_ptr().cast_mut(),
                Place::Row(row) => row_at(row),
                Place::Narrow(_) | Place::Stack(_) => unreachable!("repeated along a row before"),
            });
        }
        for target in &line.outputs {
            addresses.push(match *target {
                Target::Result(r) => {
                    let view = &self.results[r as usize];
                    view.address().wrapping_add(from * view.dtype.size())
                }
                Target::Row(row) => row_at(row),
                Target::Narrow(_) | Target::Stack(_) | Target::Fold(..) => unreachable!("reduced after"),
            });
        }
        // SAFETY: every address holds the block's elements, or one; outputs are scratch, fresh, or take the place of an
        // operand that is not read afterwards.
        unsafe { looped.run(&addresses, len, frame.own.wrapping_add(scratch.looped - scratch.own)) };
        for &(row, kind, dtype, goal) in &level.after {
            let x = row_at(row);
            match goal {
                Goal::Narrow(home) => {
                    let out = self.narrow_at(scratch, frame, home, frame.first, dtype);
                    // SAFETY: the row of scratch holds the block's elements, `out` room for one of each row.
                    unsafe { reduction::rows(kind, dtype, x, frame.count, length, out) };
                }
                Goal::Stack(stack) => {
                    for r in 0..frame.count {
                        let row = frame.first + r;
                        let sums = self.stack_at(stack, row, 0);
                        // SAFETY: accumulators belong to whoever runs these rows.
                        unsafe {
                            if row.is_multiple_of(STACK) {
                                reduction::clear(kind, dtype, sums, length);
                            }
                            reduction::stack(kind, dtype, sums, x.add(r * length * dtype.size()), length);
                        }
                    }
                }
            }
        }
    }

    /// Reads the element of each row that an index names.
    fn picks(&self, scratch: &Scratch, frame: &Frame) {
        for pick in &self.schedule.picks {
            let load = &self.loads[pick.load as usize];
            let size = load.dtype.size();
            let to = self.narrow_at(scratch, frame, pick.narrow, frame.first, load.dtype);
            for r in 0..frame.count {
                let row = frame.first + r;
                let index = self.index(pick.index, row);
                let to = to.wrapping_add(r * size);
                match (load.inner, &load.walk) {
                    // SAFETY: indices were checked, and the walk's elements are the operand's.
                    (Inner::Gather, Some(walk)) => unsafe {
                        gather(load.dtype, walk, load.base, to, row * self.grid.length + index, 1)
                    },
                    (inner, _) => {
                        let along = if inner == Inner::Splat { 0 } else { index * size };
                        let from = load.row(&self.grid, row).wrapping_add(along);
                        // SAFETY: as above.
                        unsafe { std::ptr::copy_nonoverlapping(from, to, size) };
                    }
                }
            }
        }
    }

    /// Writes the element of each row that an index names.
    fn pokes(&self, scratch: &Scratch, frame: &Frame) {
        for poke in &self.schedule.pokes {
            let view = &self.results[poke.result as usize];
            let size = view.dtype.size();
            for r in 0..frame.count {
                let row = frame.first + r;
                let from = self.narrow_at(scratch, frame, poke.narrow, row, view.dtype);
                let at = row * self.grid.length + self.index(poke.index, row);
                let to = view.address().wrapping_add(at * size);
                // SAFETY: indices were checked; the row is this thread's.
                unsafe { std::ptr::copy_nonoverlapping(from, to, size) };
            }
        }
    }

    /// The end of reductions of rows onto each other.
    fn unstack(&self) {
        let (rows, length) = (self.grid.rows, self.grid.length);
        for (stack, sums) in self.schedule.stacks.iter().zip(&self.stacks) {
            let view = &self.results[stack.result as usize];
            let (from, to) = (Base(sums.address()), Base(view.address()));
            let (wide, size) = (sums.dtype.size(), view.dtype.size());
            pool::parallel(length.div_ceil(COLUMNS), &|b| {
                let column = b * COLUMNS;
                let (sums, out) = (from.plus(column * wide), to.plus(column * size));
                let (chunks, len) = (rows.div_ceil(STACK), COLUMNS.min(length - column));
                // SAFETY: columns are disjoint; every stretch of rows has left its sums.
                unsafe { reduction::unstack(stack.kind, stack.dtype, sums, chunks, length, rows, out, len) };
            });
        }
    }
}

/// Stores past the cache are seen by other threads after this.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 machine has it.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}
