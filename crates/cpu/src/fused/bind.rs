//! A program bound to values: shapes are found, operands laid over the grid, results made.

use super::kernel::replaceable;
use super::layout::{Grid, Inner, Operand, Strides};
use super::line::{Line, Place, Target};
use super::looped::Loop;
use super::program::{Extent, Program, Work};
use super::schedule::Schedule;
use crate::cpu::Context;
use crate::pool;
use crate::reduction;
use crate::view::View;
use kiln_device::Error;
use kiln_fuse::Handles;
use kiln_ir::{AxisSet, DType, Dims, Id, Meta, Move, Node, Op, Shape, broadcast};
use smallvec::SmallVec;
use std::sync::Arc;

/// Rows shorter than this run in blocks of several.
const SHORT: usize = 64;
/// Elements that a thread takes at a time, where rows can be cut.
pub(super) const SHARE: usize = 1 << 14;
/// Bytes of fresh results from which on they are written past the cache.
const STREAM: usize = 16 << 20;
/// Bytes that a block of rows may touch and still be in the cache for its next level.
const BLOCK: usize = 128 << 10;

/// A program and its schedules.
pub(super) struct Plan<'a> {
    pub program: &'a Program,
    pub long: &'a Schedule,
    pub short: &'a Schedule,
}

/// A program bound to values.
pub(super) struct Bound<'a> {
    pub schedule: &'a Schedule,
    pub shape: Shape,
    pub grid: Grid,
    pub mode: Mode,
    pub loads: SmallVec<[Operand; 12]>,
    pub numbers: SmallVec<[[u8; 8]; 12]>,
    pub results: SmallVec<[View; 4]>,
    /// Accumulators of each reduction of rows onto each other.
    pub stacks: SmallVec<[View; 2]>,
    /// The loops of each level: over rows, over the elements of rows.
    pub loops: SmallVec<[[Option<Arc<Loop>>; 2]; 4]>,
}

/// How the grid is cut for threads and caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// Blocks of that many short rows, each block as one run.
    Short { block: usize },
    /// Blocks of that many rows.
    Rows { block: usize },
    /// Stretches of all rows, level by level.
    Columns { width: usize },
}

/// Nodes and values that are not as the program needs them: they run unfused.
fn unfit() -> Error {
    Error::Unsupported { op: "fused".into(), device: "cpu".into() }
}

