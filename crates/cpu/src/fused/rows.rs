//! Nodes around reductions of the last axes as one pass over memory: softmax, norms, their backward, sums of squares.
//!
//! A program sees a tensor as rows. Its values are *wide*, an element each, or *narrow*, one for each row: what a
//! reduction gives and what is computed from such. A block of rows is brought into scratch, every instruction runs over
//! the block, and results go to memory. Reductions use the order of the unfused device.

use super::kernel::{Base, Call, Load, gather, is_fusible, kernel, replaceable, splat, with_scratch};
use super::source::{self, Source, int};
use crate::arena::Arena;
use crate::cpu::Context;
use crate::pool;
use crate::reduction;
use crate::tile::TILE;
use crate::view::View;
use kiln_device::Error;
use kiln_fuse::{Fuser, Handles, Optimization, Status, Window};
use kiln_ir::wire::{Reader, Writer};
use kiln_ir::{AxisSet, DType, Id, Meta, Move, Node, Op, ReduceKind, Shape, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// Elements of a block, at least one row.
const BLOCK: usize = 2048;
/// The longest row: longer ones would not stay in the cache between instructions.
const LONGEST: usize = 1 << 16;

/// What a value is to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// An element for each place.
    Wide,
    /// One for each row, the reduced axes kept as 1.
    Kept,
    /// One for each row, the reduced axes gone.
    Gone,
    /// One in all.
    Number,
}

/// Collects elementwise nodes and reductions over the same rows.
pub(crate) struct Rows {
    arena: Arc<Arena>,
    places: Vec<usize>,
    forms: FxHashMap<Id, Form>,
    wide: Option<Shape>,
    axes: Option<AxisSet>,
    status: Status,
}

impl Rows {
    pub fn new(arena: Arc<Arena>) -> Rows {
        Rows {
            arena,
            places: Vec::new(),
            forms: FxHashMap::default(),
            wide: None,
            axes: None,
            status: Status::Open,
        }
    }

    /// The form of a node's result, if the node fits.
    fn form(&mut self, node: &Node, window: &Window<'_>) -> Option<Form> {
        let out = window.meta(node.outs[0]);
        match &node.op {
            Op::Full { shape, .. } => shape.is_empty().then_some(Form::Number),
            Op::Reduce { kind, axes, keep } => {
                let x = window.meta(node.ins[0]);
                let wide = *self.wide.get_or_insert(x.shape);
                let form = self.forms.get(&node.ins[0]).copied().unwrap_or(Form::Wide);
                let fits = x.shape == wide
                    && form == Form::Wide
                    && reduction::has_kernel(*kind, out.dtype)
                    && is_last(*axes, &wide)
                    && *self.axes.get_or_insert(*axes) == *axes;
                fits.then_some(if *keep { Form::Kept } else { Form::Gone })
            }
            Op::Move(Move::Reshape(shape)) => {
                let (wide, axes) = (self.wide?, self.axes?);
                match self.forms.get(&node.ins[0])? {
                    Form::Kept | Form::Gone if *shape == wide.reduced(axes, true) => Some(Form::Kept),
                    Form::Kept | Form::Gone if *shape == wide.reduced(axes, false) => Some(Form::Gone),
                    Form::Wide | Form::Kept | Form::Gone | Form::Number => None,
                }
            }
            Op::Move(Move::Expand(shape)) => {
                (*self.forms.get(&node.ins[0])? == Form::Kept && *shape == self.wide?).then_some(Form::Wide)
            }
            _ if is_fusible(node, |id| window.meta(id).dtype) => self.elementwise(node, window, out.shape),
            _ => None,
        }
    }

