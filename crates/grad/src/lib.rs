//! The derivative of every operation, written in operations.
//!
//! A backward walk asks [`saves`] what to keep when it records an operation, and [`gradient`] for nodes when it goes
//! back over it. Rules are built with `kiln_ir::V` from differentiable operations only, so their results can be
//! differentiated again. There is no graph, no walk and no memory here.
#![forbid(unsafe_code)]

mod rules;

pub use rules::{Flow, Rule, flow, gradient, saves};
