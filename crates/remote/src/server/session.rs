//! The server's side of a session, without IO: frames in, work for a device, frames out.
//!
//! This half meets the network: it keeps order, counts and assembles. The half that computes is the
//! [`Executor`](super::executor::Executor). They share a queue of tasks, so that a worker can compute while frames go
//! on arriving.

use super::assembly::{Assembly, Memory};
use super::executor::Reply;
use super::moves::{Fetch, Order};
use crate::protocol::frame;
use crate::protocol::link::{Counts, Link, Out, Packing, Priority};
use crate::protocol::message::{self, Capability, Message, kind};
use crate::protocol::{Frame, ProtocolError};
use kiln_device::{Bytes, Data, Driver, Error, Place, Share};
use kiln_ir::{Id, Meta};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
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
/// Bytes of answers that may wait for a slow client before its work is paused: those of values, which are held anyway,
/// and what answers take besides.
const MOST_WAITING: u64 = 64 << 20;
const MOST_OWN: u64 = 8 << 20;
/// Bytes of values under way, under a quota, that are gathered before the stream has come to them. The rest waits at the
/// client: room for it is taken where the stream defines it.
pub(super) const AHEAD: usize = 32 << 20;
/// What keeping a task takes, besides its bytes.
const TASK: usize = 96;
/// In what steps a session's share of the server's memory grows.
const STEP: usize = 1 << 20;
/// Transfers under way.
const MOST_TRANSFERS: usize = 1 << 17;

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

    /// The transfer that it waits for.
    fn transfer(&self) -> Option<u64> {
        kiln_ir::wire::Reader::new(&self.payload).int().ok()
    }
}

/// A session as the network sees it.
pub struct Session {
    link: Link,
    tasks: VecDeque<Task>,
    assemblies: FxHashMap<u64, Assembly>,
    assembling: usize,
    /// Uploads that failed before all of their bytes were here, and how many are still to come.
    dropped: FxHashMap<u64, usize>,
    /// Bytes of fetches that have been begun and are not yet in the stream's place.
    fetching: usize,
    /// Bytes that have come ahead of their place in the stream.
    ahead: usize,
    /// Bytes of tasks that wait.
    waiting: usize,
    /// What it takes of what all sessions may hold here.
    share: Option<Share>,
    /// A worker has a task.
    running: bool,
    quota: Quota,
    /// What the client was last told of its progress, and what is true.
    told: (u64, u64),
    executed: u64,
    micros: u64,
    /// The client has ended it.
    ended: bool,
    compress: bool,
    pong: Option<u64>,
    device: Arc<dyn Driver>,
    orders: Vec<Order>,
    /// Questions for what is exposed: those that wait for it, and those that wait for their turn.
    recalling: usize,
    recalls: VecDeque<(u64, Capability)>,
    /// What the stream has not come to, and who asked for it: these take no turn, or they would hold up what they wait
    /// for. Keyed: clients choose capabilities.
    unshown: HashMap<Capability, Vec<u64>>,
    early: usize,
    /// Values to be exposed, and whether all of them were looked for since the last task.
    exposes: Vec<Expose>,
    looked: bool,
}

/// Questions of one client that may wait for what it exposes, and those that may wait for their turn.
const MOST_RECALLING: usize = 64;
const MOST_RECALLS: usize = 1 << 16;

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
pub enum SessionEvent {
    /// Nothing to do.
    Going,
    /// A pong of this number is due.
    Ping(u64),
    /// The client has ended the session.
    Ended,
}

impl Session {
    /// An empty session.
    pub fn new(device: Arc<dyn Driver>, quota: Quota, compress: bool) -> Session {
        Session {
            link: Link::default(),
            tasks: VecDeque::new(),
            assemblies: FxHashMap::default(),
            assembling: 0,
            dropped: FxHashMap::default(),
            fetching: 0,
            ahead: 0,
            waiting: 0,
            share: None,
            running: false,
            quota,
            told: (0, 0),
            executed: 0,
            micros: 0,
            ended: false,
            compress,
            pong: None,
            device,
            orders: Vec::new(),
            recalling: 0,
            recalls: VecDeque::new(),
            unshown: HashMap::new(),
            early: 0,
            exposes: Vec::new(),
            looked: true,
        }
    }

