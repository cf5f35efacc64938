//! Layers and optimisers. A layer is a plain struct of tensors; [`Module`] names its parameters by path, so that
//! optimisers, digests and files walk any model the same way. Losses are methods of the tensor.
#![forbid(unsafe_code)]

mod checkpoint;
mod module;
mod optim;

mod attention;
mod conv;
mod embedding;
mod gpt;
mod linear;
mod norm;

pub use attention::Attention;
pub use checkpoint::{Checkpoint, CheckpointError};
pub use conv::Conv2d;
pub use embedding::Embedding;
pub use gpt::GptBlock;
pub use kiln_tensor::{NonFinite, Step, Tensor};
pub use linear::Linear;
pub use module::{Module, cast, join};
pub use norm::LayerNorm;
pub use optim::{Adam, Optimizer, Sgd, step};