    fn elementwise(&mut self, node: &Node, window: &Window<'_>, shape: Shape) -> Option<Form> {
        let wide = *self.wide.get_or_insert(shape);
        let narrow = |keep| self.axes.map(|axes| wide.reduced(axes, keep));
        let form = if shape == wide {
            Form::Wide
        } else if narrow(true) == Some(shape) {
            Form::Kept
        } else if narrow(false) == Some(shape) {
            Form::Gone
        } else {
            return None;
        };
        let fits = node.ins.iter().all(|id| match (form, self.forms.get(id)) {
            (_, Some(Form::Number)) | (Form::Wide, None | Some(Form::Wide | Form::Kept)) => true,
            (Form::Kept, Some(Form::Kept)) | (Form::Gone, Some(Form::Gone)) => true,
            (_, None) => window.meta(*id).shape == shape,
            (_, Some(_)) => false,
        });
        fits.then_some(form)
    }
}

/// Whether these are the last axes and something besides 1.
fn is_last(axes: AxisSet, shape: &Shape) -> bool {
    let first = shape.len() - axes.len().min(shape.len());
    !axes.is_empty() && axes.bound() == shape.len() && axes.iter().all(|axis| axis >= first)
}

impl Fuser<View> for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        let form = match (self.status, window.node(at)) {
            (Status::Open, Some(node)) => self.form(node, window).map(|form| (node.outs[0], form)),
            _ => None,
        };
        match form {
            Some((out, form)) => {
                self.forms.insert(out, form);
                self.places.push(at);
            }
            None => self.status = Status::Closed,
        }
        self.status
    }

    fn status(&self) -> Status {
        self.status
    }

    fn score(&self, window: &Window<'_>) -> f64 {
        super::saved(window, &self.places)
    }

    fn ready(&self) -> bool {
        self.axes.is_some() && self.wide.is_some()
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = Rows::new(self.arena.clone());
    }

    fn boxed(&self) -> Box<dyn Fuser<View>> {
        Box::new(Rows {
            arena: self.arena.clone(),
            places: self.places.clone(),
            forms: self.forms.clone(),
            wide: self.wide,
            axes: self.axes,
            status: self.status,
        })
    }

    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<View>> {
        let program = program(window, &self.places, &self.forms);
        Arc::new(FusedRows { program, arena: self.arena.clone() })
    }

    fn rebuild(&self, state: &[u8]) -> Option<Arc<dyn Optimization<View>>> {
        Some(Arc::new(FusedRows { program: Program::decode(state)?, arena: self.arena.clone() }))
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Instruction {
    node: u32,
    args: SmallVec<[Source; 3]>,
    wide: bool,
    reduce: bool,
    /// Its result goes to memory.
    stored: bool,
    /// Its result is needed under its own name, not only in another reading.
    named: bool,
}

/// What is done for each block of rows.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Program {
    nodes: u32,
    instructions: Vec<Instruction>,
    /// Results that are another reading of a value: (node, value).
    readings: Vec<(u32, u32)>,
    kept_numbers: Vec<u32>,
}

fn program(window: &Window<'_>, places: &[usize], forms: &FxHashMap<Id, Form>) -> Program {
    let nodes: Vec<&Node> = places.iter().filter_map(|&at| window.node(at)).collect();
    let mut values: FxHashMap<Id, Source> = FxHashMap::default();
    let mut program = Program {
        nodes: nodes.len() as u32,
        instructions: Vec::new(),
        readings: Vec::new(),
        kept_numbers: Vec::new(),
    };
    for (i, node) in nodes.iter().enumerate() {
        let (i, out) = (i as u32, node.outs[0]);
        let leaves = window.leaves(out, places);
        match &node.op {
            Op::Full { .. } => {
                values.insert(out, Source::Number(i));
                if leaves {
                    program.kept_numbers.push(i);
                }
            }
            Op::Move(_) => {
                if let Some(&source @ Source::Value(value)) = values.get(&node.ins[0]) {
                    values.insert(out, source);
                    if leaves {
                        program.readings.push((i, value));
                        program.instructions[value as usize].stored = true;
                    }
                }
            }
            _ => {
                let args = node.ins.iter().enumerate();
                let args = args
                    .map(|(k, id)| values.get(id).copied().unwrap_or(Source::Load(i, k as u32)))
                    .collect();
                values.insert(out, Source::Value(program.instructions.len() as u32));
                let (wide, reduce) = (forms[&out] == Form::Wide, matches!(node.op, Op::Reduce { .. }));
                program.instructions.push(Instruction {
                    node: i,
                    args,
                    wide,
                    reduce,
                    stored: leaves,
                    named: leaves,
                });
            }
        }
    }
    program
}

