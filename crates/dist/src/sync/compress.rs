//! How gradients travel, where not as they are.

use kiln_tensor::{DType, Tensor};

/// Turns gradients into what travels, and back. A lossy one rounds every shard's gradient before anything is added,
/// and sums are rounded to what travels at every node of the tree, inside a rank too: so the number of workers still
/// changes no bit.
pub trait Compress: Send + Sync {
    /// For messages, and compared between ranks.
    fn name(&self) -> &str;

    /// What gradients of this dtype travel as; sums must have a meaning there.
    fn wire(&self, dtype: DType) -> DType;

    /// What travels: the shape stays, the dtype is [`Compress::wire`].
    fn encode(&self, gradient: &Tensor) -> Tensor {
        gradient.to_dtype(self.wire(gradient.dtype()))
    }

    /// The gradient again, from the combination.
    fn decode(&self, sum: &Tensor, dtype: DType) -> Tensor {
        sum.to_dtype(dtype)
    }
}

/// Floats of 32 and 64 bits travel as bf16.
pub struct Bf16;

impl Compress for Bf16 {
    fn name(&self) -> &str {
        "bf16"
    }

    fn wire(&self, dtype: DType) -> DType {
        match dtype {
            DType::F32 | DType::F64 => DType::BF16,
            other => other,
        }
    }
}
