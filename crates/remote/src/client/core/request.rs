//! What was asked and is not answered yet.

use kiln_device::{Data, Error, Promise};
use kiln_ir::{Id, Meta};

/// An answer to hand over, outside of any lock.
pub enum Answer {
    /// To a read.
    Data(Promise<Data>, Result<Data, Error>),
    /// To a sync.
    Done(Promise<()>, Result<(), Error>),
    /// To a question.
    Content(Promise<Vec<u8>>, Result<Vec<u8>, Error>),
}

impl Answer {
    /// Hands it over.
    pub fn give(self) {
        match self {
            Answer::Data(promise, answer) => promise.answer(answer),
            Answer::Done(promise, answer) => promise.answer(answer),
            Answer::Content(promise, answer) => promise.answer(answer),
        }
    }
}

/// What was asked.
pub(super) enum Request {
    /// With the value's name and what it is, where that is known.
    Read(Promise<Data>, Option<Incoming>, Option<(Id, Meta)>),
    /// Of what was exposed.
    Recall(Promise<Data>, Option<Incoming>),
    Sync(Promise<()>),
    Query(Promise<Vec<u8>>),
    Snapshot(Id, Option<Incoming>),
    /// The end of a snapshot's reads.
    Barrier,
    /// A read that was answered before the server was lost: the same bits are expected.
    Recheck {
        id: Id,
        sum: u32,
    },
}

/// A value on its way.
pub(super) struct Incoming {
    pub meta: Meta,
    pub bytes: Vec<u8>,
}

/// The answer to whoever waits, if somebody does: an error.
pub(super) fn refused(request: Request, error: &Error) -> Option<Answer> {
    match request {
        Request::Read(promise, ..) | Request::Recall(promise, _) => {
            Some(Answer::Data(promise, Err(error.clone())))
        }
        Request::Sync(promise) => Some(Answer::Done(promise, Err(error.clone()))),
        Request::Query(promise) => Some(Answer::Content(promise, Err(error.clone()))),
        Request::Snapshot(..) | Request::Barrier | Request::Recheck { .. } => None,
    }
}
