//! What can go wrong outside the user's program, and what a poisoned value says when it is read.

use crate::Origin;
use kiln_ir::math::DivideError;
use kiln_ir::{DType, Id, Meta, OpError};
use std::sync::Arc;
use std::time::Duration;

/// A failure that reaches the user as a value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    /// The value was never computed: an operation failed, here or upstream. `value` is what that one would have given.
    #[error("{} failed: {}", place(op, origin), reason(op, cause))]
    Failed { op: String, value: Id, origin: Option<Origin>, cause: Arc<Error> },
    /// A step was not applied, because the gradient of `path` could not be computed for this `cause`, or without one because
    /// it is not finite. Until the recording side has its say, `path` is empty and the gradient's place is all that is known.
    #[error(
        "the step{} was not applied: the gradient {} {}",
        origin.map(|o| format!(" at {o}")).unwrap_or_default(),
        if path.is_empty() { format!("number {at}") } else { format!("of {path}") },
        cause.as_ref().map_or("is not finite".to_string(), |cause| format!("was not computed: {cause}"))
    )]
    StepRefused { at: usize, path: String, origin: Option<Origin>, cause: Option<Arc<Error>> },
    /// Several operations failed that nobody was told of yet.
    #[error("{} operations failed: {}", .0.len(), .0.iter().map(|e| e.to_string()).collect::<Vec<_>>().join("; "))]
    Several(Arc<[Error]>),
    #[error(transparent)]
    Op(#[from] OpError),
    #[error("{op}: index {index} is out of range for an axis of length {length}")]
    Index { op: String, index: i64, length: usize },
    #[error("{op}: integer division {}", match error { DivideError::ByZero => "by zero", DivideError::Overflow => "overflows" })]
    Divide { op: String, error: DivideError },
    #[error("custom operation {op}: {message}")]
    Custom { op: String, message: String },
    #[error("{op} panicked: {message}")]
    Panicked { op: String, message: String },
    #[error("{op} is not supported by {device}")]
    Unsupported { op: String, device: String },
    /// A `limit` of `usize::MAX` is none: then it was the system that had no more.
    #[error("out of memory: {asked} bytes asked, {}", available(*free, *limit))]
    OutOfMemory { asked: usize, free: usize, limit: usize },
    #[error("no answer after {0:?}")]
    Timeout(Duration),
    #[error("the device stopped before it answered")]
    Stopped,
    #[error("value {0} is not on this device")]
    UnknownValue(Id),
    #[error("the tensor holds {got}, not {want}")]
    DType { want: DType, got: DType },
    #[error("the tensor has {0} elements, not one")]
    NotOne(usize),
    #[error("no device has the id {0}")]
    UnknownDevice(u32),
    #[error("`{address}` is not a device address: {reason}")]
    Address { address: String, reason: String },
    /// A variable of the environment holds what it cannot mean.
    #[error(transparent)]
    Environment(#[from] kiln_env::Invalid),
    #[error("{path}: {message}")]
    File { path: String, message: String },
    #[error("{peer} cannot be reached: {reason}")]
    Disconnected { peer: String, reason: String },
    #[error("{peer} refuses: {reason}")]
    Refused { peer: String, reason: String },
    #[error(
        "the token would go to {peer} unencrypted: use kilns:// or wss://, or permit it by clear=1 in the address"
    )]
    ClearToken { peer: String },
    #[error("{device} was closed")]
    Closed { device: String },
    #[error("{peer} gave {got} for {value}, which is {want}")]
    OtherValue { peer: String, value: Id, want: Meta, got: Meta },
    #[error("{op}: it takes {bytes} bytes to say what it is to do, and a server takes {most}")]
    TooLong { op: String, bytes: usize, most: usize },
    #[error("{peer} computes with {got}, but the session was begun with {want}")]
    NumericsDiffer { peer: String, want: String, got: String },
    #[error("{peer} gave other bits for {value} when its history was run again")]
    Diverged { peer: String, value: Id },
    #[error("the server says: {message}")]
    Peer { message: String },
    #[error("the recording is truncated or damaged at byte {at}: {reason}")]
    Recording { at: u64, reason: String },
}

fn available(free: usize, limit: usize) -> String {
    match limit {
        usize::MAX => "more than the system has".into(),
        limit => format!("{free} of {limit} free"),
    }
}

impl Error {
    /// What the operation that failed would have given.
    pub fn value(&self) -> Option<Id> {
        match self {
            Error::Failed { value, .. } => Some(*value),
            _ => None,
        }
    }

    /// Why a step that was refused lacks a gradient.
    pub fn cause_of_step(&self) -> Option<&Error> {
        match self {
            Error::StepRefused { cause, .. } => cause.as_deref(),
            _ => None,
        }
    }

    /// The first failure: what made the operation fail.
    pub fn root(&self) -> &Error {
        match self {
            Error::Failed { cause, .. } | Error::StepRefused { cause: Some(cause), .. } => cause.root(),
            error => error,
        }
    }
}

/// The operation that failed, as the user called it, and where.
fn place(op: &str, origin: &Option<Origin>) -> String {
    origin.map_or_else(|| op.to_string(), |origin| format!("{} at {origin}", origin.name(op)))
}

/// The cause without the operation's name, which is told already.
fn reason(op: &str, cause: &Error) -> String {
    let text = cause.to_string();
    text.strip_prefix(op)
        .and_then(|rest| rest.strip_prefix(": "))
        .map_or_else(|| text.clone(), str::to_string)
}
