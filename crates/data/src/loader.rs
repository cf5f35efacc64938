//! The loader: a data set, and how its samples become batches.

use crate::epoch::{Batches, Epoch};
use crate::{Collate, DataError, Dataset, Random};
use kiln_tensor::Device;
use std::sync::Arc;
use std::time::Duration;

/// Batches of a data set: shuffled, transformed, loaded ahead by worker threads, and put on a device.
///
/// The order of an epoch follows from the seed, the epoch and the number of samples. Workers change nothing about it, and
/// ranks each take their part of the same batches.
///
/// ```
/// use kiln_data::DataLoader;
/// use kiln_tensor::Device;
///
/// let samples: Vec<([f32; 2], i64)> = (0..10).map(|i| ([i as f32, 0.5], i % 2)).collect();
/// let train = DataLoader::new(samples).batch(4).shuffle(1).workers(2);
/// for epoch in 0..2 {
///     for batch in train.epoch(epoch).on(&Device::default()) {
///         let (x, y) = batch?;
///         assert_eq!((x.dim(0), x.dim(1)), (y.dim(0), 2));
///     }
/// }
/// # Ok::<(), kiln_data::DataError>(())
/// ```
///
/// A damaged sample, or one whose code panics, is an `Err` in the place of its batch that names the sample and its file;
/// a program that takes the next batch goes on without it.
pub struct DataLoader<S> {
    pub(crate) source: Arc<dyn Source<S>>,
    pub(crate) plan: Plan,
}

/// How samples become batches.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub batch: usize,
    pub shuffle: bool,
    pub seed: u64,
    pub drop_last: bool,
    pub shard: usize,
    pub shards: usize,
    pub padding: Option<f64>,
    pub workers: usize,
    pub prefetch: usize,
    pub timeout: Option<Duration>,
}

/// A data set with its transforms.
pub(crate) trait Source<S>: Send + Sync {
    fn len(&self) -> usize;
    fn get(&self, index: usize, random: &mut Random) -> Result<S, DataError>;
    fn origin(&self, index: usize) -> Option<String>;
}