    /// The same with a share of what all sessions may hold.
    pub(super) fn with_share(self, share: Option<Share>) -> Session {
        Session { share, ..self }
    }

    /// Takes what has come and what waits to be sent from what all sessions may hold.
    fn weigh(&mut self) -> Result<(), ProtocolError> {
        let held = self.ahead + self.waiting + self.link.own_bytes() as usize;
        let Some(share) = &mut self.share else { return Ok(()) };
        if held <= share.bytes() && held + 2 * STEP > share.bytes() {
            return Ok(());
        }
        // In steps, so that it is asked for seldom.
        let full = ProtocolError::Misuse("more waits here than the server has memory for");
        share.resize((held / STEP + 1) * STEP).map_err(|_| full)
    }

    /// Takes a frame of a welcome connection.
    pub fn receive(&mut self, frame: &Frame<'_>) -> Result<SessionEvent, ProtocolError> {
        self.receive_as(frame, frame.payload.len())
    }

    /// The same for a frame whose payload was `len` bytes on its way.
    pub fn receive_as(&mut self, frame: &Frame<'_>, len: usize) -> Result<SessionEvent, ProtocolError> {
        if frame.seq == 0 {
            let mut scratch = Vec::new();
            match Message::decode(frame.kind, frame.payload, &mut scratch)? {
                Message::Ack { seq, limit } => self.link.acknowledged(seq, limit)?,
                Message::Ping(n) => return Ok(SessionEvent::Ping(n)),
                Message::Pong(_) => {}
                Message::Bye => {
                    self.ended = true;
                    return Ok(SessionEvent::Ended);
                }
                _ => return Err(ProtocolError::Kind(frame.kind)),
            }
            return Ok(SessionEvent::Going);
        }
        if !message::is_numbered(frame.kind) || !message::may_be_compressed(frame.kind) {
            return Err(ProtocolError::Kind(frame.kind));
        }
        if !self.link.accept_as(frame, len, message::lane(frame.kind))? {
            return Ok(SessionEvent::Going);
        }
        match message::plain(frame.kind) {
            kind::PIECE | kind::SUPPLY => {
                let supplied = message::plain(frame.kind) == kind::SUPPLY;
                let mut scratch = Vec::new();
                if let Message::Piece { of, bytes } =
                    Message::decode(frame.kind, frame.payload, &mut scratch)?
                {
                    self.piece(of, bytes, supplied, len)?;
                }
            }
            kind::UPLOAD | kind::FETCH => {
                let mut scratch = Vec::new();
                match Message::decode(frame.kind, frame.payload, &mut scratch)? {
                    Message::Upload { transfer, meta, place, .. } => self.assemble(transfer, meta, place)?,
                    Message::Fetch { transfer, meta, place, incarnation, url, capability, .. } => {
                        self.assemble(transfer, meta, place)?;
                        // What is too large is not asked for.
                        if self.wants(transfer) {
                            let url = url.to_string();
                            let fetch = Fetch { transfer, meta, incarnation, url, capability };
                            self.orders.push(Order::Fetch(fetch));
                        }
                    }
                    _ => return Err(ProtocolError::Kind(frame.kind)),
                }
                self.queue(frame)?;
            }
            kind::RECALL | kind::WITHDRAW | kind::EXPOSE => {
                let mut scratch = Vec::new();
                match Message::decode(frame.kind, frame.payload, &mut scratch)? {
                    Message::Expose { .. } if self.exposes.len() >= MOST_EXPOSES => {
                        return Err(ProtocolError::Misuse("too many values are exposed"));
                    }
                    Message::Expose { id, capability, fetches, milliseconds } => {
                        self.orders.push(Order::Announce(capability));
                        let patience = Duration::from_millis(milliseconds);
                        self.exposes.push(Expose { id, capability, fetches, patience });
                        self.unshown.entry(capability).or_default();
                        self.looked = false;
                    }
                    Message::Recall { .. } if self.recalls.len() + self.early >= MOST_RECALLS => {
                        return Err(ProtocolError::Misuse("too many recalls"));
                    }
                    Message::Recall { request, capability } => match self.unshown.get_mut(&capability) {
                        Some(waiting) => {
                            waiting.push(request);
                            self.early += 1;
                        }
                        None => self.recalls.push_back((request, capability)),
                    },
                    Message::Withdraw { transfer, error } => {
                        self.lost_assembly(transfer)?.memory = Memory::None(Box::new(error));
                    }
                    _ => return Err(ProtocolError::Kind(frame.kind)),
                }
            }
            _ => self.queue(frame)?,
        }
        Ok(SessionEvent::Going)
    }