impl<'a> Bound<'a> {
    pub fn new(
        cx: &Context<'_>,
        plan: &Plan<'a>,
        nodes: &[&Node],
        dying: &[Id],
        handles: &dyn Handles<View>,
    ) -> Result<Bound<'a>, Error> {
        let all = plan.long;
        let id = |node: u32, arg: u32| nodes[node as usize].ins[arg as usize];
        let mut views: SmallVec<[&View; 12]> = SmallVec::new();
        let mut shape = Shape::default();
        let mut widen = |other: &Shape| {
            if *other != shape {
                shape = broadcast(&shape, other).ok_or_else(unfit)?;
            }
            Ok::<(), Error>(())
        };
        for load in &all.loads {
            let id = id(load.node, load.arg);
            let view = handles.get(id).ok_or(Error::UnknownValue(id))?;
            if view.dtype != load.dtype {
                return Err(unfit());
            }
            if load.extent == Extent::Wide {
                widen(&view.shape)?;
            }
            views.push(view);
        }
        for node in nodes {
            if let Op::Full { shape, .. } | Op::Move(Move::Expand(shape)) = &node.op {
                widen(shape)?;
            }
        }
        let inner = plan.program.inner.map(|n| n as usize);
        if shape.contains(&0) || inner.is_some_and(|n| n > shape.len()) {
            return Err(unfit());
        }
        let narrow = Narrow::new(&shape, inner.unwrap_or(0));
        let strides = all.loads.iter().zip(&views).map(|(load, view)| narrow.strides(load.extent, view));
        let strides: SmallVec<[Strides; 12]> = strides.collect::<Option<_>>().ok_or_else(unfit)?;
        let grid = Grid::new(&shape, inner, &strides);
        let loads: SmallVec<[Operand; 12]> =
            views.iter().zip(&strides).map(|(view, strides)| grid.operand(&shape, view, strides)).collect();
        let mode = mode(all, &grid);
        let mut bound = Bound {
            schedule: if matches!(mode, Mode::Short { .. }) { plan.short } else { plan.long },
            shape,
            grid,
            mode,
            loads,
            numbers: SmallVec::new(),
            results: SmallVec::new(),
            stacks: SmallVec::new(),
            loops: SmallVec::new(),
        };
        bound.check_indices()?;
        for &n in &all.numbers {
            let Op::Full { value, .. } = &nodes[n as usize].op else { return Err(unfit()) };
            let mut bytes = [0; 8];
            let value = value.to_bytes();
            bytes[..value.len()].copy_from_slice(&value);
            bound.numbers.push(bytes);
        }
        for (i, load) in bound.loads.iter_mut().enumerate().filter(|(i, _)| strides[*i].wide) {
            if matches!(mode, Mode::Short { .. }) {
                load.flatten(&grid);
            }
            if load.inner == Inner::Gather {
                let view = View { shape, strides: strides[i].strides, ..views[i].clone() };
                load.walk = Some(view.walk());
            }
        }
        let taken = bound.make_results(cx, &narrow, nodes, dying, handles)?;
        bound.make_loops(taken);
        Ok(bound)
    }

    /// Every index lies within its row.
    fn check_indices(&self) -> Result<(), Error> {
        let s = self.schedule;
        for index in s.picks.iter().map(|p| p.index).chain(s.pokes.iter().map(|p| p.index)) {
            let load = &self.loads[index as usize];
            if !matches!(load.dtype, DType::I64 | DType::I32) {
                return Err(unfit());
            }
            for row in 0..self.grid.rows {
                if self.index(index, row) >= self.grid.length {
                    return Err(unfit());
                }
            }
        }
        Ok(())
    }

    /// The index of a row; a negative one is far out of range.
    pub fn index(&self, load: u32, row: usize) -> usize {
        let load = &self.loads[load as usize];
        let at = load.row(&self.grid, row);
        match load.dtype {
            // SAFETY: the operand has an element for each row, of its dtype.
            DType::I32 => unsafe { *at.cast::<i32>() as usize },
            // SAFETY: as above; only these two dtypes come here.
            _ => unsafe { *at.cast::<i64>() as usize },
        }
    }

    /// Makes a place for every result. Gives a bit for each that took the place of an operand.
    fn make_results(
        &mut self,
        cx: &Context<'_>,
        narrow: &Narrow,
        nodes: &[&Node],
        dying: &[Id],
        handles: &dyn Handles<View>,
    ) -> Result<u128, Error> {
        let s = self.schedule;
        let (mut taken, mut overwritten): (u128, SmallVec<[Id; 4]>) = (0, SmallVec::new());
        for (i, result) in s.results.iter().enumerate() {
            let meta = Meta { dtype: result.dtype, shape: narrow.shape(result.extent) };
            // A value may be overwritten by the level that reads it last.
            let free = |id: Id| {
                let mut loads = s.loads.iter().filter(|l| nodes[l.node as usize].ins[l.arg as usize] == id);
                result.extent == Extent::Wide
                    && !overwritten.contains(&id)
                    && loads.all(|l| l.extent == Extent::Wide && l.last <= result.level)
                    && replaceable(cx, handles, id, meta)
            };
            let old = dying.iter().copied().find(|&id| free(id));
            let view = match old.and_then(|id| handles.get(id)) {
                Some(view) => View { dtype: meta.dtype, ..view.clone() },
                None => cx.fresh(meta)?,
            };
            if let Some(old) = old {
                overwritten.push(old);
                taken |= 1 << i;
            }
            self.results.push(view);
        }
        let chunks = self.grid.rows.div_ceil(reduction::STACK);
        for stack in &s.stacks {
            let shape = [chunks, self.grid.length];
            self.stacks.push(cx.fresh(Meta::new(reduction::wide(stack.dtype), shape))?);
        }
        Ok(taken)
    }

    fn make_loops(&mut self, taken: u128) {
        let fresh = (self.results.iter().enumerate()).filter(|(i, _)| taken >> i & 1 == 0);
        let large = fresh.map(|(_, view)| view.meta().bytes()).sum::<usize>() >= STREAM;
        for level in &self.schedule.levels {
            let narrow = level.narrow.as_ref().map(|line| line.looped(self.splats(line, false), 0));
            let wide = level.wide.as_ref().map(|line| {
                let mut streams = 0;
                for (k, target) in line.outputs.iter().enumerate() {
                    if let Target::Result(r) = *target
                        && large
                        && taken >> r & 1 == 0
                        && self.is_aligned(&self.results[r as usize])
                    {
                        streams |= 1 << k;
                    }
                }
                line.looped(self.splats(line, true), streams)
            });
            self.loops.push([narrow, wide]);
        }
    }

    /// Whether every row of a result starts a cache line.
    fn is_aligned(&self, view: &View) -> bool {
        let even = self.grid.rows == 1 || (self.grid.length * view.dtype.size()).is_multiple_of(64);
        even && !matches!(self.mode, Mode::Short { .. }) && view.address().addr().is_multiple_of(64)
    }

    /// The inputs of a line that are one element for a whole run.
    fn splats(&self, line: &Line, wide: bool) -> u128 {
        let mut splats = 0;
        for (i, &(place, _)) in line.inputs.iter().enumerate() {
            let splat = match place {
                Place::Load(load) => self.loads[load as usize].inner == Inner::Splat,
                Place::Number(_) => true,
                Place::Narrow(_) => wide,
                Place::Row(_) | Place::Stack(_) => false,
            };
            splats |= (splat as u128) << i;
        }
        splats
    }
}

