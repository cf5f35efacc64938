//! A program bound to values: shapes are found, operands laid over the grid, results made.
//!
//! What follows from how the values lie is kept from run to run. Where a step recurs, binding is to look that they lie
//! the same, to note their addresses and to take memory for the results: no heap call.

use super::kernel::replaceable;
use super::layout::{Grid, Inner, Operand, Strides};
use super::line::{Line, Place, Target};
use super::looped::Loop;
use super::program::{Extent, Program, Work};
use super::schedule::{Schedule, Stored};
use super::scratch::Scratch;
use crate::cpu::Context;
use crate::pool;
use crate::reduction;
use crate::stop;
use crate::view::{View, expanded};
use kiln_device::Error;
use kiln_fuse::{Failure, Handles};
use kiln_host::panicked;
use kiln_ir::{AxisSet, DType, Dims, Id, Meta, Move, Node, Op, Shape, broadcast};
use smallvec::SmallVec;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

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
    pub long: &'a Arc<Schedule>,
    pub short: &'a Arc<Schedule>,
    /// Where rows are not short, it runs in parts that others choose: see [`Bound::part`].
    pub parted: bool,
}

/// A program bound to values.
pub(super) struct Bound {
    pub schedule: Arc<Schedule>,
    pub shape: Shape,
    pub grid: Grid,
    pub mode: Mode,
    pub loads: Vec<Operand>,
    pub numbers: Vec<[u8; 8]>,
    pub results: Vec<View>,
    /// Accumulators of each reduction of rows onto each other.
    pub stacks: Vec<View>,
    /// The loops of each level: over rows, over the elements of rows.
    pub loops: Vec<[Option<Arc<Loop>>; 2]>,
    pub scratch: Scratch,
    /// How many threads it is cut for.
    threads: usize,
    /// Extents and strides of the operands, and extents that nodes name.
    layouts: Vec<(Shape, Dims<isize>)>,
    named: Vec<(u32, Shape)>,
    /// Metas of the results, and a bit for each that takes the place of an operand.
    metas: Vec<Meta>,
    taken: u128,
    names: Vec<Name>,
    puts: Vec<(Id, View)>,
    /// Operands whose place a result takes.
    overwritten: SmallVec<[Id; 4]>,
}

/// A name of a result: the node that gives it, and how the result is read under that name.
struct Name {
    node: u32,
    result: usize,
    shape: Shape,
    strides: Dims<isize>,
}

/// The binding of a program's last run, without its values.
#[derive(Default)]
pub(super) struct Kept(Mutex<Option<Box<Bound>>>);