    fn queue(&mut self, frame: &Frame<'_>) -> Result<(), ProtocolError> {
        self.waiting += frame.payload.len() + TASK;
        self.tasks.push_back(Task { kind: frame.kind, payload: frame.payload.to_vec() });
        self.weigh()
    }

    fn assemble(&mut self, transfer: u64, meta: Meta, place: Place) -> Result<(), ProtocolError> {
        let want = meta.bytes();
        if self.assemblies.len() + self.dropped.len() >= MOST_TRANSFERS {
            return Err(ProtocolError::Misuse("too many transfers under way"));
        }
        let (memory, counted) = if self.assembling.saturating_add(want) > self.quota.bytes {
            let error = Error::OutOfMemory { asked: want, free: 0, limit: self.quota.bytes };
            (Memory::None(Box::new(error)), 0)
        } else {
            // Under a limit, memory taken ahead of its place in the stream could fail what comes before it.
            let ahead = want >= COPIED && !self.is_limited();
            let buffer = if ahead { self.device.upload_buffer(want, place) } else { None };
            (buffer.map_or_else(|| Memory::Grown(Vec::new()), Memory::Device), want)
        };
        self.assembling += counted;
        let assembly = Assembly {
            meta,
            place,
            filled: 0,
            counted,
            memory,
            lost: false,
            begun: false,
            asked: false,
            owed: 0,
            ahead: 0,
        };
        match self.assemblies.insert(transfer, assembly) {
            Some(_) => Err(ProtocolError::Misuse("a transfer's number is used twice")),
            None => Ok(()),
        }
    }

    fn is_limited(&self) -> bool {
        self.quota.bytes != usize::MAX || self.device.memory().limit.is_some()
    }

    /// Whether the stream has come to this transfer: everything before it is executed.
    pub fn is_next(&self, transfer: u64) -> bool {
        let next = self.tasks.front().filter(|task| task.is_transfer());
        !self.running && next.and_then(Task::transfer) == Some(transfer)
    }

    /// Takes the next bytes of a transfer, which were `len` bytes on their way if they took room there.
    fn piece(&mut self, of: u64, bytes: &[u8], supplied: bool, len: usize) -> Result<(), ProtocolError> {
        if supplied {
            self.lost_assembly(of)?;
        }
        let limited = self.is_limited();
        let waits = self.add(of, bytes, "a piece of no transfer")?;
        if supplied {
            return Ok(());
        }
        // Who is too far ahead goes on when the stream has come to that.
        match self.assemblies.get_mut(&of) {
            Some(assembly) if limited && waits && self.ahead > AHEAD => assembly.owed += frame::HEAD + len,
            _ => self.link.release(len),
        }
        Ok(())
    }

    /// Adds bytes to a transfer; gives whether the stream has not come to it.
    fn add(&mut self, of: u64, bytes: &[u8], unknown: &'static str) -> Result<bool, ProtocolError> {
        let next = self.is_next(of);
        if next {
            self.take_buffer(of);
        }
        if let Some(left) = self.dropped.get_mut(&of) {
            *left = left.saturating_sub(bytes.len());
            if *left == 0 {
                self.dropped.remove(&of);
            }
            return Ok(false);
        }
        let assembly = self.assemblies.get_mut(&of).ok_or(ProtocolError::Misuse(unknown))?;
        assembly.add(bytes)?;
        if matches!(assembly.memory, Memory::Grown(_)) {
            assembly.ahead += bytes.len();
            self.ahead += bytes.len();
            self.weigh()?;
        }
        Ok(!next)
    }