struct FusedRows {
    program: Program,
    arena: Arc<Arena>,
}

impl Optimization<View> for FusedRows {
    fn name(&self) -> String {
        "rows".into()
    }

    fn len(&self) -> usize {
        self.program.nodes as usize
    }

    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<View>) -> Result<(), Error> {
        let cx = Context { arena: &self.arena, place: handles.place() };
        let run = Run::new(&cx, &self.program, nodes, dying, handles)?;
        run.all();
        let view =
            |value: u32| run.results.iter().find(|r| r.instruction == value as usize).map(|r| r.view.clone());
        let mut puts: Vec<(Id, View)> = Vec::new();
        for &(node, value) in &self.program.readings {
            let node = nodes[node as usize];
            let view = view(value).ok_or(Error::UnknownValue(node.outs[0]))?;
            let view = match &node.op {
                Op::Move(Move::Expand(shape)) => view.expanded(shape),
                Op::Move(Move::Reshape(shape)) => {
                    view.reshaped(shape).ok_or(Error::UnknownValue(node.outs[0]))?
                }
                _ => view,
            };
            puts.push((node.outs[0], view));
        }
        for &number in &self.program.kept_numbers {
            let node = nodes[number as usize];
            if let Op::Full { shape, value } = &node.op {
                puts.push((
                    node.outs[0],
                    cx.filled(Meta::new(value.dtype(), []), &value.to_bytes())?.expanded(shape),
                ));
            }
        }
        puts.extend(run.results.iter().filter(|r| r.named).map(|r| (r.id, r.view.clone())));
        drop(run);
        puts.into_iter().for_each(|(id, view)| handles.put(id, view));
        Ok(())
    }

    fn state(&self) -> Vec<u8> {
        self.program.encode()
    }
}

/// A program bound to values.
struct Run {
    steps: Vec<Bound>,
    loads: Vec<Load>,
    load_wide: Vec<bool>,
    numbers: Vec<(SmallVec<[u8; 8]>, usize)>,
    results: Vec<Stored>,
    rows: usize,
    length: usize,
    /// Rows of a block.
    block: usize,
    slots: usize,
}

struct Stored {
    instruction: usize,
    id: Id,
    view: View,
    wide: bool,
    named: bool,
}

struct Bound {
    work: Work,
    args: SmallVec<[Place; 3]>,
    out: Place,
    wide: bool,
    size: usize,
}

