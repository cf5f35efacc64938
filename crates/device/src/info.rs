//! What a device says about itself.

use kiln_ir::DType;

/// What a device is and can do.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceInfo {
    /// Its kind, with what is around it: `profile<remote<fusion<cpu>>>`.
    pub name: String,
    /// How many devices of this kind can be opened where it is: in this process, or of its server.
    pub count: usize,
    /// What it can do with each dtype.
    pub usage: Vec<(DType, Usage)>,
    /// Names everything that decides the bits of a result; equal names, equal bits.
    pub numerics: String,
    /// Threads that compute.
    pub threads: usize,
}

impl DeviceInfo {
    /// What it can do with `dtype`.
    pub fn usage(&self, dtype: DType) -> Usage {
        self.usage.iter().find(|(d, _)| *d == dtype).map_or(Usage::NONE, |(_, u)| *u)
    }
}

/// Where a device computes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Locality {
    /// In this process, in memory that it can lend.
    Process,
    /// On a server, named by its address.
    Server(String),
}

/// What a device can do with a dtype, as a set.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage(u8);

impl Usage {
    /// Nothing.
    pub const NONE: Usage = Usage(0);
    /// Values can be stored and moved.
    pub const STORAGE: Usage = Usage(1);
    /// Values can be computed with.
    pub const ARITHMETIC: Usage = Usage(2);
    /// Computing with them uses hardware made for it.
    pub const ACCELERATED: Usage = Usage(4);

    /// Both sets together.
    pub const fn and(self, other: Usage) -> Usage {
        Usage(self.0 | other.0)
    }

    /// The set as bits, for the wire.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set of these bits; unknown ones are dropped.
    pub const fn from_bits(bits: u8) -> Usage {
        Usage(bits & 7)
    }

    /// The names of what is in it.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let all = [
            (Usage::STORAGE, "storage"),
            (Usage::ARITHMETIC, "arithmetic"),
            (Usage::ACCELERATED, "accelerated"),
        ];
        all.into_iter().filter(move |(usage, _)| self.has(*usage)).map(|(_, name)| name)
    }

    /// Whether all of `other` is in this set.
    pub const fn has(self, other: Usage) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::fmt::Debug for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

/// Bytes and values that a device holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    /// Bytes of buffers in use, persistent ones included.
    pub live_bytes: usize,
    /// Buffers in use.
    pub live_buffers: usize,
    /// Values that can be read.
    pub values: usize,
    /// Bytes kept for reuse.
    pub cached_bytes: usize,
    /// Bytes in use outside the arena.
    pub persistent_bytes: usize,
    /// The most bytes ever in use.
    pub peak_bytes: usize,
    /// Calls to the system allocator so far.
    pub system_allocs: u64,
    /// The most bytes it may hold.
    pub limit: Option<usize>,
}
