//! Buffers in a round. Every shard begins with what they were when the round began, so that it does not matter who
//! computes it; what shards did to them is combined like their gradients, and moves them once.

use super::plan::Entry;
use kiln_nn::{Buffer, Module};
use kiln_tensor::{DType, Device, Meta, Tensor};

/// The buffers of a model, and what they were.
pub(super) struct States {
    list: Vec<State>,
    /// The entry of the first one. Behind the last one is that of the weights.
    first: usize,
}

struct State {
    path: String,
    buffer: Buffer,
    before: Tensor,
    /// What its change travels as.
    wire: DType,
}

impl States {
    pub fn new(model: &dyn Module, first: usize) -> States {
        let mut list = Vec::new();
        model.visit_buffers("", &mut |path, buffer| {
            let before = buffer.get();
            // Counts are moved by a mean too, which is a fraction on its way.
            let wire = match before.dtype() {
                DType::Bool => return,
                DType::F16 | DType::BF16 => DType::F32,
                dtype if dtype.is_float() => dtype,
                _ => DType::F64,
            };
            list.push(State { path: path.to_string(), buffer: buffer.handle(), before, wire });
        });
        States { list, first }
    }

    /// What travels: the change of each buffer, and the weights if there are any.
    pub fn entries(&self) -> Vec<Entry> {
        let change = |state: &State| Entry {
            path: state.path.clone(),
            meta: Meta::new(state.wire, state.before.shape()),
            wire: state.wire,
        };
        let weights = Entry { path: "weight".into(), meta: Meta::new(DType::F32, [1]), wire: DType::F32 };
        self.list.iter().map(change).chain((!self.list.is_empty()).then_some(weights)).collect()
    }

    /// What they were.
    pub fn values(&self) -> impl Iterator<Item = &Tensor> {
        self.list.iter().map(|state| &state.before)
    }

    /// What a shard did, weighted, by entry; zeros if it was skipped. The next one finds the buffers as this one did.
    pub fn taken(&self, weight: Option<f64>, device: &Device) -> Vec<(usize, Tensor)> {
        let mut all = Vec::new();
        for (i, state) in self.list.iter().enumerate() {
            let change = match weight {
                None => Tensor::full(state.before.shape(), 0, state.wire, device),
                Some(weight) => {
                    let now = state.buffer.get();
                    (now.to_dtype(state.wire) - state.before.to_dtype(state.wire)) * weight
                }
            };
            all.push((self.first + i, change));
        }
        self.put_back();
        if !self.list.is_empty() {
            let weight = Tensor::full([1], weight.unwrap_or(0.0), DType::F32, device);
            all.push((self.first + self.list.len(), weight));
        }
        all
    }

    /// Moves the buffers by the mean of the shards' changes, of which these are the combinations.
    pub fn moved(&self, sums: &[Tensor]) {
        let Some((weights, changes)) = sums.split_last() else { return };
        // All shards may have been skipped.
        let none = weights.eq(0).reshape(());
        let weights = weights.reshape(()).masked_fill(&none, 1);
        for (state, change) in self.list.iter().zip(changes) {
            let mean = change / weights.to_dtype(state.wire);
            let dtype = state.before.dtype();
            let mean = if dtype.is_float() { mean } else { mean.round() };
            let new = state.before.to_dtype(state.wire) + mean;
            state.buffer.set(new.to_dtype(dtype).reshape(state.before.shape()));
        }
    }

    /// Makes the buffers what they were.
    pub fn put_back(&self) {
        self.list.iter().for_each(|state| state.buffer.set(state.before.clone()));
    }
}
