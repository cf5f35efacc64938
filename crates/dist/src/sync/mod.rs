//! Gradients combined over workers while backward still runs.
//!
//! Parameters lie in buckets. A gradient is handed over when it is final; a full bucket ends the recorded window, so
//! that the device gets to it early, and its exchange starts as soon as the device has computed it, on the group's own
//! thread, while backward goes on. One wait before the optimiser collects the results, which are views of the buckets.
//! What is added to what follows from the job's shards alone, so the bits are those of one worker.
//!
//! Between ranks a bucket lies in the group's memory. A device on this host computes gradients in their places there,
//! where it can; others are copied ([`Stats::copied`]). The results are read from there without a copy. Little is computed
//! after the last large bucket that could cover its exchange, so that leaves in ranges, while its rows are computed.
//!
//! Ranks of one machine that compute with one thread each and leave no core free have nothing to hide an exchange behind
//! ([`Group::overlaps`]): they compute all buckets first, then exchange them, on the thread that waits.

mod compress;
mod fill;
mod moves;
mod plan;
mod round;
mod start;
mod state;

pub use compress::{Bf16, Compress};
pub(crate) use fill::{Lent, Piece, fill};
pub use round::{Reduced, Round, Stepped};

use crate::Error;
use kiln_group::{Claim, Group, Layout, Reduce};
use kiln_tensor::Device;
use plan::Plan;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The settings of a [`GradientSync`].
#[derive(Clone)]
pub struct Config {
    /// Tells apart several that run in one group at a time.
    pub name: String,
    /// What becomes of the shards' gradients.
    pub combine: Combine,
    /// Bytes of the first bucket: small, so that the exchange starts early.
    pub first: usize,
    /// Bytes of the others.
    pub others: usize,
    /// How gradients travel, if not as they are.
    pub compress: Option<Arc<dyn Compress>>,
    /// Steps between comparisons of all ranks' parameters; none for never.
    pub check: Option<u64>,
    /// What is done about parameters that a shard's loss does not depend on.
    pub unused: Unused,
    /// How long anything waits where the group is made here.
    pub deadline: Duration,
}

impl Default for Config {
    /// Sums, buckets of 1 MiB and then 25 MiB, a check every 1,000 steps; unused parameters are an error.
    fn default() -> Config {
        Config {
            name: "gradients".into(),
            combine: Combine::Sum,
            first: 1 << 20,
            others: 25 << 20,
            compress: None,
            check: Some(1000),
            unused: Unused::Refused,
            deadline: kiln_group::Config::default().deadline,
        }
    }
}

/// What becomes of the shards' gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Combine {
    /// Their sum: for losses that are weighted by their share of the samples, see [`Round::backward_of`].
    Sum,
    /// Their sum over the number of shards.
    Mean,
}

impl Combine {
    fn reduce(self) -> Reduce {
        match self {
            Combine::Sum => Reduce::Sum,
            Combine::Mean => Reduce::Mean,
        }
    }
}

/// What is done about parameters that a shard's loss does not depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unused {
    /// The step fails on every rank with their names.
    Refused,
    /// They count as zeros; one that no shard used gets no gradient and is named in [`Reduced::unused`].
    Zeros,
}

/// Combines the gradients of all workers. A handle: clones share one; the last to go leaves.
///
/// Buffers, such as running statistics, take part: every shard of a round begins with what they were when it began, and
/// afterwards they are moved by the mean of the shards' changes, weighted by samples where [`Round::backward_of`] tells them.
/// So a model's forward pass belongs between [`GradientSync::begin`] and the shard's backward.
///
/// ```
/// use kiln_dist::{GradientSync, SyncConfig};
/// use kiln_nn::{Linear, Module, Sgd};
/// use kiln_tensor::{Device, Tensor};
///
/// // Two workers of this program, a device each; `GradientSync::start` does the same between processes.
/// let devices = [Device::open("cpu:0")?, Device::open("cpu:1")?];
/// let mut models = devices.each_ref().map(|device| Linear::new(4, 2, device));
/// let [a, b] = &mut models;
/// let syncs = GradientSync::over(&mut [a, b], 2, SyncConfig::default())?;
/// let mut optimizers = [Sgd::new(0.1), Sgd::new(0.1)];
/// for step in 0..3 {
///     let mut rounds = Vec::new();
///     for (worker, sync) in syncs.iter().enumerate() {
///         let mut round = sync.begin(&models[worker])?;
///         for shard in round.shards() {
///             let x = Tensor::full([8, 4], (step * 2 + shard) as f64, kiln_tensor::DType::F32, &devices[worker]);
///             let loss = models[worker].forward(&x).square().mean(());
///             round.backward_of(&loss, 8, 16)?;
///         }
///         rounds.push(round);
///     }
///     for (worker, round) in rounds.into_iter().enumerate() {
///         round.step(&mut models[worker], &mut optimizers[worker])?;
///     }
/// }
/// assert_eq!(models[0].weight.to_vec::<f32>()?, models[1].weight.to_vec::<f32>()?);
/// syncs.iter().try_for_each(|sync| sync.close())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct GradientSync(Arc<Inner>);

