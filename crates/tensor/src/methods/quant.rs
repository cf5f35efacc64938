//! Quantised storage: blocks of 32 elements along the last axis that share a scale.

use crate::{DType, Tensor};

/// # Quantised
impl Tensor {
    /// The elements packed as q8 or q4. There is no gradient through packing.
    ///
    /// # Panics
    /// If `dtype` is not quantised, or the last axis is not whole blocks of 32.
    #[track_caller]
    pub fn quantize(&self, dtype: DType) -> Tensor {
        assert!(dtype.is_quantised(), "quantize: {dtype} is not a quantised dtype");
        self.to_dtype(dtype)
    }

    /// Packed elements as floats.
    ///
    /// # Panics
    /// If `dtype` is not a float.
    #[track_caller]
    pub fn dequantize(&self, dtype: DType) -> Tensor {
        assert!(dtype.is_float(), "dequantize: {dtype} is not a float");
        self.to_dtype(dtype)
    }
}
