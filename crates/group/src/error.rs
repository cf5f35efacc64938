//! What can go wrong between ranks. Every survivor of a failed group gets the same value.

use crate::call::{Reduce, Signature};
use kiln_ir::DType;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A failure of a group or of one collective.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Error {
    #[error("rank {rank} is lost: {cause}")]
    RankLost { rank: usize, cause: Loss },
    /// Two ranks came to one place with different collectives; no data was mixed.
    #[error("rank {rank} is at {mine}, but rank {peer} is at {theirs}")]
    Mismatch { rank: usize, mine: Signature, peer: usize, theirs: Signature },
    /// A rank joined with a value that it could not compute. The group lives on.
    #[error("the contribution of rank {rank} is poisoned: {reason}")]
    Poisoned { rank: usize, reason: String },
    #[error(
        "{call}: rank {rank} gave up after {after:?} waiting for {}{}",
        ranks(missing),
        if stopped.is_empty() { String::new() } else { format!(" (stopped: {})", ranks(stopped)) }
    )]
    Deadline { rank: usize, call: Signature, after: Duration, missing: Vec<usize>, stopped: Vec<usize> },
    #[error("rank {rank} ended the group: {reason}")]
    Aborted { rank: usize, reason: String },
    #[error("rank {rank} is refused: its {field} is {got}, the job's is {want}")]
    Refused { rank: usize, field: String, want: String, got: String },
    #[error("{} did not come within {after:?}", ranks(missing))]
    Absent { missing: Vec<usize>, after: Duration },
    /// Where the ranks of the job would meet, somebody else is.
    #[error("join: process {pid} of user {uid} holds the place where the ranks of this job meet")]
    Taken { pid: u32, uid: u32 },
    #[error("join: {ranks} ranks on one machine, where {most} can share memory; KILN_ENGINE=mpi takes more")]
    Crowded { ranks: usize, most: usize },
    #[error("the group is closed")]
    Closed,
    #[error("{reduce} of {dtype} has no meaning")]
    Unsupported { reduce: Reduce, dtype: DType },
    #[error("{bytes} bytes are no whole number of {dtype}")]
    Length { bytes: usize, dtype: DType },
    #[error("the buffer has {got} parts, but this rank contributes {want}")]
    Parts { want: usize, got: usize },
    #[error("the buffer belongs to another group")]
    Foreign,
    #[error("`{name}` has been started in this group and is not closed")]
    Claimed { name: String },
    #[error("{shards} shards cannot be shared by {ranks} ranks: each needs one")]
    Shards { shards: usize, ranks: usize },
    #[error("rank {rank} is not in a group of {ranks}")]
    Member { rank: usize, ranks: usize },
    #[error("{variable}: {reason}")]
    Environment { variable: String, reason: String },
    #[error("{what}: {message}")]
    System { what: String, message: String },
}

/// How a rank was lost.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Loss {
    #[error("process {pid} died")]
    Died { pid: u32 },
    /// It closed its end while others still waited for it.
    #[error("it left the group after {after} collectives")]
    Left { after: u64 },
}

impl Error {
    pub(crate) fn system(what: &str, error: impl std::fmt::Display) -> Error {
        Error::System { what: what.to_string(), message: error.to_string() }
    }

    /// Whether the group goes on after it.
    pub fn is_local(&self) -> bool {
        match self {
            Error::Poisoned { .. }
            | Error::Unsupported { .. }
            | Error::Length { .. }
            | Error::Parts { .. }
            | Error::Foreign
            | Error::Claimed { .. }
            | Error::Shards { .. }
            | Error::Member { .. } => true,
            Error::RankLost { .. }
            | Error::Mismatch { .. }
            | Error::Deadline { .. }
            | Error::Aborted { .. }
            | Error::Refused { .. }
            | Error::Absent { .. }
            | Error::Taken { .. }
            | Error::Crowded { .. }
            | Error::Closed
            | Error::Environment { .. }
            | Error::System { .. } => false,
        }
    }
}

fn ranks(list: &[usize]) -> String {
    let list: Vec<String> = list.iter().map(|r| r.to_string()).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
}
