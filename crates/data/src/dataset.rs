//! Data sets: index → sample, or an error that names what is wrong.

use crate::DataError;
use std::sync::Arc;

/// A number of samples, each found by its index. Workers ask for them from several threads.
///
/// A vector of samples is one, and so is a reference to one. Of one's own:
///
/// ```
/// use kiln_data::{DataError, Dataset};
///
/// struct Squares;
///
/// impl Dataset for Squares {
///     type Sample = (f32, f32);
///
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn sample(&self, index: usize) -> Result<(f32, f32), DataError> {
///         let x = index as f32 / 100.0;
///         Ok((x, x * x))
///     }
/// }
///
/// assert_eq!(Squares.sample(50).unwrap(), (0.5, 0.25));
/// ```
///
/// There is no iterable data set of unknown length: what is resumed to the sample and split between ranks needs indices.
pub trait Dataset: Send + Sync {
    /// A sample: what [`Collate`](crate::Collate) can make batches of, or what a transform makes that from.
    type Sample;

    /// The number of samples.
    fn len(&self) -> usize;

    /// The sample at `index`, which is below [`Dataset::len`].
    fn sample(&self, index: usize) -> Result<Self::Sample, DataError>;

    /// Where a sample comes from, for errors: its file, its line.
    fn origin(&self, _index: usize) -> Option<String> {
        None
    }

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The data set of what `f` makes of each sample. What needs random numbers goes into
    /// [`DataLoader::transform`](crate::DataLoader::transform).
    fn map<T, F: Fn(Self::Sample) -> T + Send + Sync>(self, f: F) -> Map<Self, F>
    where
        Self: Sized,
    {
        Map { from: self, f }
    }

    /// Like [`Dataset::map`], where it can fail.
    fn try_map<T, F: Fn(Self::Sample) -> Result<T, DataError> + Send + Sync>(self, f: F) -> TryMap<Self, F>
    where
        Self: Sized,
    {
        TryMap { from: self, f }
    }

    /// The samples at these indices, in this order.
    ///
    /// # Panics
    /// If one of them is not there.
    #[doc(alias("Subset", "random_split"))]
    #[track_caller]
    fn subset(self, indices: impl IntoIterator<Item = usize>) -> Subset<Self>
    where
        Self: Sized,
    {
        let indices: Vec<usize> = indices.into_iter().collect();
        if let Some(beyond) = indices.iter().find(|&&index| index >= self.len()) {
            panic!("subset: there is no sample {beyond}, there are {}", self.len());
        }
        Subset { from: self, indices }
    }

    /// This set's samples, then the other's.
    #[doc(alias("ConcatDataset"))]
    fn chain<D: Dataset<Sample = Self::Sample>>(self, other: D) -> Chain<Self, D>
    where
        Self: Sized,
    {
        Chain { first: self, second: other }
    }

    /// Pairs of this set's samples and the other's.
    ///
    /// # Panics
    /// If they are not of one length.
    #[doc(alias("TensorDataset", "StackDataset"))]
    #[track_caller]
    fn zip<D: Dataset>(self, other: D) -> Zip<Self, D>
    where
        Self: Sized,
    {
        let (first, second) = (self.len(), other.len());
        assert!(first == second, "zip: {first} samples beside {second}");
        Zip { first: self, second: other }
    }
}

impl<S: Clone + Send + Sync> Dataset for Vec<S> {
    type Sample = S;

    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn sample(&self, index: usize) -> Result<S, DataError> {
        self.as_slice().get(index).cloned().ok_or(DataError::NoSample { len: self.as_slice().len() })
    }
}

macro_rules! through {
    ($($pointer:ty),*) => {$(
        impl<D: Dataset + ?Sized> Dataset for $pointer {
            type Sample = D::Sample;
            fn len(&self) -> usize {
                (**self).len()
            }
            fn sample(&self, index: usize) -> Result<D::Sample, DataError> {
                (**self).sample(index)
            }
            fn origin(&self, index: usize) -> Option<String> {
                (**self).origin(index)
            }
        }
    )*};
}
through!(&D, Arc<D>, Box<D>);

/// See [`Dataset::map`].
#[derive(Clone, Debug)]
pub struct Map<D, F> {
    from: D,
    f: F,
}

impl<D: Dataset, T, F: Fn(D::Sample) -> T + Send + Sync> Dataset for Map<D, F> {
    type Sample = T;

    fn len(&self) -> usize {
        self.from.len()
    }

    fn sample(&self, index: usize) -> Result<T, DataError> {
        self.from.sample(index).map(&self.f)
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.from.origin(index)
    }
}

/// See [`Dataset::try_map`].
#[derive(Clone, Debug)]
pub struct TryMap<D, F> {
    from: D,
    f: F,
}

impl<D: Dataset, T, F: Fn(D::Sample) -> Result<T, DataError> + Send + Sync> Dataset for TryMap<D, F> {
    type Sample = T;

    fn len(&self) -> usize {
        self.from.len()
    }

    fn sample(&self, index: usize) -> Result<T, DataError> {
        self.from.sample(index).and_then(&self.f)
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.from.origin(index)
    }
}

/// See [`Dataset::subset`].
#[derive(Clone, Debug)]
pub struct Subset<D> {
    from: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Dataset for Subset<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn sample(&self, index: usize) -> Result<D::Sample, DataError> {
        let &index = self.indices.get(index).ok_or(DataError::NoSample { len: self.indices.len() })?;
        self.from.sample(index)
    }

    fn origin(&self, index: usize) -> Option<String> {
        let &from = self.indices.get(index)?;
        Some(self.from.origin(from).unwrap_or_else(|| format!("sample {from} of the whole set")))
    }
}

/// See [`Dataset::chain`].
#[derive(Clone, Debug)]
pub struct Chain<A, B> {
    first: A,
    second: B,
}

impl<A: Dataset, B: Dataset<Sample = A::Sample>> Dataset for Chain<A, B> {
    type Sample = A::Sample;

    fn len(&self) -> usize {
        self.first.len() + self.second.len()
    }

    fn sample(&self, index: usize) -> Result<A::Sample, DataError> {
        match index.checked_sub(self.first.len()) {
            None => self.first.sample(index),
            Some(index) => self.second.sample(index),
        }
    }

    fn origin(&self, index: usize) -> Option<String> {
        match index.checked_sub(self.first.len()) {
            None => self.first.origin(index),
            Some(index) => self.second.origin(index),
        }
    }
}

/// See [`Dataset::zip`].
#[derive(Clone, Debug)]
pub struct Zip<A, B> {
    first: A,
    second: B,
}

impl<A: Dataset, B: Dataset> Dataset for Zip<A, B> {
    type Sample = (A::Sample, B::Sample);

    fn len(&self) -> usize {
        self.first.len()
    }

    fn sample(&self, index: usize) -> Result<(A::Sample, B::Sample), DataError> {
        Ok((self.first.sample(index)?, self.second.sample(index)?))
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.first.origin(index).or_else(|| self.second.origin(index))
    }
}

/// The indices of `len` samples in two parts, drawn by `seed`: the first has `first` of them.
///
/// ```
/// use kiln_data::{Dataset, split};
///
/// let all: Vec<f32> = (0..10).map(|i| i as f32).collect();
/// let (train, test) = split(all.len(), 8, 1);
/// let (train, test) = (all.clone().subset(train), all.subset(test));
/// assert_eq!((train.len(), test.len()), (8, 2));
/// ```
///
/// # Panics
/// If `first` is more than `len`, or `len` more than `u32::MAX`.
#[doc(alias("random_split", "train_test_split"))]
#[track_caller]
pub fn split(len: usize, first: usize, seed: u64) -> (Vec<usize>, Vec<usize>) {
    assert!(first <= len, "split: {first} of {len} samples");
    let Ok(n) = u32::try_from(len) else { panic!("{len} samples are more than a 32-bit index can name") };
    let mut order = crate::batches::order(n, seed, 0).into_iter().map(|index| index as usize);
    (order.by_ref().take(first).collect(), order.collect())
}
