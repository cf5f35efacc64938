//! A fused group as instructions in static single assignment: what a fuser makes.
//!
//! It says which node is which and where operands come from, and nothing about types, sizes or numbers: those are read
//! off the nodes when it runs.

use kiln_fuse::Window;
use kiln_ir::{Id, Node, Op};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// What is done for a grid of rows.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Program {
    pub nodes: u32,
    /// How many last axes make a row; nothing where every cut will do.
    pub inner: Option<u32>,
    pub instructions: Vec<Instruction>,
    /// Results that are another reading of a value: (node, value).
    pub readings: Vec<(u32, u32)>,
    /// Numbers that are needed outside as tensors too.
    pub kept_numbers: Vec<u32>,
    pub pokes: Vec<Poke>,
    /// Numbers that the program takes for +0.
    pub zeros: Vec<u32>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Instruction {
    pub node: u32,
    pub work: Work,
    pub extent: Extent,
    pub args: SmallVec<[Source; 3]>,
    /// Its result goes to memory.
    pub stored: bool,
    /// Its result is needed under its node's own name, not only in another reading.
    pub named: bool,
}

/// An operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// From memory: operand `1` of node `0`.
    Load(u32, u32),
    /// The number that node `0` gives everywhere.
    Number(u32),
    /// The result of an instruction.
    Value(u32),
}

/// How many elements a value has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Extent {
    /// One for each place.
    Wide,
    /// One for each row, the axes of a row kept as 1.
    Kept,
    /// One for each row, the axes of a row gone.
    Gone,
    /// One for each place of a row, the axes of the rows kept as 1.
    ColumnKept,
    /// One for each place of a row, the axes of the rows gone.
    Column,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// An elementwise operation.
    Map,
    /// A reduction of each row.
    Fold,
    /// A reduction of the rows onto each other.
    Stack,
    /// The element of each row of a loaded operand at that row's index.
    Pick,
}

/// An element of each row of a stored value that is something else than the instructions say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Poke {
    pub value: u32,
    /// Where the index of each row is: an operand of a node.
    pub index: (u32, u32),
    /// What is there instead, one for each row.
    pub with: u32,
}

impl Program {
    /// The program of the nodes at `places`, whose results have these extents.
    pub fn new(
        window: &Window<'_>,
        places: &[usize],
        inner: Option<usize>,
        extent: impl Fn(Id) -> Extent,
    ) -> Program {
        let nodes: SmallVec<[&Node; 16]> = places.iter().filter_map(|&at| window.node(at)).collect();
        let makers = nodes.iter().enumerate().map(|(i, node)| (node.outs[0], i)).collect();
        let program =
            Program { nodes: nodes.len() as u32, inner: inner.map(|n| n as u32), ..Program::default() };
        let (values, at, poked) = Default::default();
        let mut builder = Builder { nodes: &nodes, makers, values, at, poked, program };
        for (i, node) in nodes.iter().enumerate() {
            let out = node.outs[0];
            builder.node(i, node, extent(out), window.leaves(out, places));
        }
        builder.program
    }
}

struct Builder<'a> {
    nodes: &'a [&'a Node],
    makers: FxHashMap<Id, usize>,
    values: FxHashMap<Id, Source>,
    /// The element at an index of each row: (value, index).
    at: FxHashMap<(Id, Id), Source>,
    /// Wide values that are not what their instructions say at these indices.
    poked: FxHashMap<Id, Id>,
    program: Program,
}

