//! What a server says: answers, failures, progress.

use super::request::{Answer, Incoming, Request, refused};
use super::{Core, FrameOutcome};
use crate::client::faults::MOST;
use crate::client::pool;
use crate::protocol::greeting::{Refusal, Welcome};
use crate::protocol::message::{self, Message, kind};
use crate::protocol::{Frame, ProtocolError, plain};
use kiln_device::{Data, Error};
use kiln_ir::{Id, Item, Meta};

/// Batches that are executed and whose failures may still be under way.
const RECENT: usize = 64;

impl Core {
    /// Takes a frame.
    pub fn receive(&mut self, frame: &Frame<'_>) -> Result<FrameOutcome, ProtocolError> {
        match frame.kind {
            kind::WELCOME if !self.open => return self.welcome(Welcome::decode(frame.payload)?),
            kind::REFUSED if !self.open => return Ok(FrameOutcome::Refused(Refusal::decode(frame.payload)?)),
            kind::ENDED if self.open => {
                let (peer, reason) =
                    (self.config.peer.clone(), plain(&String::from_utf8_lossy(frame.payload)));
                self.fail(Error::Refused { peer, reason });
                return Ok(FrameOutcome::Leave);
            }
            kind if !self.open => return Err(ProtocolError::Kind(kind)),
            _ => {}
        }
        if frame.seq != 0 {
            if !self.link.accept(frame, message::lane(frame.kind))? {
                return Ok(FrameOutcome::Going);
            }
            self.progress += 1;
            self.link.release(frame.payload.len());
        }
        let mut scratch = Vec::new();
        match Message::decode(frame.kind, frame.payload, &mut scratch)? {
            Message::Ack { seq, limit } => {
                let queued = self.link.queued_frames();
                self.link.acknowledged(seq, limit)?;
                self.progress += (queued - self.link.queued_frames()) as u64;
            }
            Message::Progress { tasks, micros } => {
                self.executed = self.executed.max(tasks);
                self.micros = self.micros.max(micros);
                // A word of progress overtakes the failures before it, which wait with the other answers.
                while self.sent.len() > RECENT && self.sent.front().is_some_and(|s| s.task <= self.executed) {
                    self.sent.pop_front();
                }
                let executed = self.executed;
                let done = self.fetching.extract_if(|_, (task, _)| *task <= executed);
                self.settled.extend(done.map(|(_, (_, moved))| moved));
                self.bound();
            }
            Message::Pong(_) => {}
            Message::Drain => return Ok(FrameOutcome::Leave),
            Message::Value { request, meta } => self.value(request, meta)?,
            Message::Lost { transfer, reason } => self.lost(transfer, &plain(reason)),
            Message::Piece { of, bytes } => self.piece(of, bytes)?,
            Message::Done { request } => match self.requests.remove(&request) {
                Some(Request::Sync(promise)) => {
                    self.stats.replies += 1;
                    self.answers.push(Answer::Done(promise, Ok(())));
                }
                Some(Request::Barrier) => self.journal.reached(),
                _ => {}
            },
            Message::Failed { request, error } => self.refused_by_server(request, error),
            Message::Fault { value, error } => self.fault(value, error),
            Message::Answer { request, content } => match self.requests.remove(&request) {
                Some(Request::Query(promise)) => {
                    self.stats.replies += 1;
                    self.answers.push(Answer::Content(promise, Ok(content.to_vec())));
                }
                Some(Request::Recheck { id, sum }) => {
                    if content != sum.to_le_bytes() {
                        self.fail(Error::Diverged { peer: self.config.peer.clone(), value: id });
                    }
                }
                other => {
                    other.into_iter().for_each(|r| drop(self.requests.insert(request, r)));
                }
            },
            other => return Err(ProtocolError::Kind(other.encode().0)),
        }
        Ok(FrameOutcome::Going)
    }