impl Kept {
    fn take(&self) -> Option<Box<Bound>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Hands the results to `handles`, and keeps the rest for the next run.
    pub fn finish(&self, mut bound: Box<Bound>, handles: &mut dyn Handles<View>) {
        bound.results.clear();
        bound.stacks.clear();
        for (id, view) in bound.puts.drain(..) {
            view.buffer.reached(view.buffer.len());
            handles.put(id, view);
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(bound);
    }
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

/// The extents that an operation names itself.
fn extents(op: &Op) -> Option<Shape> {
    match op {
        Op::Full { shape, .. } | Op::Move(Move::Expand(shape) | Move::Reshape(shape)) => Some(*shape),
        _ => None,
    }
}

impl Bound {
    /// The program bound to these values, as before if they lie as those of its last run.
    pub fn new(
        cx: &Context<'_>,
        plan: &Plan<'_>,
        kept: &Kept,
        nodes: &[&Node],
        dying: &[Id],
        handles: &dyn Handles<View>,
    ) -> Result<Box<Bound>, Error> {
        let last = match kept.take() {
            Some(mut last) => last.fits(plan, nodes, handles)?.then_some(last),
            None => None,
        };
        let mut bound = match last {
            Some(last) => last,
            None => Box::new(Bound::lay(plan, nodes, handles)?),
        };
        bound.check_indices()?;
        bound.numbers.clear();
        for &n in &plan.long.numbers {
            let Op::Full { value, .. } = &nodes[n as usize].op else { return Err(unfit()) };
            let mut bytes = [0; 8];
            let value = value.to_bytes();
            bytes[..value.len()].copy_from_slice(&value);
            bound.numbers.push(bytes);
        }
        let taken = bound.make_results(cx, nodes, dying, handles)?;
        if bound.loops.is_empty() || taken != bound.taken {
            bound.make_loops(taken);
            bound.taken = taken;
            bound.scratch = bound.lay_scratch(plan.parted).ok_or_else(unfit)?;
        }
        bound.make_puts(cx, plan.program, nodes)?;
        Ok(bound)
    }

    /// Whether these values lie as those it was bound to. Notes their addresses.
    fn fits(&mut self, plan: &Plan<'_>, nodes: &[&Node], handles: &dyn Handles<View>) -> Result<bool, Error> {
        let same = |&(node, shape): &(u32, Shape)| extents(&nodes[node as usize].op) == Some(shape);
        if self.threads != pool::threads() || !self.named.iter().all(same) {
            return Ok(false);
        }
        for ((spec, load), (shape, strides)) in plan.long.loads.iter().zip(&mut self.loads).zip(&self.layouts)
        {
            let id = nodes[spec.node as usize].ins[spec.arg as usize];
            let view = handles.get(id).ok_or(Error::UnknownValue(id))?;
            if view.dtype != spec.dtype || view.shape != *shape || view.strides != *strides {
                return Ok(false);
            }
            load.base = view.address();
        }
        Ok(true)
    }

    /// Lays the values over a grid.
    fn lay(plan: &Plan<'_>, nodes: &[&Node], handles: &dyn Handles<View>) -> Result<Bound, Error> {
        let all = plan.long;
        let mut views: SmallVec<[&View; 12]> = SmallVec::new();
        let mut shape = Shape::default();
        let mut widen = |other: &Shape| {
            if *other != shape {
                shape = broadcast(&shape, other).ok_or_else(unfit)?;
            }
            Ok::<(), Error>(())
        };
        for load in &all.loads {
            let id = nodes[load.node as usize].ins[load.arg as usize];
            let view = handles.get(id).ok_or(Error::UnknownValue(id))?;
            if view.dtype != load.dtype {
                return Err(unfit());
            }
            if load.extent == Extent::Wide {
                widen(&view.shape)?;
            }
            views.push(view);
        }
        let mut named = Vec::new();
        for (i, node) in nodes.iter().enumerate() {
            if let Op::Full { shape, .. } | Op::Move(Move::Expand(shape)) = &node.op {
                widen(shape)?;
            }
            named.extend(extents(&node.op).map(|shape| (i as u32, shape)));
        }
        let inner = plan.program.inner.map(|n| n as usize);
        let large = shape.checked_numel().is_none();
        if large || shape.contains(&0) || inner.is_some_and(|n| n > shape.len()) {
            return Err(unfit());
        }
        let narrow = Narrow::new(&shape, inner.unwrap_or(0));
        let strides = all.loads.iter().zip(&views).map(|(load, view)| narrow.strides(load.extent, view));
        let strides: SmallVec<[Strides; 12]> = strides.collect::<Option<_>>().ok_or_else(unfit)?;
        let grid = Grid::new(&shape, inner, &strides);
        let mode = mode(all, &grid);
        let schedule = if matches!(mode, Mode::Short { .. }) { plan.short } else { plan.long };
        let mut loads = Vec::with_capacity(views.len());
        for (view, strides) in views.iter().zip(&strides) {
            let mut load = grid.operand(&shape, view, strides);
            if strides.wide {
                if matches!(mode, Mode::Short { .. }) {
                    load.flatten(&grid);
                }
                if load.inner == Inner::Gather {
                    let view = View { shape, strides: strides.strides, ..(*view).clone() };
                    load.walk = Some(Box::new(view.walk()));
                }
            }
            loads.push(load);
        }
        let meta = |result: &Stored| Meta { dtype: result.dtype, shape: narrow.shape(result.extent) };
        // What is made under a name is what its node gives, whatever the program says.
        let names = names(plan.program, schedule, &narrow, nodes)?;
        let wanted = super::group::metas(nodes, handles).ok_or_else(unfit)?;
        for name in &names {
            let made = Meta { dtype: schedule.results[name.result].dtype, shape: name.shape };
            if wanted.get(&nodes[name.node as usize].outs[0]) != Some(&made) {
                return Err(unfit());
            }
        }
        Ok(Bound {
            shape,
            grid,
            mode,
            loads,
            numbers: Vec::new(),
            results: Vec::new(),
            stacks: Vec::new(),
            loops: Vec::new(),
            scratch: Scratch::default(),
            threads: pool::threads(),
            layouts: views.iter().map(|view| (view.shape, view.strides)).collect(),
            named,
            metas: schedule.results.iter().map(meta).collect(),
            taken: 0,
            names,
            puts: Vec::new(),
            overwritten: SmallVec::new(),
            schedule: schedule.clone(),
        })
    }

    /// Every index lies within its row.
    fn check_indices(&self) -> Result<(), Error> {
        let s = &self.schedule;
        for index in s.picks.iter().map(|p| p.index).chain(s.pokes.iter().map(|p| p.index)) {
            let load = &self.loads[index as usize];
            if !matches!(load.dtype, DType::I64 | DType::I32) {
                return Err(unfit());
            }
            for row in 0..self.grid.rows {
                if row.is_multiple_of(SHARE) {
                    stop::check();
                }
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
        nodes: &[&Node],
        dying: &[Id],
        handles: &dyn Handles<View>,
    ) -> Result<u128, Error> {
        let s = &self.schedule;
        let (mut taken, mut overwritten): (u128, SmallVec<[Id; 4]>) = (0, SmallVec::new());
        for (i, (result, &meta)) in s.results.iter().zip(&self.metas).enumerate() {
            // A value may be overwritten by the level that reads it last.
            let free = |id: Id| {
                let mut loads = s.loads.iter().filter(|l| nodes[l.node as usize].ins[l.arg as usize] == id);
                result.extent == Extent::Wide
                    && !overwritten.contains(&id)
                    && loads.all(|l| l.extent == Extent::Wide && l.last <= result.level)
                    && replaceable(cx, handles, id, meta)
            };
            let mut names = self.names.iter().filter(|name| name.result == i);
            let placed =
                names.next().and_then(|name| handles.output_memory(nodes[name.node as usize].outs[0]));
            // Under another name it would be seen to change with that memory.
            let placed =
                placed.filter(|_| names.next().is_none()).and_then(|memory| cx.fresh_at(meta, memory));
            let old = dying.iter().copied().find(|&id| placed.is_none() && free(id));
            let view = match (placed, old.and_then(|id| handles.get(id))) {
                (Some(view), _) => view,
                (None, Some(view)) => View { dtype: meta.dtype, ..view.clone() },
                (None, None) => cx.fresh(meta)?,
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
        self.overwritten = overwritten;
        Ok(taken)
    }

    /// Runs `run`, which computes this, under a group's name. Once a result may have been written over one of the `dying`
    /// operands there is no way back: then a panic in it is told as such.
    pub fn spend(
        &self,
        name: &str,
        dying: &[Id],
        run: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Failure> {
        let run = || {
            let done = run();
            #[cfg(test)]
            tests::strike();
            done
        };
        if !self.overwritten.iter().any(|id| dying.contains(id)) {
            return Ok(run()?);
        }
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(done) => done.map_err(Failure::Spent),
            Err(panic) => Err(Failure::Spent(panicked(name, &*panic))),
        }
    }

    /// Makes the views of results under all their names.
    fn make_puts(&mut self, cx: &Context<'_>, program: &Program, nodes: &[&Node]) -> Result<(), Error> {
        for name in &self.names {
            let result = &self.results[name.result];
            let view = View {
                buffer: result.buffer.clone(),
                dtype: result.dtype,
                shape: name.shape,
                strides: name.strides,
                start: result.start,
            };
            self.puts.push((nodes[name.node as usize].outs[0], view));
        }
        for &number in &program.kept_numbers {
            let node = nodes[number as usize];
            if let Op::Full { shape, value } = &node.op {
                let single = cx.filled(Meta::new(value.dtype(), []), &value.to_bytes())?;
                self.puts.push((node.outs[0], single.expanded(shape)));
            }
        }
        Ok(())
    }

    fn make_loops(&mut self, taken: u128) {
        self.loops.clear();
        let fresh = (self.results.iter().enumerate()).filter(|(i, _)| taken >> i & 1 == 0);
        let large = fresh.map(|(_, view)| view.meta().bytes()).sum::<usize>() >= STREAM;
        let schedule = self.schedule.clone();
        for level in &schedule.levels {
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

/// The names of all results. A result lies row-major, so that what another shape makes of it is known beforehand.
fn names(
    program: &Program,
    schedule: &Schedule,
    narrow: &Narrow,
    nodes: &[&Node],
) -> Result<Vec<Name>, Error> {
    let results = &schedule.results;
    let mut names = Vec::new();
    for &(node, value) in &program.readings {
        let result = results.iter().position(|r| r.value == value).ok_or_else(unfit)?;
        let kept = narrow.shape(Extent::Kept);
        let (shape, strides) = match &nodes[node as usize].op {
            Op::Move(Move::Expand(shape)) => (*shape, expanded(&kept, &kept.contiguous_strides(), shape)),
            Op::Move(Move::Reshape(shape)) => (*shape, shape.contiguous_strides()),
            Op::Reduce { keep: false, .. } => {
                let gone = narrow.shape(Extent::Gone);
                (gone, gone.contiguous_strides())
            }
            _ => (kept, kept.contiguous_strides()),
        };
        names.push(Name { node, result, shape, strides });
    }
    for (at, result) in results.iter().enumerate() {
        let instruction = &program.instructions[result.value as usize];
        // The same node may stand for an element of each row too.
        if instruction.named && instruction.work != Work::Pick {
            let shape = narrow.shape(result.extent);
            let strides = shape.contiguous_strides();
            names.push(Name { node: result.node, result: at, shape, strides });
        }
    }
    Ok(names)
}

/// Whether the numbers that a program takes for zero are.
pub(super) fn zeros(program: &Program, nodes: &[&Node]) -> bool {
    let zero = |&n: &u32| match &nodes[n as usize].op {
        Op::Full { value, .. } => value.to_bytes().iter().all(|&b| b == 0),
        _ => false,
    };
    program.zeros.iter().all(zero)
}

#[cfg(test)]
mod tests {
    use crate::cpu::Cpu;
    use kiln_device::{Batch, Bytes, Data, Driver, Error, Observe, Place, Urgency};
    use kiln_ir::{Id, text};
    use std::cell::Cell;

    thread_local! {
        /// The next group that ran panics at its end.
        static FAULT: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn strike() {
        assert!(!FAULT.take(), "struck");
    }

    /// Runs a program whose inputs are the numbers from 1 on, with a panic at the end of its group.
    fn struck(program: &str, out: u64) -> (Cpu, Result<Vec<f32>, Error>) {
        let (cpu, program) = (Cpu::start(), text::parse(program).unwrap());
        for (id, meta) in &program.inputs {
            let bytes = (1..=meta.shape.numel()).flat_map(|i| (i as f32).to_le_bytes()).collect::<Vec<_>>();
            cpu.write(*id, Data::new(*meta, Bytes::new(bytes)), Place::Reuse);
        }
        FAULT.set(true);
        let batch = Batch { items: program.items, urgency: Urgency::Now, ..Batch::default() };
        cpu.submit(batch);
        assert!(!FAULT.take(), "the group ran");
        let data = cpu.read(Id(out)).wait();
        let floats = |data: Data| {
            data.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        (cpu, data.map(floats))
    }

    #[test]
    fn a_group_that_fails_over_its_operands_fails_and_another_runs_unfused() {
        // The result takes the place of its operand, which ends: computed again it would be of other numbers.
        let (cpu, y) =
            struck("a = input f32[4]\nb = neg a\nfree a\nc = square b\nd = add c b\nfree b\nfree c", 3);
        let error = y.unwrap_err();
        assert!(matches!(error.root(), Error::Panicked { message, .. } if message == "struck"), "{error}");
        assert_eq!((cpu.fusion().fallbacks, cpu.failures().len()), (1, 1));
        assert_eq!(cpu.memory().values, 1);
        // The operand is still there.
        let (cpu, y) = struck("a = input f32[4]\nb = neg a\nc = square b\nd = add c b\nfree b\nfree c", 3);
        assert_eq!(y.unwrap(), [0.0, 2.0, 6.0, 12.0]);
        assert_eq!((cpu.fusion().fallbacks, cpu.failures().len()), (1, 0));
        // A product's epilogue over a residual.
        let text = "x = input f32[96,96]\nr = input f32[96,96]\ny = dot x x transpose=false\nz = add y r\nfree y\nfree r";
        let (cpu, y) = struck(text, 3);
        assert!(matches!(y.unwrap_err().root(), Error::Panicked { message, .. } if message == "struck"));
        assert_eq!((cpu.fusion().fallbacks, cpu.memory().values), (1, 2));
    }
}
