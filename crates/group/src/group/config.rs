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
        let seconds = std::env::var("KILN_DEADLINE").ok().and_then(|s| s.trim().parse::<f64>().ok());
        let deadline = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).filter(|d| !d.is_zero());
        Config {
            deadline: deadline.unwrap_or(Duration::from_secs(60)),
            shards: None,
            threads: 1,
            flight: std::env::var_os("KILN_FLIGHT").map(PathBuf::from),
            rate: None,
        }
    }
}

/// The cores that all ranks of this machine have together: `KILN_CORES`, where a launcher has divided them, else those
/// that this process may use.
pub(super) fn cores() -> usize {
    let told = std::env::var("KILN_CORES").ok().and_then(|v| v.trim().parse().ok());
    told.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}
