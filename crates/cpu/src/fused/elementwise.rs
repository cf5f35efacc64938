//! Elementwise nodes of one shape as one pass over memory.
//!
//! The fuser collects them; its result is a small program in static single assignment: operands are loaded tile by
//! tile, each instruction is one loop of `slices.rs` from tiles to a tile, results go straight to memory. The loops are
//! those of the unfused device, so the bits are too. Numbers come from the nodes themselves at every run.

use super::kernel::{Base, Call, Load, gather, is_fusible, kernel, replaceable, splat, with_scratch};
use super::source::{self, Source, int};
use crate::arena::Arena;
use crate::cpu::Context;
use crate::tile::{TILE, tiles};
use crate::view::View;
use kiln_device::Error;
use kiln_fuse::{Fuser, Handles, Optimization, Status, Window};
use kiln_ir::wire::{Reader, Writer};
use kiln_ir::{Id, Meta, Node, Op, Shape};
use smallvec::SmallVec;
use std::sync::Arc;

/// Collects elementwise nodes that give one shape, and the numbers they use.
pub(crate) struct Elementwise {
    arena: Arc<Arena>,
    places: Vec<usize>,
    shape: Option<Shape>,
    status: Status,
}

impl Elementwise {
    pub fn new(arena: Arc<Arena>) -> Elementwise {
        Elementwise { arena, places: Vec::new(), shape: None, status: Status::Open }
    }

    fn takes(&mut self, node: &Node, window: &Window<'_>) -> bool {
        match &node.op {
            Op::Full { shape, .. } => shape.is_empty(),
            _ if is_fusible(node, |id| window.meta(id).dtype) => {
                let shape = window.meta(node.outs[0]).shape;
                *self.shape.get_or_insert(shape) == shape
            }
            _ => false,
        }
    }
}

impl Fuser<View> for Elementwise {
    fn name(&self) -> &'static str {
        "elementwise"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        let taken =
            self.status == Status::Open && window.node(at).is_some_and(|node| self.takes(node, window));
        if taken {
            self.places.push(at);
        } else {
            self.status = Status::Closed;
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
        self.shape.is_some()
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = Elementwise::new(self.arena.clone());
    }

    fn boxed(&self) -> Box<dyn Fuser<View>> {
        let (arena, places) = (self.arena.clone(), self.places.clone());
        Box::new(Elementwise { arena, places, shape: self.shape, status: self.status })
    }

    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<View>> {
        Arc::new(Fused { program: program(window, &self.places), arena: self.arena.clone() })
    }

    fn rebuild(&self, state: &[u8]) -> Option<Arc<dyn Optimization<View>>> {
        Some(Arc::new(Fused { program: Program::decode(state)?, arena: self.arena.clone() }))
    }
}

/// One node.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Instruction {
    /// Its place among the nodes.
    node: u32,
    args: SmallVec<[Source; 3]>,
    /// Its result is needed outside.
    stored: bool,
    /// The scratch tile it is computed in, where it is not stored.
    slot: u32,
}

/// What is done for each tile.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Program {
    nodes: u32,
    instructions: Vec<Instruction>,
    /// Numbers that are needed outside as tensors too.
    kept_numbers: Vec<u32>,
    slots: u32,
}

/// The program of the nodes at `places`.
fn program(window: &Window<'_>, places: &[usize]) -> Program {
    let nodes: Vec<&Node> = places.iter().filter_map(|&at| window.node(at)).collect();
    let mut values: Vec<(Id, Source)> = Vec::new();
    let mut instructions: Vec<Instruction> = Vec::new();
    let mut kept_numbers = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let out = node.outs[0];
        let leaves = window.leaves(out, places);
        if let Op::Full { .. } = node.op {
            values.push((out, Source::Number(i as u32)));
            if leaves {
                kept_numbers.push(i as u32);
            }
            continue;
        }
        let find = |(k, id): (usize, &Id)| {
            let made = values.iter().find(|(made, _)| made == id).map(|(_, source)| *source);
            made.unwrap_or(Source::Load(i as u32, k as u32))
        };
        let args = node.ins.iter().enumerate().map(find).collect();
        values.push((out, Source::Value(instructions.len() as u32)));
        instructions.push(Instruction { node: i as u32, args, stored: leaves, slot: 0 });
    }
    let slots = assign_slots(&mut instructions);
    Program { nodes: nodes.len() as u32, instructions, kept_numbers, slots }
}

