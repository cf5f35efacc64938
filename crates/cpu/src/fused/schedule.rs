//! A program cut into lines: passes over rows, and passes over the elements that rows have in common.
//!
//! A value's level is the number of reductions it waits for. For each level there is one line over the elements of a
//! row, which ends in reductions and stores, and before it one over what there is one of for each row. What a later
//! level needs of an earlier one is computed again where that is cheap, and else kept in a row of scratch.

use super::kernel::{Call, Kernel};
use super::line::{Draft, Line, MOST, Place, Target};
use super::pass::{Output, Step};
use super::program::{Extent, Instruction, Program, Source, Work};
use crate::reduction;
use kiln_ir::{Binary, DType, Id, Node, Op, ReduceKind, Unary};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, BTreeSet};

/// What is done, level by level. Everything refers to places in the lists here.
#[derive(Default)]
pub(super) struct Schedule {
    pub loads: Vec<Load>,
    /// The nodes that give numbers.
    pub numbers: Vec<u32>,
    pub picks: Vec<Pick>,
    pub levels: Vec<Level>,
    pub pokes: Vec<Poke>,
    /// Values with one element for each row, and the result that holds them, if one does.
    pub narrows: Vec<(DType, Option<u32>)>,
    /// Rows of scratch.
    pub rows: Vec<DType>,
    pub results: Vec<Stored>,
    pub stacks: Vec<Stack>,
}

/// An operand in memory.
pub(super) struct Load {
    pub node: u32,
    pub arg: u32,
    pub extent: Extent,
    pub dtype: DType,
    /// The last level that reads this value, in whatever form.
    pub last: usize,
}

/// The element of each row of a load at that row's index.
pub(super) struct Pick {
    pub load: u32,
    pub index: u32,
    pub narrow: u32,
}

/// An element of each row of a result that is written last.
pub(super) struct Poke {
    pub result: u32,
    pub index: u32,
    pub narrow: u32,
}

/// A result in memory.
pub(super) struct Stored {
    pub value: u32,
    pub node: u32,
    pub extent: Extent,
    pub dtype: DType,
    pub level: usize,
}

/// A reduction of rows onto each other.
pub(super) struct Stack {
    pub kind: ReduceKind,
    pub dtype: DType,
    pub result: u32,
}

#[derive(Default)]
pub(super) struct Level {
    /// Over rows.
    pub narrow: Option<Line>,
    /// Narrow values that are repeated along rows of scratch first: (narrow, row). Only where rows are short.
    pub spreads: Vec<(u32, u32)>,
    /// Over the elements of rows.
    pub wide: Option<Line>,
    /// Reductions of rows of scratch that come after. Only where rows are short.
    pub after: Vec<(u32, ReduceKind, DType, Goal)>,
}

/// Where a reduction's result goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Goal {
    Narrow(u32),
    Stack(u32),
}

/// Work that is rather done again than kept, in additions.
const CHEAP: u32 = 3;

/// The schedule of a program; `dtype` gives that of every operand and result of its nodes. With `short`, lines run over
/// whole blocks of rows at once. Nothing if the nodes are not those of the program.
pub(super) fn schedule(
    program: &Program,
    nodes: &[&Node],
    dtype: impl Fn(Id) -> Option<DType>,
    short: bool,
) -> Option<Schedule> {
    let mut builder = Builder {
        program,
        nodes,
        short,
        ids: Vec::new(),
        types: Vec::new(),
        levels: Vec::new(),
        costs: Vec::new(),
        homes: BTreeMap::new(),
        kept: BTreeMap::new(),
        spread: BTreeMap::new(),
        out: Schedule::default(),
    };
    for instruction in &program.instructions {
        builder.instruction(instruction, &dtype)?;
    }
    builder.goals(&dtype)?;
    builder.lines()?;
    // Who takes the place of an operand is a bit for each.
    (builder.out.results.len() <= MOST).then_some(builder.out)
}

struct Builder<'a> {
    program: &'a Program,
    nodes: &'a [&'a Node],
    short: bool,
    /// The value that each load reads.
    ids: Vec<Id>,
    /// The dtype, level and cost of each instruction.
    types: Vec<DType>,
    levels: Vec<usize>,
    costs: Vec<u32>,
    /// Narrow values that are needed beyond their line.
    homes: BTreeMap<u32, u32>,
    /// Wide values that are kept in rows of scratch.
    kept: BTreeMap<u32, u32>,
    /// Narrow values that are repeated along rows of scratch.
    spread: BTreeMap<u32, u32>,
    out: Schedule,
}

