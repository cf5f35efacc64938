//! Results do not depend on the floating-point environment of whoever asks for them. In a process of its own: the pool's
//! workers are started by the thread that has changed it.
#![cfg(target_arch = "x86_64")]

use kiln_cpu::{Cpu, pool};
use kiln_device::{Batch, Bytes, Data, Driver, Place, Urgency};
use kiln_ir::{DType, Id, text};
use std::arch::asm;

/// Subnormals are taken for zeros, operands and results; rounding is towards zero.
const OTHER: u32 = 0x1f80 | 1 << 15 | 1 << 6 | 3 << 13;

fn set(word: u32) {
    // SAFETY: it reads four bytes, a valid word.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &word, options(nostack)) };
}

fn get() -> u32 {
    let mut word = 0u32;
    // SAFETY: it stores four bytes there.
    unsafe { asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack)) };
    word & !0x3f
}

/// Chains, products and sums of numbers around the smallest.
fn results(urgency: Urgency) -> Vec<Vec<u8>> {
    let cpu = Cpu::start();
    let program = text::parse(
        "a = input f32[300,300]\nb = input f32[300,300]\nt = full shape=[] value=f32:0.5\nc = mul a t\nd = add c b\n\
         e = dot a b transpose=false\ns = sum a axes=[1] keep=false\nm = cumsum b axis=0 reverse=false",
    );
    let program = program.unwrap();
    for (k, (id, meta)) in program.inputs.iter().enumerate() {
        // By their bits: what is computed here is computed in the changed environment.
        let tiny = |i: usize| (1 + (i * 7919 + k) % 1009) as u32 * if k == 0 { 701 } else { 4001 };
        let bytes: Vec<u8> = (0..meta.shape.numel()).flat_map(|i| tiny(i).to_le_bytes()).collect();
        cpu.write(*id, Data::new(*meta, Bytes::new(bytes)), Place::Reuse);
    }
    cpu.submit(Batch { items: program.items, urgency, ..Batch::default() });
    let c = cpu.read(Id(3)).wait().unwrap();
    assert_eq!(c.meta.dtype, DType::F32);
    let c: Vec<u32> = c.bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    // Operands and results below the smallest normal number, and not one of them zero.
    assert!(c.iter().all(|&bits| (1..1 << 23).contains(&bits)), "subnormals are gone");
    (3..8).map(|id| cpu.read(Id(id)).wait().unwrap().bytes.to_vec()).collect()
}

#[test]
fn subnormals_and_rounding_are_the_same_in_any_environment() {
    pool::set_threads(3);
    set(OTHER);
    let there: Vec<_> = [Urgency::Now, Urgency::Awaited, Urgency::Background].map(results).into();
    assert_eq!(get(), OTHER, "the caller's own environment is back");
    // A thread of its own begins with what the one that started it had.
    let other = std::thread::spawn(|| {
        assert_eq!(get(), OTHER);
        results(Urgency::Now)
    });
    let other = other.join().unwrap();
    set(0x1f80);
    let want = results(Urgency::Now);
    pool::set_threads(1);
    assert_eq!(results(Urgency::Now), want);
    assert!(there.iter().chain([&other]).all(|got| *got == want));
}
