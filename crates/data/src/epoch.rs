//! An epoch under way: its order, the part of it that is still to come, and its batches.

use crate::loader::{Plan, Source};
use crate::workers::{Missing, Workers};
use crate::{Collate, DataError, DataLoader, Misfit, Random};
use kiln_tensor::Device;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// One pass over a data set, see [`DataLoader::epoch`].
#[must_use = "an epoch is loaded by `on`"]
pub struct Epoch<'a, S> {
    loader: &'a DataLoader<S>,
    epoch: u64,
    from: usize,
}

impl<'a, S: Collate> Epoch<'a, S> {
    pub(crate) fn new(loader: &'a DataLoader<S>, epoch: u64) -> Epoch<'a, S> {
        Epoch { loader, epoch, from: 0 }
    }

    /// Goes on where [`Batches::position`] was taken: so many samples of the epoch's order are passed over, without
    /// loading them. Every sample that is left comes as it would have come.
    ///
    /// # Panics
    /// If there are not so many samples.
    #[track_caller]
    pub fn resume(mut self, position: usize) -> Self {
        let len = self.loader.len();
        assert!(position <= len, "resume: sample {position} of an epoch of {len}");
        self.from = position;
        self
    }

    /// The number of batches that are to come.
    pub fn batches(&self) -> usize {
        self.loader.plan.batches(self.loader.len() - self.from)
    }

    /// Begins to load, and gives the batches as tensors on a device.
    #[doc(alias("pin_memory", "to"))]
    pub fn on(self, device: &Device) -> Batches<S> {
        let plan = self.loader.plan.clone();
        let len = self.loader.len();
        let order = plan.shuffle.then(|| crate::batches::order(len as u32, plan.seed, self.epoch));
        let job = Arc::new(Job {
            source: self.loader.source.clone(),
            batches: self.batches(),
            order,
            len,
            from: self.from,
            epoch: self.epoch,
            device: device.clone(),
            plan,
        });
        let workers = (job.plan.workers > 0).then(|| {
            let (threads, window) = (job.plan.workers, job.plan.workers.saturating_mul(job.plan.prefetch));
            let (work, batches) = (job.clone(), job.batches);
            Workers::start(threads.min(batches), window, batches, move |at| work.load(at))
        });
        Batches { job, workers, loaded: 0, given: 0, ahead: None }
    }
}

/// The batches of an epoch on a device.
///
/// With workers, the upload of the next batch is under way while a batch is worked on.
pub struct Batches<S: Collate> {
    job: Arc<Job<S>>,
    workers: Option<Workers<Result<S::Packed, DataError>>>,
    /// Batches that were taken from the workers.
    loaded: usize,
    /// Batches that were given out.
    given: usize,
    ahead: Option<Result<S::Batch, DataError>>,
}

impl<S: Collate> Batches<S> {
    /// The samples of the epoch's order that are behind, over all shards: what [`Epoch::resume`] takes. A batch counts
    /// once it is given out, also if it was an error.
    pub fn position(&self) -> usize {
        self.job.places(self.given).start
    }

    /// Loads the next batch and places it on the device.
    fn load(&mut self) -> Result<S::Batch, DataError> {
        let at = self.loaded;
        self.loaded += 1;
        let packed = match &mut self.workers {
            None => self.job.load(at),
            Some(workers) => match workers.take(self.job.plan.timeout) {
                Ok(packed) => packed,
                Err(missing) => {
                    let timeout = self.job.plan.timeout.unwrap_or_default();
                    // Nobody will bring what comes after it either.
                    self.loaded = self.job.batches;
                    Err(match missing {
                        Missing::Late => DataError::Timeout { batch: at, waited: timeout },
                        Missing::Lost => DataError::Panicked { message: "a worker ended".into() },
                    })
                }
            },
        };
        packed.map(|packed| S::place(packed, &self.job.device))
    }
}

impl<S: Collate> Iterator for Batches<S> {
    type Item = Result<S::Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batches = self.job.batches;
        if self.ahead.is_none() && self.loaded == batches {
            return None;
        }
        let batch = match self.ahead.take() {
            Some(batch) => batch,
            None => self.load(),
        };
        if self.workers.is_some() && self.loaded < batches {
            self.ahead = Some(self.load());
        }
        self.given += 1;
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.job.batches - self.loaded + usize::from(self.ahead.is_some());
        (0, Some(left))
    }
}

/// What workers need to know of an epoch.
struct Job<S> {
    source: Arc<dyn Source<S>>,
    plan: Plan,
    /// The shuffled order; without it, that of the data set.
    order: Option<Vec<u32>>,
    len: usize,
    from: usize,
    batches: usize,
    epoch: u64,
    device: Device,
}

impl<S: Collate> Job<S> {
    /// The places of a batch in the epoch's order, all shards together.
    fn places(&self, batch: usize) -> std::ops::Range<usize> {
        let at = |batch: usize| batch.saturating_mul(self.plan.batch).saturating_add(self.from).min(self.len);
        at(batch)..at(batch + 1)
    }

    /// The samples of this shard in a batch.
    fn indices(&self, batch: usize) -> Vec<usize> {
        let all = self.places(batch);
        let at = |shard: usize| all.start + all.len() * shard / self.plan.shards;
        let own = at(self.plan.shard)..at(self.plan.shard + 1);
        match &self.order {
            Some(order) => order[own].iter().map(|&index| index as usize).collect(),
            None => own.collect(),
        }
    }

    fn load(&self, batch: usize) -> Result<S::Packed, DataError> {
        let indices = self.indices(batch);
        let mut samples = Vec::with_capacity(indices.len());
        for &index in &indices {
            let mut random = Random::of(self.plan.seed, &[self.epoch, index as u64]);
            let got = caught(|| self.source.get(index, &mut random));
            samples.push(got.map_err(|cause| self.sample(index, cause))?);
        }
        let packed = caught(|| Ok(S::pack(samples, self.plan.padding)));
        let packed = packed.and_then(|packed| packed.map_err(|misfit| self.misfit(&indices, misfit)));
        let staged = packed.and_then(|packed| caught(|| Ok(S::stage(packed, &self.device))));
        staged.map_err(|cause| match cause {
            DataError::Sample { .. } => cause,
            cause => DataError::Batch { batch, samples: indices, cause: Box::new(cause) },
        })
    }

    fn sample(&self, index: usize, cause: DataError) -> DataError {
        let origin = caught(|| Ok(self.source.origin(index))).ok().flatten();
        DataError::Sample { index, origin, cause: Box::new(cause) }
    }

    fn misfit(&self, indices: &[usize], misfit: Misfit) -> DataError {
        match misfit {
            Misfit::Shape { at, first, found } => match indices.get(at) {
                Some(&index) => self.sample(index, DataError::Shape { first, found }),
                None => DataError::Shape { first, found },
            },
            Misfit::TooLarge { samples, shape } => DataError::TooLarge { samples, shape },
        }
    }
}

/// Runs code of others: what it panics with is an error.
fn caught<T>(f: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
        // A payload whose drop panics would unwind here.
        std::mem::forget(panic);
        Err(DataError::Panicked { message: message.unwrap_or_else(|| "without a word".into()) })
    })
}
