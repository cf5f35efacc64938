//! Where values are: in registers as long as they are needed and there is room, else in memory.

use super::super::asm::{Place, memory};
use super::super::graph::{Form, Target};
use super::{ADDRESSES, Body, Home, INDEX, NEVER, POOL, Residence, SLOT, SLOTS};
use iced_x86::{Code, Instruction, MemoryOperand, Register};

impl Body<'_> {
    /// Frees the register of a value that is not used again.
    pub(super) fn release(&mut self, value: u32) {
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
            self.freed.push(slot);
            self.values[value as usize].home = Home::Nowhere;
        }
    }

    /// A free register, by moving the value needed last out of one.
    pub(super) fn take(&mut self, class: usize) -> u8 {
        if let Some(reg) = self.held[class].iter().position(|held| held.is_none()) {
            return reg as u8;
        }
        let mut best = (0, 0, NEVER);
        for (reg, held) in self.held[class].iter().enumerate() {
            let Some(value) = *held else { continue };
            let Residence { next, pinned, .. } = self.values[value as usize];
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
    pub(super) fn put_away(&mut self, value: u32) {
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

    pub(super) fn give(&mut self, value: u32, class: usize, reg: u8) {
        self.held[class][reg as usize] = Some(value);
        self.values[value as usize].reg = Some(reg);
    }

    /// A register for a new value.
    pub(super) fn define(&mut self, node: u32, copy: usize) -> Register {
        let (value, class) = (self.value(node, copy), self.class(node));
        let reg = self.take(class);
        self.give(value, class, reg);
        self.register(class, reg)
    }

    /// A register that is free for the length of this item.
    pub(super) fn scratch(&mut self) -> u32 {
        self.take(0) as u32
    }

    /// Whether the value's register may be written over by this item.
    pub(super) fn ends(&self, value: u32) -> bool {
        let held = self.values[value as usize];
        held.reg.is_some() && held.next == NEVER && !held.pinned
    }

    /// The register of a value that ends here becomes that of a new one.
    pub(super) fn replace(&mut self, old: u32, node: u32, copy: usize) -> Register {
        let new = self.value(node, copy);
        if let Some(reg) = self.values[old as usize].reg.take() {
            self.give(new, 0, reg);
            return self.register(0, reg);
        }
        self.define(node, copy)
    }

    /// A new register with the contents of another, or of memory.
    pub(super) fn copied(&mut self, from: Place, node: u32, copy: usize) -> Register {
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

    /// The value in a register.
    pub(super) fn ensure(&mut self, value: u32) -> Register {
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
            Home::Stream(input, form) => self.load(input, form, value, dst),
            // Only what was computed is asked for.
            Home::Nowhere => self.slots = SLOTS + 1,
        }
        dst
    }

    pub(super) fn load_code(&self) -> Code {
        match self.target {
            Target::Avx512 => Code::EVEX_Vmovups_zmm_k1z_zmmm512,
            Target::Avx2 => Code::VEX_Vmovups_ymm_ymmm256,
        }
    }

    /// A vector's place in memory.
    pub(super) fn home(&self, value: u32) -> MemoryOperand {
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
    pub(super) fn stays(&self, value: u32) -> bool {
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
    pub(super) fn place(&mut self, value: u32) -> Place {
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
    pub(super) fn element(&mut self, address: u32, size: usize, copy: usize) -> MemoryOperand {
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
}
