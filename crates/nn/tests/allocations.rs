//! Heap calls while a recurring training step is planned and executed, counted by an allocator of this test's own.

use kiln_nn::{Linear, Optimizer, Sgd, module};
use kiln_tensor::{Device, Tensor};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Ordering::Relaxed) {
            CALLS.fetch_add(1, Ordering::Relaxed);
        }
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

/// Heap calls during `f`.
fn calls(f: impl FnOnce()) -> usize {
    CALLS.store(0, Ordering::Relaxed);
    COUNTING.store(true, Ordering::Relaxed);
    f();
    COUNTING.store(false, Ordering::Relaxed);
    CALLS.load(Ordering::Relaxed)
}

struct Model {
    first: Linear,
    second: Linear,
}

module!(Model { first, second });

#[test]
fn heap_calls_of_a_recurring_step_are_bounded_and_do_not_grow() {
    let device = Device::open("cpu:9").unwrap();
    let x = Tensor::randn([32, 64], &device);
    let target = Tensor::from_vec((0..32i64).map(|i| i % 10).collect::<Vec<_>>(), [32], &device);
    let mut model = Model { first: Linear::new(64, 32, &device), second: Linear::new(32, 10, &device) };
    let mut optimizer = Sgd::new(0.01);
    let mut counts = Vec::new();
    for _ in 0..8 {
        let loss = model.second.forward(&model.first.forward(&x).relu()).cross_entropy(&target);
        let gradients = loss.backward();
        optimizer.step(&mut model, &gradients);
        drop((gradients, loss));
        // All of the step waits: it is planned and executed here.
        counts.push(calls(|| device.sync().unwrap()));
    }
    let last = counts[7];
    println!("heap calls in planning and executing a step: {counts:?}");
    assert_eq!(counts[6], last, "{counts:?}");
    assert!(last <= MOST, "{counts:?}");
}

/// What this step needs at most: an answer to wait for, a counted buffer for each result, and what fused programs
/// take to be bound to values. It may fall, never rise.
const MOST: usize = 249;
