//! Instructions one after another, as bytes; which instruction a lane operation is on each target.

use super::graph::{LaneOp, Target};
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};

/// An operand of an instruction.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Reg(Register),
    Mem(MemoryOperand),
}

/// `[base + index * scale + offset]`.
pub(super) fn memory(base: Register, index: Register, scale: usize, offset: usize) -> MemoryOperand {
    let (scale, size) = (scale as u32, (offset != 0) as u32);
    MemoryOperand::new(base, index, scale, offset as i64, size, false, Register::None)
}

/// A place that jumps lead to.
#[derive(Clone, Copy)]
pub(super) struct Label(u64);

/// The last four bytes of an instruction, not yet known.
#[must_use]
pub(super) struct Open(usize);

pub(super) struct Asm {
    encoder: Encoder,
    at: u64,
    /// Four bytes that are known later: where they end.
    patches: Vec<(usize, i32)>,
    /// An instruction was refused.
    failed: bool,
    /// For whoever wants to read them.
    pub listing: Option<Vec<Instruction>>,
}

impl Asm {
    pub fn new(listed: bool) -> Option<Asm> {
        let encoder = Encoder::try_with_capacity(64, 4096).ok()?;
        Some(Asm { encoder, at: 0, patches: Vec::new(), failed: false, listing: listed.then(Vec::new) })
    }

    pub fn put(&mut self, instruction: Result<Instruction, IcedError>) {
        let Ok(mut instruction) = instruction else { return self.failed = true };
        instruction.set_ip(self.at);
        match self.encoder.encode(&instruction, self.at) {
            Ok(length) => self.at += length as u64,
            Err(_) => self.failed = true,
        }
        if let Some(listing) = &mut self.listing {
            listing.push(instruction);
        }
    }

    /// As [`Asm::put`], only for the lanes of a mask; the others become 0 if `zeroed`, else they stay.
    pub fn put_masked(&mut self, instruction: Result<Instruction, IcedError>, mask: Register, zeroed: bool) {
        self.put(instruction.map(|mut instruction| {
            instruction.set_op_mask(mask);
            instruction.set_zeroing_masking(zeroed);
            instruction
        }));
    }

    /// `code dst, src`.
    pub fn two(&mut self, code: Code, dst: Register, src: Place) {
        self.put(two(code, dst, src));
    }

    /// `code dst, a, b`.
    pub fn three(&mut self, code: Code, dst: Register, a: Register, b: Place) {
        self.put(three(code, dst, a, b));
    }

    /// `code dst, src, imm`.
    pub fn two_by(&mut self, code: Code, dst: Register, src: Place, by: u32) {
        self.put(match src {
            Place::Reg(src) => Instruction::with3(code, dst, src, by),
            Place::Mem(src) => Instruction::with3(code, dst, src, by),
        });
    }

    /// `code dst, a, b, imm`.
    pub fn three_by(&mut self, code: Code, dst: Register, a: Register, b: Place, by: u32) {
        self.put(three_by(code, dst, a, b, by));
    }

    /// Where the next instruction will be.
    pub fn here(&self) -> Label {
        Label(self.at)
    }

    pub fn jump_back(&mut self, code: Code, to: Label) {
        self.put(Instruction::with_branch(code, to.0));
    }

    /// A jump forward, by four bytes of distance.
    pub fn jump(&mut self, code: Code) -> Open {
        // Some place that is too far for one byte.
        self.put(Instruction::with_branch(code, self.at + 0x1000));
        self.open()
    }

    /// The last four bytes put are to be filled in.
    pub fn open(&mut self) -> Open {
        self.patches.push((self.at as usize, 0));
        Open(self.patches.len() - 1)
    }

    /// The goal of that jump is here.
    pub fn land(&mut self, jump: Open) {
        let distance = self.at as i64 - self.patches[jump.0].0 as i64;
        self.fill(jump, distance as i32);
    }

    pub fn fill(&mut self, open: Open, value: i32) {
        self.patches[open.0].1 = value;
    }

