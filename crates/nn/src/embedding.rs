//! A vector for each of a number of ids.

use crate::Module;
use kiln_tensor::{Device, Scope, Tensor};

/// A table `[count, width]` whose rows are looked up by id.
#[derive(Clone, Module)]
pub struct Embedding {
    /// `[count, width]`.
    pub weight: Tensor,
}

impl Embedding {
    /// A table of standard normal numbers.
    #[track_caller]
    pub fn new(count: usize, width: usize, device: &Device) -> Embedding {
        let _persistent = device.persistent_scope();
        Embedding { weight: Tensor::randn([count, width], device).requires_grad() }
    }

    /// The rows of `ids`, integers of any shape: the result has one more axis, of the table's width.
    #[track_caller]
    pub fn forward(&self, ids: &Tensor) -> Tensor {
        let _scope = Scope::enter("embedding");
        self.weight.embedding(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_by_id_and_a_row_taken_twice_gets_both_gradients() {
        let device = Device::cpu();
        let weight = Tensor::from_vec(vec![0.0f32, 1.0, 10.0, 11.0, 20.0, 21.0], [3, 2], &device);
        let table = Embedding { weight: weight.requires_grad() };
        let y = table.forward(&Tensor::from_vec(vec![2i64, 0, 2, 2], [2, 2], &device));
        assert_eq!(y.shape()[..], [2, 2, 2]);
        assert_eq!(y.to_vec::<f32>().unwrap(), [20.0, 21.0, 0.0, 1.0, 20.0, 21.0, 20.0, 21.0]);
        let gradients = y.sum(()).backward();
        assert_eq!(
            gradients.get(&table.weight).unwrap().to_vec::<f32>().unwrap(),
            [1.0, 1.0, 0.0, 0.0, 3.0, 3.0]
        );
    }
}