    /// The stream has come to this transfer: a large one gets its buffer now, or fails for lack of it.
    fn take_buffer(&mut self, transfer: u64) {
        let Some(assembly) = self.assemblies.get_mut(&transfer) else { return };
        let want = assembly.meta.bytes();
        let Memory::Grown(held) = &assembly.memory else { return };
        if want < COPIED || assembly.asked {
            return;
        }
        assembly.asked = true;
        match self.device.upload_buffer(want, assembly.place) {
            Some(mut buffer) => {
                buffer.bytes()[..held.len()].copy_from_slice(held);
                assembly.memory = Memory::Device(buffer);
            }
            None => {
                let memory = self.device.memory();
                let free = memory.limit.map_or(usize::MAX, |limit| limit.saturating_sub(memory.live_bytes));
                if free >= want {
                    // Any memory will do.
                    return;
                }
                let limit = memory.limit.unwrap_or(self.quota.bytes);
                let error = Error::OutOfMemory { asked: want, free, limit };
                assembly.memory = Memory::None(Box::new(error));
            }
        }
        self.ahead -= std::mem::take(&mut assembly.ahead);
    }

    /// The stream has come further: what waits for that gets its buffer, and the client may send the rest of it.
    fn further(&mut self) {
        let next = self.tasks.front().filter(|task| task.is_transfer()).and_then(Task::transfer);
        let Some(transfer) = next.filter(|_| !self.running) else { return };
        if let Some(assembly) = self.assemblies.get_mut(&transfer) {
            let owed = std::mem::take(&mut assembly.owed);
            if owed > 0 {
                self.link.release(owed - frame::HEAD);
                self.take_buffer(transfer);
            }
        }
    }

    /// Whether a fetch may begin now, so that what arrives finds room; it has begun then.
    pub fn begin_fetch(&mut self, transfer: u64, shared: bool) -> bool {
        let fits = shared || !self.is_limited() || self.is_next(transfer);
        let Some(assembly) = self.assemblies.get_mut(&transfer) else { return true };
        let want = if shared { 0 } else { assembly.counted };
        if !fits && self.fetching.saturating_add(want) > AHEAD {
            return false;
        }
        assembly.begun = !shared;
        self.fetching += want;
        true
    }

    /// A transfer whose pieces the client sends itself.
    fn lost_assembly(&mut self, transfer: u64) -> Result<&mut Assembly, ProtocolError> {
        let assembly = self.assemblies.get_mut(&transfer).filter(|a| a.lost);
        assembly.ok_or(ProtocolError::Misuse("bytes of no lost transfer"))
    }

    /// What the session wants of its server.
    pub fn orders(&mut self) -> Vec<Order> {
        let mut orders = std::mem::take(&mut self.orders);
        // Values that are recalled wait where they are until there is room for the answer.
        while self.recalling < MOST_RECALLING
            && self.has_room()
            && let Some((request, capability)) = self.recalls.pop_front()
        {
            self.recalling += 1;
            orders.push(Order::Recall(request, capability));
        }
        orders
    }

    /// Whether answers may be added to those that wait.
    fn has_room(&self) -> bool {
        self.link.queued_bytes() <= MOST_WAITING && self.link.own_bytes() <= MOST_OWN
    }

    /// Bytes of a fetch that have come.
    pub fn fetched(&self, transfer: u64) -> usize {
        self.assemblies.get(&transfer).map_or(0, |a| a.filled)
    }

    /// Whether a fetch is still waited for.
    pub fn wants(&self, transfer: u64) -> bool {
        self.assemblies.get(&transfer).is_some_and(|a| !a.is_complete())
    }

    /// The next bytes of a fetch. True when it is complete.
    pub fn fetch(&mut self, transfer: u64, bytes: &[u8]) -> Result<bool, ProtocolError> {
        self.add(transfer, bytes, "a fetch that nobody waits for")?;
        Ok(self.assemblies.get(&transfer).is_none_or(Assembly::is_complete))
    }