/// How a grid is best cut.
fn mode(s: &Schedule, grid: &Grid) -> Mode {
    let (rows, length) = (grid.rows, grid.length);
    let threads = pool::threads();
    let reduces = !s.narrows.is_empty();
    if length < SHORT && rows > 1 {
        return Mode::Short { block: (2048 / length).clamp(1, reduction::STACK).min(rows) };
    }
    let few = if reduces {
        rows < 2 * threads && length > 2 * SHARE
    } else if s.stacks.is_empty() {
        rows == 1 || rows < 8 * threads && length > SHARE
    } else {
        rows < 2 * threads * reduction::STACK && length >= 1024
    };
    if few {
        // Whole chunks of every reduction, and of tiles.
        let width = (SHARE / rows).max(1024).next_multiple_of(reduction::CHUNK);
        return Mode::Columns { width: width.min(length) };
    }
    let touched = s.loads.iter().filter(|l| l.extent == Extent::Wide).count() + s.rows.len();
    let bytes = (length * 4 * touched).max(1);
    let block = if reduces { (BLOCK / bytes).max(1) } else { (SHARE / length).max(1) };
    // A power of two, so that blocks fill the stretches of rows that are reduced onto each other.
    Mode::Rows { block: (1 << block.ilog2()).min(reduction::STACK) }
}

/// The shapes of a program's values.
pub(super) struct Narrow {
    wide: Shape,
    inner: usize,
    axes: AxisSet,
}

impl Narrow {
    pub fn new(wide: &Shape, inner: usize) -> Narrow {
        let first = wide.len() - inner;
        let axes = (first..wide.len()).fold(AxisSet::default(), AxisSet::with);
        Narrow { wide: *wide, inner, axes }
    }

    pub fn shape(&self, extent: Extent) -> Shape {
        let first = self.wide.len() - self.inner;
        let before = || (0..first).fold(AxisSet::default(), AxisSet::with);
        match extent {
            Extent::Wide => self.wide,
            Extent::Kept => self.wide.reduced(self.axes, true),
            Extent::Gone => self.wide.reduced(self.axes, false),
            Extent::ColumnKept => self.wide.reduced(before(), true),
            Extent::Column => self.wide.reduced(before(), false),
        }
    }

    /// An operand's distances along the axes of the whole shape; nothing if it does not fit there.
    fn strides(&self, extent: Extent, view: &View) -> Option<Strides> {
        let shape = self.shape(extent);
        let lead = shape.len().checked_sub(view.shape.len())?;
        let mut strides = Dims::repeat(0isize, self.wide.len());
        for (axis, (&extent, &stride)) in view.shape.iter().zip(view.strides.iter()).enumerate() {
            match shape[lead + axis] {
                whole if whole == extent && extent != 1 => strides[lead + axis] = stride,
                _ if extent == 1 => {}
                _ => return None,
            }
        }
        Some(Strides { wide: extent == Extent::Wide, strides })
    }
}

/// The views of results under all their names.
pub(super) fn puts(
    cx: &Context<'_>,
    program: &Program,
    bound: &Bound<'_>,
    nodes: &[&Node],
) -> Result<SmallVec<[(Id, View); 8]>, Error> {
    let mut puts: SmallVec<[(Id, View); 8]> = SmallVec::new();
    let results = &bound.schedule.results;
    let narrow = Narrow::new(&bound.shape, program.inner.unwrap_or(0) as usize);
    for &(node, value) in &program.readings {
        let node = nodes[node as usize];
        let at = results.iter().position(|r| r.value == value).ok_or_else(unfit)?;
        let view = &bound.results[at];
        let view = match &node.op {
            Op::Move(Move::Expand(shape)) => {
                view.reshaped(&narrow.shape(Extent::Kept)).ok_or_else(unfit)?.expanded(shape)
            }
            Op::Move(Move::Reshape(shape)) => view.reshaped(shape).ok_or_else(unfit)?,
            Op::Reduce { keep: false, .. } => view.reshaped(&narrow.shape(Extent::Gone)).ok_or_else(unfit)?,
            _ => view.reshaped(&narrow.shape(Extent::Kept)).ok_or_else(unfit)?,
        };
        puts.push((node.outs[0], view));
    }
    for &number in &program.kept_numbers {
        let node = nodes[number as usize];
        if let Op::Full { shape, value } = &node.op {
            let single = cx.filled(Meta::new(value.dtype(), []), &value.to_bytes())?;
            puts.push((node.outs[0], single.expanded(shape)));
        }
    }
    for (result, view) in results.iter().zip(&bound.results) {
        let instruction = &program.instructions[result.value as usize];
        // The same node may stand for an element of each row too.
        if instruction.named && instruction.work != Work::Pick {
            puts.push((nodes[result.node as usize].outs[0], view.clone()));
        }
    }
    Ok(puts)
}

/// Whether the numbers that a program takes for zero are.
pub(super) fn zeros(program: &Program, nodes: &[&Node]) -> Result<(), Error> {
    let zero = |&n: &u32| match &nodes[n as usize].op {
        Op::Full { value, .. } => value.to_bytes().iter().all(|&b| b == 0),
        _ => false,
    };
    if program.zeros.iter().all(zero) { Ok(()) } else { Err(unfit()) }
}
