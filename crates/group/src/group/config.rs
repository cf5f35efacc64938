//! The settings of a group.

use std::path::PathBuf;
use std::time::Duration;

/// The settings of a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long a collective waits for the other ranks.
    pub deadline: Duration,
    /// Logical shards of the job; the number of ranks if not set.
    pub shards: Option<usize>,
    /// Threads that each rank computes with. Waiting spins only if all ranks' threads have a core of their own.
    pub threads: usize,
    /// Where the flight record goes when a group fails.
    pub flight: Option<PathBuf>,
    /// Bytes a second that collectives may move at most: tries out a slower link than there is.
    pub rate: Option<u64>,
}

impl Default for Config {
    /// 60 s or what `KILN_DEADLINE` says, as many shards as ranks, one thread, the folder that `KILN_FLIGHT` names.
    fn default() -> Config {
        Config {
            deadline: kiln_env::DEADLINE.get().unwrap_or(Duration::from_secs(60)),
            shards: None,
            threads: 1,
            flight: kiln_env::FLIGHT.get(),
            rate: None,
        }
    }
}

/// The cores that all ranks of this machine have together: `KILN_CORES`, where a launcher has divided them, else those
/// that this process may use.
pub(super) fn cores() -> usize {
    kiln_env::CORES.get().unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}
