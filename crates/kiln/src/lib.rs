//! Kiln: deep learning in which one tensor program runs anywhere without a change.
//!
//! ```
//! use kiln::prelude::*;
//!
//! let device = Device::default();
//! let w = Tensor::randn([4, 3], &device).requires_grad();
//! let x = Tensor::randn([8, 4], &device);
//! let loss = x.matmul(&w).tanh().square().mean(());
//! let grads = loss.backward();
//! println!("loss {loss}\n{}", grads.get(&w).unwrap());
//! ```
//!
//! # Features
//!
//! - `remote` (on): devices on servers, by `Device::open("kiln://…")`, and the server. Without it nothing of the network is
//!   compiled.
//! - `images`: folders of PNG and JPEG images as a data set, `data::ImageFolder`.
//! - `mpi`: ranks on many machines through the cluster's own MPI, which must be installed, with clang for its bindings.
#![forbid(unsafe_code)]

pub use kiln_tensor::*;

/// Operations as data: the op tables, nodes, text and wire forms, custom operations.
pub mod ir {
    pub use kiln_ir::*;
}

/// The device trait and its decorators, for those who write a device or a tool.
pub mod device {
    pub use kiln_cpu::{Cpu, Reference, reference};
    pub use kiln_device::*;
}

/// Devices on servers: protocol, client and server.
#[cfg(feature = "remote")]
pub mod remote {
    pub use kiln_remote::*;
}

/// The fusion engine, for those who write a fuser or a device.
pub mod fuse {
    pub use kiln_fuse::*;
}

/// The shell of a device around the kernels of any machine, for those who write a device.
pub mod host {
    pub use kiln_host::*;
}

/// Layers and optimisers.
pub mod nn {
    pub use kiln_derive::Module;
    pub use kiln_nn::*;
}

/// Training spread over workers.
pub mod dist {
    pub use kiln_dist::*;
}

/// Data sets, and the loader that makes batches of them.
pub mod data {
    pub use kiln_data::*;
}

/// Model files: safetensors, PyTorch's and NumPy's, straight to a device; models saved and loaded in one line.
pub mod store {
    pub use kiln_store::*;
}

/// What most programs need.
pub mod prelude {
    pub use crate::nn::{
        Adam, AdaptiveAvgPool2d, Attend, Attention, AvgPool2d, BatchNorm1d, BatchNorm2d, Conv1d, Conv2d,
        ConvTranspose2d, Dropout, Embedding, GptBlock, GroupNorm, Gru, Layer, LayerNorm, Linear, Lstm,
        MaxPool2d, Module, MultiHeadAttention, NonFinite, Optimizer, RmsNorm, Rnn, Sequential, Sgd,
        TransformerDecoderLayer, TransformerEncoderLayer,
    };
    pub use kiln_data::{DataLoader, Dataset, Mnist};
    pub use kiln_store::{Load, ModelFile, TensorFile};
    pub use kiln_tensor::{
        Axes, ClassOptions, ConvOptions, DType, Device, Error, Generator, Gradients, Interpolate, PadMode,
        Padding, PoolOptions, Reduction, Shape, Tensor, checkpoint, einsum, grad, no_grad, seed, step_by,
    };
}

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
