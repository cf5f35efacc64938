//! The instructions of a loop's body: values get registers as they come, the one needed last makes room.
//!
//! The body is a straight line of items, those of several copies (neighbouring vectors, or chunks) interleaved so that
//! one's latency hides behind another's work. What is the same for every element is computed before the loop and stays
//! in a register if there is room, else in memory, from where most instructions take an operand for nothing.
//!
//! Quotients by such a value are not divided for but multiplied and corrected. Where an element is too large or too small
//! for that, all elements of the turn are computed once more, by dividing, in code behind the loops.

mod compute;
mod registers;
mod transfer;

use super::asm::{self, Asm, Label, Open, Place, memory};
use super::graph::{Form, Graph, LaneOp, Target};
use super::lower::{Fold, Lowered, Store};
use iced_x86::{Code, MemoryOperand, Register};
use rustc_hash::FxHashMap;

/// Not used again.
const NEVER: u32 = u32::MAX;
/// The mask of the lanes that are there.
pub(super) const TAIL: Register = Register::K7;
/// The mask of the lanes whose quotients must be divided for.
const INEXACT: Register = Register::K6;
/// The addresses, the constants, the current element.
pub(super) const ADDRESSES: Register = Register::RDI;
pub(super) const POOL: Register = Register::RDX;
pub(super) const INDEX: Register = Register::RCX;
/// From so many divisions and roots on a loop waits for the divider.
const DIVIDER: usize = 3;
/// The most folds on AVX2: each keeps two of 16 registers.
pub(super) const FOLDS: usize = 4;
/// Bytes of a place on the stack.
pub(super) const SLOT: usize = 64;
/// Stack that may be used without asking for it: a page, less what is saved there.
const SLOTS: u32 = 56;

/// What the body does, in order.
#[derive(Clone, Copy)]
enum Item {
    Node(u32),
    /// Loads what will be stored before anything is: an output may take an input's place.
    Hold(u32),
    /// Leaves if a quotient must be divided for, before anything is written.
    Check,
    Fold(u32),
    Store(u32),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Home {
    Nowhere,
    Pool(u32),
    Slot(u32),
    Stream(u32, Form),
}

#[derive(Clone, Copy)]
struct Residence {
    reg: Option<u8>,
    home: Home,
    /// The item that uses it next.
    next: u32,
    pinned: bool,
}

/// How elements are taken in.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub copies: usize,
    /// Elements from one copy to the next.
    pub apart: usize,
    /// Only the lanes of [`TAIL`] are there.
    pub masked: bool,
}

pub(super) struct Body<'a> {
    pub asm: Asm,
    graph: &'a Graph,
    stores: &'a [Store],
    folds: &'a [Fold],
    target: Target,
    fixed: Vec<bool>,
    needed: Vec<bool>,
    pub pool: Vec<u32>,
    places: FxHashMap<u32, u32>,
    /// Where addresses are, by number; those without a register are fetched.
    pub bases: Vec<Option<Register>>,
    values: Vec<Residence>,
    /// Which value a register holds: vectors, then masks.
    held: [Vec<Option<u32>>; 2],
    /// Values of the current item, which stay.
    locked: [u32; 4],
    free: Vec<u32>,
    /// Slots that are free after the current item, whose instruction may still take an operand from there.
    freed: Vec<u32>,
    pub slots: u32,
    shape: Shape,
    /// Copies of the main loop.
    pub copies: usize,
    /// Quotients by what is the same for every element are not divided for: in most bodies, and in this one.
    multiplies: bool,
    quick: bool,
    /// Where bodies leave for [`Body::finish`], what they are, and where they go on.
    left: Vec<(Open, Shape, Label)>,
    leaves: Option<Open>,
}

