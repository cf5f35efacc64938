//! The loops around a body, as a function `(addresses, len, pool)` of the C calling convention.
//!
//! Without folds: vectors a few at a time, then one by one, the last only as far as there are elements. With folds:
//! chunks a few at a time, one lane of accumulators each, then one by one; on AVX2, whose registers hold half of the
//! lanes, only one by one.

use super::asm::memory;
use super::body::{ADDRESSES, Body, INDEX, SLOT, Shape, TAIL};
use super::graph::{LaneOp, Target};
use super::lower::Lowered;
use crate::reference::order::INNER;
use iced_x86::{Code, Instruction, Register};

/// How many elements there are, and where a loop ends.
const LEN: Register = Register::RSI;
const END: Register = Register::R11;
/// Registers for addresses, those that a function must restore last.
const BASES: [Register; 8] = [
    Register::R8,
    Register::R9,
    Register::R10,
    Register::RBX,
    Register::R12,
    Register::R13,
    Register::R14,
    Register::R15,
];
/// How many of them a function may overwrite.
const OURS: usize = 3;

/// Machine code with its constants.
pub(super) struct Assembled {
    pub bytes: Vec<u8>,
    pub pool: Vec<u32>,
    pub listing: Option<Vec<Instruction>>,
}

pub(super) fn assemble(lowered: &Lowered, listed: bool) -> Option<Assembled> {
    let mut body = Body::new(lowered, listed)?;
    let saved = enter(&mut body, lowered);
    body.asm.put(Instruction::with2(Code::Sub_rm64_imm32, Register::RSP, 0x1000));
    let frame = body.asm.open();
    body.asm.put(Instruction::with2(Code::And_rm64_imm8, Register::RSP, -(SLOT as i32)));
    body.prologue();
    body.asm.put(Instruction::with2(Code::Xor_r32_rm32, Register::ECX, Register::ECX));
    if lowered.folds.is_empty() {
        vectors(&mut body, lowered.graph.target);
    } else {
        chunks(&mut body, lowered);
    }
    leave(&mut body, saved);
    body.finish();
    let slots = body.slots as usize;
    body.asm.fill(frame, (slots * SLOT) as i32);
    if !body.fits() {
        return None;
    }
    let bytes = body.asm.finish()?;
    Some(Assembled { bytes, pool: body.pool, listing: body.asm.listing.take() })
}

/// Saves what the function must restore and fetches addresses; how many registers were saved.
fn enter(body: &mut Body<'_>, lowered: &Lowered) -> usize {
    let mut streams: Vec<u32> = lowered.stores.iter().map(|store| store.to).collect();
    streams.extend(lowered.graph.nodes.iter().filter_map(|node| match node.lane {
        LaneOp::Load(input, _) => Some(input),
        _ => None,
    }));
    streams.extend(lowered.folds.iter().map(|fold| fold.to));
    streams.truncate(BASES.len());
    let saved = streams.len().saturating_sub(OURS);
    body.asm.put(Instruction::with1(Code::Push_r64, Register::RBP));
    body.asm.put(Instruction::with2(Code::Mov_r64_rm64, Register::RBP, Register::RSP));
    for &base in &BASES[OURS..OURS + saved] {
        body.asm.put(Instruction::with1(Code::Push_r64, base));
    }
    for (&stream, &base) in streams.iter().zip(&BASES) {
        let stream = stream as usize;
        if body.bases.len() <= stream {
            body.bases.resize(stream + 1, None);
        }
        body.bases[stream] = Some(base);
        let from = memory(ADDRESSES, Register::None, 1, stream * 8);
        body.asm.put(Instruction::with2(Code::Mov_r64_rm64, base, from));
    }
    saved
}

fn leave(body: &mut Body<'_>, saved: usize) {
    let from = iced_x86::MemoryOperand::with_base_displ(Register::RBP, -(saved as i64) * 8);
    body.asm.put(Instruction::with2(Code::Lea_r64_m, Register::RSP, from));
    for &base in BASES[OURS..OURS + saved].iter().rev() {
        body.asm.put(Instruction::with1(Code::Pop_r64, base));
    }
    body.asm.put(Instruction::with1(Code::Pop_r64, Register::RBP));
    body.asm.put(Ok(Instruction::with(Code::VEX_Vzeroupper)));
    body.asm.put(Ok(Instruction::with(Code::Retnq)));
}

fn vectors(body: &mut Body<'_>, target: Target) {
    let (lanes, copies) = (target.lanes(), body.copies);
    let wide = lanes * copies;
    if copies > 1 {
        // END is the last place where that many begin.
        let from = iced_x86::MemoryOperand::with_base_displ(LEN, -(wide as i64));
        body.asm.put(Instruction::with2(Code::Lea_r64_m, END, from));
        body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, END));
        let none = body.asm.jump(Code::Jg_rel32_64);
        let top = body.asm.here();
        body.run(Shape { copies, apart: lanes, masked: false });
        body.asm.put(Instruction::with2(Code::Add_rm64_imm32, INDEX, wide as i32));
        body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, END));
        body.asm.jump_back(Code::Jle_rel32_64, top);
        body.asm.land(none);
    }
    body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, LEN));
    let none = body.asm.jump(Code::Jge_rel32_64);
    let top = body.asm.here();
    if target == Target::Avx512 {
        mask(body, LEN);
    }
    body.run(Shape { copies: 1, apart: 0, masked: target == Target::Avx512 });
    body.asm.put(Instruction::with2(Code::Add_rm64_imm32, INDEX, lanes as i32));
    body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, LEN));
    body.asm.jump_back(Code::Jl_rel32_64, top);
    body.asm.land(none);
}

