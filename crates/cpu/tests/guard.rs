//! With `KILN_GUARD=1`, whoever writes beside a buffer is found: each case runs in a process of its own, which must die.
#![cfg(target_os = "linux")]

use kiln_cpu::arena::{Arena, Place};
use kiln_cpu::{Cpu, Reference};
use kiln_device::{Batch, Driver};
use kiln_ir::{Id, Item, text};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

/// Runs one of the cases below.
fn case(name: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--ignored", "--nocapture", name]).env("KILN_GUARD", "1");
    command.output().unwrap()
}

#[test]
fn writes_beside_a_buffer_end_the_process() {
    for (name, bytes) in [("one_byte_past_the_end", 100), ("one_byte_before_the_start", 5000)] {
        let output = case(name);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(&format!("beside a buffer of {bytes} bytes")), "{said}");
    }
    let output = case("a_page_past_the_end");
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

#[test]
fn programs_run_between_guard_pages() {
    for name in ["a_program", "rows_with_an_operand_per_row"] {
        let output = case(name);
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
#[ignore = "runs with guard pages"]
fn one_byte_past_the_end() {
    let buffer = Arena::new(None).alloc(100, Place::Reuse).unwrap();
    // SAFETY: the byte is in the buffer's mapping, which is what is tried here.
    unsafe { *buffer.as_mut_ptr().add(100) = 1 };
}

#[test]
#[ignore = "runs with guard pages"]
fn one_byte_before_the_start() {
    let buffer = Arena::new(None).alloc(5000, Place::Persistent).unwrap();
    // SAFETY: as above.
    unsafe { *buffer.as_mut_ptr().sub(1) = 1 };
}

#[test]
#[ignore = "runs with guard pages"]
fn a_page_past_the_end() {
    let buffer = Arena::new(None).alloc(64, Place::Reuse).unwrap();
    // SAFETY: not at all; the process ends here.
    unsafe { buffer.as_mut_ptr().add(64).write_volatile(1) };
}

#[test]
#[ignore = "runs with guard pages"]
fn a_program() {
    let device = Cpu::start();
    let program = "a = random_normal shape=[33,65] dtype=f32 key=1 offset=2\nb = exp a\nc = max b axes=[1] keep=true\n\
        d = sub b c\ne = sum d axes=[0] keep=false\nf = dot a b transpose=true\ng, h = sort f axis=1 descending=true take=3";
    device.submit(Batch { items: text::parse(program).unwrap().items, ..Batch::default() });
    for id in 0..8 {
        assert!(device.read(Id(id)).wait().is_ok(), "value {id}");
    }
    assert!(device.memory().live_bytes > 0);
}

/// An operand with an element per row, transposed, is gathered into a worker's own scratch, behind rows that stay.
#[test]
#[ignore = "runs with guard pages"]
fn rows_with_an_operand_per_row() {
    for length in [2, 9, 17, 40, 100, 700] {
        let program = format!(
            "a = random_normal shape=[20,30,{length}] dtype=f32 key=1 offset=2\n\
             b = random_normal shape=[30,20,1] dtype=f32 key=3 offset=4\n\
             c = permute b order=[1,0,2]\nd = exp a\ne = sum d axes=[2] keep=true\nf = mul e c\ng = mul d f"
        );
        let run = |device: &dyn Driver| {
            let mut items = text::parse(&program).unwrap().items;
            items.extend((0..6).map(|id| Item::Free(Id(id))));
            device.submit(Batch { items, ..Batch::default() });
            device.read(Id(6)).wait().unwrap().bytes.to_vec()
        };
        let cpu = Cpu::start();
        assert_eq!(run(&cpu), run(&Reference::start()), "{length}");
        assert!(cpu.fusion().fused >= 4, "{:?}", cpu.fusion());
    }
}