/// Gives each unstored result a scratch tile, used again once the result is not needed any more.
fn assign_slots(instructions: &mut [Instruction]) -> u32 {
    let last_use = |value: usize, instructions: &[Instruction]| {
        instructions.iter().rposition(|i| i.args.contains(&Source::Value(value as u32))).unwrap_or(value)
    };
    let (mut free, mut slots): (Vec<u32>, u32) = (Vec::new(), 0);
    let mut busy: Vec<(usize, u32)> = Vec::new();
    for at in 0..instructions.len() {
        // A tile is free again only after the instruction that reads it last: results never share one with operands.
        busy.retain(|&(until, slot)| {
            if until < at {
                free.push(slot);
            }
            until >= at
        });
        if !instructions[at].stored {
            let slot = free.pop().unwrap_or_else(|| {
                slots += 1;
                slots - 1
            });
            instructions[at].slot = slot;
            busy.push((last_use(at, instructions), slot));
        }
    }
    slots
}

struct Fused {
    program: Program,
    arena: Arc<Arena>,
}

impl Optimization<View> for Fused {
    fn name(&self) -> String {
        "elementwise".into()
    }

    fn len(&self) -> usize {
        self.program.nodes as usize
    }

    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<View>) -> Result<(), Error> {
        let cx = Context { arena: &self.arena, place: handles.place() };
        let run = Run::new(&cx, &self.program, nodes, dying, handles)?;
        run.all();
        for (id, view) in run.results {
            handles.put(id, view);
        }
        for &number in &self.program.kept_numbers {
            let node = nodes[number as usize];
            if let Op::Full { shape, value } = &node.op {
                let single = cx.filled(Meta::new(value.dtype(), []), &value.to_bytes())?;
                handles.put(node.outs[0], single.expanded(shape));
            }
        }
        Ok(())
    }

    fn state(&self) -> Vec<u8> {
        self.program.encode()
    }
}

/// A program bound to values.
struct Run<'a> {
    program: &'a Program,
    ops: Vec<Bound>,
    loads: Vec<Load>,
    /// The bytes of each number, and the scratch tile it fills.
    numbers: Vec<(SmallVec<[u8; 8]>, usize)>,
    results: Vec<(Id, View)>,
    count: usize,
}

/// An instruction's operation, and where its operands and result are.
struct Bound {
    call: Call,
    args: SmallVec<[Place; 3]>,
    out: Place,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// A tile of scratch.
    Slot(usize),
    /// A loaded operand.
    Load(usize),
    /// A result in memory.
    Result(usize),
}

