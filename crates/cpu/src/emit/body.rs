//! The instructions of a loop's body: values get registers as they come, the one needed last makes room.
//!
//! The body is a straight line of items, those of several copies (neighbouring vectors, or chunks) interleaved so that
//! one's latency hides behind another's work. What is the same for every element is computed before the loop and stays
//! in a register if there is room, else in memory, from where most instructions take an operand for nothing.

use super::asm::{self, Asm, Place, memory};
use super::graph::{self, Form, Graph, Lane, Target};
use super::lower::{Fold, Lowered, Store};
use iced_x86::{Code, Instruction, MemoryOperand, Register};
use rustc_hash::FxHashMap;

/// Not used again.
const NEVER: u32 = u32::MAX;
/// The mask of the lanes that are there.
pub(super) const TAIL: Register = Register::K7;
/// The addresses, the constants, the current element.
pub(super) const ADDRESSES: Register = Register::RDI;
pub(super) const POOL: Register = Register::RDX;
pub(super) const INDEX: Register = Register::RCX;
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
struct Held {
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
    values: Vec<Held>,
    /// Which value a register holds: vectors, then masks.
    held: [Vec<Option<u32>>; 2],
    /// Values of the current item, which stay.
    locked: [u32; 4],
    free: Vec<u32>,
    pub slots: u32,
    shape: Shape,
    /// Copies of the main loop.
    pub copies: usize,
}

