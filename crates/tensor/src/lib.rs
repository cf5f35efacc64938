//! Tensors: what a user holds.
//!
//! A method on [`Tensor`] asks `infer` for the result's dtype and shape, records a node in the calling thread's lane
//! (`lane.rs`) and returns at once; a read seals the lane and waits. Where a tensor is tracked, the node is also kept
//! in the value's own graph (`tape.rs`), which `backward` walks. Methods are grouped by theme under `methods/`.
#![forbid(unsafe_code)]

mod device;
mod element;
mod idle;
mod lane;
mod news;
mod period;
mod tensor;
mod value;

mod backward;
mod checkpoint;
mod functional;
mod tape;

mod create;
mod methods;
mod operators;
mod print;
mod random;
mod read;
mod step;

pub use backward::{Backward, Gradients, LeafGradient, grad};
pub use checkpoint::{checkpoint, custom_grad};
pub use device::{Device, DeviceId};
pub use element::{Element, Number};
pub use functional::{hessian, jacobian, jvp, vjp};
pub use lane::PlaceScope;
pub use methods::*;
pub use operators::Operand;
pub use random::{Generator, seed, with_generator};
pub use step::{NonFinite, Step};
pub use tape::{is_grad_enabled, no_grad};
pub use tensor::Tensor;

pub use kiln_cpu::pool::{set_threads, threads};
pub use kiln_device::{
    Bytes, Data, DeviceInfo, Error, Host, LineGuard, Locality, Memory, Origin, Pending, Scope, ScopeGuard,
    Usage, scope,
};
pub use kiln_ir::{DType, MAX_RANK, Meta, OpError, Shape, promote};
