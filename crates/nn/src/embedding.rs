//! A vector for each of a number of ids.

use crate::Module;
use crate::layer::{layers, misfit};
use crate::module::note;
use kiln_tensor::{DType, Device, Scope, Tensor, no_grad};

/// A table `[count, width]` whose rows are looked up by id.
///
/// ```
/// use kiln_nn::Embedding;
/// # use kiln_tensor::{Device, Tensor};
/// # let device = Device::cpu();
/// let table = Embedding::new(10, 4, &device).padding_idx(0); // row 0 is zeros and stays so
/// let ids = Tensor::from_vec(vec![3i64, 7, 0], [1, 3], &device);
/// assert_eq!(table.forward(&ids).shape()[..], [1, 3, 4]);
/// ```
#[derive(Clone, Module)]
pub struct Embedding {
    /// `[count, width]`.
    pub weight: Tensor,
    /// The id whose row gets no gradient.
    pub padding: Option<usize>,
}

layers!(Embedding);

impl Embedding {
    /// A table of standard normal numbers.
    #[track_caller]
    pub fn new(count: usize, width: usize, device: &Device) -> Embedding {
        Embedding { weight: crate::init::normal([count, width], 0.0, 1.0, device), padding: None }
    }

    /// A table of these rows, which is trained on if they are a leaf.
    ///
    /// # Panics
    /// If they are no matrix.
    #[doc(alias("from_pretrained"))]
    #[track_caller]
    pub fn from_rows(weight: Tensor) -> Embedding {
        if weight.rank() != 2 {
            misfit("embedding", format!("rows of shape {:?} are not [count, width]", weight.shape()));
        }
        Embedding { weight, padding: None }
    }

    /// With zeros for this id, which get no gradient.
    ///
    /// # Panics
    /// If there is no such row.
    #[track_caller]
    pub fn padding_idx(mut self, id: usize) -> Embedding {
        let (count, width) = (self.weight.dim(0), self.weight.dim(1));
        if id >= count {
            misfit("embedding", format!("there is no row {id} among {count}"));
        }
        let device = self.weight.device();
        let _persistent = device.persistent_scope();
        let zeros = Tensor::full([1, width], 0, self.weight.dtype(), &device);
        let at = id as isize;
        let weight = no_grad(|| self.weight.slice_assign(0, at, at + 1, 1, &zeros));
        self.weight = if self.weight.is_leaf() { weight.requires_grad() } else { weight };
        self.padding = Some(id);
        self
    }

    /// The rows of `ids`, integers of any shape: the result has one more axis, of the table's width.
    #[track_caller]
    pub fn forward(&self, ids: &Tensor) -> Tensor {
        let _scope = Scope::enter("embedding");
        let rows = self.weight.embedding(ids);
        note(
            self,
            match self.padding {
                Some(id) if rows.is_tracked() => {
                    let padding = ids.to_dtype(DType::I64).eq(id as i64).unsqueeze(-1);
                    padding.where_(&rows.detach(), &rows)
                }
                _ => rows,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_by_id_and_a_row_taken_twice_gets_both_gradients() {
        let device = Device::cpu();
        let weight = Tensor::from_vec(vec![0.0f32, 1.0, 10.0, 11.0, 20.0, 21.0], [3, 2], &device);
        let mut table = Embedding::from_rows(weight.requires_grad());
        let y = table.forward(&Tensor::from_vec(vec![2i64, 0, 2, 2], [2, 2], &device));
        assert_eq!(y.shape()[..], [2, 2, 2]);
        assert_eq!(y.to_vec::<f32>().unwrap(), [20.0, 21.0, 0.0, 1.0, 20.0, 21.0, 20.0, 21.0]);
        let gradients = y.sum(()).backward();
        assert_eq!(
            gradients.get(&table.weight).unwrap().to_vec::<f32>().unwrap(),
            [1.0, 1.0, 0.0, 0.0, 3.0, 3.0]
        );
        table = table.padding_idx(2);
        let y = table.forward(&Tensor::from_vec(vec![2i64, 0, 2, 2], [2, 2], &device));
        assert_eq!(y.to_vec::<f32>().unwrap(), [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        let gradients = y.sum(()).backward();
        assert_eq!(
            gradients.get(&table.weight).unwrap().to_vec::<f32>().unwrap(),
            [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        );
    }
}