impl<'a> Body<'a> {
    pub fn new(lowered: &'a Lowered, listed: bool) -> Option<Body<'a>> {
        let Lowered { graph, stores, folds } = lowered;
        let target = graph.target;
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
            fixed: graph.fixed(),
            needed: Vec::new(),
            pool: Vec::new(),
            places: FxHashMap::default(),
            bases: Vec::new(),
            values: Vec::new(),
            held: registers,
            locked: [NEVER; 4],
            free: Vec::new(),
            slots: 0,
            shape: Shape { copies: 1, apart: 0, masked: false },
            copies: 1,
        };
        body.find_needed();
        body.choose_copies();
        let empty = Held { reg: None, home: Home::Nowhere, next: NEVER, pinned: false };
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
                node.args().iter().for_each(|&arg| needed[arg as usize] = true);
            }
        }
        self.needed = needed;
    }

    /// What a fold's last instruction takes: the element, if one instruction adds it, else the next state.
    fn folded(&self, fold: &Fold) -> (Option<Code>, u32) {
        match self.graph.at(fold.next) {
            node if matches!(node.lane, Lane::Add | Lane::Mul) && fold.value != fold.sum => {
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
                && !matches!(lane, Lane::Load(..) | Lane::Sum(_))
        });
        let held = self.stores.iter().filter(|s| matches!(self.graph.at(s.value).lane, Lane::Load(..)));
        computed
            .map(Item::Node)
            .chain((0..self.folds.len() as u32).map(Item::Fold))
            .chain(held.map(|store| Item::Hold(store.value)))
            .chain((0..self.stores.len() as u32).map(Item::Store))
            .collect()
    }

    fn args(&self, item: Item, args: &mut [u32; 3]) -> usize {
        match item {
            Item::Node(node) => {
                let node = self.graph.at(node);
                *args = node.args;
                node.lane.arity()
            }
            Item::Hold(value) => {
                args[0] = value;
                1
            }
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
                && !matches!(self.graph.at(node).lane, Lane::Sum(_))
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
            if let Lane::Const(bits) = self.graph.at(node).lane {
                self.values[node as usize].home = Home::Pool(self.pooled(bits));
            }
        }
        let early: Vec<Item> = (0..self.graph.nodes.len() as u32)
            .filter(|&n| self.needed[n as usize] && self.fixed[n as usize])
            .filter(|&n| !matches!(self.graph.at(n).lane, Lane::Const(_)))
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
        let room = self.held[0].len().saturating_sub(taken);
        let mut pinned = [0, 0];
        for node in kept {
            let class = self.class(node);
            let limit = [room, 3][class];
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

    /// Four bytes of memory that hold a constant. On AVX-512.
    pub fn constant(&mut self, bits: u32) -> MemoryOperand {
        let at = self.pooled(bits);
        memory(POOL, Register::None, 1, at as usize * 4)
    }

    /// The body of a loop. What it leaves in registers but pinned values is nothing.
    pub fn run(&mut self, shape: Shape) {
        let items = self.items();
        self.straight(&items, shape, &[]);
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
                    Lane::Load(input, form) => self.values[value].home = Home::Stream(input, form),
                    Lane::Sum(_) => {}
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
                Item::Fold(fold) => self.fold(&self.folds[fold as usize], copy, args[0]),
                Item::Store(store) => self.store(&self.stores[store as usize], copy, args[0]),
            }
            args[..arity].iter().for_each(|&arg| self.release(arg));
        }
    }

    /// Frees the register of a value that is not used again.
    fn release(&mut self, value: u32) {
        let held = self.values[value as usize];
        if held.next != NEVER || held.pinned {
            return;
        }
        let class = self.class(self.node_of(value));
        if let Some(reg) = held.reg {
            self.held[class][reg as usize] = None;
            self.values[value as usize].reg = None;
        }
        if let Home::Slot(slot) = held.home
            && !self.fixed[self.node_of(value) as usize]
        {
            self.free.push(slot);
            self.values[value as usize].home = Home::Nowhere;
        }
    }

    /// A free register, by moving the value needed last out of one.
    fn take(&mut self, class: usize) -> u8 {
        if let Some(reg) = self.held[class].iter().position(|held| held.is_none()) {
            return reg as u8;
        }
        let mut best = (0, 0, NEVER);
        for (reg, held) in self.held[class].iter().enumerate() {
            let Some(value) = *held else { continue };
            let Held { next, pinned, .. } = self.values[value as usize];
            if !pinned && !self.locked.contains(&value) && (best.2 == NEVER || next > best.1) {
                best = (reg, next, value);
            }
        }
        let (reg, _, value) = best;
        if value == NEVER {
            // Every register is pinned or in use: the plan left too little room.
            self.slots = SLOTS + 1;
            return 0;
        }
        self.put_away(value);
        reg as u8
    }

    /// Moves a value out of its register.
    fn put_away(&mut self, value: u32) {
        let held = self.values[value as usize];
        let Some(reg) = held.reg else { return };
        let class = self.class(self.node_of(value));
        if held.home == Home::Nowhere {
            let slot = self.free.pop().unwrap_or_else(|| {
                self.slots += 1;
                self.slots - 1
            });
            let to = memory(Register::RSP, Register::None, 1, slot as usize * SLOT);
            let from = self.register(class, reg);
            let code = match (class, self.target) {
                (0, Target::Avx512) => Code::EVEX_Vmovups_zmmm512_k1z_zmm,
                (0, Target::Avx2) => Code::VEX_Vmovups_ymmm256_ymm,
                _ => Code::VEX_Kmovw_m16_kr,
            };
            self.asm.put(Instruction::with2(code, to, from));
            self.values[value as usize].home = Home::Slot(slot);
        }
        self.held[class][reg as usize] = None;
        self.values[value as usize].reg = None;
    }

    fn give(&mut self, value: u32, class: usize, reg: u8) {
        self.held[class][reg as usize] = Some(value);
        self.values[value as usize].reg = Some(reg);
    }

    /// A register for a new value.
    fn define(&mut self, node: u32, copy: usize) -> Register {
        let (value, class) = (self.value(node, copy), self.class(node));
        let reg = self.take(class);
        self.give(value, class, reg);
        self.register(class, reg)
    }

    /// A register that is free for the length of this item.
    fn scratch(&mut self) -> u32 {
        self.take(0) as u32
    }

    /// The value in a register.
    fn ensure(&mut self, value: u32) -> Register {
        let node = self.node_of(value);
        let class = self.class(node);
        if let Some(reg) = self.values[value as usize].reg {
            return self.register(class, reg);
        }
        let reg = self.take(class);
        self.give(value, class, reg);
        let dst = self.register(class, reg);
        match self.values[value as usize].home {
            Home::Pool(_) if self.target == Target::Avx512 => {
                let from = MemoryOperand { is_broadcast: false, ..self.home(value) };
                self.asm.two(Code::EVEX_Vbroadcastss_zmm_k1z_xmmm32, dst, Place::Mem(from));
            }
            Home::Slot(_) if class == 1 => {
                self.asm.two(Code::VEX_Kmovw_kr_km16, dst, Place::Mem(self.home(value)))
            }
            Home::Pool(_) | Home::Slot(_) => {
                let from = Place::Mem(self.home(value));
                self.asm.two(self.load_code(), dst, from);
            }
            Home::Stream(input, form) => self.load(input, form, value, dst, reg as u32),
            // Only what was computed is asked for.
            Home::Nowhere => self.slots = SLOTS + 1,
        }
        dst
    }

    fn load_code(&self) -> Code {
        match self.target {
            Target::Avx512 => Code::EVEX_Vmovups_zmm_k1z_zmmm512,
            Target::Avx2 => Code::VEX_Vmovups_ymm_ymmm256,
        }
    }

    /// A vector's place in memory.
    fn home(&self, value: u32) -> MemoryOperand {
        match self.values[value as usize].home {
            Home::Pool(at) => match self.target {
                Target::Avx512 => {
                    let at = memory(POOL, Register::None, 1, at as usize * 4);
                    MemoryOperand { is_broadcast: true, ..at }
                }
                Target::Avx2 => memory(POOL, Register::None, 1, at as usize * 32),
            },
            Home::Slot(slot) => memory(Register::RSP, Register::None, 1, slot as usize * SLOT),
            Home::Stream(..) | Home::Nowhere => memory(Register::RSP, Register::None, 1, 0),
        }
    }

    /// Whether an instruction had better take the value from memory.
    fn stays(&self, value: u32) -> bool {
        let held = self.values[value as usize];
        let vector = held.reg.is_none() && self.class(self.node_of(value)) == 0;
        vector
            && match held.home {
                Home::Pool(_) => true,
                Home::Slot(_) => held.next == NEVER || self.fixed[self.node_of(value) as usize],
                Home::Stream(_, Form::Word) => held.next == NEVER && !self.shape.masked,
                Home::Stream(..) | Home::Nowhere => false,
            }
    }

    /// The value where it is best taken from.
    fn place(&mut self, value: u32) -> Place {
        if !self.stays(value) {
            return Place::Reg(self.ensure(value));
        }
        match self.values[value as usize].home {
            Home::Stream(input, _) => {
                let copy = value as usize / self.graph.nodes.len();
                Place::Mem(self.element(input, 4, copy))
            }
            _ => Place::Mem(self.home(value)),
        }
    }

    /// Where a copy's elements of an operand begin.
    fn element(&mut self, address: u32, size: usize, copy: usize) -> MemoryOperand {
        let base = self.base(address);
        memory(base, INDEX, size, copy * self.shape.apart * size)
    }

    /// The address of that number in a register.
    pub fn base(&mut self, address: u32) -> Register {
        self.bases.get(address as usize).copied().flatten().unwrap_or_else(|| {
            let from = memory(ADDRESSES, Register::None, 1, address as usize * 8);
            self.asm.put(Instruction::with2(Code::Mov_r64_rm64, Register::RAX, from));
            Register::RAX
        })
    }

    fn load(&mut self, input: u32, form: Form, value: u32, dst: Register, reg: u32) {
        use Code::*;
        let copy = value as usize / self.graph.nodes.len();
        let from = self.element(input, form.size(), copy);
        let [avx512, avx2] = match form {
            Form::Word => [EVEX_Vmovups_zmm_k1z_zmmm512, VEX_Vmovups_ymm_ymmm256],
            Form::Half => [EVEX_Vcvtph2ps_zmm_k1z_ymmm256_sae, VEX_Vcvtph2ps_ymm_xmmm128],
            Form::Brain | Form::U16 => [EVEX_Vpmovzxwd_zmm_k1z_ymmm256, VEX_Vpmovzxwd_ymm_xmmm128],
            Form::I16 => [EVEX_Vpmovsxwd_zmm_k1z_ymmm256, VEX_Vpmovsxwd_ymm_xmmm128],
            Form::U8 => [EVEX_Vpmovzxbd_zmm_k1z_xmmm128, VEX_Vpmovzxbd_ymm_xmmm64],
            Form::I8 => [EVEX_Vpmovsxbd_zmm_k1z_xmmm128, VEX_Vpmovsxbd_ymm_xmmm64],
            Form::Bool => {
                let bytes = Register::XMM0 + self.scratch();
                self.masked_two(EVEX_Vmovdqu8_xmm_k1z_xmmm128, bytes, Place::Mem(from));
                return self.asm.three(EVEX_Vptestmb_kr_k1_xmm_xmmm128, dst, bytes, Place::Reg(bytes));
            }
        };
        let code = if self.target == Target::Avx512 { avx512 } else { avx2 };
        self.masked_two(code, dst, Place::Mem(from));
        if form == Form::Brain {
            let (code, _) = self.shift_left(16);
            self.asm.two_by(code, dst, Place::Reg(self.register(0, reg as u8)), 16);
        }
    }

    fn shift_left(&self, by: u32) -> (Code, u32) {
        match self.target {
            Target::Avx512 => (Code::EVEX_Vpslld_zmm_k1z_zmmm512b32_imm8, by),
            Target::Avx2 => (Code::VEX_Vpslld_ymm_ymm_imm8, by),
        }
    }

    /// `code dst, src`, of the lanes that are there.
    fn masked_two(&mut self, code: Code, dst: Register, src: Place) {
        let instruction = asm::two(code, dst, src);
        if self.shape.masked {
            self.asm.put_masked(instruction, TAIL, true);
        } else {
            self.asm.put(instruction);
        }
    }

    /// One element for all lanes, before the loop.
    fn splat(&mut self, input: u32, form: Form, node: u32) {
        use Code::*;
        let base = self.base(input);
        let from = memory(base, Register::None, 1, 0);
        let dst = self.define(node, 0);
        let reg = self.values[node as usize].reg.unwrap_or(0) as u32;
        let low = Register::XMM0 + reg;
        let eax = Register::EAX;
        let extend = match form {
            Form::Word => {
                let code = match self.target {
                    Target::Avx512 => EVEX_Vbroadcastss_zmm_k1z_xmmm32,
                    Target::Avx2 => VEX_Vbroadcastss_ymm_m32,
                };
                return self.asm.put(Instruction::with2(code, dst, from));
            }
            Form::Half | Form::Brain | Form::U16 => Movzx_r32_rm16,
            Form::I16 => Movsx_r32_rm16,
            Form::U8 | Form::Bool => Movzx_r32_rm8,
            Form::I8 => Movsx_r32_rm8,
        };
        self.asm.put(Instruction::with2(extend, eax, from));
        match form {
            Form::Bool => {
                self.asm.put(Instruction::with1(Neg_rm32, eax));
                return self.asm.put(Instruction::with2(VEX_Kmovw_kr_r32, dst, eax));
            }
            Form::Brain => self.asm.put(Instruction::with2(Shl_rm32_imm8, eax, 16)),
            _ => {}
        }
        match self.target {
            Target::Avx512 => self.asm.put(Instruction::with2(EVEX_Vpbroadcastd_zmm_k1z_r32, dst, eax)),
            Target::Avx2 => {
                self.asm.put(Instruction::with2(VEX_Vmovd_xmm_rm32, low, eax));
                self.asm.put(Instruction::with2(VEX_Vpbroadcastd_ymm_xmmm32, dst, low));
            }
        }
        if form == Form::Half {
            self.half_to_float(dst, reg, true);
        }
    }

    /// From f16 in the low half of a register; `apart` if each has a lane of 32 bits, all equal.
    fn half_to_float(&mut self, dst: Register, reg: u32, apart: bool) {
        use Code::*;
        match self.target {
            Target::Avx512 => {
                if apart {
                    self.asm.put(Instruction::with2(
                        EVEX_Vpbroadcastw_ymm_k1z_xmmm16,
                        Register::YMM0 + reg,
                        Register::XMM0 + reg,
                    ));
                }
                self.asm.put(Instruction::with2(
                    EVEX_Vcvtph2ps_zmm_k1z_ymmm256_sae,
                    dst,
                    Register::YMM0 + reg,
                ));
            }
            Target::Avx2 => {
                if apart {
                    let low = Register::XMM0 + reg;
                    self.asm.put(Instruction::with2(VEX_Vpbroadcastw_xmm_xmmm16, low, low));
                }
                self.asm.put(Instruction::with2(VEX_Vcvtph2ps_ymm_xmmm128, dst, Register::XMM0 + reg));
            }
        }
    }

    fn compute(&mut self, node: u32, copy: usize, args: &[u32; 3]) {
        let lane = self.graph.at(node).lane;
        let [a, b, c] = *args;
        match lane {
            Lane::Const(_) | Lane::Load(..) | Lane::Sum(_) => {}
            Lane::Splat(input, form) => self.splat(input, form, node),
            Lane::Half => {
                let from = self.ensure(a);
                self.release(a);
                let dst = self.define(node, copy);
                let reg = self.values[self.value(node, copy) as usize].reg.unwrap_or(0) as u32;
                let (code, narrow) = match self.target {
                    Target::Avx512 => (Code::EVEX_Vcvtps2ph_ymmm256_k1z_zmm_imm8_sae, Register::YMM0 + reg),
                    Target::Avx2 => (Code::VEX_Vcvtps2ph_xmmm128_ymm_imm8, Register::XMM0 + reg),
                };
                self.asm.put(Instruction::with3(code, narrow, from, 0));
                self.half_to_float(dst, reg, false);
            }
            Lane::Fma | Lane::Fnma => self.multiply_add(lane == Lane::Fnma, node, copy, args),
            Lane::Merge => self.merge(node, copy, args),
            Lane::Compare(_) | Lane::CompareInt(_) => self.compare(lane, node, copy, a, b),
            Lane::Pick => {
                let truth = self.ensure(a);
                let otherwise = self.ensure(c);
                let then = self.place(b);
                args.iter().for_each(|&arg| self.release(arg));
                let dst = self.define(node, copy);
                match self.target {
                    Target::Avx512 => {
                        let code = Code::EVEX_Vblendmps_zmm_k1z_zmm_zmmm512b32;
                        let instruction = match then {
                            Place::Reg(then) => Instruction::with3(code, dst, otherwise, then),
                            Place::Mem(then) => Instruction::with3(code, dst, otherwise, then),
                        };
                        self.asm.put_masked(instruction, truth, false);
                    }
                    Target::Avx2 => {
                        let code = Code::VEX_Vblendvps_ymm_ymm_ymmm256_ymm;
                        self.asm.put(match then {
                            Place::Reg(then) => Instruction::with4(code, dst, otherwise, then, truth),
                            Place::Mem(then) => Instruction::with4(code, dst, otherwise, then, truth),
                        });
                    }
                }
            }
            Lane::Keep => {
                let truth = self.ensure(a);
                let then = self.place(b);
                self.release(a);
                self.release(b);
                let dst = self.define(node, copy);
                match (self.target, then) {
                    (Target::Avx512, Place::Mem(from)) if from.is_broadcast => {
                        let from = MemoryOperand { is_broadcast: false, ..from };
                        let code = Code::EVEX_Vbroadcastss_zmm_k1z_xmmm32;
                        self.asm.put_masked(Instruction::with2(code, dst, from), truth, true);
                    }
                    (Target::Avx512, from) => {
                        self.asm.put_masked(
                            asm::two(Code::EVEX_Vmovups_zmm_k1z_zmmm512, dst, from),
                            truth,
                            true,
                        );
                    }
                    (Target::Avx2, from) => {
                        self.asm.three(Code::VEX_Vandps_ymm_ymm_ymmm256, dst, truth, from);
                    }
                }
            }
            _ if lane.arity() == 1 => {
                let Some((code, by)) = asm::unary(self.target, lane) else { return };
                let shifts = matches!(lane, Lane::Shl(_) | Lane::Shr(_) | Lane::Sar(_));
                let from = match self.target {
                    Target::Avx2 if shifts => Place::Reg(self.ensure(a)),
                    _ => self.place(a),
                };
                self.release(a);
                let dst = self.define(node, copy);
                match by {
                    Some(by) => self.asm.two_by(code, dst, from, by),
                    None => self.asm.two(code, dst, from),
                }
            }
            _ => {
                let Some(code) = asm::binary(self.target, lane) else { return };
                let swap = lane.commutes() && self.stays(a) && !self.stays(b);
                let (a, b) = if swap { (b, a) } else { (a, b) };
                let left = self.ensure(a);
                let right = self.place(b);
                self.release(a);
                self.release(b);
                let dst = self.define(node, copy);
                self.asm.three(code, dst, left, right);
            }
        }
    }

    fn compare(&mut self, lane: Lane, node: u32, copy: usize, a: u32, b: u32) {
        use Code::*;
        let swap = self.stays(a) && !self.stays(b);
        let swapped = match lane {
            Lane::Compare(graph::SAME | graph::UNORDERED | graph::UNEQUAL) => Some(lane),
            Lane::Compare(graph::BELOW) => Some(Lane::Compare(14)),
            Lane::Compare(graph::AT_MOST) => Some(Lane::Compare(13)),
            Lane::Compare(graph::NOT_AT_MOST) => Some(Lane::Compare(9)),
            Lane::Compare(graph::NOT_ABOVE) => Some(Lane::Compare(5)),
            Lane::CompareInt(graph::EQUAL | graph::NOT_EQUAL) => Some(lane),
            _ => None,
        };
        let (lane, a, b) = match swapped {
            Some(lane) if swap => (lane, b, a),
            _ => (lane, a, b),
        };
        let left = self.ensure(a);
        let right = self.place(b);
        self.release(a);
        self.release(b);
        let dst = self.define(node, copy);
        match (lane, self.target) {
            (Lane::Compare(by), Target::Avx512) => {
                self.asm.three_by(EVEX_Vcmpps_kr_k1_zmm_zmmm512b32_imm8_sae, dst, left, right, by)
            }
            (Lane::Compare(by), Target::Avx2) => {
                self.asm.three_by(VEX_Vcmpps_ymm_ymm_ymmm256_imm8, dst, left, right, by)
            }
            (Lane::CompareInt(by), Target::Avx512) => {
                self.asm.three_by(EVEX_Vpcmpd_kr_k1_zmm_zmmm512b32_imm8, dst, left, right, by)
            }
            (Lane::CompareInt(graph::EQUAL), Target::Avx2) => {
                self.asm.three(VEX_Vpcmpeqd_ymm_ymm_ymmm256, dst, left, right)
            }
            _ => self.asm.three(VEX_Vpcmpgtd_ymm_ymm_ymmm256, dst, left, right),
        }
    }

    /// Whether the value's register may be written over by this item.
    fn ends(&self, value: u32) -> bool {
        let held = self.values[value as usize];
        held.reg.is_some() && held.next == NEVER && !held.pinned
    }

    /// The register of a value that ends here becomes that of a new one.
    fn replace(&mut self, old: u32, node: u32, copy: usize) -> Register {
        let new = self.value(node, copy);
        if let Some(reg) = self.values[old as usize].reg.take() {
            self.give(new, 0, reg);
            return self.register(0, reg);
        }
        self.define(node, copy)
    }

    /// A new register with the contents of another, or of memory.
    fn copied(&mut self, from: Place, node: u32, copy: usize) -> Register {
        let dst = self.define(node, copy);
        let code = match from {
            Place::Mem(at) if at.is_broadcast => {
                let at = MemoryOperand { is_broadcast: false, ..at };
                self.asm.two(Code::EVEX_Vbroadcastss_zmm_k1z_xmmm32, dst, Place::Mem(at));
                return dst;
            }
            _ => self.load_code(),
        };
        self.asm.two(code, dst, from);
        dst
    }

    fn multiply_add(&mut self, negated: bool, node: u32, copy: usize, args: &[u32; 3]) {
        let [mut a, mut b, c] = *args;
        let [f132, f213, f231] = asm::fused(self.target, negated);
        // At most one operand stays in memory: the sum, else a factor, which then is the second.
        if !self.stays(c) && self.stays(a) && !self.stays(b) {
            (a, b) = (b, a);
        }
        let sum_stays = self.stays(c);
        let left = self.ensure(a);
        if sum_stays {
            let right = self.ensure(b);
            let sum = self.place(c);
            if self.ends(a) {
                let dst = self.replace(a, node, copy);
                return self.asm.three(f213, dst, right, sum);
            }
            if self.ends(b) {
                let dst = self.replace(b, node, copy);
                return self.asm.three(f213, dst, left, sum);
            }
            let dst = self.copied(sum, node, copy);
            return self.asm.three(f231, dst, left, Place::Reg(right));
        }
        let sum = self.ensure(c);
        let right = self.place(b);
        if self.ends(a) {
            let dst = self.replace(a, node, copy);
            return self.asm.three(f132, dst, sum, right);
        }
        if self.ends(c) {
            let dst = self.replace(c, node, copy);
            return self.asm.three(f231, dst, left, right);
        }
        if let Place::Reg(_) = right
            && self.ends(b)
        {
            let dst = self.replace(b, node, copy);
            return self.asm.three(f213, dst, left, Place::Reg(sum));
        }
        match right {
            Place::Mem(_) => {
                let dst = self.copied(right, node, copy);
                self.asm.three(f213, dst, left, Place::Reg(sum));
            }
            Place::Reg(_) => {
                let dst = self.copied(Place::Reg(sum), node, copy);
                self.asm.three(f231, dst, left, right);
            }
        }
    }

    /// Bits of `args[1]` where `args[0]` has ones, else of `args[2]`.
    fn merge(&mut self, node: u32, copy: usize, args: &[u32; 3]) {
        let [mask, a, b] = *args;
        let one = self.ensure(a);
        let two = self.ensure(b);
        let mask = self.place(mask);
        // The bit of the result for each (first, second, third) operand.
        let (dst, other, by) = if self.ends(a) {
            (self.replace(a, node, copy), two, 0b1110_0100)
        } else if self.ends(b) {
            (self.replace(b, node, copy), one, 0b1101_1000)
        } else {
            (self.copied(Place::Reg(one), node, copy), two, 0b1110_0100)
        };
        self.asm.three_by(Code::EVEX_Vpternlogd_zmm_k1z_zmm_zmmm512b32_imm8, dst, other, mask, by);
    }

    fn fold(&mut self, fold: &Fold, copy: usize, taken: u32) {
        let sum = self.ensure(self.value(fold.sum, copy));
        let (code, _) = self.folded(fold);
        let from = match self.place(taken) {
            Place::Mem(at) if code.is_none() && at.is_broadcast => Place::Reg(self.ensure(taken)),
            from => from,
        };
        let instruction = match (code, from) {
            (Some(code), Place::Reg(from)) => Instruction::with3(code, sum, sum, from),
            (Some(code), Place::Mem(from)) => Instruction::with3(code, sum, sum, from),
            (None, from) => asm::two(self.load_code(), sum, from),
        };
        if self.shape.masked {
            self.asm.put_masked(instruction, TAIL, false);
        } else {
            self.asm.put(instruction);
        }
    }

    /// The lanes of a fold begin anew.
    pub fn begin_fold(&mut self, fold: &Fold, copies: usize) {
        for copy in 0..copies {
            let sum = self.ensure(self.value(fold.sum, copy));
            let bits = fold.start.to_bits();
            if bits == 0 {
                self.asm.three(Code::EVEX_Vpxord_zmm_k1z_zmm_zmmm512b32, sum, sum, Place::Reg(sum));
                continue;
            }
            let from = self.constant(bits);
            self.asm.two(Code::EVEX_Vbroadcastss_zmm_k1z_xmmm32, sum, Place::Mem(from));
        }
    }

    /// The lanes of a fold are written, a copy after another.
    pub fn end_fold(&mut self, fold: &Fold, copies: usize, base: Register) {
        for copy in 0..copies {
            let sum = self.ensure(self.value(fold.sum, copy));
            let to = memory(base, Register::None, 1, copy * SLOT);
            self.asm.put(Instruction::with2(Code::EVEX_Vmovups_zmmm512_k1z_zmm, to, sum));
        }
    }

    fn store(&mut self, store: &Store, copy: usize, value: u32) {
        use Code::*;
        let from = self.ensure(value);
        let to = self.element(store.to, store.form.size(), copy);
        let stream = store.stream && !self.shape.masked;
        if self.target == Target::Avx2 {
            return self.store_avx2(store, from, to, stream);
        }
        let scratch = if store.form == Form::Word { 0 } else { self.scratch() };
        let (xmm, ymm) = (Register::XMM0 + scratch, Register::YMM0 + scratch);
        let instruction = match (store.form, stream) {
            (Form::Word, false) => Instruction::with2(EVEX_Vmovups_zmmm512_k1z_zmm, to, from),
            (Form::Word, true) => Instruction::with2(EVEX_Vmovntps_m512_zmm, to, from),
            (Form::Half, false) => Instruction::with3(EVEX_Vcvtps2ph_ymmm256_k1z_zmm_imm8_sae, to, from, 0),
            (Form::Half, true) => {
                self.asm.put(Instruction::with3(EVEX_Vcvtps2ph_ymmm256_k1z_zmm_imm8_sae, ymm, from, 0));
                Instruction::with2(EVEX_Vmovntdq_m256_ymm, to, ymm)
            }
            (Form::Brain | Form::U16 | Form::I16, false) => {
                Instruction::with2(EVEX_Vpmovdw_ymmm256_k1z_zmm, to, from)
            }
            (Form::Brain | Form::U16 | Form::I16, true) => {
                self.asm.put(Instruction::with2(EVEX_Vpmovdw_ymmm256_k1z_zmm, ymm, from));
                Instruction::with2(EVEX_Vmovntdq_m256_ymm, to, ymm)
            }
            (Form::U8 | Form::I8, false) => Instruction::with2(EVEX_Vpmovdb_xmmm128_k1z_zmm, to, from),
            (Form::U8 | Form::I8, true) => {
                self.asm.put(Instruction::with2(EVEX_Vpmovdb_xmmm128_k1z_zmm, xmm, from));
                Instruction::with2(EVEX_Vmovntdq_m128_xmm, to, xmm)
            }
            (Form::Bool, stream) => {
                self.asm.put(Instruction::with2(EVEX_Vpmovm2b_xmm_kr, xmm, from));
                self.asm.put(Instruction::with2(EVEX_Vpabsb_xmm_k1z_xmmm128, xmm, xmm));
                let code = if stream { EVEX_Vmovntdq_m128_xmm } else { EVEX_Vmovdqu8_xmmm128_k1z_xmm };
                Instruction::with2(code, to, xmm)
            }
        };
        if self.shape.masked {
            self.asm.put_masked(instruction, TAIL, false);
        } else {
            self.asm.put(instruction);
        }
    }

    /// Lanes of 8 or 16 bits are packed from both halves of the vector.
    fn store_avx2(&mut self, store: &Store, from: Register, to: MemoryOperand, stream: bool) {
        use Code::*;
        if store.form == Form::Word {
            let code = if stream { VEX_Vmovntps_m256_ymm } else { VEX_Vmovups_ymmm256_ymm };
            return self.asm.put(Instruction::with2(code, to, from));
        }
        if store.form == Form::Half {
            return self.asm.put(Instruction::with3(VEX_Vcvtps2ph_xmmm128_ymm_imm8, to, from, 0));
        }
        let low = Register::XMM0 + (from as u32 - Register::YMM0 as u32);
        let xmm = Register::XMM0 + self.scratch();
        self.asm.put(Instruction::with3(VEX_Vextracti128_xmmm128_ymm_imm8, xmm, from, 1));
        self.asm.put(Instruction::with3(VEX_Vpackusdw_xmm_xmm_xmmm128, xmm, low, xmm));
        if store.form.size() == 2 {
            return self.asm.put(Instruction::with2(VEX_Vmovdqu_xmmm128_xmm, to, xmm));
        }
        self.asm.put(Instruction::with3(VEX_Vpackuswb_xmm_xmm_xmmm128, xmm, xmm, xmm));
        self.asm.put(Instruction::with2(VEX_Vmovq_xmmm64_xmm, to, xmm));
    }
}