    fn value(&mut self, request: u64, meta: Meta) -> Result<(), ProtocolError> {
        if let Some(Request::Read(_, _, Some((value, want)))) = self.requests.get(&request)
            && meta != *want
        {
            let (peer, value, want) = (self.config.peer.clone(), *value, *want);
            let error = Error::OtherValue { peer, value, want, got: meta };
            let request = self.requests.remove(&request);
            self.answers.extend(request.and_then(|request| refused(request, &error)));
            return Ok(());
        }
        let Some(Request::Read(_, slot, _) | Request::Recall(_, slot) | Request::Snapshot(_, slot)) =
            self.requests.get_mut(&request)
        else {
            return Ok(());
        };
        let bytes = pool::take(meta.bytes())
            .ok_or(ProtocolError::Misuse("a value is larger than this machine's memory"))?;
        *slot = Some(Incoming { meta, bytes });
        if meta.bytes() == 0 {
            self.arrived(request);
        }
        Ok(())
    }

    fn piece(&mut self, request: u64, bytes: &[u8]) -> Result<(), ProtocolError> {
        let Some(
            Request::Read(_, Some(incoming), _)
            | Request::Recall(_, Some(incoming))
            | Request::Snapshot(_, Some(incoming)),
        ) = self.requests.get_mut(&request)
        else {
            // The asker has gone, or the request was asked again.
            return Ok(());
        };
        if incoming.bytes.len() + bytes.len() > incoming.meta.bytes() {
            return Err(ProtocolError::Misuse("a value has more bytes than its shape"));
        }
        incoming.bytes.extend_from_slice(bytes);
        if incoming.bytes.len() == incoming.meta.bytes() {
            self.arrived(request);
        }
        Ok(())
    }

    fn arrived(&mut self, request: u64) {
        let data = |incoming: Incoming| Data::new(incoming.meta, pool::filled(incoming.bytes));
        match self.requests.remove(&request) {
            Some(Request::Read(promise, Some(incoming), _)) => {
                self.stats.replies += 1;
                if self.journal.is_kept() {
                    self.journal.answered(request, message::digest(&incoming.bytes));
                }
                self.answers.push(Answer::Data(promise, Ok(data(incoming))));
            }
            Some(Request::Recall(promise, Some(incoming))) => {
                self.answers.push(Answer::Data(promise, Ok(data(incoming))));
            }
            Some(Request::Snapshot(id, Some(incoming))) => {
                self.journal.took(id, Ok(data(incoming)));
            }
            _ => {}
        }
    }

    fn refused_by_server(&mut self, request: u64, error: Error) {
        match self.requests.remove(&request) {
            // A value that was never computed is a part of the snapshot like any other.
            Some(Request::Snapshot(id, _)) if matches!(error, Error::Failed { .. }) && self.can_poison() => {
                self.journal.took(id, Err(error));
            }
            Some(Request::Snapshot(..) | Request::Barrier) => {
                self.journal.give_up_snapshot();
                self.requests.retain(|_, r| !matches!(r, Request::Snapshot(..) | Request::Barrier));
            }
            Some(Request::Recheck { .. }) | None => {}
            Some(request) => {
                self.stats.replies += 1;
                let error = self.faults.located(error);
                self.answers.extend(refused(request, &error));
            }
        }
    }

    /// An operation has failed: finds who recorded it.
    fn fault(&mut self, value: Id, error: Error) {
        let origin = self.sent.iter().find_map(|sent| {
            let defines = |item: &Item| matches!(item, Item::Run(node) if node.outs.contains(&value));
            let at = sent.batch.items.iter().position(defines)?;
            sent.batch.origins.get(at).copied()
        });
        // What fails again when its history is run again has been told.
        if self.faults.knows(value) {
            return;
        }
        if let Some(origin) = origin {
            self.faults.note(value, origin);
        }
        if self.failures.len() < MOST {
            self.failures.push(self.faults.located(error));
        }
    }
}
