//! The server's side of a session, without IO: frames in, work for a device, frames out.
//!
//! This half meets the network: it keeps order, counts and assembles. The half that computes is the
//! [`Executor`](super::executor::Executor). They share a queue of tasks, so that a worker can compute while frames go
//! on arriving.

use super::assembly::{Assembly, Memory};
use super::executor::Reply;
use super::moves::{Fetch, Order};
use crate::protocol::link::{Counts, Lane, Link, Out};
use crate::protocol::message::{self, Capability, Message, kind};
use crate::protocol::{Frame, ProtocolError};
use kiln_device::{Bytes, Data, Device, Error, Place};
use kiln_ir::{Id, Meta};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// What a session may hold.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// Bytes of values, by their shapes, and of uploads under way.
    pub bytes: usize,
    /// Values.
    pub values: usize,
}

impl Default for Quota {
    fn default() -> Quota {
        Quota { bytes: usize::MAX, values: 1 << 22 }
    }
}

/// Values below this are gathered anywhere and copied.
const COPIED: usize = 64 << 10;
/// Bytes of answers that may wait for a slow client before its work is paused.
const MOST_WAITING: u64 = 64 << 20;

/// A numbered message that waits for the device.
pub struct Task {
    pub(super) kind: u8,
    pub(super) payload: Vec<u8>,
}

impl Task {
    /// Whether it waits for bytes.
    fn is_transfer(&self) -> bool {
        matches!(self.kind, kind::UPLOAD | kind::FETCH)
    }
}

/// A session as the network sees it.
pub struct Session {
    link: Link,
    tasks: VecDeque<Task>,
    assemblies: FxHashMap<u64, Assembly>,
    assembling: usize,
    quota: Quota,
    /// What the client was last told of its progress, and what is true.
    told: (u64, u64),
    executed: u64,
    micros: u64,
    /// The client has ended it.
    ended: bool,
    compress: bool,
    pong: Option<u64>,
    device: Arc<dyn Device>,
    orders: Vec<Order>,
    /// Questions that wait for what is exposed.
    recalls: usize,
    /// Values to be exposed, and whether all of them were looked for since the last task.
    exposes: Vec<Expose>,
    looked: bool,
}

/// Questions of one client that may wait for what it exposes.
const MOST_RECALLS: usize = 1024;

/// Values that a session may have waiting to be exposed.
const MOST_EXPOSES: usize = 1 << 14;

/// A value to be exposed.
pub struct Expose {
    pub(super) id: Id,
    pub(super) capability: Capability,
    pub(super) fetches: u64,
    pub(super) patience: Duration,
}

/// What came of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing to do.
    Going,
    /// A pong of this number is due.
    Ping(u64),
    /// The client has ended the session.
    Ended,
}

impl Session {
    /// An empty session.
    pub fn new(device: Arc<dyn Device>, quota: Quota, compress: bool) -> Session {
        Session {
            link: Link::default(),
            tasks: VecDeque::new(),
            assemblies: FxHashMap::default(),
            assembling: 0,
            quota,
            told: (0, 0),
            executed: 0,
            micros: 0,
            ended: false,
            compress,
            pong: None,
            device,
            orders: Vec::new(),
            recalls: 0,
            exposes: Vec::new(),
            looked: true,
        }
    }

    /// Takes a frame of a welcome connection.
    pub fn receive(&mut self, frame: &Frame<'_>) -> Result<Step, ProtocolError> {
        if frame.seq == 0 {
            let mut room = Vec::new();
            match Message::decode(frame.kind, frame.payload, &mut room)? {
                Message::Ack { seq, limit } => self.link.acknowledged(seq, limit)?,
                Message::Ping(n) => return Ok(Step::Ping(n)),
                Message::Pong(_) => {}
                Message::Bye => {
                    self.ended = true;
                    return Ok(Step::Ended);
                }
                _ => return Err(ProtocolError::Kind(frame.kind)),
            }
            return Ok(Step::Going);
        }
        if frame.kind < 16 {
            return Err(ProtocolError::Kind(frame.kind));
        }
        if !self.link.accept(frame, message::lane(frame.kind))? {
            return Ok(Step::Going);
        }
        match frame.kind & 0x7f {
            kind::PIECE | kind::SUPPLY => {
                if frame.kind & 0x7f == kind::PIECE {
                    self.link.release(frame.payload.len());
                }
                let mut room = Vec::new();
                if let Message::Piece { of, bytes } = Message::decode(frame.kind, frame.payload, &mut room)? {
                    self.piece(of, bytes, frame.kind & 0x7f == kind::SUPPLY)?;
                }
            }
            kind::UPLOAD | kind::FETCH => {
                let mut room = Vec::new();
                match Message::decode(frame.kind, frame.payload, &mut room)? {
                    Message::Upload { transfer, meta, place, .. } => self.assemble(transfer, meta, place)?,
                    Message::Fetch { transfer, meta, place, incarnation, url, capability, .. } => {
                        self.assemble(transfer, meta, place)?;
                        let url = url.to_string();
                        let fetch = Fetch { transfer, meta, incarnation, url, capability };
                        self.orders.push(Order::Fetch(fetch));
                    }
                    _ => return Err(ProtocolError::Kind(frame.kind)),
                }
                self.queue(frame);
            }
            kind::RECALL | kind::WITHDRAW | kind::EXPOSE => {
                let mut room = Vec::new();
                match Message::decode(frame.kind, frame.payload, &mut room)? {
                    Message::Expose { .. } if self.exposes.len() >= MOST_EXPOSES => {
                        return Err(ProtocolError::Misuse("too many values are exposed"));
                    }
                    Message::Expose { id, capability, fetches, milliseconds } => {
                        self.orders.push(Order::Announce(capability));
                        let patience = Duration::from_millis(milliseconds);
                        self.exposes.push(Expose { id, capability, fetches, patience });
                        self.looked = false;
                    }
                    Message::Recall { request, capability } if self.recalls < MOST_RECALLS => {
                        self.recalls += 1;
                        self.orders.push(Order::Recall(request, capability));
                    }
                    Message::Recall { .. } => return Err(ProtocolError::Misuse("too many recalls")),
                    Message::Withdraw { transfer, error } => {
                        self.lost_assembly(transfer)?.memory = Memory::None(error);
                    }
                    _ => return Err(ProtocolError::Kind(frame.kind)),
                }
            }
            _ => self.queue(frame),
        }
        Ok(Step::Going)
    }

