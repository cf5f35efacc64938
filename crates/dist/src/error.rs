//! What can go wrong where workers exchange.

use kiln_tensor::Meta;
use std::time::Duration;

/// Why workers could not exchange.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error(transparent)]
    Group(#[from] kiln_group::Error),
    #[error(transparent)]
    Device(#[from] kiln_tensor::Error),
    #[error("rank {rank} has other parameters than rank 0: `{got}` instead of `{want}`")]
    Parameters { rank: usize, want: String, got: String },
    #[error("rank {rank}: the loss does not depend on {}", paths.join(", "))]
    Unused { rank: usize, paths: Vec<String> },
    #[error("rank {rank}: `{path}` is on {got}, the parameters before it on {want}: a rank has one device")]
    Devices { rank: usize, path: String, want: String, got: String },
    #[error("rank {rank} holds {held} shards, and this is one more")]
    Shard { rank: usize, held: usize },
    #[error("rank {rank} has {left} more shards to differentiate before it can wait")]
    Unfinished { rank: usize, left: usize },
    #[error("the gradients of other workers are not there: all of them differentiate before one waits")]
    Early,
    #[error("rank {rank} gave up after {after:?} waiting for {}", .missing.iter().map(|r| format!("rank {r}")).collect::<Vec<_>>().join(", "))]
    Late { rank: usize, after: Duration, missing: Vec<usize> },
    #[error("rank {rank}: a gradient was given for a tensor that is no parameter of this step")]
    Foreign { rank: usize },
    #[error("rank {rank}: the gradient given for `{path}` is {got} instead of {want}")]
    Gradient { rank: usize, path: String, want: Meta, got: Meta },
    #[error("the round before is still open: it is waited for or dropped before the next begins")]
    Open,
    #[error("{shards} shards in {ranks} ranks: collectives of tensors need a rank for each shard")]
    Shared { shards: usize, ranks: usize },
}
