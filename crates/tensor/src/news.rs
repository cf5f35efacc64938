//! Failures that nobody was told of yet: each is told once, to the thread that recorded the operation. A read tells of
//! what its value failed with, [`Device::sync`] of everything else, and both of a step that was not applied.
//!
//! Answers are looked at on whichever thread gives them, perhaps one that executes: nothing here takes a lane's lock.

use crate::lane::{self, Lane};
use crate::{Device, Tensor};
use kiln_device::{Error, Origin};
use kiln_ir::Id;
use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard};

/// Failures that are remembered as told, steps whose outcome may still be told, and failures that wait.
const MOST: usize = 256;

/// What is to be told of one device.
#[derive(Default)]
pub(crate) struct News {
    told: VecDeque<ToldFailure>,
    steps: VecDeque<StepOutcome>,
    waiting: VecDeque<(Option<&'static Lane>, Error)>,
    /// Steps that were skipped as agreed.
    skipped: VecDeque<String>,
}

/// A failure that was told: the value that there would have been, and where it was recorded.
struct ToldFailure {
    value: Id,
    origin: Option<Origin>,
}

/// Values between those of an operation and of its backward, at most.
const NEAR: u64 = 1 << 20;

impl ToldFailure {
    fn of(error: &Error) -> Option<ToldFailure> {
        match error {
            Error::Failed { value, origin, .. } => Some(ToldFailure { value: *value, origin: *origin }),
            _ => None,
        }
    }

    /// Whether an error is this failure, or that of the same operation's backward.
    fn covers(&self, error: &Error) -> bool {
        let Error::Failed { value, origin, .. } = error else { return false };
        let again = |own: Origin, other: Origin| {
            (own.line, own.scope) == (other.line, other.scope)
                && own.backward != other.backward
                && value.0.abs_diff(self.value.0) < NEAR
        };
        *value == self.value || self.origin.zip(*origin).is_some_and(|(own, other)| again(own, other))
    }
}

/// A step whose outcome may still be told.
struct StepOutcome {
    /// Its guard.
    word: Id,
    /// Whose gradients the operands of the guard are.
    paths: Arc<[String]>,
    /// A gradient that is not finite is no failure.
    skips: bool,
}

impl Device {
    /// Remembers what the operands of a guard are called.
    pub(crate) fn note_step(&self, word: &Tensor, paths: Vec<String>, skips: bool) {
        let mut news = self.news();
        let paths = match news.steps.back() {
            Some(last) if last.paths[..] == paths[..] => last.paths.clone(),
            _ => paths.into(),
        };
        keep(&mut news.steps, StepOutcome { word: word.value.id, paths, skips });
    }

    /// The answer of a read, unless there is something else to tell first: a step of that lane's thread that was not
    /// applied.
    pub(crate) fn answered<T>(&self, lane: Option<&Lane>, answer: Result<T, Error>) -> Result<T, Error> {
        self.gather();
        let mut news = self.news();
        match answer {
            Err(error) => {
                news.tell(&error);
                Err(error)
            }
            Ok(answer) => {
                let refused = |(owner, error): &(Option<&Lane>, Error)| {
                    is_for(*owner, lane) && matches!(error, Error::StepRefused { .. })
                };
                let Some((_, error)) =
                    news.waiting.iter().position(refused).and_then(|i| news.waiting.remove(i))
                else {
                    return Ok(answer);
                };
                news.tell(&error);
                Err(error)
            }
        }
    }

    /// What a read of machinery failed with is told by that machinery.
    pub fn told(&self, error: &Error) {
        self.gather();
        self.news().tell(error);
    }

    /// Everything that the thread of this lane was not told of yet.
    pub(crate) fn untold(&self, lane: Option<&Lane>) -> Result<(), Error> {
        self.gather();
        let mut news = self.news();
        let (due, others): (VecDeque<_>, VecDeque<_>) =
            news.waiting.drain(..).partition(|(owner, _)| is_for(*owner, lane));
        news.waiting = others;
        let mut due: Vec<Error> = due.into_iter().map(|(_, error)| error).collect();
        // A step that was refused tells of its cause.
        let causes: Vec<ToldFailure> =
            due.iter().filter_map(|e| ToldFailure::of(e.cause_of_step()?)).collect();
        due.retain(|error| !causes.iter().any(|told| told.covers(error)));
        due.iter().for_each(|error| news.tell(error));
        match due.len() {
            0 => Ok(()),
            1 => Err(due.remove(0)),
            _ => Err(Error::Several(due.into())),
        }
    }

    /// Steps that were skipped, in words.
    pub(crate) fn skipped(&self) -> Vec<String> {
        self.gather();
        self.news().skipped.drain(..).collect()
    }

    /// Takes over what the device has noted.
    fn gather(&self) {
        for error in self.driver().failures() {
            let value = error.value();
            let owner = value.and_then(lane::owner);
            let mut news = self.news();
            let error = news.named(error);
            if news.knows(&error) {
                continue;
            }
            match error {
                Error::StepRefused { cause: None, .. } if value.is_some_and(|id| news.skips(id)) => {
                    keep(&mut news.skipped, error.to_string())
                }
                error if news.waiting.len() < MOST => news.waiting.push_back((owner, error)),
                // The first tell most.
                _ => {}
            }
        }
    }
}

/// Whether what a lane recorded is told to this one's thread: its own, and what the threads that have ended left.
fn is_for(owner: Option<&Lane>, lane: Option<&Lane>) -> bool {
    owner.is_none_or(|owner| owner.is_closed() || lane.is_some_and(|lane| std::ptr::eq(lane, owner)))
}

fn keep<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() == MOST {
        list.pop_front();
    }
    list.push_back(item);
}

impl News {
    fn skips(&self, word: Id) -> bool {
        self.steps.iter().rev().any(|step| step.word == word && step.skips)
    }

    /// The failure of a guard as that of its step.
    fn named(&self, error: Error) -> Error {
        let Error::Failed { value, origin, cause, .. } = &error else { return error };
        let Error::StepRefused { at, cause, .. } = &**cause else { return error };
        let step = self.steps.iter().rev().find(|step| step.word == *value);
        let path = step.and_then(|step| step.paths.get(*at)).cloned().unwrap_or_default();
        Error::StepRefused { at: *at, path, origin: *origin, cause: cause.clone() }
    }

    /// Whether this failure, or what it is due to, was told.
    fn knows(&self, error: &Error) -> bool {
        let of = |error: &Error| self.told.iter().any(|told| told.covers(error));
        of(error) || error.cause_of_step().is_some_and(of)
    }

    /// This failure, and what failed because of it, is not told again.
    fn tell(&mut self, error: &Error) {
        for told in [Some(error), error.cause_of_step()].into_iter().flatten().filter_map(ToldFailure::of) {
            keep(&mut self.told, told);
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|(_, error)| !self.knows(error));
        self.waiting = waiting;
    }
}

impl Device {
    fn news(&self) -> MutexGuard<'_, News> {
        self.unread().lock().unwrap_or_else(|e| e.into_inner())
    }
}
