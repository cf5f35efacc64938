//! Buckets combined by moves between devices: each worker leaves its contribution, and the last one records the
//! exchange for all. Servers move the bytes among themselves; nothing waits here.

use crate::{Partial, all_reduce};
use kiln_tensor::{Error, Tensor};
use std::collections::HashMap;
use std::sync::Mutex;

/// A bucket of a round.
type Key = (u64, usize);

/// What workers have left for each other.
pub(super) struct Moves {
    workers: usize,
    shards: usize,
    left: Mutex<HashMap<Key, Bucket>>,
}

enum Bucket {
    /// What came so far, by worker.
    Filling(Vec<Option<Vec<Partial<Vec<Tensor>>>>>),
    /// The results, by worker.
    Done(Result<Vec<Option<Vec<Tensor>>>, Error>),
}

impl Moves {
    pub fn new(workers: usize, shards: usize) -> Moves {
        Moves { workers, shards, left: Mutex::default() }
    }

    /// Leaves a worker's contribution to a bucket.
    pub fn leave(&self, key: Key, worker: usize, partials: Vec<Partial<Vec<Tensor>>>) {
        let mut left = self.left.lock().unwrap_or_else(|e| e.into_inner());
        let bucket = left.entry(key).or_insert_with(|| Bucket::Filling(vec![None; self.workers]));
        let Bucket::Filling(came) = bucket else { return };
        came[worker] = Some(partials);
        if came.iter().all(Option::is_some) {
            let all = std::mem::take(came).into_iter().flatten().collect();
            let sums = all_reduce(self.shards, all);
            *bucket = Bucket::Done(sums.map(|lists| lists.into_iter().map(Some).collect()));
        }
    }

    /// A worker's result of a bucket; nothing if another worker has not come yet.
    pub fn take(&self, key: Key, worker: usize) -> Option<Result<Vec<Tensor>, Error>> {
        let mut left = self.left.lock().unwrap_or_else(|e| e.into_inner());
        let Some(Bucket::Done(sums)) = left.get_mut(&key) else { return None };
        let (sum, empty) = match sums {
            Ok(lists) => {
                let list = lists[worker].take()?;
                (Ok(list), lists.iter().all(Option::is_none))
            }
            Err(error) => (Err(error.clone()), false),
        };
        if empty {
            left.remove(&key);
        }
        Some(sum)
    }
}