    fn queue(&mut self, frame: &Frame<'_>) {
        self.tasks.push_back(Task { kind: frame.kind, payload: frame.payload.to_vec() });
    }

    fn assemble(&mut self, transfer: u64, meta: Meta, place: Place) -> Result<(), ProtocolError> {
        let want = meta.bytes();
        let (memory, counted) = if self.assembling.saturating_add(want) > self.quota.bytes {
            (Memory::None(Error::OutOfMemory { asked: want, free: 0, limit: self.quota.bytes }), 0)
        } else {
            // Under a limit, room taken ahead of its place in the stream could fail what comes before it.
            let ahead = want >= COPIED && self.device.memory().limit.is_none();
            let room = if ahead { self.device.room(want, place) } else { None };
            (room.map_or_else(|| Memory::Grown(Vec::new()), Memory::Room), want)
        };
        self.assembling += counted;
        let assembly = Assembly { meta, filled: 0, counted, memory, lost: false };
        match self.assemblies.insert(transfer, assembly) {
            Some(_) => Err(ProtocolError::Misuse("a transfer's number is used twice")),
            None => Ok(()),
        }
    }

    fn piece(&mut self, of: u64, bytes: &[u8], supplied: bool) -> Result<(), ProtocolError> {
        if supplied {
            return self.lost_assembly(of)?.add(bytes);
        }
        let assembly = self.assemblies.get_mut(&of).ok_or(ProtocolError::Misuse("a piece of no transfer"))?;
        assembly.add(bytes)
    }

    /// A transfer whose pieces the client sends itself.
    fn lost_assembly(&mut self, transfer: u64) -> Result<&mut Assembly, ProtocolError> {
        let assembly = self.assemblies.get_mut(&transfer).filter(|a| a.lost);
        assembly.ok_or(ProtocolError::Misuse("bytes of no lost transfer"))
    }

    /// What the session wants of its server.
    pub fn orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// Bytes of a fetch that have come.
    pub fn fetched(&self, transfer: u64) -> usize {
        self.assemblies.get(&transfer).map_or(0, |a| a.filled)
    }

    /// The next bytes of a fetch. True when it is complete.
    pub fn fetch(&mut self, transfer: u64, bytes: &[u8]) -> Result<bool, ProtocolError> {
        let assembly = self
            .assemblies
            .get_mut(&transfer)
            .ok_or(ProtocolError::Misuse("a fetch that nobody waits for"))?;
        assembly.add(bytes)?;
        Ok(assembly.is_complete())
    }

    /// A fetch is over at once: with all of its value, or with the reason why there is none.
    pub fn fetch_whole(&mut self, transfer: u64, value: Result<Data, Error>) {
        if let Some(assembly) = self.assemblies.get_mut(&transfer) {
            assembly.memory = match value {
                Ok(data) if data.meta == assembly.meta => Memory::Whole(data),
                Ok(_) => Memory::None(Error::Peer { message: "a moved value has another shape".into() }),
                Err(error) => Memory::None(error),
            };
        }
    }

    /// A fetch has failed: the client is asked for the bytes, from the first on.
    pub fn fetch_lost(&mut self, transfer: u64, reason: &str) {
        if let Some(assembly) = self.assemblies.get_mut(&transfer) {
            assembly.lost = true;
            assembly.filled = 0;
            if let Memory::Grown(held) = &mut assembly.memory {
                held.clear();
            }
            let (kind, body) = Message::Lost { transfer, reason }.encode();
            self.link.send(Lane::Normal, kind, body);
        }
    }