    /// A fetch is over at once: with all of its value, or with the reason why there is none.
    pub fn fetch_whole(&mut self, transfer: u64, value: Result<Data, Error>) {
        if let Some(assembly) = self.assemblies.get_mut(&transfer) {
            assembly.memory = match value {
                Ok(data) if data.meta == assembly.meta => Memory::Whole(Box::new(data)),
                Ok(_) => {
                    Memory::None(Box::new(Error::Peer { message: "a moved value has another shape".into() }))
                }
                Err(error) => Memory::None(Box::new(error)),
            };
        }
    }

    /// A fetch has failed: the client is asked for the bytes, from the first on.
    pub fn fetch_lost(&mut self, transfer: u64, reason: &str) {
        if let Some(assembly) = self.assemblies.get_mut(&transfer) {
            assembly.lost = true;
            assembly.filled = 0;
            if let Memory::Grown(held) = &mut assembly.memory {
                *held = Vec::new();
                self.ahead -= std::mem::take(&mut assembly.ahead);
            }
            let (kind, body) = Message::Lost { transfer, reason }.encode();
            self.link.send(Priority::Normal, kind, body);
        }
    }

    /// Answers a recall.
    pub fn recalled(&mut self, request: u64, value: Result<Data, Error>) {
        self.recalling -= 1;
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

    /// A value is exposed: who asked for it takes turns with the others.
    pub fn shown(&mut self, capability: Capability) {
        let waiting = self.unshown.remove(&capability).unwrap_or_default();
        self.early -= waiting.len();
        self.recalls.extend(waiting.into_iter().map(|request| (request, capability)));
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
        if !self.has_room() {
            return false;
        }
        !task.is_transfer() || self.arrived(task).is_some()
    }

    /// The transfer of a task whose bytes are all there.
    fn arrived(&self, task: &Task) -> Option<u64> {
        let transfer = task.transfer()?;
        self.assemblies.get(&transfer)?.is_complete().then_some(transfer)
    }

    /// The next task, and the bytes of an upload or a fetch.
    pub fn take(&mut self) -> Option<(Task, Option<Result<Bytes, Error>>)> {
        if !self.is_ready() {
            return None;
        }
        let bytes = match self.tasks.front() {
            Some(task) if task.is_transfer() => {
                let transfer = self.arrived(task)?;
                let assembly = self.assemblies.remove(&transfer)?;
                let left = assembly.meta.bytes() - assembly.filled;
                if task.kind == kind::UPLOAD && left > 0 {
                    self.dropped.insert(transfer, left);
                }
                self.assembling -= assembly.counted;
                self.ahead -= assembly.ahead;
                if assembly.begun {
                    self.fetching -= assembly.counted;
                }
                if assembly.owed > 0 {
                    self.link.release(assembly.owed - frame::HEAD);
                }
                Some(assembly.done())
            }
            _ => None,
        };
        let task = self.tasks.pop_front()?;
        self.waiting -= task.payload.len() + TASK;
        self.running = true;
        Some((task, bytes))
    }

    /// A task is done: its answers go out, its bytes make room.
    pub fn finish(&mut self, task: &Task, replies: Vec<Reply>, micros: u64) {
        self.link.release(task.payload.len());
        self.looked = false;
        self.running = false;
        self.further();
        self.executed += 1;
        self.micros += micros;
        replies.into_iter().for_each(|reply| self.reply(reply));
    }

    fn reply(&mut self, reply: Reply) {
        match reply {
            Reply::Message(kind, body) => self.link.send(Priority::Normal, kind, body),
            Reply::Value { request, data, background } => {
                let lane = if background { Priority::Background } else { Priority::Normal };
                let (kind, body) = Message::Value { request, meta: data.meta }.encode();
                self.link.send(lane, kind, body);
                self.link.send_content(lane, request, data.bytes, self.compress);
            }
        }
    }

    /// The next numbered frame to send.
    pub fn next(&mut self) -> Option<Out> {
        self.link.next()
    }

    /// The next piece that is to be compressed before it goes, without this lock.
    pub fn packing(&self) -> Option<Packing> {
        self.link.packing()
    }

    /// A piece is compressed.
    pub fn packed(&mut self, packing: Packing) {
        self.link.packed(packing);
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

    /// Bytes that have come ahead of their place, and what answers that wait take besides values.
    pub fn held(&self) -> (usize, u64) {
        (self.ahead, self.link.own_bytes())
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