enum Work {
    Map(Call),
    Reduce(ReduceKind, DType),
    /// A narrow value spread over its rows.
    Spread(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Slot(usize),
    Load(usize),
    Result(usize),
}

impl Run {
    fn new(
        cx: &Context<'_>,
        program: &Program,
        nodes: &[&Node],
        dying: &[Id],
        handles: &dyn Handles<View>,
    ) -> Result<Run, Error> {
        let unfit = |node: &Node| Error::Unsupported { op: node.op.name().into(), device: "rows".into() };
        let find = |id: Id| handles.get(id).ok_or(Error::UnknownValue(id));
        let metas = metas(program, nodes, &find)?;
        let reduce = program.instructions.iter().find(|i| i.reduce).ok_or(Error::Stopped)?;
        let Op::Reduce { axes, .. } = &nodes[reduce.node as usize].op else { return Err(Error::Stopped) };
        let wide = match reduce.args[0] {
            Source::Load(node, k) => find(nodes[node as usize].ins[k as usize])?.shape,
            Source::Value(v) => metas[v as usize].shape,
            Source::Number(_) => return Err(Error::Stopped),
        };
        let length: usize = axes.iter().map(|i| wide[i]).product();
        let rows = wide.reduced(*axes, false).numel();
        // Rows that are too long, or too few to share out, are better off with the kernels for one reduction.
        if length == 0 || length > LONGEST || rows == 0 || rows < 8 && length > BLOCK {
            return Err(unfit(nodes[reduce.node as usize]));
        }
        let mut run = Run {
            steps: Vec::new(),
            loads: Vec::new(),
            load_wide: Vec::new(),
            numbers: Vec::new(),
            results: Vec::new(),
            rows,
            length,
            block: (BLOCK / length).clamp(1, rows),
            slots: 0,
        };
        let narrow = |keep: bool| wide.reduced(*axes, keep);
        let mut loaded: Vec<(Id, bool)> = Vec::new();
        let mut overwritten: Vec<Id> = Vec::new();
        let mut places: Vec<(Place, bool)> = Vec::new();
        let mut spread: FxHashMap<usize, usize> = FxHashMap::default();
        for (at, instruction) in program.instructions.iter().enumerate() {
            let node = nodes[instruction.node as usize];
            let wide_operands = instruction.wide || instruction.reduce;
            let mut args: SmallVec<[Place; 3]> = SmallVec::new();
            let mut from = metas[at].dtype;
            for (k, (source, &id)) in instruction.args.iter().zip(&node.ins).enumerate() {
                let (place, dtype) = match *source {
                    Source::Load(..) => {
                        let index = match loaded.iter().position(|l| *l == (id, wide_operands)) {
                            Some(index) => index,
                            None => {
                                let x = find(id)?;
                                let shape = if wide_operands { wide } else { x.shape };
                                if !wide_operands && x.shape != narrow(true) && x.shape != narrow(false) {
                                    return Err(unfit(node));
                                }
                                let view = x.expanded(&shape);
                                let (walk, direct) = (view.walk(), view.is_dense());
                                run.loads.push(Load { view, walk, direct, slot: usize::MAX });
                                run.load_wide.push(wide_operands);
                                loaded.push((id, wide_operands));
                                loaded.len() - 1
                            }
                        };
                        (Place::Load(index), run.loads[index].view.dtype)
                    }
                    Source::Number(n) => {
                        let Op::Full { value, .. } = &nodes[n as usize].op else { return Err(unfit(node)) };
                        run.numbers.push((value.to_bytes(), run.slots));
                        run.slots += 1;
                        (Place::Slot(run.slots - 1), value.dtype())
                    }
                    Source::Value(v) => {
                        let (place, is_wide) = places[v as usize];
                        let dtype = metas[v as usize].dtype;
                        if wide_operands && !is_wide {
                            let slot = *spread.entry(v as usize).or_insert_with(|| {
                                run.slots += 1;
                                let (out, size) = (Place::Slot(run.slots - 1), dtype.size());
                                let args = SmallVec::from_slice(&[place]);
                                run.steps.push(Bound {
                                    work: Work::Spread(size),
                                    args,
                                    out,
                                    wide: true,
                                    size,
                                });
                                run.slots - 1
                            });
                            (Place::Slot(slot), dtype)
                        } else {
                            (place, dtype)
                        }
                    }
                };
                if k + 1 == instruction.args.len() {
                    from = dtype;
                }
                args.push(place);
            }
            let meta = metas[at];
            let work = match &node.op {
                Op::Reduce { kind, .. } => Work::Reduce(*kind, from),
                _ => Work::Map(Call::new(node, from, meta.dtype).ok_or_else(|| unfit(node))?),
            };
            let out = if instruction.stored {
                let old = dying
                    .iter()
                    .copied()
                    .find(|id| !overwritten.contains(id) && replaceable(cx, handles, *id, meta));
                let view = match old.and_then(|id| handles.get(id)) {
                    Some(view) => View { dtype: meta.dtype, ..view.clone() },
                    None => cx.fresh(meta)?,
                };
                overwritten.extend(old);
                let id = node.outs[0];
                run.results.push(Stored {
                    instruction: at,
                    id,
                    view,
                    wide: instruction.wide,
                    named: instruction.named,
                });
                Place::Result(run.results.len() - 1)
            } else {
                run.slots += 1;
                Place::Slot(run.slots - 1)
            };
            places.push((out, instruction.wide));
            run.steps.push(Bound { work, args, out, wide: instruction.wide, size: meta.dtype.size() });
        }
        for (load, (id, _)) in run.loads.iter_mut().zip(&loaded) {
            load.direct &= !overwritten.contains(id);
            if !load.direct {
                load.slot = run.slots;
                run.slots += 1;
            }
        }
        Ok(run)
    }

