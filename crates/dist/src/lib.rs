//! Training spread over workers, with the same bits whatever their number.
//!
//! A job has K logical shards. Every global batch is cut into K ([`Shards`]), the gradients of the shards are combined
//! in one fixed binary tree ([`Counter`], [`combine`]), and how many workers share the shards decides only who adds
//! what. [`all_reduce`] does so over several devices of one program, on servers too.
#![forbid(unsafe_code)]

mod devices;
mod shards;

pub use devices::all_reduce;
pub use shards::{Counter, Partial, Shards, combine};
