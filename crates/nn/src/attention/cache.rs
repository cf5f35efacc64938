//! What earlier places came to.

use crate::layer::misfit;
use kiln_tensor::{Tensor, no_grad};

/// The keys and values of places that attention has seen, so that the next ones are computed alone. They are written into
/// memory that is taken once: nothing is copied until there are more than it holds, and then it doubles.
///
/// ```
/// use kiln_nn::{Attend, KvCache, MultiHeadAttention};
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let layer = MultiHeadAttention::new(16, 4, &device).causal();
/// let x = Tensor::randn([2, 6, 16], &device);
/// let mut cache = KvCache::new(64);
/// let start = x.narrow(1, 0, 5);
/// layer.attend(&start, &start, &start, Attend::new().cache(&mut cache));
/// let next = x.narrow(1, 5, 1);
/// let y = layer.attend(&next, &next, &next, Attend::new().cache(&mut cache));
/// assert_eq!((y.shape()[1], cache.len()), (1, 6));
/// ```
#[derive(Default)]
pub struct KvCache {
    kept: Option<[Tensor; 2]>,
    length: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty cache with room for that many places, which is taken with the first of them.
    pub fn new(capacity: usize) -> KvCache {
        KvCache { kept: None, length: 0, capacity }
    }

    /// How many places it holds.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// How many places it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all places but the first ones, and keeps the memory.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Takes samples by number, in that order: `[n]` integers. What a beam search does.
    #[track_caller]
    pub fn reorder(&mut self, samples: &Tensor) {
        self.kept = self.kept.take().map(|kept| no_grad(|| kept.map(|t| t.index_select(0, samples))));
    }

    /// Adds places, `[batch, heads, length, width]`, and gives the keys and values of all so far. Gradients do not go
    /// through it.
    ///
    /// # Panics
    /// If they are of another shape than those before, but for the length.
    #[track_caller]
    pub fn append(&mut self, key: &Tensor, value: &Tensor) -> (Tensor, Tensor) {
        no_grad(|| self.append_untracked(&key.detach(), &value.detach()))
    }

    #[track_caller]
    fn append_untracked(&mut self, key: &Tensor, value: &Tensor) -> (Tensor, Tensor) {
        if key.rank() != 4 || value.rank() != 4 || key.shape()[..3] != value.shape()[..3] {
            let (key, value) = (key.shape(), value.shape());
            misfit("kv_cache", format!("{key:?} and {value:?} are not [batch, heads, length, width]"));
        }
        let end = self.length + key.dim(2);
        let kept = match self.kept.take() {
            Some(kept) => kept,
            None => {
                self.capacity = self.capacity.max(end);
                [key, value].map(|t| sized(t, self.capacity))
            }
        };
        for (kept, new) in kept.iter().zip([key, value]) {
            let (old, new) = (kept.meta(), new.meta());
            let alike = |axis: usize| old.shape[axis] == new.shape[axis];
            if !(alike(0) && alike(1) && alike(3) && old.dtype == new.dtype) {
                misfit("kv_cache", format!("{new} does not continue {old}"));
            }
        }
        let kept = match end > self.capacity {
            false => kept,
            true => {
                self.capacity = end.max(2 * self.capacity);
                let length = self.length;
                kept.map(|old| {
                    let old = old.narrow(2, 0, length);
                    sized(&old, self.capacity).slice_assign(2, 0, length as isize, 1, &old)
                })
            }
        };
        let (at, [keys, values]) = (self.length as isize, kept);
        // By value: an old one that nobody else has is written into, not copied.
        let put = |kept: Tensor, new: &Tensor| kept.slice_assign(2, at, end as isize, 1, new);
        let kept = [put(keys, key), put(values, value)];
        self.length = end;
        let [keys, values] = [&kept[0], &kept[1]].map(|t| t.narrow(2, 0, end));
        self.kept = Some(kept);
        (keys, values)
    }
}

/// Zeros like `t` with that many places.
#[track_caller]
fn sized(t: &Tensor, capacity: usize) -> Tensor {
    let mut shape = t.shape();
    shape[2] = capacity;
    let device = t.device();
    let _persistent = device.persistent_scope();
    Tensor::full(shape, 0, t.dtype(), &device)
}