    fn all(&self) {
        let blocks = self.rows.div_ceil(self.block);
        let share = ((1 << 15) / (self.block * self.length)).max(1);
        let bases: Vec<Base> = self.loads.iter().map(|l| Base(l.view.address())).collect();
        let results: Vec<Base> = self.results.iter().map(|r| Base(r.view.address())).collect();
        // Every tile is as long as the longest: whole cache lines of eight-byte elements.
        let stride = (self.block * self.length).next_multiple_of(8);
        pool::parallel(blocks.div_ceil(share), &|s| {
            with_scratch(self.slots * stride, |scratch| {
                let slot = |i: usize| scratch.wrapping_add(i * stride).cast::<u8>();
                for (bytes, at) in &self.numbers {
                    splat(slot(*at), bytes, self.block * self.length);
                }
                for block in s * share..((s + 1) * share).min(blocks) {
                    let first = block * self.block;
                    self.block(&slot, &bases, &results, first, self.block.min(self.rows - first));
                }
            });
        });
    }

    /// Runs every instruction over `count` rows from `first` on.
    fn block(
        &self,
        slot: &dyn Fn(usize) -> *mut u8,
        bases: &[Base],
        results: &[Base],
        first: usize,
        count: usize,
    ) {
        let extent =
            |wide: bool| if wide { (first * self.length, count * self.length) } else { (first, count) };
        for (i, load) in self.loads.iter().enumerate() {
            if !load.direct {
                let (from, len) = extent(self.load_wide[i]);
                gather(load, bases[i].0, slot(load.slot), from, len);
            }
        }
        let place = |p: Place| match p {
            Place::Slot(i) => slot(i),
            Place::Load(i) if self.loads[i].direct => {
                bases[i].0.wrapping_add(extent(self.load_wide[i]).0 * self.loads[i].view.dtype.size())
            }
            Place::Load(i) => slot(self.loads[i].slot),
            Place::Result(i) => {
                let result = &self.results[i];
                results[i].0.wrapping_add(extent(result.wide).0 * result.view.dtype.size())
            }
        };
        for step in &self.steps {
            let args: SmallVec<[*const u8; 3]> = step.args.iter().map(|&p| place(p).cast_const()).collect();
            let out = place(step.out);
            match &step.work {
                Work::Map(call) => {
                    let len = extent(step.wide).1;
                    for at in (0..len).step_by(TILE) {
                        let parts: SmallVec<[*const u8; 3]> = args
                            .iter()
                            .enumerate()
                            .map(|(k, x)| x.wrapping_add(at * call.operand_size(k)))
                            .collect();
                        // SAFETY: scratch tiles hold a block of eight-byte elements, loads and results a block from
                        // `first` on; no scratch tile is used twice, overwritten operands were copied to scratch, and
                        // other results are fresh, so nothing overlaps. Blocks of different threads are disjoint.
                        unsafe { kernel(call, &parts, out.wrapping_add(at * step.size), TILE.min(len - at)) };
                    }
                }
                // SAFETY: as above.
                Work::Reduce(kind, dtype) => unsafe {
                    reduction::rows(*kind, *dtype, args[0], count, self.length, out)
                },
                // SAFETY: as above; a narrow tile holds `count` elements.
                Work::Spread(size) => unsafe { spread(args[0], *size, count, self.length, out) },
            }
        }
    }
}

/// Repeats each of `count` elements `length` times.
///
/// # Safety
/// `x` holds `count` elements of `size` bytes, `out` room for `count * length`, and they do not overlap.
unsafe fn spread(x: *const u8, size: usize, count: usize, length: usize, out: *mut u8) {
    for row in 0..count {
        // SAFETY: promised by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(x.add(row * size), size) };
        splat(out.wrapping_add(row * length * size), bytes, length);
    }
}

/// The meta of each instruction's result.
fn metas<'h>(
    program: &Program,
    nodes: &[&Node],
    find: &dyn Fn(Id) -> Result<&'h View, Error>,
) -> Result<Vec<Meta>, Error> {
    let mut metas: Vec<Meta> = Vec::with_capacity(program.instructions.len());
    let mut read: FxHashMap<Id, Meta> = FxHashMap::default();
    for node in nodes {
        let mut ins: SmallVec<[Meta; 3]> = SmallVec::new();
        for &id in &node.ins {
            ins.push(match read.get(&id) {
                Some(meta) => *meta,
                None => find(id)?.meta(),
            });
        }
        read.insert(node.outs[0], infer(&node.op, &ins)?[0]);
    }
    for instruction in &program.instructions {
        metas.push(read[&nodes[instruction.node as usize].outs[0]]);
    }
    Ok(metas)
}

