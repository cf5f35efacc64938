//! Layers and optimisers. A layer is a plain struct of tensors; [`Module`] names its parameters by path, so that
//! optimisers, digests and files walk any model the same way. Losses are methods of the tensor.
#![forbid(unsafe_code)]

mod linear;
mod module;
mod optim;

pub use kiln_tensor::Tensor;
pub use linear::Linear;
pub use module::{Module, join};
pub use optim::{Adam, Optimizer, Sgd};