struct Inner {
    config: Config,
    layout: Layout,
    rank: usize,
    way: Way,
    /// All ranks are of this process.
    together: bool,
    state: Mutex<State>,
    /// As in [`Stats::copied`].
    copied: Arc<AtomicU64>,
}

/// How contributions reach the others.
enum Way {
    /// There are no others.
    Alone,
    /// Through a group of ranks, which nobody else uses.
    Ranks(Group),
    /// From device to device, as recorded moves.
    Moves(Arc<moves::Moves>),
}

#[derive(Default)]
struct State {
    plan: Option<Arc<Plan>>,
    /// Rounds begun so far.
    rounds: u64,
    /// A round is under way.
    open: bool,
    /// What it computes on.
    device: Option<Device>,
    closed: bool,
    claim: Option<Claim>,
    stats: Stats,
}

/// How contributions reach the other workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Route {
    /// There are no others.
    #[default]
    Alone,
    /// Between ranks, through a group.
    Ranks,
    /// From device to device, by moves.
    Moves,
}

/// What a sync has done so far, on this rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// How contributions reach the others.
    pub route: Route,
    /// Steps.
    pub rounds: u64,
    /// Buckets exchanged.
    pub buckets: u64,
    /// Buckets that left while the last shard's backward had yet to make other gradients.
    pub early: u64,
    /// Steps of which something is still kept for other workers, where devices exchange by moves.
    pub open: u64,
    /// Bytes copied into buckets: of gradients that the device did not compute in their places.
    pub copied: u64,
    /// How long [`Round::wait`] and [`Round::step`] have waited.
    pub waited: Duration,
    /// How long each rank was waited for, as the last to come.
    pub late: Vec<Duration>,
}

impl GradientSync {
    /// For one worker that holds all shards. With one shard, gradients are given back as backward made them.
    pub fn alone(shards: usize, config: Config) -> Result<GradientSync, Error> {
        Ok(GradientSync::new(config, Layout::new(shards, 1)?, 0, Way::Alone, false, None))
    }

    fn new(
        config: Config,
        layout: Layout,
        rank: usize,
        way: Way,
        together: bool,
        claim: Option<Claim>,
    ) -> GradientSync {
        let state = Mutex::new(State { claim, ..State::default() });
        GradientSync(Arc::new(Inner { config, layout, rank, way, together, state, copied: Arc::default() }))
    }

    /// Who holds which shards.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// This worker's place.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// What has been done so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.0.lock().stats.clone();
        stats.copied = self.0.copied.load(Ordering::Relaxed);
        match &self.0.way {
            Way::Alone => {}
            Way::Ranks(group) => (stats.route, stats.late) = (Route::Ranks, group.traffic().waited),
            Way::Moves(moves) => (stats.route, stats.open) = (Route::Moves, moves.open() as u64),
        }
        stats
    }

    /// Finishes or fails what is pending, by the deadline. Later rounds are refused. Closing again does nothing.
    pub fn close(&self) -> Result<(), Error> {
        let device = {
            let mut state = self.0.lock();
            if state.closed {
                return Ok(());
            }
            state.closed = true;
            state.claim = None;
            state.device.take()
        };
        match &self.0.way {
            Way::Ranks(group) => {
                // What a round has recorded and not waited for.
                device.iter().for_each(|device| device.sync_async().start());
                Ok(group.close()?)
            }
            Way::Alone => Ok(()),
            Way::Moves(moves) => {
                moves.close(self.0.rank);
                Ok(())
            }
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl std::fmt::Debug for GradientSync {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { config, layout, rank, .. } = &*self.0;
        let (ranks, shards) = (layout.ranks(), layout.shards());
        write!(f, "GradientSync({}, rank {rank} of {ranks}, {shards} shards)", config.name)
    }
}