impl<S: 'static> DataLoader<S> {
    /// Batches of one sample, in order, loaded when they are asked for.
    pub fn new(dataset: impl Dataset<Sample = S> + 'static) -> DataLoader<S> {
        let plan = Plan {
            batch: 1,
            shuffle: false,
            seed: 0,
            drop_last: false,
            shard: 0,
            shards: 1,
            padding: None,
            workers: 0,
            prefetch: 2,
            timeout: None,
        };
        DataLoader { source: Arc::new(Plain(dataset)), plan }
    }

    /// Samples in a batch; the last one of an epoch has what is left.
    ///
    /// # Panics
    /// If it is 0.
    #[doc(alias("batch_size"))]
    #[track_caller]
    pub fn batch(mut self, samples: usize) -> Self {
        assert!(samples > 0, "a batch needs at least one sample");
        self.plan.batch = samples;
        self
    }

    /// Another order in each epoch, which follows from this seed. The transforms' random numbers follow from it too.
    ///
    /// # Panics
    /// If there are more than `u32::MAX` samples.
    #[track_caller]
    pub fn shuffle(mut self, seed: u64) -> Self {
        let len = self.source.len();
        assert!(u32::try_from(len).is_ok(), "{len} samples are more than a 32-bit index can name");
        (self.plan.shuffle, self.plan.seed) = (true, seed);
        self
    }

    /// Threads that load ahead. With 0, the default, a batch is loaded by the thread that asks for it, when it does.
    #[doc(alias("num_workers"))]
    pub fn workers(mut self, threads: usize) -> Self {
        self.plan.workers = threads;
        self
    }

    /// Batches that each worker may be ahead, 2 by default. One more lies on the device.
    ///
    /// # Panics
    /// If it is 0.
    #[doc(alias("prefetch_factor"))]
    #[track_caller]
    pub fn prefetch(mut self, batches: usize) -> Self {
        assert!(batches > 0, "prefetch: a worker needs room for one batch");
        self.plan.prefetch = batches;
        self
    }

    /// Fills samples that are shorter than the longest of their batch up with this value, at the end of each axis.
    /// Without it, samples of different shapes are an error.
    #[doc(alias("pad_sequence"))]
    pub fn pad(mut self, value: f64) -> Self {
        self.plan.padding = Some(value);
        self
    }

    /// Leaves out the last batch of an epoch if it is short.
    pub fn drop_last(mut self) -> Self {
        self.plan.drop_last = true;
        self
    }

    /// Takes the `shard`-th of `shards` equal parts of each batch: this rank's, or one logical shard's. All of them see
    /// the same batches, whatever their number, and together have every sample once. A last batch with fewer samples
    /// than shards is left out, for all of them.
    ///
    /// # Panics
    /// If there are not so many shards.
    #[doc(alias("DistributedSampler"))]
    #[track_caller]
    pub fn shard(mut self, shard: usize, shards: usize) -> Self {
        assert!(shard < shards, "shard: there is no shard {shard} of {shards}");
        (self.plan.shard, self.plan.shards) = (shard, shards);
        self
    }

    /// Gives up a batch that workers do not bring in this time, with [`DataError::Timeout`]. Without it, a data set that
    /// never answers is waited for. Without workers it has no effect.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.plan.timeout = Some(limit);
        self
    }

    /// Applies `f` to each sample when it is loaded, by the workers. Its random numbers depend on the seed of
    /// [`DataLoader::shuffle`], the epoch and the sample alone.
    ///
    /// ```
    /// use kiln_data::{DataLoader, Image};
    ///
    /// let images = vec![(Image::new(vec![0.5; 64], 1, 8, 8), 3i64)];
    /// let train = DataLoader::new(images)
    ///     .transform(|(image, label), random| (image.pad(2).random_crop(8, 8, random).random_flip(random), label));
    /// # assert_eq!(train.len(), 1);
    /// ```
    #[doc(alias("transforms", "Compose"))]
    pub fn transform<T: 'static>(
        self,
        f: impl Fn(S, &mut Random) -> T + Send + Sync + 'static,
    ) -> DataLoader<T> {
        self.try_transform(move |sample, random| Ok(f(sample, random)))
    }

    /// Like [`DataLoader::transform`], where it can fail.
    pub fn try_transform<T: 'static>(
        self,
        f: impl Fn(S, &mut Random) -> Result<T, DataError> + Send + Sync + 'static,
    ) -> DataLoader<T> {
        DataLoader { source: Arc::new(Transformed { from: self.source, f }), plan: self.plan }
    }

    /// The number of samples in the data set.
    pub fn len(&self) -> usize {
        self.source.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of batches in an epoch.
    pub fn batches(&self) -> usize {
        self.plan.batches(self.len())
    }
}

impl<S: Collate> DataLoader<S> {
    /// An epoch: every sample once, in the epoch's order.
    pub fn epoch(&self, epoch: u64) -> Epoch<'_, S> {
        Epoch::new(self, epoch)
    }

    /// The batches of epoch 0 on a device, for data that is not shuffled.
    pub fn on(&self, device: &Device) -> Batches<S> {
        self.epoch(0).on(device)
    }
}

impl Plan {
    /// Batches in so many samples.
    pub fn batches(&self, samples: usize) -> usize {
        let rest = samples % self.batch;
        let short = rest > 0 && !self.drop_last && rest >= self.shards;
        let whole = if self.batch >= self.shards { samples / self.batch } else { 0 };
        whole + usize::from(short)
    }
}

impl<S> Clone for DataLoader<S> {
    fn clone(&self) -> Self {
        DataLoader { source: self.source.clone(), plan: self.plan.clone() }
    }
}

impl<S> std::fmt::Debug for DataLoader<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DataLoader of {} samples, {:?}", self.source.len(), self.plan)
    }
}

struct Plain<D>(D);

impl<D: Dataset> Source<D::Sample> for Plain<D> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize, _: &mut Random) -> Result<D::Sample, DataError> {
        self.0.sample(index)
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.0.origin(index)
    }
}

struct Transformed<S, F> {
    from: Arc<dyn Source<S>>,
    f: F,
}

impl<S, T, F: Fn(S, &mut Random) -> Result<T, DataError> + Send + Sync> Source<T> for Transformed<S, F> {
    fn len(&self) -> usize {
        self.from.len()
    }

    fn get(&self, index: usize, random: &mut Random) -> Result<T, DataError> {
        let sample = self.from.get(index, random)?;
        (self.f)(sample, random)
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.from.origin(index)
    }
}
