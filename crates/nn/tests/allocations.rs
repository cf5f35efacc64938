//! Heap calls and arena growth while a recurring training step is planned and executed.
//!
//! The test's thread records a step and waits without helping, so that the device's background thread plans and executes
//! it, with the pool's workers. An allocator of this test's own counts every call for memory on all threads but the test's.
//! What recording takes is not counted: the user's thread makes values, and a heap call for each; nor is giving it back,
//! which falls to whoever lets go last.

use kiln_nn::{Adam, Linear, Module, Optimizer, Sgd};
use kiln_tensor::{Device, Tensor};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// This thread records.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if !RECORDS.try_with(Cell::get).unwrap_or(true) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: everything is left to the system's allocator; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Module)]
struct Model {
    first: Linear,
    second: Linear,
}

/// Heap calls and blocks from the system in each of some steps, while they were planned and executed.
fn steps(mut optimizer: impl Optimizer) -> Vec<(usize, u64)> {
    let device = Device::open("cpu:9").unwrap();
    let x = Tensor::randn([32, 64], &device);
    let target = Tensor::from_vec((0..32i64).map(|i| i % 10).collect::<Vec<_>>(), [32], &device);
    let mut model = Model { first: Linear::new(64, 32, &device), second: Linear::new(32, 10, &device) };
    let mut step = || {
        let loss = model.second.forward(&model.first.forward(&x).relu()).cross_entropy(&target);
        let gradients = loss.backward();
        optimizer.step(&mut model, &gradients);
        drop((gradients, loss));
        let before = (CALLS.load(Ordering::Relaxed), device.memory().system_allocs);
        device.sync_async().wait_timeout(Duration::from_secs(60)).unwrap();
        (CALLS.load(Ordering::Relaxed) - before.0, device.memory().system_allocs - before.1)
    };
    (0..12).map(|_| step()).collect()
}

#[test]
fn a_recurring_step_is_planned_and_executed_without_a_heap_call() {
    RECORDS.set(true);
    for (name, counts) in [("sgd", steps(Sgd::new(0.01))), ("adam", steps(Adam::new(1e-3)))] {
        println!("{name}: heap calls and blocks of planning and executing each step: {counts:?}");
        // The first ones plan and make memory for what recurs.
        assert_eq!(counts[6..], [(0, 0); 6], "{name}: {counts:?}");
        assert!(counts[0].0 > 0, "{name}: nothing is counted");
    }
}
