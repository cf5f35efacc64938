//! Training spread over workers, with the same bits whatever their number.
//!
//! A job has K logical shards over W ranks ([`Layout`]). Every global batch is cut into K ([`samples`]), the gradients of
//! the shards are combined in one fixed binary tree ([`partials`], [`combine`]), and how many ranks share the shards
//! decides only who adds what. [`GradientSync`] does so while backward runs, over the processes of a [`Group`] or over
//! several devices of one program; [`all_reduce`] reduces lists of tensors over devices, on servers too.
#![forbid(unsafe_code)]

mod devices;
mod error;
mod shards;
mod sync;

pub use devices::all_reduce;
pub use error::Error;
pub use kiln_group::{Config, Group, Identity, Layout, Rendezvous};
pub use shards::{Partial, combine, partials, samples};
pub use sync::{Bf16, Combine, Compress, Config as SyncConfig, GradientSync, Reduced, Round, Stats, Unused};
