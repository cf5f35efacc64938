//! How a session begins, goes on over a new connection, and is rebuilt on another server.

use super::request::{Request, refused};
use super::{Core, FrameOutcome, Login, Session};
use crate::client::journal::{Entry, Journal, Kept};
use crate::client::moves::Errand;
use crate::protocol::frame::control;
use crate::protocol::greeting::{Hello, Purpose, Welcome};
use crate::protocol::message::{Message, Query, kind};
use crate::protocol::template::Sender;
use crate::protocol::{ProtocolError, VERSIONS};
use kiln_device::Error;
use kiln_ir::wire::{Reader, Table, Writer};
use std::time::Duration;

impl Core {
    /// The first frame of a connection. `elsewhere`: the server is not the one of the session.
    pub fn hello(&mut self, login: &Login, elsewhere: bool) -> Vec<u8> {
        self.open = false;
        self.greeted = (login.recover, login.compress);
        let purpose = match &mut self.session {
            Some(session) if !elsewhere => {
                session.epoch += 1;
                let (number, secret, epoch) = (session.number, session.secret, session.epoch);
                Purpose::Resume { session: number, secret, epoch, received: self.link.received() }
            }
            _ => Purpose::Open { device: login.device.clone() },
        };
        let mut table = Writer::default();
        self.table.encode(&mut table);
        let hello = Hello {
            versions: VERSIONS,
            token: login.token.clone(),
            purpose,
            compress: login.compress,
            program: self.config.program.clone(),
            table: table.bytes,
        };
        control(kind::HELLO, &hello.encode())
    }

    pub(super) fn welcome(&mut self, welcome: Welcome) -> Result<FrameOutcome, ProtocolError> {
        if let Some(received) = welcome.resumed {
            let session =
                self.session.as_ref().ok_or(ProtocolError::Misuse("there is no session to resume"))?;
            if session.number != welcome.session || session.incarnation != welcome.incarnation {
                return Err(ProtocolError::Misuse("another session was resumed"));
            }
            self.link.resume(received)?;
            self.open = true;
            self.stats.resumed += 1;
            return Ok(FrameOutcome::Opened(false));
        }
        let first = self.session.is_none();
        if let Some(old) = &self.session
            && old.info.numerics != welcome.info.numerics
            && !self.config.any_numerics
        {
            let (want, got) = (old.info.numerics.clone(), welcome.info.numerics.clone());
            return Ok(FrameOutcome::Unfit(Error::NumericsDiffer {
                peer: self.config.peer.clone(),
                want,
                got,
            }));
        }
        self.known.set(Table::decode(&mut Reader::new(&welcome.table))?.common());
        self.session = Some(Session {
            version: welcome.version,
            number: welcome.session,
            secret: welcome.secret,
            incarnation: welcome.incarnation,
            epoch: 0,
            compress: welcome.compress && self.greeted.1,
            info: welcome.info,
            advertise: welcome.advertise,
            heartbeat: Duration::from_millis(welcome.heartbeat.max(1)),
        });
        self.open = true;
        self.rebuild(first);
        if !self.greeted.0 {
            self.journal.abandon("recovery is switched off");
        }
        Ok(FrameOutcome::Opened(true))
    }

    /// Brings a new session to where the stream is.
    fn rebuild(&mut self, first: bool) {
        let old = std::mem::take(&mut self.link).counts();
        self.stats.before.sent_frames += old.sent_frames;
        self.stats.before.sent_bytes += old.sent_bytes;
        self.stats.before.received_frames += old.received_frames;
        self.stats.before.received_bytes += old.received_bytes;
        self.sender = Sender::default();
        (self.tasks, self.executed, self.micros, self.snapshot_at) = (0, 0, 0, 0);
        self.journal.give_up_snapshot();
        self.requests
            .retain(|_, r| !matches!(r, Request::Snapshot(..) | Request::Barrier | Request::Recheck { .. }));
        for request in self.requests.values_mut() {
            if let Request::Read(_, incoming, _) = request {
                *incoming = None;
            }
        }
        // Nothing is exposed on the new server: who recalls must expose again.
        for (_, request) in self.requests.extract_if(|_, r| matches!(r, Request::Recall(..))) {
            self.answers.extend(refused(request, &Error::Stopped));
        }
        self.settled.extend(self.fetching.drain().map(|(_, (_, moved))| moved));
        if !first && !self.journal.covers(self.impure) {
            self.journal.abandon("an operation ran that is not pure");
        }
        // Out of the way while it is sent; sending adds nothing to it.
        let journal = std::mem::take(&mut self.journal);
        let sent = self.send_again(&journal, first);
        self.journal = journal;
        // What was not known to be executed may still fail, somewhere in what was sent again.
        self.sent.iter_mut().for_each(|sent| sent.task = self.tasks);
        match sent {
            Ok(()) if first => {}
            Ok(()) => self.snapshot(),
            Err(reason) => self.fail(Error::Disconnected { peer: self.config.peer.clone(), reason }),
        }
    }

    fn send_again(&mut self, journal: &Journal, first: bool) -> Result<(), String> {
        let (base, entries) = match journal.replay() {
            Ok(replay) => replay,
            Err(_) if first => return Ok(()),
            Err(reason) => return Err(format!("the server was lost with its values, and {reason}")),
        };
        if !first {
            self.stats.replayed += 1;
            let held = journal.held();
            self.event(format!(
                "rebuilding the session from a snapshot of {} bytes and {} entries",
                held.snapshot + held.stored,
                held.entries
            ));
        }
        if !first && self.traced && self.can_trace() {
            let request = self.next_request;
            self.next_request += 1;
            self.task(Message::Query { request, query: Query::Trace(true) }, false);
        }
        for (&id, kept) in base {
            match kept {
                Kept::Data(data, place) => {
                    self.transmit(&Entry::Upload { id, data: data.clone(), place: *place })
                }
                Kept::Stored(spilled, place) => self.upload_stored(id, spilled, *place),
                Kept::Failed(error) => self.transmit(&Entry::Poison { id, error: error.clone() }),
            }
        }
        for entry in entries {
            match entry {
                Entry::Fetched(moved) if !first => {
                    self.errands.push(Errand::Expose(moved.clone()));
                    self.transmit(entry);
                }
                Entry::Read { request, id, digest } if !self.requests.contains_key(request) => {
                    if let Some(sum) = digest {
                        let request = self.next_request;
                        self.next_request += 1;
                        self.requests.insert(request, Request::Recheck { id: *id, sum: *sum });
                        self.task(Message::Digest { request, id: *id }, false);
                    }
                }
                Entry::Sync { request } | Entry::Query { request, .. }
                    if !self.requests.contains_key(request) => {}
                entry => self.transmit(entry),
            }
        }
        Ok(())
    }
}
