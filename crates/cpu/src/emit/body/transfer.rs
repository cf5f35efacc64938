//! Operands from memory, and values to memory and to the accumulators of folds.

use super::super::asm::{self, Place, memory};
use super::super::graph::{Form, Target};
use super::super::lower::{Fold, Store};
use super::{Body, TAIL};
use iced_x86::{Code, Instruction, MemoryOperand, Register};

impl Body<'_> {
    pub(super) fn load(&mut self, input: u32, form: Form, value: u32, dst: Register) {
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
            let code = match self.target {
                Target::Avx512 => Code::EVEX_Vpslld_zmm_k1z_zmmm512b32_imm8,
                Target::Avx2 => Code::VEX_Vpslld_ymm_ymm_imm8,
            };
            self.asm.two_by(code, dst, Place::Reg(dst), 16);
        }
    }

    /// `code dst, src`, of the lanes that are there.
    pub(super) fn masked_two(&mut self, code: Code, dst: Register, src: Place) {
        let instruction = asm::two(code, dst, src);
        if self.shape.masked {
            self.asm.put_masked(instruction, TAIL, true);
        } else {
            self.asm.put(instruction);
        }
    }

    pub(super) fn fold(&mut self, fold: &Fold, copy: usize, taken: u32) {
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
            let (zero, load) = match self.target {
                Target::Avx512 => {
                    (Code::EVEX_Vpxord_zmm_k1z_zmm_zmmm512b32, Code::EVEX_Vbroadcastss_zmm_k1z_xmmm32)
                }
                Target::Avx2 => (Code::VEX_Vxorps_ymm_ymm_ymmm256, Code::VEX_Vmovups_ymm_ymmm256),
            };
            if bits == 0 {
                self.asm.three(zero, sum, sum, Place::Reg(sum));
                continue;
            }
            let from = self.constant(bits);
            self.asm.two(load, sum, Place::Mem(from));
        }
    }

    /// The lanes of a fold are written, a copy after another.
    pub fn end_fold(&mut self, fold: &Fold, copies: usize, base: Register) {
        for copy in 0..copies {
            let sum = self.ensure(self.value(fold.sum, copy));
            let code = match self.target {
                Target::Avx512 => Code::EVEX_Vmovups_zmmm512_k1z_zmm,
                Target::Avx2 => Code::VEX_Vmovups_ymmm256_ymm,
            };
            let to = memory(base, Register::None, 1, copy * self.target.lanes() * 4);
            self.asm.put(Instruction::with2(code, to, sum));
        }
    }

    pub(super) fn store(&mut self, store: &Store, copy: usize, value: u32) {
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
    pub(super) fn store_avx2(&mut self, store: &Store, from: Register, to: MemoryOperand, stream: bool) {
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