impl<'a> Body<'a> {
    pub fn new(lowered: &'a Lowered, listed: bool) -> Option<Body<'a>> {
        let Lowered { graph, stores, folds } = lowered;
        let target = graph.target;
        if target == Target::Avx2 && folds.len() > FOLDS {
            return None;
        }
        let registers = match target {
            Target::Avx512 => [vec![None; 32], vec![None; 6]],
            Target::Avx2 => [vec![None; 16], Vec::new()],
        };
        let mut body = Body {
            asm: Asm::new(listed)?,
            graph,
            stores,
            folds,
            target,
            fixed: graph.fixed.clone(),
            needed: Vec::new(),
            pool: Vec::new(),
            places: FxHashMap::default(),
            bases: Vec::new(),
            values: Vec::new(),
            held: registers,
            locked: [NEVER; 4],
            free: Vec::new(),
            freed: Vec::new(),
            slots: 0,
            shape: Shape { copies: 1, apart: 0, masked: false },
            copies: 1,
            multiplies: true,
            quick: false,
            left: Vec::new(),
            leaves: None,
        };
        body.find_needed();
        body.multiplies = body.quotients();
        body.quick = body.multiplies;
        if body.multiplies {
            // The last is INEXACT.
            body.held[1].pop();
        } else {
            body.find_needed();
        }
        body.choose_copies();
        let empty = Residence { reg: None, home: Home::Nowhere, next: NEVER, pinned: false };
        body.values = vec![empty; graph.nodes.len() * body.copies];
        Some(body)
    }

    /// Whether the code stays within the stack it may use.
    pub fn fits(&self) -> bool {
        self.slots <= SLOTS
    }

    fn find_needed(&mut self) {
        let mut needed = vec![false; self.graph.nodes.len()];
        self.stores.iter().for_each(|store| needed[store.value as usize] = true);
        self.folds.iter().for_each(|fold| needed[self.folded(fold).1 as usize] = true);
        for (i, node) in self.graph.nodes.iter().enumerate().rev() {
            if needed[i] {
                let arity = self.arity(node.lane, self.multiplies);
                node.args[..arity].iter().for_each(|&arg| needed[arg as usize] = true);
            }
        }
        self.needed = needed;
    }

    /// Whether quotients by what is the same for every element are worth many instructions: they are where the loop waits
    /// for the core's divider, not where it waits for memory.
    fn quotients(&self) -> bool {
        let busy = |lane| matches!(lane, LaneOp::Over | LaneOp::Div | LaneOp::Sqrt);
        let divides = |&n: &usize| self.needed[n] && !self.fixed[n] && busy(self.graph.nodes[n].lane);
        let divided: Vec<usize> = (0..self.graph.nodes.len()).filter(divides).collect();
        divided.len() >= DIVIDER && divided.iter().any(|&n| self.graph.nodes[n].lane == LaneOp::Over)
    }

    /// What a fold's last instruction takes: the element, if one instruction adds it, else the next state.
    fn folded(&self, fold: &Fold) -> (Option<Code>, u32) {
        match self.graph.at(fold.next) {
            node if matches!(node.lane, LaneOp::Add | LaneOp::Mul) && fold.value != fold.sum => {
                (asm::binary(self.target, node.lane), fold.value)
            }
            _ => (None, fold.next),
        }
    }

    fn items(&self) -> Vec<Item> {
        let computed = (0..self.graph.nodes.len() as u32).filter(|&n| {
            let lane = self.graph.at(n).lane;
            self.needed[n as usize]
                && !self.fixed[n as usize]
                && !matches!(lane, LaneOp::Load(..) | LaneOp::Sum(_))
        });
        let held = self.stores.iter().filter(|s| matches!(self.graph.at(s.value).lane, LaneOp::Load(..)));
        computed
            .map(Item::Node)
            .chain(self.quick.then_some(Item::Check))
            .chain((0..self.folds.len() as u32).map(Item::Fold))
            .chain(held.map(|store| Item::Hold(store.value)))
            .chain((0..self.stores.len() as u32).map(Item::Store))
            .collect()
    }

    /// A division does not take the inverse.
    fn arity(&self, lane: LaneOp, multiplies: bool) -> usize {
        if lane == LaneOp::Over && !multiplies { 2 } else { lane.arity() }
    }

    fn args(&self, item: Item, args: &mut [u32; 3]) -> usize {
        match item {
            Item::Node(node) => {
                let node = self.graph.at(node);
                *args = node.args;
                self.arity(node.lane, self.quick)
            }
            Item::Hold(value) => {
                args[0] = value;
                1
            }
            Item::Check => 0,
            Item::Fold(fold) => {
                args[0] = self.folded(&self.folds[fold as usize]).1;
                1
            }
            Item::Store(store) => {
                args[0] = self.stores[store as usize].value;
                1
            }
        }
    }

    /// As many copies as registers allow.
    fn choose_copies(&mut self) {
        let fixed = self.used().into_iter().filter(|&(node, _)| self.class(node) == 0).count();
        let (one, registers) = (self.alive() + self.folds.len(), self.held[0].len());
        self.copies = match registers {
            // The two halves of the lanes.
            _ if self.target == Target::Avx2 && !self.folds.is_empty() => 2,
            _ if 4 * one + fixed < registers => 4,
            _ if 2 * one + 4 <= registers => 2,
            _ => 1,
        };
    }

    /// Vectors of one copy that are alive at once, at most.
    fn alive(&self) -> usize {
        let items = self.items();
        let mut last = vec![0usize; self.graph.nodes.len()];
        let mut args = [0; 3];
        for (i, &item) in items.iter().enumerate() {
            let arity = self.args(item, &mut args);
            args[..arity].iter().for_each(|&arg| last[arg as usize] = i);
        }
        let counts = |node: u32| {
            !self.fixed[node as usize]
                && self.class(node) == 0
                && !matches!(self.graph.at(node).lane, LaneOp::Sum(_))
        };
        let (mut live, mut most) = (0usize, 0);
        let mut begun = vec![false; last.len()];
        for (i, &item) in items.iter().enumerate() {
            let arity = self.args(item, &mut args);
            for &arg in args[..arity].iter().filter(|&&arg| counts(arg)) {
                live += !std::mem::replace(&mut begun[arg as usize], true) as usize;
            }
            most = most.max(live);
            for &arg in args[..arity].iter().filter(|&&arg| counts(arg) && last[arg as usize] == i) {
                live -= std::mem::replace(&mut begun[arg as usize], false) as usize;
            }
            if let Item::Node(node) = item
                && counts(node)
            {
                begun[node as usize] = true;
                live += 1;
            }
            most = most.max(live);
        }
        most
    }

    /// What the body uses of what is the same for every element, and how often.
    fn used(&self) -> Vec<(u32, usize)> {
        let mut uses = vec![0; self.graph.nodes.len()];
        let mut args = [0; 3];
        for item in self.items() {
            let arity = self.args(item, &mut args);
            args[..arity].iter().for_each(|&arg| uses[arg as usize] += self.fixed[arg as usize] as usize);
        }
        (0..).zip(uses).filter(|&(_, uses)| uses > 0).collect()
    }

    fn class(&self, node: u32) -> usize {
        (self.target == Target::Avx512 && self.graph.at(node).lane.is_mask()) as usize
    }

    fn value(&self, node: u32, copy: usize) -> u32 {
        if self.fixed[node as usize] { node } else { node + (copy * self.graph.nodes.len()) as u32 }
    }

    fn node_of(&self, value: u32) -> u32 {
        value % self.graph.nodes.len() as u32
    }

    /// The register of that number and class.
    fn register(&self, class: usize, reg: u8) -> Register {
        match (class, self.target) {
            (0, Target::Avx512) => Register::ZMM0 + reg as u32,
            (0, Target::Avx2) => Register::YMM0 + reg as u32,
            _ => Register::K1 + reg as u32,
        }
    }

    /// Computes what is the same for every element, and pins as much of it as there is room for.
    pub fn prologue(&mut self) {
        for node in 0..self.graph.nodes.len() as u32 {
            if let LaneOp::Const(bits) = self.graph.at(node).lane {
                self.values[node as usize].home = Home::Pool(self.pooled(bits));
            }
        }
        let early: Vec<Item> = (0..self.graph.nodes.len() as u32)
            .filter(|&n| self.needed[n as usize] && self.fixed[n as usize])
            .filter(|&n| !matches!(self.graph.at(n).lane, LaneOp::Const(_)))
            .map(Item::Node)
            .collect();
        let mut used = self.used();
        used.sort_by_key(|&(node, uses)| (usize::MAX - uses, node));
        let kept: Vec<u32> = used.iter().map(|&(node, _)| node).collect();
        self.straight(&early, Shape { copies: 1, apart: 0, masked: false }, &kept);
        for fold in self.folds {
            for copy in 0..self.copies {
                let value = self.value(fold.sum, copy);
                self.locked = [NEVER; 4];
                let reg = self.take(0);
                self.give(value, 0, reg);
                self.values[value as usize].pinned = true;
            }
        }
        let taken = (self.alive() + self.folds.len()) * self.copies + 2;
        let free = self.held[0].len().saturating_sub(taken);
        let mut pinned = [0, 0];
        for node in kept {
            let class = self.class(node);
            let limit = [free, self.held[1].len().saturating_sub(3)][class];
            self.locked = [node, NEVER, NEVER, NEVER];
            if pinned[class] < limit {
                pinned[class] += 1;
                self.ensure(node);
                self.values[node as usize].pinned = true;
            } else {
                self.put_away(node);
            }
        }
    }

    /// The place of a constant among all.
    fn pooled(&mut self, bits: u32) -> u32 {
        let next = self.pool.len() as u32;
        let at = *self.places.entry(bits).or_insert(next);
        if at == next {
            self.pool.push(bits);
        }
        at
    }

    /// Memory that holds a constant: four bytes on AVX-512, a vector on AVX2.
    pub fn constant(&mut self, bits: u32) -> MemoryOperand {
        let at = self.pooled(bits) as usize;
        let size = match self.target {
            Target::Avx512 => 4,
            Target::Avx2 => 32,
        };
        memory(POOL, Register::None, 1, at * size)
    }

    /// The body of a loop. What it leaves in registers but pinned values is nothing.
    pub fn run(&mut self, shape: Shape) {
        self.quick = self.multiplies && !shape.masked;
        if self.quick {
            self.asm.three(Code::VEX_Kxorw_kr_kr_kr, INEXACT, INEXACT, Place::Reg(INEXACT));
        }
        let items = self.items();
        self.straight(&items, shape, &[]);
        if let Some(leaves) = self.leaves.take() {
            self.left.push((leaves, shape, self.asm.here()));
        }
    }

    /// What bodies left for: the same by dividing.
    pub fn finish(&mut self) {
        self.quick = false;
        for (leaves, shape, back) in std::mem::take(&mut self.left) {
            self.asm.land(leaves);
            let items = self.items();
            self.straight(&items, shape, &[]);
            self.asm.jump_back(Code::Jmp_rel32_64, back);
        }
    }

    /// Leaves if any lane of [`INEXACT`] is set.
    fn check(&mut self) {
        self.asm.two(Code::VEX_Kortestw_kr_kr, INEXACT, Place::Reg(INEXACT));
        self.leaves = Some(self.asm.jump(Code::Jne_rel32_64));
    }

    /// Items in order for each copy, interleaved; `kept` values are wanted afterwards.
    fn straight(&mut self, items: &[Item], shape: Shape, kept: &[u32]) {
        self.shape = shape;
        let n = self.graph.nodes.len();
        for copy in 0..shape.copies {
            for node in 0..n as u32 {
                if self.fixed[node as usize] {
                    continue;
                }
                let value = self.value(node, copy) as usize;
                match self.graph.at(node).lane {
                    LaneOp::Load(input, form) => self.values[value].home = Home::Stream(input, form),
                    LaneOp::Sum(_) => {}
                    _ => self.values[value].home = Home::Nowhere,
                }
            }
        }
        // The next use of every operand after each item, and the first of every value.
        let mut next = vec![[NEVER; 3]; items.len() * shape.copies];
        for value in &mut self.values {
            value.next = NEVER;
        }
        for &value in kept {
            self.values[value as usize].next = NEVER - 1;
        }
        let mut args = [0; 3];
        for at in (0..next.len()).rev() {
            let (item, copy) = (items[at / shape.copies], at % shape.copies);
            let arity = self.args(item, &mut args);
            for k in 0..arity {
                next[at][k] = self.values[self.value(args[k], copy) as usize].next;
            }
            for &arg in &args[..arity] {
                let value = self.value(arg, copy) as usize;
                self.values[value].next = at as u32;
            }
        }
        for (at, next) in next.iter().enumerate() {
            let (item, copy) = (items[at / shape.copies], at % shape.copies);
            let arity = self.args(item, &mut args);
            let args = args.map(|arg| self.value(arg, copy));
            self.locked = [NEVER; 4];
            self.locked[..arity].copy_from_slice(&args[..arity]);
            for k in 0..arity {
                self.values[args[k] as usize].next = next[k];
            }
            match item {
                Item::Node(node) => self.compute(node, copy, &args),
                Item::Hold(_) => {
                    self.ensure(args[0]);
                    self.values[args[0] as usize].home = Home::Nowhere;
                }
                Item::Check if copy + 1 == shape.copies => self.check(),
                Item::Check => {}
                Item::Fold(fold) => self.fold(&self.folds[fold as usize], copy, args[0]),
                Item::Store(store) => self.store(&self.stores[store as usize], copy, args[0]),
            }
            args[..arity].iter().for_each(|&arg| self.release(arg));
            self.free.append(&mut self.freed);
        }
    }
}