/// The mask of the lanes from the current element to `end`.
fn mask(body: &mut Body<'_>, end: Register) {
    let (eax, rax) = (Register::EAX, Register::RAX);
    let (most, ones) = (body.constant(16), body.constant(!0));
    body.asm.put(Instruction::with2(Code::Mov_r64_rm64, rax, end));
    body.asm.put(Instruction::with2(Code::Sub_r64_rm64, rax, INDEX));
    body.asm.put(Instruction::with2(Code::Cmp_rm64_imm8, rax, 16));
    body.asm.put(Instruction::with2(Code::Cmovg_r32_rm32, eax, most));
    body.asm.put(Instruction::with3(Code::VEX_Bzhi_r32_rm32_r32, eax, ones, eax));
    body.asm.put(Instruction::with2(Code::VEX_Kmovw_kr_r32, TAIL, eax));
}

fn chunks(body: &mut Body<'_>, lowered: &Lowered) {
    let chunk = INNER.chunk;
    let rax = Register::RAX;
    let (mut copies, one) = match lowered.graph.target {
        Target::Avx512 => (body.copies, Shape { copies: 1, apart: 0, masked: true }),
        Target::Avx2 => (1, Shape { copies: 2, apart: Target::Avx2.lanes(), masked: false }),
    };
    // A row has few chunks: what is left over by four at a time is done by two.
    while copies > 1 {
        let top = body.asm.here();
        body.asm.put(Instruction::with2(
            Code::Lea_r64_m,
            rax,
            memory(INDEX, Register::None, 1, chunk * copies),
        ));
        body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, rax, LEN));
        let none = body.asm.jump(Code::Jg_rel32_64);
        body.asm.put(Instruction::with2(Code::Lea_r64_m, END, memory(INDEX, Register::None, 1, chunk)));
        lowered.folds.iter().for_each(|fold| body.begin_fold(fold, copies));
        let inner = body.asm.here();
        body.run(Shape { copies, apart: chunk, masked: false });
        body.asm.put(Instruction::with2(Code::Add_rm64_imm8, INDEX, 16));
        body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, END));
        body.asm.jump_back(Code::Jl_rel32_64, inner);
        write(body, lowered, copies);
        body.asm.put(Instruction::with2(Code::Add_rm64_imm32, INDEX, (chunk * (copies - 1)) as i32));
        body.asm.jump_back(Code::Jmp_rel32_64, top);
        body.asm.land(none);
        copies /= 2;
    }
    let top = body.asm.here();
    body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, LEN));
    let none = body.asm.jump(Code::Jge_rel32_64);
    body.asm.put(Instruction::with2(Code::Lea_r64_m, END, memory(INDEX, Register::None, 1, chunk)));
    body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, END, LEN));
    body.asm.put(Instruction::with2(Code::Cmovg_r64_rm64, END, LEN));
    lowered.folds.iter().for_each(|fold| body.begin_fold(fold, one.copies));
    let inner = body.asm.here();
    if one.masked {
        mask(body, END);
    }
    body.run(one);
    body.asm.put(Instruction::with2(Code::Add_rm64_imm8, INDEX, 16));
    body.asm.put(Instruction::with2(Code::Cmp_r64_rm64, INDEX, END));
    body.asm.jump_back(Code::Jl_rel32_64, inner);
    write(body, lowered, one.copies);
    body.asm.jump_back(Code::Jmp_rel32_64, top);
    body.asm.land(none);
}

/// Writes the lanes of chunks, of which the first ends at END: as many bytes for each chunk of the operand.
fn write(body: &mut Body<'_>, lowered: &Lowered, copies: usize) {
    let rax = Register::RAX;
    for fold in &lowered.folds {
        let before = iced_x86::MemoryOperand::with_base_displ(END, -1);
        body.asm.put(Instruction::with2(Code::Lea_r64_m, rax, before));
        body.asm.put(Instruction::with2(Code::Shr_rm64_imm8, rax, INNER.chunk.ilog2()));
        body.asm.put(Instruction::with2(Code::Shl_rm64_imm8, rax, SLOT.ilog2()));
        match body.bases.get(fold.to as usize).copied().flatten() {
            Some(base) => body.asm.put(Instruction::with2(Code::Add_r64_rm64, rax, base)),
            None => {
                let base = memory(ADDRESSES, Register::None, 1, fold.to as usize * 8);
                body.asm.put(Instruction::with2(Code::Add_r64_rm64, rax, base));
            }
        }
        body.end_fold(fold, copies, rax);
    }
}
