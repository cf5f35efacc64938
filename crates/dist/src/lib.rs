//! Training spread over workers, with the same bits whatever their number.
//!
//! A job has K logical shards over W ranks ([`Layout`]). Every global batch is cut into K ([`samples`]), the gradients of
//! the shards are combined in one fixed binary tree ([`partials`], [`combine`]), and how many ranks share the shards
//! decides only who adds what. [`GradientSync`] does so while backward runs, over the processes of a [`Group`] or over
//! several devices of one program. [`Collective`] are the collectives on tensors between ranks, and
//! [`all_reduce_devices`] and its kin those between devices, on servers too.
// But where a bucket's memory is lent to a device, `sync/fill.rs`.
#![deny(unsafe_code)]

mod collective;
mod devices;
mod error;
mod shards;
mod sync;

pub use collective::{Collective, Handle};
pub use devices::{
    all_gather_devices, all_reduce, all_reduce_devices, broadcast_devices, reduce_scatter_devices,
};
pub use error::Error;
pub use kiln_group::{Config, Group, Identity, Layout, Reduce, Rendezvous, flight};
pub use shards::{Partial, combine, partials, samples};
pub use sync::{
    Bf16, Combine, Compress, Config as SyncConfig, GradientSync, Reduced, Round, Route, Stats, Stepped,
    Unused,
};