    /// The bytes, if every instruction was a possible one.
    pub fn finish(&mut self) -> Option<Vec<u8>> {
        let mut bytes = self.encoder.take_buffer();
        for &(end, value) in &self.patches {
            bytes.get_mut(end.checked_sub(4)?..end)?.copy_from_slice(&value.to_le_bytes());
        }
        (!self.failed).then_some(bytes)
    }
}

/// `code dst, src`.
pub(super) fn two(code: Code, dst: Register, src: Place) -> Result<Instruction, IcedError> {
    match src {
        Place::Reg(src) => Instruction::with2(code, dst, src),
        Place::Mem(src) => Instruction::with2(code, dst, src),
    }
}

/// `code dst, a, b`.
pub(super) fn three(code: Code, dst: Register, a: Register, b: Place) -> Result<Instruction, IcedError> {
    match b {
        Place::Reg(b) => Instruction::with3(code, dst, a, b),
        Place::Mem(b) => Instruction::with3(code, dst, a, b),
    }
}

/// `code dst, a, b, imm`.
pub(super) fn three_by(
    code: Code,
    dst: Register,
    a: Register,
    b: Place,
    by: u32,
) -> Result<Instruction, IcedError> {
    match b {
        Place::Reg(b) => Instruction::with4(code, dst, a, b, by),
        Place::Mem(b) => Instruction::with4(code, dst, a, b, by),
    }
}

/// The instruction of a lane operation with two operands.
pub(super) fn binary(target: Target, lane: LaneOp) -> Option<Code> {
    use Code::*;
    let [avx512, avx2] = match lane {
        LaneOp::Add => [EVEX_Vaddps_zmm_k1z_zmm_zmmm512b32_er, VEX_Vaddps_ymm_ymm_ymmm256],
        LaneOp::Sub => [EVEX_Vsubps_zmm_k1z_zmm_zmmm512b32_er, VEX_Vsubps_ymm_ymm_ymmm256],
        LaneOp::Mul => [EVEX_Vmulps_zmm_k1z_zmm_zmmm512b32_er, VEX_Vmulps_ymm_ymm_ymmm256],
        LaneOp::Div => [EVEX_Vdivps_zmm_k1z_zmm_zmmm512b32_er, VEX_Vdivps_ymm_ymm_ymmm256],
        LaneOp::Min => [EVEX_Vminps_zmm_k1z_zmm_zmmm512b32_sae, VEX_Vminps_ymm_ymm_ymmm256],
        LaneOp::Max => [EVEX_Vmaxps_zmm_k1z_zmm_zmmm512b32_sae, VEX_Vmaxps_ymm_ymm_ymmm256],
        LaneOp::And => [EVEX_Vpandd_zmm_k1z_zmm_zmmm512b32, VEX_Vandps_ymm_ymm_ymmm256],
        LaneOp::Or => [EVEX_Vpord_zmm_k1z_zmm_zmmm512b32, VEX_Vorps_ymm_ymm_ymmm256],
        LaneOp::Xor => [EVEX_Vpxord_zmm_k1z_zmm_zmmm512b32, VEX_Vxorps_ymm_ymm_ymmm256],
        LaneOp::AddInt => [EVEX_Vpaddd_zmm_k1z_zmm_zmmm512b32, VEX_Vpaddd_ymm_ymm_ymmm256],
        LaneOp::SubInt => [EVEX_Vpsubd_zmm_k1z_zmm_zmmm512b32, VEX_Vpsubd_ymm_ymm_ymmm256],
        LaneOp::MulInt => [EVEX_Vpmulld_zmm_k1z_zmm_zmmm512b32, VEX_Vpmulld_ymm_ymm_ymmm256],
        LaneOp::MinInt => [EVEX_Vpminsd_zmm_k1z_zmm_zmmm512b32, VEX_Vpminsd_ymm_ymm_ymmm256],
        LaneOp::MaxInt => [EVEX_Vpmaxsd_zmm_k1z_zmm_zmmm512b32, VEX_Vpmaxsd_ymm_ymm_ymmm256],
        LaneOp::Both => [VEX_Kandw_kr_kr_kr; 2],
        LaneOp::Either => [VEX_Korw_kr_kr_kr; 2],
        LaneOp::Differ => [VEX_Kxorw_kr_kr_kr; 2],
        _ => return None,
    };
    Some(if target == Target::Avx512 { avx512 } else { avx2 })
}

