//! What a device says about itself.

use kiln_ir::DType;

/// What a device is and can do. Where it computes and what it takes part in stay as they are for as long as it lives.
///
/// A device of one's own names what it is and takes the rest from [`DeviceInfo::new`]:
///
/// ```
/// # use kiln_device::{DeviceInfo, Processor};
/// let info = DeviceInfo { processor: Processor::Accelerator, ..DeviceInfo::new("npu", "npu-1") };
/// assert!(!info.uses_host_cores() && info.threads().is_none());
/// ```
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
    /// Where it computes; a decorator says where the device below it does.
    pub locality: Locality,
    /// What computes there.
    pub processor: Processor,
    /// It computes beside the program, not when somebody waits: then [`Observe::is_idle`](crate::Observe::is_idle) says
    /// when it has nothing to do.
    pub asynchronous: bool,
    /// It executes every operation itself, so that [`Driver::supports`](crate::Driver::supports) need not be asked.
    pub supports_all: bool,
    /// It computes values in memory that is chosen for them, see
    /// [`Placing::place_output`](crate::Placing::place_output).
    pub places_outputs: bool,
    /// The network in which it can fetch values from every other device ([`Peer::fetch`](crate::Peer::fetch)), if it is in
    /// one.
    pub peers: Option<&'static str>,
}

impl DeviceInfo {
    /// A device of this name and numerics as most begin: the only one of its kind, computing with all dtypes but packed
    /// ones, in this process, on one core, when somebody waits, and with no more to it.
    pub fn new(name: &str, numerics: &str) -> DeviceInfo {
        let both = Usage::STORAGE.and(Usage::ARITHMETIC);
        let usage = |d: DType| (d, if d.is_quantised() { Usage::STORAGE } else { both });
        DeviceInfo {
            name: name.into(),
            count: 1,
            usage: DType::ALL.map(usage).to_vec(),
            numerics: numerics.into(),
            locality: Locality::Process,
            processor: Processor::Cores { threads: 1 },
            asynchronous: false,
            supports_all: false,
            places_outputs: false,
            peers: None,
        }
    }

    /// What it can do with `dtype`.
    pub fn usage(&self, dtype: DType) -> Usage {
        self.usage.iter().find(|(d, _)| *d == dtype).map_or(Usage::NONE, |(_, u)| *u)
    }

    /// Whether it computes on a server.
    pub fn is_remote(&self) -> bool {
        matches!(self.locality, Locality::Server(_))
    }

    /// Whether it computes on the cores that the program runs on.
    pub fn uses_host_cores(&self) -> bool {
        matches!((&self.locality, &self.processor), (Locality::Process, Processor::Cores { .. }))
    }

    /// How many threads compute, of a device that computes on cores.
    pub fn threads(&self) -> Option<usize> {
        match self.processor {
            Processor::Cores { threads } => Some(threads),
            Processor::Accelerator => None,
        }
    }
}

/// Where a device computes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Locality {
    /// In this process.
    Process,
    /// On a server, named by its address.
    Server(String),
}

/// What a device computes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Processor {
    /// The cores of the host where it is, in that host's memory.
    Cores {
        /// Threads that compute.
        threads: usize,
    },
    /// Hardware beside them.
    Accelerator,
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