impl Program {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.int(self.nodes as u64);
        w.int(self.kept_numbers.len() as u64);
        self.kept_numbers.iter().for_each(|&n| w.int(n as u64));
        w.int(self.readings.len() as u64);
        for &(node, value) in &self.readings {
            w.int(node as u64);
            w.int(value as u64);
        }
        w.int(self.instructions.len() as u64);
        for i in &self.instructions {
            w.int(i.node as u64);
            w.int(i.wide as u64 | (i.reduce as u64) << 1 | (i.stored as u64) << 2 | (i.named as u64) << 3);
            source::encode(&i.args, &mut w);
        }
        w.bytes
    }

    /// The program that was encoded, if these bytes are one whose parts all fit together.
    fn decode(bytes: &[u8]) -> Option<Program> {
        let mut r = Reader::new(bytes);
        let nodes = int(&mut r)?;
        let count = r.length(1).ok()?;
        let kept_numbers = (0..count).map(|_| int(&mut r).filter(|n| *n < nodes)).collect::<Option<_>>()?;
        let count = r.length(2).ok()?;
        let readings: Vec<(u32, u32)> = (0..count)
            .map(|_| Some((int(&mut r).filter(|n| *n < nodes)?, int(&mut r)?)))
            .collect::<Option<_>>()?;
        let count = r.length(3).ok()?;
        let mut instructions = Vec::new();
        for at in 0..count {
            let (node, flags) = (int(&mut r).filter(|n| *n < nodes)?, int(&mut r)?);
            let args = source::decode(&mut r, nodes, at)?;
            let flag = |bit: u32| flags & bit != 0;
            instructions.push(Instruction {
                node,
                args,
                wide: flag(1),
                reduce: flag(2),
                stored: flag(4),
                named: flag(8),
            });
        }
        let fits = r.is_empty() && readings.iter().all(|&(_, v)| (v as usize) < instructions.len());
        fits.then_some(Program { nodes, instructions, readings, kept_numbers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_read_back_as_it_was() {
        let text = "a = input f32[4,8]\nm = max a axes=[1] keep=true\nb = sub a m\ne = exp b\ns = sum e axes=[1] keep=true\ny = div e s\nfree m\nfree b\nfree e\nfree s";
        let program = kiln_ir::text::parse(text).unwrap();
        let metas = kiln_ir::verify(program.clone()).unwrap().metas;
        let window = Window::new(&program.items, |id| metas.get(&id).copied()).unwrap();
        let mut rows = Rows::new(Arena::new(None));
        for at in 0..5 {
            assert_eq!(rows.offer(at, &window), Status::Open, "node {at}");
        }
        assert!(rows.ready());
        let program = super::program(&window, &rows.places, &rows.forms);
        source::check_form(&program.encode(), &program, Program::decode);
    }
}
