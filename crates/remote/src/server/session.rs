//! The server's side of a session, without IO: frames in, work for a device, frames out.
//!
//! The half that meets the network ([`Session`]) keeps order, counts and assembles; the half that computes
//! ([`Executor`]) decodes, verifies every operation before the device sees it, and answers. They share a queue of tasks,
//! so that a worker can compute while frames go on arriving.

use super::assembly::{Assembly, Memory};
use super::moves::{Fetch, Order, Shown};
use crate::protocol::link::{Counts, Lane, Link, Out};
use crate::protocol::message::{self, Capability, Message, Query, kind};
use crate::protocol::template::Receiver;
use crate::protocol::{Frame, ProtocolError};
use kiln_device::{Batch, Bytes, Data, Device, Error, Place, Urgency};
use kiln_ir::wire::Table;
use kiln_ir::{Id, Item, Meta, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    kind: u8,
    payload: Vec<u8>,
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
    id: Id,
    capability: Capability,
    fetches: u64,
    patience: Duration,
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

/// What a task gives back to the client.
pub enum Reply {
    /// A message.
    Message(u8, crate::protocol::Body),
    /// A value in pieces.
    Value {
        /// The request that it answers.
        request: u64,
        /// The value.
        data: Data,
        /// It gives way to other answers.
        background: bool,
    },
}

impl Reply {
    fn of(message: Message<'_>) -> Reply {
        let (kind, body) = message.encode();
        Reply::Message(kind, body)
    }
}

/// The half of a session that computes.
pub struct Executor {
    device: Arc<dyn Device>,
    table: Table,
    templates: Receiver,
    /// Dtype and shape of each value, or why there is none.
    values: FxHashMap<Id, Result<Meta, Arc<Error>>>,
    bytes: usize,
    quota: Quota,
    operations: u64,
}

impl Executor {
    /// An executor on a device of its own, for a client with this table.
    pub fn new(device: Arc<dyn Device>, table: Table, quota: Quota) -> Executor {
        device.limit((quota.bytes != usize::MAX).then_some(quota.bytes));
        let (templates, values) = (Receiver::default(), FxHashMap::default());
        Executor { device, table, templates, values, bytes: 0, quota, operations: 0 }
    }

    /// Does a task. An error means that the client does not keep to the protocol: the session ends.
    pub fn run(
        &mut self,
        task: &Task,
        upload: Option<Result<Bytes, Error>>,
    ) -> Result<(Vec<Reply>, u64), ProtocolError> {
        let start = Instant::now();
        let mut room = Vec::new();
        let mut replies = Vec::new();
        match Message::decode(task.kind, &task.payload, &mut room)? {
            Message::Define { template, structure, bindings } => {
                let batch = self.templates.define(&self.table, template, structure, bindings)?;
                self.batch(batch, &mut replies)?;
            }
            Message::Call { template, bindings } => {
                let batch = self.templates.call(&self.table, template, bindings)?;
                self.batch(batch, &mut replies)?;
            }
            Message::Forget { template } => self.templates.forget(template),
            Message::Upload { id, meta, place, .. } | Message::Fetch { id, meta, place, .. } => {
                self.upload(id, meta, place, upload, &mut replies)?
            }
            Message::Read { request, id, background } => {
                replies.push(match self.read(id) {
                    Ok(data) => Reply::Value { request, data, background },
                    Err(error) => Reply::of(Message::Failed { request, error }),
                });
            }
            Message::Digest { request, id } => {
                replies.push(match self.read(id) {
                    Ok(data) => {
                        let sum = message::digest(&data.bytes).to_le_bytes();
                        Reply::of(Message::Answer { request, content: &sum })
                    }
                    Err(error) => Reply::of(Message::Failed { request, error }),
                });
            }
            Message::Sync { request } => {
                replies.push(match self.device.sync().wait() {
                    Ok(()) => Reply::of(Message::Done { request }),
                    Err(error) => Reply::of(Message::Failed { request, error }),
                });
            }
            Message::Query { request, query } => {
                match query {
                    Query::Memory => {}
                    Query::Cleanup => self.device.cleanup(),
                    Query::Limit(limit) => {
                        let asked = limit.map_or(usize::MAX, |x| usize::try_from(x).unwrap_or(usize::MAX));
                        let limit = asked.min(self.quota.bytes);
                        self.device.limit((limit != usize::MAX).then_some(limit));
                    }
                }
                let content = message::encode_memory(&self.device.memory());
                replies.push(Reply::of(Message::Answer { request, content: &content }));
            }
            _ => return Err(ProtocolError::Kind(task.kind)),
        }
        for error in self.device.failures() {
            if let Error::Failed { value, .. } = error {
                replies.push(Reply::of(Message::Fault { value, error }));
            }
        }
        Ok((replies, start.elapsed().as_micros() as u64))
    }

    /// Verifies a batch and gives it to the device. An operation that cannot be applied fails with what depends on it,
    /// and the device does not see them.
    fn batch(&mut self, batch: Batch, replies: &mut Vec<Reply>) -> Result<(), ProtocolError> {
        let Batch { items, place, .. } = batch;
        let mut due = Vec::with_capacity(items.len());
        for item in items {
            if self.admit(&item, &mut due, place, replies)? {
                due.push(item);
            }
        }
        self.submit(due, place);
        Ok(())
    }

    fn submit(&mut self, items: Vec<Item>, place: Place) {
        self.operations += items.len() as u64;
        self.device.submit(Batch { items, origins: Vec::new(), place, urgency: Urgency::Now });
    }

    /// Whether the device is to see this item after those that are `due`.
    fn admit(
        &mut self,
        item: &Item,
        due: &mut Vec<Item>,
        place: Place,
        replies: &mut Vec<Reply>,
    ) -> Result<bool, ProtocolError> {
        let node = match item {
            Item::Free(id) => return self.free(*id),
            Item::Run(node) => node,
        };
        let mut ins: SmallVec<[Meta; 4]> = SmallVec::new();
        let mut poison = None;
        for id in &node.ins {
            match self.values.get(id) {
                Some(Ok(meta)) => ins.push(*meta),
                Some(Err(error)) => poison = Some(error.clone()),
                None => {
                    let value = *node.outs.first().ok_or(ProtocolError::Misuse("no results"))?;
                    poison = Some(self.fault(node.op.name(), value, Error::UnknownValue(*id), replies));
                }
            }
        }
        if let Some(error) = poison {
            node.outs.iter().try_for_each(|id| self.define(*id, Err(error.clone())))?;
            return Ok(false);
        }
        match infer(&node.op, &ins) {
            Ok(outs) if outs.len() == node.outs.len() => {
                node.outs.iter().zip(outs).try_for_each(|(id, meta)| self.define(*id, Ok(meta)))?;
                Ok(true)
            }
            Ok(_) => Err(ProtocolError::Misuse("an operation with another number of results")),
            Err(cause) => {
                let value =
                    *node.outs.first().ok_or(ProtocolError::Misuse("an operation without results"))?;
                // An operand that has failed on the device says more than its shape does.
                self.submit(std::mem::take(due), place);
                let failed = node.ins.iter().find_map(|id| self.device.read(*id).wait().err());
                let error = match failed {
                    Some(error) => Arc::new(error),
                    None => self.fault(node.op.name(), value, cause.into(), replies),
                };
                node.outs.iter().try_for_each(|id| self.define(*id, Err(error.clone())))?;
                Ok(false)
            }
        }
    }

    fn fault(&mut self, op: &str, value: Id, cause: Error, replies: &mut Vec<Reply>) -> Arc<Error> {
        let error = Error::Failed { op: op.into(), value, origin: None, cause: Arc::new(cause) };
        replies.push(Reply::of(Message::Fault { value, error: error.clone() }));
        Arc::new(error)
    }

    fn define(&mut self, id: Id, value: Result<Meta, Arc<Error>>) -> Result<(), ProtocolError> {
        if self.values.len() >= self.quota.values {
            return Err(ProtocolError::Misuse("more values than the quota allows"));
        }
        self.bytes = self.bytes.saturating_add(value.as_ref().map_or(0, |meta| meta.bytes()));
        match self.values.insert(id, value) {
            Some(_) => Err(ProtocolError::Misuse("a value that exists already")),
            None => Ok(()),
        }
    }

    fn free(&mut self, id: Id) -> Result<bool, ProtocolError> {
        match self.values.remove(&id) {
            Some(Ok(meta)) => {
                self.bytes = self.bytes.saturating_sub(meta.bytes());
                Ok(true)
            }
            Some(Err(_)) | None => Ok(false),
        }
    }

    fn upload(
        &mut self,
        id: Id,
        meta: Meta,
        place: Place,
        bytes: Option<Result<Bytes, Error>>,
        replies: &mut Vec<Reply>,
    ) -> Result<(), ProtocolError> {
        match bytes {
            Some(Ok(bytes)) if bytes.len() == meta.bytes() => {
                self.define(id, Ok(meta))?;
                self.device.write(id, Data::new(meta, bytes), place);
                // Executed now, so that a failure is told in its place.
                let _ = self.device.sync().wait();
                Ok(())
            }
            // What failed elsewhere was told there.
            Some(Err(error @ Error::Failed { .. })) => self.define(id, Err(Arc::new(error))),
            Some(Err(cause)) => {
                let error = self.fault("write", id, cause, replies);
                self.define(id, Err(error))
            }
            _ => Err(ProtocolError::Misuse("an upload without its bytes")),
        }
    }

    /// A value's content.
    fn read(&self, id: Id) -> Result<Data, Error> {
        match self.values.get(&id) {
            Some(Ok(_)) => self.device.read(id).wait(),
            Some(Err(error)) => Err((**error).clone()),
            None => Err(Error::UnknownValue(id)),
        }
    }

    /// Looks for values to be exposed: those that are there, and those that are not yet.
    pub fn show(&self, exposes: Vec<Expose>) -> (Vec<Shown>, Vec<Expose>) {
        let (there, later): (Vec<_>, Vec<_>) =
            exposes.into_iter().partition(|expose| self.values.contains_key(&expose.id));
        let show = |Expose { id, capability, fetches, patience }| Shown {
            capability,
            fetches,
            patience,
            value: self.read(id),
        };
        (there.into_iter().map(show).collect(), later)
    }

    /// Values, their bytes by shape, and operations so far.
    pub fn held(&self) -> (usize, usize, u64) {
        (self.values.len(), self.bytes, self.operations)
    }

    /// The device that computes.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }
}
