//! Truncated messages and hostile lengths at every field: an error, and never an allocation on a stranger's word.

use kiln_chaos::fuzz::{self, TARGETS};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Notes the largest allocation.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Watched {
    // SAFETY: as the trait asks.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as the trait asks.
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Sizes at which things break.
const LENGTHS: [u64; 9] =
    [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX];

fn leb(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

#[test]
fn lengths_are_believed_as_far_as_there_are_bytes() {
    fuzz::quiet();
    let messages = TARGETS.iter().find(|t| t.name == "messages").unwrap();
    let seeds = fuzz::seeds("messages");
    fuzz::once(messages, &seeds[0]).unwrap();
    let (mut tried, mut failed) = (0, Vec::new());
    LARGEST.store(0, Ordering::Relaxed);
    for seed in &seeds {
        let cuts = (0..seed.len()).map(|end| seed[..end].to_vec());
        let places = (1..seed.len()).flat_map(|at| LENGTHS.iter().map(move |&n| (at, n)));
        let changed = places.map(|(at, n)| [&seed[..at], &leb(n), &seed[at + 1..]].concat());
        for input in cuts.chain(changed) {
            tried += 1;
            if let Err(crash) = fuzz::once(messages, &input) {
                failed.push(format!("{}: {:?}", crash.message, crash.input));
            }
        }
    }
    let largest = LARGEST.load(Ordering::Relaxed);
    let _ = std::panic::take_hook();
    assert!(failed.is_empty(), "{} of {tried}, such as {}", failed.len(), failed[0]);
    assert!(tried > 5_000, "{tried}");
    // The longest message here has a few hundred bytes; a compressed one may claim a frame's worth.
    assert!(largest <= (1 << 20) + 4096, "{largest} bytes at once");
}