impl<'a> Run<'a> {
    fn new(
        cx: &Context<'_>,
        program: &'a Program,
        nodes: &[&Node],
        dying: &[Id],
        handles: &dyn Handles<View>,
    ) -> Result<Run<'a>, Error> {
        let missing = |id: Id| Error::UnknownValue(id);
        let mut shape: Option<Shape> = None;
        let mut metas: Vec<Meta> = Vec::new();
        let mut loads: Vec<(Id, Load)> = Vec::new();
        let mut slots = program.slots as usize;
        let mut numbers: Vec<(u32, SmallVec<[u8; 8]>, usize)> = Vec::new();
        let mut ops = Vec::new();
        let mut results: Vec<(Id, View)> = Vec::new();
        let mut overwritten: Vec<Id> = Vec::new();
        // Metas first: the whole shape is that of every result.
        let find = |id: Id| handles.get(id).ok_or_else(|| missing(id));
        for instruction in &program.instructions {
            let node = nodes[instruction.node as usize];
            let mut ins: SmallVec<[Meta; 3]> = SmallVec::new();
            for (source, &id) in instruction.args.iter().zip(&node.ins) {
                ins.push(match *source {
                    Source::Load(..) => find(id)?.meta(),
                    Source::Number(n) => match &nodes[n as usize].op {
                        Op::Full { shape, value } => Meta { dtype: value.dtype(), shape: *shape },
                        _ => return Err(missing(id)),
                    },
                    Source::Value(v) => metas[v as usize],
                });
            }
            let meta = kiln_ir::infer(&node.op, &ins)?[0];
            shape.get_or_insert(meta.shape);
            metas.push(meta);
        }
        let shape = shape.unwrap_or_default();
        for (at, instruction) in program.instructions.iter().enumerate() {
            let node = nodes[instruction.node as usize];
            let mut args: SmallVec<[Place; 3]> = SmallVec::new();
            let mut from = metas[at].dtype;
            for (k, (source, &id)) in instruction.args.iter().zip(&node.ins).enumerate() {
                let (place, dtype) = match *source {
                    Source::Load(..) => {
                        let index = match loads.iter().position(|(loaded, _)| *loaded == id) {
                            Some(index) => index,
                            None => {
                                let view = find(id)?.expanded(&shape);
                                let (walk, direct) = (view.walk(), view.is_dense());
                                loads.push((id, Load { view, walk, direct, slot: usize::MAX }));
                                loads.len() - 1
                            }
                        };
                        (Place::Load(index), loads[index].1.view.dtype)
                    }
                    Source::Number(n) => {
                        let Op::Full { value, .. } = &nodes[n as usize].op else { return Err(missing(id)) };
                        let slot = match numbers.iter().find(|(number, ..)| *number == n) {
                            Some((.., slot)) => *slot,
                            None => {
                                numbers.push((n, value.to_bytes(), slots));
                                slots += 1;
                                slots - 1
                            }
                        };
                        (Place::Slot(slot), value.dtype())
                    }
                    Source::Value(v) => {
                        let value = &program.instructions[v as usize];
                        let place = match results
                            .iter()
                            .position(|(id, _)| *id == nodes[value.node as usize].outs[0])
                        {
                            Some(result) => Place::Result(result),
                            None => Place::Slot(value.slot as usize),
                        };
                        (place, metas[v as usize].dtype)
                    }
                };
                // The last operand decides: the first of a select is its condition.
                if k + 1 == instruction.args.len() {
                    from = dtype;
                }
                args.push(place);
            }
            let call = Call::new(node, from, metas[at].dtype)
                .ok_or_else(|| Error::Unsupported { op: node.op.name().into(), device: "cpu".into() })?;
            let out = if instruction.stored {
                let meta = Meta { dtype: metas[at].dtype, shape };
                let old = dying
                    .iter()
                    .copied()
                    .find(|id| !overwritten.contains(id) && replaceable(cx, handles, *id, meta));
                let view = match old.and_then(|id| handles.get(id)) {
                    Some(view) => View { dtype: meta.dtype, ..view.clone() },
                    None => cx.fresh(meta)?,
                };
                overwritten.extend(old);
                results.push((node.outs[0], view));
                Place::Result(results.len() - 1)
            } else {
                Place::Slot(instruction.slot as usize)
            };
            ops.push(Bound { call, args, out });
        }
        for (id, load) in &mut loads {
            load.direct &= !overwritten.contains(id);
            if !load.direct {
                load.slot = slots;
                slots += 1;
            }
        }
        let loads = loads.into_iter().map(|(_, load)| load).collect();
        let numbers = numbers.into_iter().map(|(_, bytes, slot)| (bytes, slot)).collect();
        Ok(Run { program, ops, loads, numbers, results, count: shape.numel() })
    }

    fn all(&self) {
        let slots = self.slots();
        let (loads, results): (Vec<Base>, Vec<Base>) = (
            self.loads.iter().map(|l| Base(l.view.address())).collect(),
            self.results.iter().map(|(_, v)| Base(v.address())).collect(),
        );
        tiles(self.count, &|from, len| {
            with_scratch(slots * TILE, |scratch| self.tile(scratch, &loads, &results, from, len));
        });
    }

    fn slots(&self) -> usize {
        let loaded = self.loads.iter().filter(|l| !l.direct).count();
        self.program.slots as usize + self.numbers.len() + loaded
    }

    fn tile(&self, scratch: *mut u64, loads: &[Base], results: &[Base], from: usize, len: usize) {
        let slot = |i: usize| scratch.wrapping_add(i * TILE).cast::<u8>();
        for (bytes, at) in &self.numbers {
            splat(slot(*at), bytes, len);
        }
        for (load, base) in self.loads.iter().zip(loads) {
            if !load.direct {
                gather(load, base.0, slot(load.slot), from, len);
            }
        }
        let place = |p: Place| match p {
            Place::Slot(i) => slot(i),
            Place::Load(i) if self.loads[i].direct => {
                loads[i].0.wrapping_add(from * self.loads[i].view.dtype.size())
            }
            Place::Load(i) => slot(self.loads[i].slot),
            Place::Result(i) => results[i].0.wrapping_add(from * self.results[i].1.dtype.size()),
        };
        for op in &self.ops {
            let args: SmallVec<[*const u8; 3]> = op.args.iter().map(|&p| place(p).cast_const()).collect();
            // SAFETY: each place holds `len` elements of its type (scratch tiles hold TILE elements of eight bytes); an
            // instruction's result shares memory with none of its operands, because scratch tiles are given back only
            // after their last use, operands that are overwritten were copied to scratch above, and results are fresh
            // otherwise. Tiles of different threads are disjoint.
            unsafe { kernel(&op.call, &args, place(op.out), len) };
        }
    }
}