impl Builder<'_> {
    fn instruction(&mut self, i: &Instruction, dtype: &impl Fn(Id) -> Option<DType>) -> Option<()> {
        let node = *self.nodes.get(i.node as usize)?;
        let (mut level, mut cost) = (0, 0u32);
        for source in &i.args {
            match *source {
                Source::Load(node, arg) => {
                    let id = *self.nodes.get(node as usize)?.ins.get(arg as usize)?;
                    let extent = match i.work {
                        Work::Map => i.extent,
                        Work::Fold | Work::Stack => Extent::Wide,
                        Work::Pick if i.args[0] == *source => Extent::Wide,
                        Work::Pick => Extent::Kept,
                    };
                    self.load(node, arg, id, extent, dtype(id)?);
                }
                Source::Number(n) => {
                    let Op::Full { .. } = self.nodes.get(n as usize)?.op else { return None };
                    if !self.out.numbers.contains(&n) {
                        self.out.numbers.push(n);
                    }
                }
                Source::Value(v) => {
                    level = level.max(self.levels[v as usize]);
                    if self.program.instructions[v as usize].extent == Extent::Wide {
                        cost = cost.saturating_add(self.costs[v as usize]);
                    }
                }
            }
        }
        // What is made follows from the operands, as everything does that writes it.
        let made = match (i.work, &node.op) {
            (Work::Pick, _) => self.dtype(*i.args.first()?)?,
            (Work::Map, _) => {
                let call = self.call(i)?;
                cost = cost.saturating_add(price(&call));
                call.to
            }
            (Work::Fold | Work::Stack, Op::Reduce { kind, .. }) => {
                self.dtype(*i.args.first()?).filter(|&of| reduction::has_kernel(*kind, of))?
            }
            (Work::Fold | Work::Stack, _) => return None,
        };
        self.types.push(made);
        self.costs.push(cost);
        self.levels.push(level + (i.work == Work::Fold) as usize);
        Some(())
    }

    fn load(&mut self, node: u32, arg: u32, id: Id, extent: Extent, dtype: DType) {
        let found =
            (self.out.loads.iter().zip(&self.ids)).any(|(l, &other)| other == id && l.extent == extent);
        if !found {
            self.ids.push(id);
            self.out.loads.push(Load { node, arg, extent, dtype, last: 0 });
        }
    }

    /// The load of an operand in that extent.
    fn loaded(&self, node: u32, arg: u32, extent: Extent) -> Option<u32> {
        let id = self.nodes.get(node as usize)?.ins.get(arg as usize)?;
        let found =
            (self.out.loads.iter().zip(&self.ids)).position(|(l, other)| other == id && l.extent == extent);
        found.map(|at| at as u32)
    }

    fn dtype(&self, source: Source) -> Option<DType> {
        match source {
            Source::Load(node, arg) => {
                let id = self.nodes[node as usize].ins.get(arg as usize)?;
                let at = self.ids.iter().position(|other| other == id)?;
                Some(self.out.loads[at].dtype)
            }
            Source::Number(n) => match &self.nodes[n as usize].op {
                Op::Full { value, .. } => Some(value.dtype()),
                _ => None,
            },
            Source::Value(v) => Some(self.types[v as usize]),
        }
    }

    fn call(&self, i: &Instruction) -> Option<Call> {
        let args = i.args.iter().map(|&arg| self.dtype(arg));
        let args: SmallVec<[DType; 3]> = args.collect::<Option<_>>()?;
        Call::new(self.nodes[i.node as usize], &args)
    }

    /// Results, and the narrow values that are needed beyond their line.
    fn goals(&mut self, dtype: &impl Fn(Id) -> Option<DType>) -> Option<()> {
        let program = self.program;
        for (v, i) in program.instructions.iter().enumerate() {
            let v = v as u32;
            if i.stored {
                let (extent, dtype, level) = (i.extent, self.types[v as usize], self.levels[v as usize]);
                self.out.results.push(Stored { value: v, node: i.node, extent, dtype, level });
            }
            if i.is_narrow() && (i.stored || i.work != Work::Map) {
                self.home(v);
            }
            for &source in &i.args {
                let Source::Value(arg) = source else { continue };
                let later = i.extent == Extent::Wide || self.levels[v as usize] > self.levels[arg as usize];
                if program.instructions[arg as usize].is_narrow() && later {
                    self.home(arg);
                }
            }
            match (i.work, &self.nodes[i.node as usize].op) {
                (Work::Pick, _) => {
                    let [Source::Load(a, b), Source::Load(c, d)] = i.args[..] else { return None };
                    let (load, index) = (self.loaded(a, b, Extent::Wide)?, self.loaded(c, d, Extent::Kept)?);
                    let narrow = self.home(v);
                    self.out.picks.push(Pick { load, index, narrow });
                }
                (Work::Stack, Op::Reduce { kind, .. }) => {
                    // A sum over the rows that nobody needs.
                    if let Some(result) = self.result(v) {
                        let dtype = self.types[v as usize];
                        self.out.stacks.push(Stack { kind: *kind, dtype, result });
                    }
                }
                (Work::Fold, Op::Reduce { .. }) | (Work::Map, _) => {}
                (Work::Fold | Work::Stack, _) => return None,
            }
        }
        for poke in &program.pokes {
            let id = *self.nodes.get(poke.index.0 as usize)?.ins.get(poke.index.1 as usize)?;
            self.load(poke.index.0, poke.index.1, id, Extent::Kept, dtype(id)?);
            let index = self.loaded(poke.index.0, poke.index.1, Extent::Kept)?;
            let (result, narrow) = (self.result(poke.value)?, self.home(poke.with));
            if self.types[poke.with as usize] != self.types[poke.value as usize] {
                return None;
            }
            self.out.pokes.push(Poke { result, index, narrow });
        }
        Some(())
    }

    /// Where a narrow value is kept.
    fn home(&mut self, v: u32) -> u32 {
        if let Some(&home) = self.homes.get(&v) {
            return home;
        }
        let home = self.out.narrows.len() as u32;
        self.out.narrows.push((self.types[v as usize], self.result(v)));
        self.homes.insert(v, home);
        home
    }

    fn result(&self, v: u32) -> Option<u32> {
        self.out.results.iter().position(|r| r.value == v).map(|at| at as u32)
    }

    /// Where a wide value is kept for later levels.
    fn keep(&mut self, v: u32) -> u32 {
        let (next, dtype) = (self.out.rows.len() as u32, self.types[v as usize]);
        *self.kept.entry(v).or_insert_with(|| {
            self.out.rows.push(dtype);
            next
        })
    }

    fn lines(&mut self) -> Option<()> {
        let program = self.program;
        let count = self.levels.iter().max().map_or(1, |most| most + 1);
        self.out.levels.resize_with(count, Level::default);
        // From the last on: a line tells what earlier ones must keep for it.
        for level in (0..count).rev() {
            let mut goals: Vec<(Source, Target)> = Vec::new();
            for (v, i) in program.instructions.iter().enumerate() {
                let op = &self.nodes[i.node as usize].op;
                match (i.work, op) {
                    (Work::Fold, Op::Reduce { kind, .. }) if self.levels[v] == level + 1 => {
                        let dtype = self.types[v];
                        let home = self.home(v as u32);
                        goals.push((i.args[0], Target::Fold(*kind, dtype, home)));
                    }
                    (Work::Stack, _) if self.levels[v] == level => {
                        let stack =
                            self.out.stacks.iter().position(|s| Some(s.result) == self.result(v as u32));
                        goals.extend(stack.map(|s| (i.args[0], Target::Stack(s as u32))));
                    }
                    (Work::Map, _) if i.extent == Extent::Wide && self.levels[v] == level => {
                        let value = Source::Value(v as u32);
                        let row = self.kept.get(&(v as u32)).map(|&row| Target::Row(row));
                        goals.extend(row.map(|row| (value, row)));
                        goals.extend(self.result(v as u32).map(|r| (value, Target::Result(r))));
                    }
                    _ => {}
                }
            }
            if !goals.is_empty() {
                let line = self.wide(level, &goals)?;
                self.out.levels[level].wide = Some(line);
            }
            self.out.levels[level].narrow = self.narrow(level)?;
        }
        self.last_readings();
        // A narrow value that was repeated once need not be again.
        let mut seen: BTreeSet<u32> = BTreeSet::new();
        for level in &mut self.out.levels {
            level.spreads.retain(|&(narrow, _)| seen.insert(narrow));
        }
        Some(())
    }

    /// The line over the elements of a row that reaches `goals`.
    fn wide(&mut self, level: usize, goals: &[(Source, Target)]) -> Option<Line> {
        let program = self.program;
        // What is computed in this line: everything of this level, and what is cheap of earlier ones.
        let mut steps: BTreeSet<u32> = BTreeSet::new();
        let mut wanted: Vec<Source> = goals.iter().map(|g| g.0).collect();
        while let Some(source) = wanted.pop() {
            let Source::Value(v) = source else { continue };
            let i = &program.instructions[v as usize];
            if i.extent != Extent::Wide {
                continue;
            }
            if self.levels[v as usize] < level && self.costs[v as usize] > CHEAP {
                self.keep(v);
            } else if steps.insert(v) {
                wanted.extend(i.args.iter().copied());
            }
        }
        let mut line = Draft::default();
        for &v in &steps {
            for &source in &program.instructions[v as usize].args {
                self.input(&mut line, source, &steps, Extent::Wide)?;
            }
        }
        for &(source, target) in goals {
            self.input(&mut line, source, &steps, Extent::Wide)?;
            if let Target::Stack(s) = target
                && !self.short
            {
                line.input(Place::Stack(s), reduction::wide(self.out.stacks[s as usize].dtype));
            }
        }
        self.steps(&mut line, &steps, Extent::Wide)?;
        let mut after = Vec::new();
        for &(source, target) in goals {
            let value = self.value(&line, source, &steps, Extent::Wide)?;
            let reduction = match target {
                Target::Fold(kind, dtype, home) => Some((kind, dtype, Goal::Narrow(home))),
                Target::Stack(s) => {
                    let stack = &self.out.stacks[s as usize];
                    Some((stack.kind, stack.dtype, Goal::Stack(s)))
                }
                Target::Result(_) | Target::Narrow(_) | Target::Row(_) => None,
            };
            match (target, reduction) {
                (_, Some((kind, dtype, goal))) if self.short => {
                    let row = self.out.rows.len() as u32;
                    self.out.rows.push(dtype);
                    line.store(value, Target::Row(row));
                    after.push((row, kind, dtype, goal));
                }
                (Target::Fold(kind, ..), _) => {
                    let kind = if kind == ReduceKind::Mean { ReduceKind::Sum } else { kind };
                    line.outputs.push(target);
                    line.stores.push(Output::Fold { value, kind });
                }
                (Target::Stack(s), _) => {
                    let stack = &self.out.stacks[s as usize];
                    let (from, to) = (stack.dtype, reduction::wide(stack.dtype));
                    let widened = match from == to {
                        true => value,
                        false => line.step(Call { op: Kernel::Cast, from, to }, smallvec![value]),
                    };
                    let so_far = line.find(Place::Stack(s))?;
                    let op = Kernel::Binary(reduction::stacking(stack.kind));
                    let sum = line.step(Call { op, from: to, to }, smallvec![so_far, widened]);
                    line.store(sum, target);
                }
                (Target::Result(_) | Target::Narrow(_) | Target::Row(_), _) => line.store(value, target),
            }
        }
        if self.short {
            for (place, dtype) in &mut line.inputs {
                let Place::Narrow(narrow) = *place else { continue };
                let next = self.out.rows.len() as u32;
                let row = *self.spread.entry(narrow).or_insert(next);
                if row == next {
                    self.out.rows.push(*dtype);
                }
                *place = Place::Row(row);
                self.out.levels[level].spreads.push((narrow, row));
            }
        }
        self.out.levels[level].after = after;
        line.finish()
    }

    /// The line over rows.
    fn narrow(&mut self, level: usize) -> Option<Option<Line>> {
        let program = self.program;
        let here =
            |(v, i): &(usize, &Instruction)| i.work == Work::Map && i.is_narrow() && self.levels[*v] == level;
        let steps: BTreeSet<u32> =
            program.instructions.iter().enumerate().filter(here).map(|(v, _)| v as u32).collect();
        if steps.is_empty() {
            return Some(None);
        }
        let mut line = Draft::default();
        for &v in &steps {
            let i = &program.instructions[v as usize];
            for &source in &i.args {
                self.input(&mut line, source, &steps, i.extent)?;
            }
        }
        self.steps(&mut line, &steps, Extent::Kept)?;
        for &v in &steps {
            if let Some(&home) = self.homes.get(&v) {
                let value = self.value(&line, Source::Value(v), &steps, Extent::Kept)?;
                line.store(value, Target::Narrow(home));
            }
        }
        Some(Some(line.finish()?))
    }

    fn steps(&self, line: &mut Draft, steps: &BTreeSet<u32>, extent: Extent) -> Option<()> {
        for &v in steps {
            let i = &self.program.instructions[v as usize];
            let extent = if extent == Extent::Wide { extent } else { i.extent };
            let args: Option<SmallVec<[u32; 3]>> =
                i.args.iter().map(|&source| self.value(line, source, steps, extent)).collect();
            line.steps.push(Step { call: self.call(i)?, args: args? });
        }
        Some(())
    }

    /// Makes sure that an operand is an input, unless it is computed by `steps`.
    fn input(
        &mut self,
        line: &mut Draft,
        source: Source,
        steps: &BTreeSet<u32>,
        extent: Extent,
    ) -> Option<()> {
        if let Some((place, dtype)) = self.place(source, steps, extent)? {
            line.input(place, dtype);
        }
        Some(())
    }

    /// Where an operand is that is not computed by `steps`.
    fn place(&self, source: Source, steps: &BTreeSet<u32>, extent: Extent) -> Option<Option<(Place, DType)>> {
        let place = match source {
            Source::Load(node, arg) => Place::Load(self.loaded(node, arg, extent)?),
            Source::Number(n) => Place::Number(self.out.numbers.iter().position(|&other| other == n)? as u32),
            Source::Value(v) if steps.contains(&v) => return Some(None),
            Source::Value(v) if self.program.instructions[v as usize].extent == Extent::Wide => {
                Place::Row(*self.kept.get(&v)?)
            }
            Source::Value(v) => Place::Narrow(*self.homes.get(&v)?),
        };
        Some(Some((place, self.dtype(source)?)))
    }

    /// The number of an operand in the line.
    fn value(&self, line: &Draft, source: Source, steps: &BTreeSet<u32>, extent: Extent) -> Option<u32> {
        match (self.place(source, steps, extent)?, source) {
            (Some((place, _)), _) => line.find(place),
            (None, Source::Value(v)) => Some((line.inputs.len() + steps.range(..v).count()) as u32),
            (None, _) => None,
        }
    }

    /// Notes the last level that reads each loaded value.
    fn last_readings(&mut self) {
        let mut last: BTreeMap<Id, usize> = BTreeMap::new();
        for (level, lines) in self.out.levels.iter().enumerate() {
            for line in [&lines.narrow, &lines.wide].into_iter().flatten() {
                for (place, _) in &line.inputs {
                    if let Place::Load(load) = place {
                        last.insert(self.ids[*load as usize], level);
                    }
                }
            }
        }
        // Indices are read again at the end.
        for poke in &self.out.pokes {
            last.insert(self.ids[poke.index as usize], usize::MAX);
        }
        for (load, id) in self.out.loads.iter_mut().zip(&self.ids) {
            load.last = last.get(id).copied().unwrap_or(0);
        }
    }
}

/// What a step costs, in additions.
fn price(call: &Call) -> u32 {
    match call.op {
        Kernel::Unary(Unary::Neg | Unary::Abs | Unary::Square | Unary::Relu) => 1,
        Kernel::Binary(Binary::Add | Binary::Sub | Binary::Mul | Binary::Maximum | Binary::Minimum) => 1,
        Kernel::Select | Kernel::Cast => 1,
        Kernel::Unary(Unary::Sqrt | Unary::Rsqrt | Unary::Reciprocal) | Kernel::Binary(Binary::Div) => 4,
        Kernel::Unary(_) | Kernel::Binary(_) => 16,
    }
}