/// The instruction of a lane operation with one operand, and its immediate.
pub(super) fn unary(target: Target, lane: LaneOp) -> Option<(Code, Option<u32>)> {
    use Code::*;
    let (avx512, avx2, by) = match lane {
        LaneOp::Sqrt => (EVEX_Vsqrtps_zmm_k1z_zmmm512b32_er, VEX_Vsqrtps_ymm_ymmm256, None),
        LaneOp::ToFloat => (EVEX_Vcvtdq2ps_zmm_k1z_zmmm512b32_er, VEX_Vcvtdq2ps_ymm_ymmm256, None),
        LaneOp::ToInt => (EVEX_Vcvttps2dq_zmm_k1z_zmmm512b32_sae, VEX_Vcvttps2dq_ymm_ymmm256, None),
        LaneOp::AbsInt => (EVEX_Vpabsd_zmm_k1z_zmmm512b32, VEX_Vpabsd_ymm_ymmm256, None),
        LaneOp::Not => (VEX_Knotw_kr_kr, VEX_Knotw_kr_kr, None),
        LaneOp::Round(by) => {
            (EVEX_Vrndscaleps_zmm_k1z_zmmm512b32_imm8_sae, VEX_Vroundps_ymm_ymmm256_imm8, Some(by))
        }
        LaneOp::Shl(by) => (EVEX_Vpslld_zmm_k1z_zmmm512b32_imm8, VEX_Vpslld_ymm_ymm_imm8, Some(by)),
        LaneOp::Shr(by) => (EVEX_Vpsrld_zmm_k1z_zmmm512b32_imm8, VEX_Vpsrld_ymm_ymm_imm8, Some(by)),
        LaneOp::Sar(by) => (EVEX_Vpsrad_zmm_k1z_zmmm512b32_imm8, VEX_Vpsrad_ymm_ymm_imm8, Some(by)),
        _ => return None,
    };
    Some((if target == Target::Avx512 { avx512 } else { avx2 }, by))
}

/// The forms 132, 213 and 231 of a fused multiply-add.
pub(super) fn fused(target: Target, negated: bool) -> [Code; 3] {
    use Code::*;
    match (target, negated) {
        (Target::Avx512, false) => [
            EVEX_Vfmadd132ps_zmm_k1z_zmm_zmmm512b32_er,
            EVEX_Vfmadd213ps_zmm_k1z_zmm_zmmm512b32_er,
            EVEX_Vfmadd231ps_zmm_k1z_zmm_zmmm512b32_er,
        ],
        (Target::Avx512, true) => [
            EVEX_Vfnmadd132ps_zmm_k1z_zmm_zmmm512b32_er,
            EVEX_Vfnmadd213ps_zmm_k1z_zmm_zmmm512b32_er,
            EVEX_Vfnmadd231ps_zmm_k1z_zmm_zmmm512b32_er,
        ],
        (Target::Avx2, false) => [
            VEX_Vfmadd132ps_ymm_ymm_ymmm256,
            VEX_Vfmadd213ps_ymm_ymm_ymmm256,
            VEX_Vfmadd231ps_ymm_ymm_ymmm256,
        ],
        (Target::Avx2, true) => [
            VEX_Vfnmadd132ps_ymm_ymm_ymmm256,
            VEX_Vfnmadd213ps_ymm_ymm_ymmm256,
            VEX_Vfnmadd231ps_ymm_ymm_ymmm256,
        ],
    }
}
