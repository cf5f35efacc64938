//! What lies in the memory that all ranks see.

use crate::engine::SMALL;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Bytes kept of the error that ended the group.
pub const FAILURE: usize = 2048 - 16;
/// Bytes kept of the reason of a poisoned contribution.
pub const REASON: usize = 192;

/// Shared by all ranks: the failure, then the slots of each.
#[repr(C, align(64))]
pub struct Header {
    /// 0 none, 1 being written, 2 there.
    pub state: AtomicU32,
    pub length: AtomicU32,
    /// The last collective for which its writer has seen what everyone gave.
    pub after: AtomicU64,
    pub failure: UnsafeCell<[u8; FAILURE]>,
}

#[repr(C, align(64))]
pub struct RankSlots {
    pub slots: [Slot; 2],
    /// The last collective whose second phase this rank has finished.
    pub done: Line<AtomicU64>,
    /// The collective in which this rank stopped waiting for what others would announce.
    pub gave_up: Line<AtomicU64>,
    /// Changes when a parked owner should look again.
    pub wakeup: Line<AtomicU32>,
    pub parked: Line<AtomicU32>,
    /// One more than the number of collectives after which it left; 0 while it is here.
    pub left: Line<AtomicU64>,
}

/// Alone in its cache line.
#[repr(C, align(64))]
pub struct Line<T>(pub T);

#[repr(C, align(64))]
pub struct Slot {
    /// The sequence number, written last.
    pub stamp: AtomicU64,
    pub signature: UnsafeCell<[u64; 5]>,
    /// Of a large contribution: the buffer. 0 if the contribution is here.
    pub buffer: UnsafeCell<u64>,
    /// One more than the length of the reason if it is poisoned, otherwise 0.
    pub poison: UnsafeCell<u64>,
    /// Parts of a small contribution, one after another.
    pub data: UnsafeCell<[u8; SMALL]>,
    pub reason: UnsafeCell<[u8; REASON]>,
}

/// Bytes of the slots for that many ranks. All zero is a fresh start.
pub fn bytes(ranks: usize) -> usize {
    size_of::<Header>() + ranks * size_of::<RankSlots>()
}
