//! Bytes from an enemy: typed errors, no panic, and memory in proportion to what was sent.

use crate::any::program;
use crate::forms::{STREAM, small_table};
use kiln_ir::text::{parse, parse_meta, parse_op};
use kiln_ir::wire::{Reader, Table, WireError, Writer};
use kiln_ir::*;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Thread-locals are gone while a thread ends; its last allocations are of no interest.
        let _ = LIVE.try_with(|live| {
            live.set(live.get().wrapping_add(layout.size()));
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
        });
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _ = LIVE.try_with(|live| live.set(live.get().saturating_sub(layout.size())));
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Decodes, and checks how much was held at most meanwhile.
fn decode(bytes: &[u8]) -> Result<Vec<Item>, WireError> {
    LIVE.set(0);
    PEAK.set(0);
    let mut r = Reader::new(bytes);
    let result = Table::decode(&mut r).and_then(|table| table.read_items(&mut r));
    // The shortest item takes two bytes, and a list holds up to three times its items while it grows.
    let limit = 64 * 1024 + bytes.len() * 2 * size_of::<Item>();
    assert!(PEAK.get() <= limit, "{} bytes held for {} sent", PEAK.get(), bytes.len());
    result
}

fn encode(table: &Table, items: &[Item]) -> Vec<u8> {
    let mut w = Writer::default();
    table.encode(&mut w);
    table.items(items, &mut w);
    w.bytes
}

fn leb(value: u64) -> Vec<u8> {
    let mut w = Writer::default();
    w.int(value);
    w.bytes
}

#[test]
fn truncation_at_every_byte_is_seen() {
    let items = parse(STREAM).unwrap().items;
    for table in [small_table(), Table::local()] {
        let bytes = encode(&table, &items);
        assert_eq!(decode(&bytes).unwrap(), items);
        for n in 0..bytes.len() {
            assert_eq!(decode(&bytes[..n]), Err(WireError::Truncated), "{n} of {}", bytes.len());
        }
    }
}

#[test]
fn lengths_are_not_believed() {
    let bytes = encode(&small_table(), &parse(STREAM).unwrap().items);
    for at in 0..bytes.len() {
        let cap = (bytes.len() - at - 1) as u64;
        for length in [0, 1, cap, cap / 2, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX] {
            let _ = decode(&[&bytes[..at], &leb(length), &bytes[at + 1..]].concat());
        }
    }
    for count in [1 << 20, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX] {
        let table = encode(&small_table(), &[]);
        let bytes = [&table[..table.len() - 1], &leb(count)].concat();
        assert_eq!(decode(&bytes), Err(WireError::Truncated));
        assert_eq!(Reader::new(&leb(count)).text(), Err(WireError::Truncated));
        assert_eq!(Reader::new(&leb(count)).ids(), Err(WireError::Truncated));
    }
}

#[test]
fn overlong_integers_are_malformed() {
    assert_eq!(Reader::new(&[0xff; 11]).int(), Err(WireError::Malformed { what: "integer" }));
    assert_eq!(Reader::new(&leb(u64::MAX)).int(), Ok(u64::MAX));
    let mut over = leb(u64::MAX);
    over[9] = 2;
    assert_eq!(Reader::new(&over).int(), Err(WireError::Malformed { what: "integer" }));
}

#[test]
fn long_honest_streams_fit_the_bound() {
    let items: Vec<Item> = (0..50_000).map(|i| Item::Free(Id(i % 100))).collect();
    assert_eq!(decode(&encode(&small_table(), &items)).unwrap().len(), items.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn mutations_give_typed_errors(
        program in program(), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..6),
    ) {
        let mut bytes = encode(&Table::local(), &program.items);
        let table = encode(&Table::local(), &[]).len() - 1;
        for (at, byte, how) in edits {
            // Half of the edits go to the items, which are the smaller part.
            let range = if byte & 1 == 0 { 0..bytes.len() } else { table.min(bytes.len() - 1)..bytes.len() };
            let at = range.start + at.index(range.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
        }
        if let Ok(items) = decode(&bytes) {
            let program = Program { inputs: program.inputs, items };
            let _ = program.to_string();
            let _ = verify(program);
        }
    }

    #[test]
    fn noise_gives_typed_errors(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&noise);
        let with_table = [&encode(&small_table(), &[]), &noise[..]].concat();
        let _ = decode(&with_table[..]);
        let mut r = Reader::new(&noise);
        let _ = small_table().read_items(&mut r);
        let _ = Reader::new(&noise).meta();
    }

    #[test]
    fn text_never_panics(text in ".{0,80}", program in program(), cut in any::<prop::sample::Index>()) {
        let _ = (parse(&text), parse_op(&text), parse_meta(&text), Scalar::parse(&text));
        let printed = program.to_string();
        let at = (0..=cut.index(printed.len() + 1)).rev().find(|&i| printed.is_char_boundary(i)).unwrap_or(0);
        let _ = parse(&printed[..at]);
        let _ = parse(&format!("{}{text}{}", &printed[..at], &printed[at..]));
    }
}
