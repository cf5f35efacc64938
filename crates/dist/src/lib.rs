//! Training spread over workers, with the same bits whatever their number.
//!
//! A job has K logical shards over W ranks ([`Layout`]). Every global batch is cut into K ([`samples`]), the gradients of
//! the shards are combined in one fixed binary tree ([`partials`], [`combine`]), and how many ranks share the shards
//! decides only who adds what. [`all_reduce`] does so over several devices of one program, on servers too,
//! [`all_reduce_ranks`] over the processes of a [`Group`].
#![forbid(unsafe_code)]

mod devices;
mod ranks;
mod shards;

pub use devices::all_reduce;
pub use kiln_group::{Config, Group, Identity, Layout, Rendezvous};
pub use ranks::{Error, all_reduce_ranks};
pub use shards::{Partial, combine, partials, samples};