    /// Answers a recall.
    pub fn recalled(&mut self, request: u64, value: Result<Data, Error>) {
        self.recalls -= 1;
        self.reply(match value {
            Ok(data) => Reply::Value { request, data, background: false },
            Err(error) => Reply::of(Message::Failed { request, error }),
        });
    }

    /// Values to be exposed, to be looked for now: those that are not there yet are given back.
    pub fn exposes(&mut self) -> Vec<Expose> {
        match std::mem::replace(&mut self.looked, true) {
            true => Vec::new(),
            false => std::mem::take(&mut self.exposes),
        }
    }

    /// Values that are to be exposed once the stream has come to them.
    pub fn expose_later(&mut self, later: Vec<Expose>) {
        self.exposes.extend(later);
    }

    /// Whether a worker would find something to do.
    pub fn is_ready(&self) -> bool {
        if !self.looked && !self.exposes.is_empty() {
            return true;
        }
        let Some(task) = self.tasks.front() else { return false };
        if self.link.queued_bytes() > MOST_WAITING {
            return false;
        }
        !task.is_transfer() || self.arrived(task).is_some()
    }

    /// The transfer of a task whose bytes are all there.
    fn arrived(&self, task: &Task) -> Option<u64> {
        let transfer = kiln_ir::wire::Reader::new(&task.payload).int().ok()?;
        self.assemblies.get(&transfer)?.is_complete().then_some(transfer)
    }

    /// The next task, and the bytes of an upload or a fetch.
    pub fn take(&mut self) -> Option<(Task, Option<Result<Bytes, Error>>)> {
        if !self.is_ready() {
            return None;
        }
        let bytes = match self.tasks.front() {
            Some(task) if task.is_transfer() => {
                let assembly = self.arrived(task).and_then(|t| self.assemblies.remove(&t))?;
                self.assembling -= assembly.counted;
                Some(assembly.done())
            }
            _ => None,
        };
        self.tasks.pop_front().map(|task| (task, bytes))
    }

    /// A task is done: its answers go out, its bytes make room.
    pub fn finish(&mut self, task: &Task, replies: Vec<Reply>, micros: u64) {
        self.link.release(task.payload.len());
        self.looked = false;
        self.executed += 1;
        self.micros += micros;
        replies.into_iter().for_each(|reply| self.reply(reply));
    }

    fn reply(&mut self, reply: Reply) {
        match reply {
            Reply::Message(kind, body) => self.link.send(Lane::Normal, kind, body),
            Reply::Value { request, data, background } => {
                let lane = if background { Lane::Background } else { Lane::Normal };
                let (kind, body) = Message::Value { request, meta: data.meta }.encode();
                self.link.send(lane, kind, body);
                for (kind, body) in message::pieces(request, &data.bytes, self.compress) {
                    self.link.send(lane, kind, body);
                }
            }
        }
    }

    /// The next numbered frame to send.
    pub fn next(&mut self) -> Option<Out> {
        self.link.next()
    }

    /// The client has asked for a sign of life.
    pub fn pong(&mut self, number: u64) {
        self.pong = Some(number);
    }

    /// Whether there are notices that could wait.
    pub fn owes(&self) -> bool {
        self.link.owes() || self.told.0 != self.executed
    }

    /// Whether everything has been sent and acknowledged.
    pub fn is_sent(&self) -> bool {
        self.link.queued_frames() == 0
    }

    /// Control messages that are due: acknowledgement and progress, if not `soon` only when there is much to tell.
    pub fn notices(&mut self, soon: bool) -> SmallVec<[Message<'static>; 2]> {
        let mut due: SmallVec<[Message<'static>; 2]> =
            self.pong.take().map(Message::Pong).into_iter().collect();
        due.extend(self.link.acknowledge(soon));
        if self.told.0 != self.executed && (soon || self.executed - self.told.0 >= 16) {
            self.told = (self.executed, self.micros);
            due.push(Message::Progress { tasks: self.executed, micros: self.micros });
        }
        due
    }

    /// The client has a new connection and has received everything up to `received`.
    pub fn resume(&mut self, received: u64) -> Result<u64, ProtocolError> {
        self.link.resume(received)?;
        self.told = (0, 0);
        Ok(self.link.received())
    }

    /// Whether the client has ended it.
    pub fn is_over(&self) -> bool {
        self.ended && self.tasks.is_empty()
    }

    /// Tasks that wait, tasks executed, and the microseconds they took.
    pub fn load(&self) -> (usize, u64, u64) {
        (self.tasks.len(), self.executed, self.micros)
    }

    /// What has gone over its link.
    pub fn counts(&self) -> Counts {
        self.link.counts()
    }
}