impl Builder<'_> {
    fn node(&mut self, i: usize, node: &Node, extent: Extent, leaves: bool) {
        let out = node.outs[0];
        match &node.op {
            Op::Full { .. } => {
                self.values.insert(out, Source::Number(i as u32));
                if leaves {
                    self.program.kept_numbers.push(i as u32);
                }
            }
            Op::Move(_) => {
                let source = self.source(i, 0);
                self.reading(i, out, source, leaves);
            }
            Op::Gather { .. } => {
                let source = self.at(i, 0, node.ins[1]);
                self.reading(i, out, source, leaves);
            }
            // Elsewhere it is its first operand.
            Op::Scatter { .. } => {
                let source = self.source(i, 0);
                self.values.insert(out, source);
                self.poked.insert(out, node.ins[1]);
            }
            Op::Reduce { .. } => match self.scattered(node.ins[0]) {
                Some((zeros, scatter)) => {
                    self.program.zeros.push(zeros);
                    let source = self.at(i, 0, self.nodes[scatter].ins[1]);
                    self.reading(i, out, source, leaves);
                }
                None => {
                    let work = match extent {
                        Extent::Column | Extent::ColumnKept => Work::Stack,
                        Extent::Wide | Extent::Kept | Extent::Gone => Work::Fold,
                    };
                    let source = self.source(i, 0);
                    self.push(i, work, extent, smallvec![source], leaves);
                }
            },
            _ => {
                let args = (0..node.ins.len()).map(|k| self.source(i, k)).collect();
                let value = self.push(i, Work::Map, extent, args, leaves);
                let index = node.ins.iter().find_map(|id| self.poked.get(id).copied());
                if let Some(index) = index.filter(|_| extent == Extent::Wide) {
                    self.poked.insert(out, index);
                    if let (true, Source::Value(with)) = (leaves, self.made_at(i, index)) {
                        let index = self.operand(index);
                        self.program.pokes.push(Poke { value, index, with });
                    }
                }
            }
        }
    }

    /// Operand `k` of node `i`.
    fn source(&self, i: usize, k: usize) -> Source {
        let id = self.nodes[i].ins[k];
        self.values.get(&id).copied().unwrap_or(Source::Load(i as u32, k as u32))
    }

    fn push(
        &mut self,
        i: usize,
        work: Work,
        extent: Extent,
        args: SmallVec<[Source; 3]>,
        leaves: bool,
    ) -> u32 {
        let value = self.program.instructions.len() as u32;
        self.values.insert(self.nodes[i].outs[0], Source::Value(value));
        let node = i as u32;
        self.program.instructions.push(Instruction {
            node,
            work,
            extent,
            args,
            stored: leaves,
            named: leaves,
        });
        value
    }

    /// A result that is a value already there.
    fn reading(&mut self, i: usize, out: Id, source: Source, leaves: bool) {
        self.values.insert(out, source);
        if let Source::Value(value) = source
            && leaves
        {
            self.program.readings.push((i as u32, value));
            self.program.instructions[value as usize].stored = true;
        }
    }

    /// The number and the scatter that made a value, if it is a number everywhere but at the scatter's indices.
    fn scattered(&self, id: Id) -> Option<(u32, usize)> {
        let scatter = *self.makers.get(&id)?;
        match (&self.nodes[scatter].op, self.source(scatter, 0)) {
            (Op::Scatter { .. }, Source::Number(zeros)) => Some((zeros, scatter)),
            _ => None,
        }
    }

    /// Operand `k` of node `i` at the index of each row.
    fn at(&mut self, i: usize, k: usize, index: Id) -> Source {
        let id = self.nodes[i].ins[k];
        if let Some(&source) = self.at.get(&(id, index)) {
            return source;
        }
        let source = match self.makers.get(&id) {
            Some(&maker) => self.made_at(maker, index),
            None => {
                let (node, arg) = self.operand(index);
                let args = smallvec![Source::Load(i as u32, k as u32), Source::Load(node, arg)];
                self.narrow(i, Work::Pick, args)
            }
        };
        self.at.insert((id, index), source);
        source
    }

    /// The result of a node at the index of each row. Elementwise operations are done again, on what their operands are
    /// there.
    fn made_at(&mut self, i: usize, index: Id) -> Source {
        let node = self.nodes[i];
        let key = (node.outs[0], index);
        if let Some(&source) = self.at.get(&key) {
            return source;
        }
        let made = self.values.get(&node.outs[0]).copied();
        let source = match (&node.op, made) {
            // Added to what was there.
            (Op::Scatter { .. }, _) => {
                let args = smallvec![self.at(i, 0, index), self.source(i, 2)];
                self.narrow(i, Work::Map, args)
            }
            (_, Some(Source::Value(value)))
                if self.program.instructions[value as usize].extent == Extent::Wide =>
            {
                let args = (0..node.ins.len()).map(|k| self.at(i, k, index)).collect();
                self.narrow(i, Work::Map, args)
            }
            (_, made) => made.unwrap_or(Source::Number(i as u32)),
        };
        self.at.insert(key, source);
        source
    }

    fn narrow(&mut self, i: usize, work: Work, args: SmallVec<[Source; 3]>) -> Source {
        let value = self.program.instructions.len() as u32;
        let (node, extent) = (i as u32, Extent::Kept);
        self.program.instructions.push(Instruction { node, work, extent, args, stored: false, named: false });
        Source::Value(value)
    }

    /// A node and operand that names a value from outside.
    fn operand(&self, id: Id) -> (u32, u32) {
        let found = self.nodes.iter().enumerate().find_map(|(i, node)| {
            node.ins.iter().position(|&other| other == id).map(|k| (i as u32, k as u32))
        });
        found.unwrap_or_default()
    }
}

impl Instruction {
    /// Whether it gives one element for each row.
    pub fn is_narrow(&self) -> bool {
        matches!(self.extent, Extent::Kept | Extent::Gone)
    }
}
