//! Tests of the arena.

use super::*;

const MIB: usize = 1 << 20;

#[test]
#[cfg(target_os = "linux")]
fn small_blocks_share_a_mapping_that_goes_with_the_last() {
    let arena = Arena::new(None);
    let alloc = |bytes, place| arena.alloc(bytes, place).unwrap();
    let size = class_size(300 << 10).unwrap();
    let mut blocks: Vec<Buffer> = (0..40).map(|_| alloc(300 << 10, Place::Reuse)).collect();
    let place = |b: &Buffer| b.as_ptr().addr();
    let follow = blocks.windows(2).filter(|pair| place(&pair[0]) + size == place(&pair[1])).count();
    assert!(follow > 35, "{follow} of 40 follow the one before");
    for (i, block) in blocks.iter_mut().enumerate() {
        assert!(block.as_slice().iter().all(|&b| b == 0) && place(block).is_multiple_of(ALIGN));
        block.as_mut_slice().fill(i as u8 + 1);
    }
    let home = |block: &Buffer| Arc::downgrade(block.block.home.as_ref().unwrap());
    let (first, last) = (home(&blocks[0]), home(&blocks[39]));
    let kept = blocks.split_off(39);
    drop(blocks);
    arena.cleanup();
    assert!(first.upgrade().is_none() && last.upgrade().is_some());
    assert!(kept[0].as_slice().iter().all(|&b| b == 40));
    drop(kept);
    arena.cleanup();
    assert!(last.upgrade().is_none());
    assert!(alloc(300 << 10, Place::Persistent).block.home.is_none());
    assert!(alloc(3 << 20, Place::Reuse).block.home.is_none());
    assert!(alloc(4 << 10, Place::Reuse).block.home.is_none());
}

#[test]
fn freed_block_comes_back() {
    let arena = Arena::new(None);
    for bytes in [1, 100, 1000, MIB, 3 * MIB] {
        let before = arena.stats().system_allocs;
        let first = arena.alloc(bytes, Place::Reuse).unwrap();
        let address = first.as_ptr() as usize;
        assert_eq!(address % ALIGN, 0);
        drop(first);
        let second = arena.alloc(bytes, Place::Reuse).unwrap();
        assert_eq!(second.as_ptr() as usize, address);
        assert_eq!(arena.stats().system_allocs, before + 1);
    }
}

#[test]
fn fresh_memory_is_zero_and_all_of_it_writable() {
    for place in [Place::Reuse, Place::Persistent] {
        for bytes in [0, 1, 63, 100, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3] {
            let mut buffer = Arena::new(None).alloc(bytes, place).unwrap();
            assert_eq!(buffer.len(), bytes);
            assert!(buffer.as_slice().iter().all(|&b| b == 0));
            buffer.as_mut_slice().fill(7);
            assert!(buffer.as_slice().iter().all(|&b| b == 7));
        }
    }
}

#[test]
fn limit_drops_caches_first_then_refuses() {
    let arena = Arena::new(Some(4 * MIB));
    drop(arena.alloc(2 * MIB, Place::Reuse).unwrap());
    assert_eq!(arena.stats().cached_bytes, 2 * MIB);
    let big = arena.alloc(3 * MIB, Place::Reuse).unwrap();
    assert_eq!(arena.stats().cached_bytes, 0);
    let error = arena.alloc(MIB + 1, Place::Reuse).unwrap_err();
    assert_eq!(error, Exhausted { asked: MIB + 1, free: MIB, limit: Some(4 * MIB) });
    let rest = arena.alloc(MIB, Place::Persistent).unwrap();
    assert!(arena.alloc(1, Place::Reuse).is_err());
    assert!(arena.alloc(0, Place::Reuse).is_ok());
    drop((big, rest));
    arena.set_limit(Some(MIB));
    assert_eq!(arena.stats().cached_bytes, 0);
    assert!(arena.alloc(2 * MIB, Place::Reuse).is_err());
    arena.set_limit(None);
    assert!(arena.alloc(2 * MIB, Place::Reuse).is_ok());
}

#[test]
fn absurd_sizes_are_refused() {
    let arena = Arena::new(None);
    for bytes in [isize::MAX as usize, usize::MAX, MAX_BYTES, MAX_BYTES - 1, 1 << 60] {
        for place in [Place::Reuse, Place::Persistent] {
            assert_eq!(arena.alloc(bytes, place).unwrap_err().asked, bytes);
        }
    }
    let stats = arena.stats();
    assert_eq!((stats.live_bytes, stats.live_buffers), (0, 0));
    assert_eq!((stats.persistent_bytes, stats.persistent_buffers), (0, 0));
}

#[test]
fn persistent_is_counted_apart_and_not_cached() {
    let arena = Arena::new(None);
    let weights = arena.alloc(1001, Place::Persistent).unwrap();
    let value = arena.alloc(1001, Place::Reuse).unwrap();
    let stats = arena.stats();
    assert_eq!((stats.persistent_bytes, stats.persistent_buffers), (1001, 1));
    assert_eq!((stats.live_bytes, stats.live_buffers), (1024, 1));
    drop((weights, value));
    let stats = arena.stats();
    assert_eq!((stats.persistent_bytes, stats.live_bytes, stats.cached_bytes), (0, 0, 1024));
    assert_eq!(stats.peak_bytes, 2025);
    arena.reset_peak();
    assert_eq!(arena.stats().peak_bytes, 0);
    arena.cleanup();
    assert_eq!(arena.stats().cached_bytes, 0);
}

#[test]
fn threads_leave_nothing_live() {
    let arena = Arena::new(Some(64 * MIB));
    std::thread::scope(|s| {
        for seed in 0..4usize {
            let arena = &arena;
            s.spawn(move || {
                let mut held = Vec::new();
                for i in 0..2000usize {
                    let bytes = (i * 7919 + seed * 104_729) % 40_000;
                    let place = if i % 5 == 0 { Place::Persistent } else { Place::Reuse };
                    let mut buffer = arena.alloc(bytes, place).unwrap();
                    buffer.as_mut_slice().fill(seed as u8);
                    held.push(buffer);
                    if i % 3 == 0 {
                        let out = held.swap_remove(i % held.len());
                        assert!(out.as_slice().iter().all(|&b| b == seed as u8));
                    }
                    if held.len() > 50 {
                        held.clear();
                    }
                }
            });
        }
    });
    let stats = arena.stats();
    assert_eq!((stats.live_bytes, stats.live_buffers, stats.persistent_bytes), (0, 0, 0));
    assert!(stats.cached_bytes > 0 && stats.peak_bytes > 0);
}
