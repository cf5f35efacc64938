//! Placeholder head.

pub mod arena;
pub mod gemm;
pub mod pool;
