//! Layers and optimisers. A layer is a plain struct of tensors; [`Module`] names its parameters by path, so that
//! optimisers, digests and files walk any model the same way. Layers have PyTorch's names, arguments, initial values and
//! names in a state dict. Losses are methods of the tensor.
#![forbid(unsafe_code)]

// What `#[derive(Module)]` writes names this crate, also in here.
extern crate self as kiln_nn;

mod module;
mod optim;

mod layer;

pub mod init;

mod activation;
mod attention;
mod conv;
mod dropout;
mod embedding;
mod gpt;
mod linear;
mod norm;
mod pool;
mod recurrent;
mod resize;
mod sequential;
mod transformer;
mod unpool;

pub use activation::*;
pub use attention::*;
pub use conv::*;
pub use dropout::*;
pub use embedding::Embedding;
pub use gpt::GptBlock;
pub use kiln_derive::NnModule as Module;
pub use kiln_tensor::{NonFinite, Step, Tensor};
pub use layer::Layer;
pub use linear::Linear;
pub use module::{
    Buffer, LoadError, LoadReport, Mode, Module, Part, PartMut, Setting, cast, derive, join, matches,
};
pub use norm::*;
pub use optim::{Adam, Optimizer, Sgd, step};
pub use pool::*;
pub use recurrent::*;
pub use resize::*;
pub use sequential::Sequential;
pub use transformer::*;
pub use unpool::*;
