//! A session's part in moves between servers: it exposes, fetches, and stands in where servers cannot reach each other.

use super::Core;
use super::request::Request;
use crate::client::journal::Entry;
use crate::client::moves::{Errand, Move, Reach};
use crate::protocol::Message;
use crate::protocol::link::Priority;
use crate::protocol::message::{self, Capability};
use kiln_device::{Data, Error, Promise};
use kiln_ir::Id;
use std::sync::Arc;

impl Core {
    /// A value that is fetched from another server.
    pub fn fetch(&mut self, moved: Arc<Move>) {
        if self.failed.is_some() {
            self.settled.push(moved);
            return;
        }
        self.journal.define(moved.id, moved.place);
        self.faults.follow(&moved.source.faults());
        let entry = Entry::Fetched(moved);
        self.transmit(&entry);
        self.journal.push(entry);
        self.bound();
    }

    /// Lets servers fetch a value so many times. It is not repeated on another server: whoever still needs the value
    /// exposes it again.
    pub fn expose(&mut self, id: Id, capability: Capability, fetches: u64, milliseconds: u64) {
        if self.failed.is_none() && self.session.is_some() {
            // Ahead of the stream: what waits there may wait for this very value, by way of another server.
            let (kind, body) = Message::Expose { id, capability, fetches, milliseconds }.encode();
            self.link.send(Priority::Urgent, kind, body);
        }
    }

    /// Asks for what was exposed.
    pub fn recall(&mut self, capability: Capability, promise: Promise<Data>) {
        if let Some(request) = self.ask(Request::Recall(promise, None)) {
            let (kind, body) = Message::Recall { request, capability }.encode();
            self.link.send(Priority::Urgent, kind, body);
        }
    }

    /// Gives the bytes of a transfer that was lost on its direct way, or says that there are none.
    pub fn supply(&mut self, transfer: u64, answer: Result<Data, Error>) {
        // Another session may have begun meanwhile.
        let Some((_, moved)) = self.fetching.get(&transfer) else { return };
        match answer {
            Ok(data) if data.meta == moved.meta => {
                let compress = self.session.as_ref().is_some_and(|s| s.compress);
                for (kind, body) in message::pieces(transfer, &data.bytes, compress) {
                    self.link.send(Priority::Urgent, message::supply(kind), body);
                }
            }
            answer => {
                let error = answer.err().unwrap_or(Error::UnknownValue(moved.id));
                let (kind, body) = Message::Withdraw { transfer, error }.encode();
                self.link.send(Priority::Urgent, kind, body);
            }
        }
    }

    /// A fetch has failed on the server: the bytes go through the client.
    pub(super) fn lost(&mut self, transfer: u64, reason: &str) {
        let Some((_, moved)) = self.fetching.get(&transfer) else { return };
        let (moved, from) = (moved.clone(), moved.source.reach().url);
        self.event(format!("{} goes through the client, not straight from {from}: {reason}", moved.id));
        self.errands.push(Errand::Pass(transfer, moved));
    }

    /// What is to be done for it, outside of any lock.
    pub fn errands(&mut self) -> Vec<Errand> {
        std::mem::take(&mut self.errands)
    }

    /// Moves that need not be done again, to be dropped outside of any lock.
    pub fn settled(&mut self) -> Vec<Arc<Move>> {
        let mut settled = std::mem::take(&mut self.settled);
        settled.append(&mut self.journal.settled());
        settled
    }

    /// How other servers reach the session's, as far as it has said, and which start of it this is.
    pub fn reach(&self) -> Reach {
        self.session
            .as_ref()
            .map_or_else(Reach::default, |s| Reach { url: s.advertise.clone(), incarnation: s.incarnation })
    }
}
