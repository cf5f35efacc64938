//! Files that lie about their size: an error, and never an allocation on their word.

use flate2::{Compression, write::GzEncoder};
use kiln_data::{Cifar, Csv, DataError, Fault, Idx, JsonLines, Labels, Lines};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::Mutex;
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
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract.
        unsafe { System.realloc(at, layout, size) }
    }

    // SAFETY: as the trait asks.
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// One test at a time looks at the largest allocation.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn extents_are_believed_as_far_as_there_are_bytes() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    LARGEST.store(0, Ordering::Relaxed);
    for code in [8u8, 9, 0xB, 0xC, 0xD, 0xE] {
        for extents in
            [vec![u32::MAX], vec![60_000, 28, 28], vec![1 << 15, 1 << 15, 1 << 15], vec![1 << 31, 0]]
        {
            let mut file = vec![0, 0, code, extents.len() as u8];
            extents.iter().for_each(|extent: &u32| file.extend(extent.to_be_bytes()));
            file.extend([1; 100]);
            let fault = Idx::parse(&file).unwrap_err();
            assert!(matches!(fault.fault(), Some(Fault::Length { .. })), "{fault}");
        }
    }
    assert!(LARGEST.load(Ordering::Relaxed) < 1 << 17, "{LARGEST:?}");
}

type Reader = fn(&[u8]) -> Result<(), DataError>;

#[test]
fn what_unpacks_to_a_thousand_times_itself_is_refused() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let mut out = GzEncoder::new(Vec::new(), Compression::best());
    out.write_all(&[0, 0, 8, 1, 0x20, 0, 0, 0]).unwrap();
    for _ in 0..512 {
        out.write_all(&[0; 1 << 20]).unwrap();
    }
    let bomb = out.finish().unwrap();
    assert!(bomb.len() < 1 << 20);
    LARGEST.store(0, Ordering::Relaxed);
    let readers: [(&str, Reader); 5] = [
        ("idx", |bytes| Idx::parse(bytes).map(drop)),
        ("cifar", |bytes| Cifar::parse(bytes, Labels::Ten).map(drop)),
        ("csv", |bytes| Csv::parse(bytes).map(drop)),
        ("lines", |bytes| Lines::parse(bytes).map(drop)),
        ("json", |bytes| JsonLines::<serde_json::Value>::parse(bytes).map(drop)),
    ];
    for (name, read) in readers {
        let error = read(&bomb).unwrap_err();
        assert!(matches!(error.fault(), Some(Fault::Bomb { .. })), "{name}: {error}");
    }
    // Vectors that grow take up to twice what is in them.
    assert!(LARGEST.load(Ordering::Relaxed) < 320 << 20, "{LARGEST:?}");
}