impl Program {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.int(self.nodes as u64);
        w.int(self.slots as u64);
        w.int(self.kept_numbers.len() as u64);
        self.kept_numbers.iter().for_each(|&n| w.int(n as u64));
        w.int(self.instructions.len() as u64);
        for i in &self.instructions {
            w.int(i.node as u64);
            w.int(i.stored as u64);
            w.int(i.slot as u64);
            source::encode(&i.args, &mut w);
        }
        w.bytes
    }

    /// The program that was encoded, if these bytes are one whose parts all fit together.
    fn decode(bytes: &[u8]) -> Option<Program> {
        let mut r = Reader::new(bytes);
        let (nodes, slots) = (int(&mut r)?, int(&mut r)?);
        let count = r.length(1).ok()?;
        let kept_numbers = (0..count).map(|_| int(&mut r).filter(|n| *n < nodes)).collect::<Option<_>>()?;
        let count = r.length(4).ok()?;
        let mut instructions = Vec::new();
        for at in 0..count {
            let (node, stored, slot) = (int(&mut r)?, int(&mut r)? == 1, int(&mut r)?);
            let args = source::decode(&mut r, nodes, at)?;
            instructions.push(Instruction { node, args, stored, slot });
        }
        // Scratch tiles decide memory safety, so they are computed anew rather than believed.
        let computed = assign_slots(&mut instructions);
        let fits = r.is_empty() && computed == slots && instructions.iter().all(|i| i.node < nodes);
        fits.then_some(Program { nodes, instructions, kept_numbers, slots })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_read_back_as_it_was() {
        let text = "a = input f32[4]\nn = full shape=[] value=f32:2.0\nb = mul a n\nc = exp b\nd = add b c\nfree b\nfree c";
        let program = kiln_ir::text::parse(text).unwrap();
        let metas = kiln_ir::verify(program.clone()).unwrap().metas;
        let window = Window::new(&program.items, |id| metas.get(&id).copied()).unwrap();
        let program = super::program(&window, &[0, 1, 2, 3]);
        assert_eq!(program.instructions.len(), 3);
        source::check_form(&program.encode(), &program, Program::decode);
    }
}
