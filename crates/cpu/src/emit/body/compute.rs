//! The instructions of lane operations.

use super::super::asm::{self, Place, memory};
use super::super::graph::{self, Form, LaneOp, Target};
use super::{Body, INEXACT};
use iced_x86::{Code, Instruction, MemoryOperand, Register};

/// Quotients from 2^-75 to 2^75 are in range for divisors from 2^-20 to 2^20; as bits without the sign, shifted by one.
const LEAST: u32 = (127 - 75) << 24;
const SPAN: u32 = 150 << 24;
/// The predicate of a comparison without signs.
const NOT_LESS_EQUAL: u32 = 6;

impl Body<'_> {
    pub(super) fn compute(&mut self, node: u32, copy: usize, args: &[u32; 3]) {
        let lane = self.graph.at(node).lane;
        let [a, b, c] = *args;
        match lane {
            LaneOp::Const(_) | LaneOp::Load(..) | LaneOp::Sum(_) => {}
            LaneOp::Splat(input, form) => self.splat(input, form, node),
            LaneOp::Half => {
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
            LaneOp::Over => self.quotient(node, copy, args),
            LaneOp::Fma | LaneOp::Fnma => self.multiply_add(lane == LaneOp::Fnma, node, copy, args),
            LaneOp::Merge => self.merge(node, copy, args),
            LaneOp::Compare(_) | LaneOp::CompareInt(_) => self.compare(lane, node, copy, a, b),
            LaneOp::Pick => {
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
            LaneOp::Keep => {
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
            LaneOp::Lower | LaneOp::Upper => {
                let swap = self.stays(a) && !self.stays(b);
                let (a, b) = if swap { (b, a) } else { (a, b) };
                let left = self.ensure(a);
                let right = self.place(b);
                self.release(a);
                self.release(b);
                let dst = self.define(node, copy);
                // The sign is that of the result; then which of the two.
                let by = 0b100 + (lane == LaneOp::Upper) as u32;
                self.asm.three_by(Code::EVEX_Vrangeps_zmm_k1z_zmm_zmmm512b32_imm8_sae, dst, left, right, by);
            }
            _ if lane.arity() == 1 => {
                let Some((code, by)) = asm::unary(self.target, lane) else { return };
                let shifts = matches!(lane, LaneOp::Shl(_) | LaneOp::Shr(_) | LaneOp::Sar(_));
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

    /// a / b by c, which is 1 / b: twice a product corrected by what it leaves of a. After the first time the quotient is
    /// one of the two numbers next to the true one, after the second the nearest (Markstein's theorem), provided that no
    /// step leaves the range of normal numbers. Lanes where one might are noted. A quotient of 0 is the product.
    fn quotient(&mut self, node: u32, copy: usize, args: &[u32; 3]) {
        use Code::*;
        let [a, b, c] = *args;
        let dividend = self.ensure(a);
        let divisor = self.place(b);
        if !self.quick {
            self.release(a);
            self.release(b);
            let dst = self.define(node, copy);
            return self.asm.three(EVEX_Vdivps_zmm_k1z_zmm_zmmm512b32_er, dst, dividend, divisor);
        }
        let inverse = self.place(c);
        let dst = self.define(node, copy);
        self.locked[3] = self.value(node, copy);
        let rest = Register::ZMM0 + self.scratch();
        let some = Register::K1 + self.take(1) as u32;
        let [.., subtract] = asm::fused(Target::Avx512, true);
        let [.., add] = asm::fused(Target::Avx512, false);
        let every = |at: MemoryOperand| Place::Mem(MemoryOperand { is_broadcast: true, ..at });
        let [size, least, span] = [!0 >> 1, LEAST, SPAN].map(|bits| every(self.constant(bits)));
        self.asm.three(EVEX_Vmulps_zmm_k1z_zmm_zmmm512b32_er, dst, dividend, inverse);
        self.asm.three(EVEX_Vptestmd_kr_k1_zmm_zmmm512b32, some, dividend, size);
        for _ in 0..2 {
            self.asm.two(EVEX_Vmovups_zmm_k1z_zmmm512, rest, Place::Reg(dividend));
            self.asm.three(subtract, rest, dst, divisor);
            self.asm.put_masked(asm::three(add, dst, rest, inverse), some, false);
        }
        self.asm.three(EVEX_Vpaddd_zmm_k1z_zmm_zmmm512b32, rest, dst, Place::Reg(dst));
        self.asm.three(EVEX_Vpsubd_zmm_k1z_zmm_zmmm512b32, rest, rest, least);
        let outside = asm::three_by(EVEX_Vpcmpud_kr_k1_zmm_zmmm512b32_imm8, some, rest, span, NOT_LESS_EQUAL);
        self.asm.put_masked(outside, some, false);
        self.asm.three(VEX_Korw_kr_kr_kr, INEXACT, INEXACT, Place::Reg(some));
        args.iter().for_each(|&arg| self.release(arg));
    }

    /// One element for all lanes, before the loop.
    pub(super) fn splat(&mut self, input: u32, form: Form, node: u32) {
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
    pub(super) fn half_to_float(&mut self, dst: Register, reg: u32, apart: bool) {
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

    pub(super) fn compare(&mut self, lane: LaneOp, node: u32, copy: usize, a: u32, b: u32) {
        use Code::*;
        let swap = self.stays(a) && !self.stays(b);
        let swapped = match lane {
            LaneOp::Compare(graph::SAME | graph::UNORDERED | graph::UNEQUAL) => Some(lane),
            LaneOp::Compare(graph::BELOW) => Some(LaneOp::Compare(14)),
            LaneOp::Compare(graph::AT_MOST) => Some(LaneOp::Compare(13)),
            LaneOp::Compare(graph::NOT_AT_MOST) => Some(LaneOp::Compare(9)),
            LaneOp::Compare(graph::NOT_ABOVE) => Some(LaneOp::Compare(5)),
            LaneOp::CompareInt(graph::EQUAL | graph::NOT_EQUAL) => Some(lane),
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
            (LaneOp::Compare(by), Target::Avx512) => {
                self.asm.three_by(EVEX_Vcmpps_kr_k1_zmm_zmmm512b32_imm8_sae, dst, left, right, by)
            }
            (LaneOp::Compare(by), Target::Avx2) => {
                self.asm.three_by(VEX_Vcmpps_ymm_ymm_ymmm256_imm8, dst, left, right, by)
            }
            (LaneOp::CompareInt(by), Target::Avx512) => {
                self.asm.three_by(EVEX_Vpcmpd_kr_k1_zmm_zmmm512b32_imm8, dst, left, right, by)
            }
            (LaneOp::CompareInt(graph::EQUAL), Target::Avx2) => {
                self.asm.three(VEX_Vpcmpeqd_ymm_ymm_ymmm256, dst, left, right)
            }
            _ => self.asm.three(VEX_Vpcmpgtd_ymm_ymm_ymmm256, dst, left, right),
        }
    }

    pub(super) fn multiply_add(&mut self, negated: bool, node: u32, copy: usize, args: &[u32; 3]) {
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
    pub(super) fn merge(&mut self, node: u32, copy: usize, args: &[u32; 3]) {
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
}
