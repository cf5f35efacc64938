//! The client's side of a session, without IO: what is recorded goes in, frames come out, and the other way round.
//!
//! Everything that is asked becomes a journal entry and, while there is a session, messages on its link. A lost
//! connection is resumed: the link sends again what was not acknowledged. A lost server is replaced: a new session
//! gets the journal from its last snapshot on. There is no third way.

mod moves;
mod open;
mod receive;
mod request;

pub use request::Answer;

use super::faults::{self, Faults};
use super::journal::{Entry, Held, Journal};
use super::known::Known;
use super::moves::{Errand, Move, Reach};
use super::spill::Spilled;
use crate::protocol::frame::{self, control};
use crate::protocol::greeting::Refusal;
use crate::protocol::link::{Counts, Link, Out, Priority};
use crate::protocol::message::{self, Message, Query, kind};
use crate::protocol::template::{self, Sender, Sending};
use kiln_device::{Batch, Data, DeviceInfo, Error, Place, Promise, Spans};
use kiln_ir::wire::Table;
use kiln_ir::{Id, Item, Meta, Op};
use request::{Request, refused};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// What a client says to one server, and how it behaves there. Each server of a list has its own.
#[derive(Clone)]
pub struct Login {
    /// The device on it; empty for its first.
    pub device: String,
    /// Proves that the client may connect.
    pub token: Vec<u8>,
    /// Keep what is needed to go on after the server is lost.
    pub recover: bool,
    /// Compress what is sent, if the server can take it.
    pub compress: bool,
}

/// What a client is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// The servers, as errors name them.
    pub peer: String,
    /// What the server's people see.
    pub program: String,
    /// The most bytes kept in memory for recovery, snapshot included.
    pub most_lineage: usize,
    /// Bytes of snapshots beyond which their values go to files.
    pub most_snapshot: usize,
    /// The most bytes in such files.
    pub most_stored: usize,
    /// Microseconds of the device's time that a replay may take before a snapshot is due.
    pub replay_micros: u64,
    /// Bytes of uploads since the last snapshot that make one due.
    pub replay_bytes: usize,
    /// Whether another server may compute with other numerics.
    pub any_numerics: bool,
}

/// What a client has seen.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Stats {
    /// Connections that went on with the session.
    pub resumed: u64,
    /// Sessions rebuilt on a server.
    pub replayed: u64,
    /// Replies to requests, errors included.
    pub replies: u64,
    /// Batches sent whole, and batches called by id.
    pub defined: u64,
    /// See `defined`.
    pub called: u64,
    /// Frames and bytes of the current session.
    pub link: Counts,
    /// Frames and bytes of earlier sessions.
    pub before: Counts,
    /// What is kept for recovery.
    pub held: Held,
}

/// What came of a frame.
#[derive(Debug, PartialEq)]
pub enum FrameOutcome {
    /// The connection goes on.
    Going,
    /// The session is open; true if it is a new one.
    Opened(bool),
    /// The server does not take the connection.
    Refused(Refusal),
    /// The server took the connection, but cannot go on with what was begun elsewhere.
    Unfit(Error),
    /// The server asks to go elsewhere.
    Leave,
}

/// Something that people should know though nobody waited for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct News {
    /// What happened.
    pub text: String,
    /// It is told even where a program has no logger.
    pub loud: bool,
}

struct Session {
    version: u64,
    number: u64,
    secret: [u8; 32],
    incarnation: u64,
    epoch: u64,
    compress: bool,
    info: DeviceInfo,
    advertise: String,
    heartbeat: Duration,
}

/// A batch whose failures may still be told: who recorded what.
struct Sent {
    task: u64,
    batch: Arc<Batch>,
}

/// A session as its client sees it.
pub struct Core {
    config: Config,
    table: Table,
    /// Of the last hello: whether to keep what recovery needs, and to compress.
    greeted: (bool, bool),
    session: Option<Session>,
    /// Whether the current connection is welcome.
    open: bool,
    link: Link,
    sender: Sender,
    journal: Journal,
    requests: FxHashMap<u64, Request>,
    next_request: u64,
    next_transfer: u64,
    /// Tasks sent in this session, and those executed.
    tasks: u64,
    executed: u64,
    micros: u64,
    /// The device's time at the last snapshot, and what a snapshot cost.
    snapshot_at: u64,
    sent: VecDeque<Sent>,
    /// Fetches that are not known to be executed, by transfer, with the number of their task.
    fetching: FxHashMap<u64, (u64, Arc<Move>)>,
    errands: Vec<Errand>,
    settled: Vec<Arc<Move>>,
    faults: Arc<Faults>,
    known: Arc<Known>,
    failures: Vec<Error>,
    answers: Vec<Answer>,
    ping: bool,
    /// What was received is to be acknowledged before anything else is sent.
    settle: bool,
    failed: Option<Error>,
    events: Vec<String>,
    /// Events that have not been logged yet.
    news: Vec<News>,
    stats: Stats,
    progress: u64,
    /// What the device runs is noted.
    traced: bool,
    /// Where the journal stood after the last operation whose results cannot be had by running it again.
    impure: u64,
}

impl Core {
    /// A client that has not connected yet.
    pub fn new(config: Config) -> Core {
        Core {
            config,
            table: Table::local(),
            greeted: (true, false),
            session: None,
            open: false,
            link: Link::default(),
            sender: Sender::default(),
            journal: Journal::default(),
            requests: FxHashMap::default(),
            next_request: 1,
            next_transfer: 1,
            tasks: 0,
            executed: 0,
            micros: 0,
            snapshot_at: 0,
            sent: VecDeque::new(),
            fetching: FxHashMap::default(),
            errands: Vec::new(),
            settled: Vec::new(),
            faults: Arc::default(),
            known: Arc::default(),
            failures: Vec::new(),
            answers: Vec::new(),
            ping: false,
            settle: false,
            failed: None,
            events: Vec::new(),
            news: Vec::new(),
            stats: Stats::default(),
            progress: 0,
            traced: false,
            impure: 0,
        }
    }

    // What is recorded.

    /// A stretch of the stream.
    pub fn submit(&mut self, batch: Batch) {
        if self.failed.is_some() || batch.items.is_empty() {
            return;
        }
        let mut pure = true;
        for item in &batch.items {
            match item {
                Item::Free(id) => self.journal.free(*id),
                Item::Run(node) => {
                    node.outs.iter().for_each(|id| self.journal.define(*id, batch.place));
                    if let Op::Custom(custom) = &node.op
                        && kiln_ir::custom::find(&custom.name).is_some_and(|op| !op.pure())
                    {
                        pure = false;
                    }
                }
            }
        }
        // A frame has a limit, and so has what a server keeps for one template.
        let batch = Arc::new(batch);
        for (at, items) in batch.items.chunks(MOST_ITEMS).enumerate() {
            self.part(&batch, at * MOST_ITEMS, items);
        }
        if !pure {
            if self.journal.is_kept() && self.journal.covers(self.impure) {
                self.event("an operation ran that is not pure: no recovery until the next snapshot".into());
            }
            self.impure = self.journal.end();
        }
        self.sent.push_back(Sent { task: self.tasks, batch });
        // Without a server's word on what is executed, this would grow.
        while self.sent.len() > MOST_SENT {
            self.sent.pop_front();
        }
        self.bound();
    }

    /// Sends items of a batch, those from place `at`, in as many frames as it takes.
    fn part(&mut self, batch: &Batch, at: usize, items: &[Item]) {
        let split = template::split(&self.table, items, batch.place);
        let bytes = split.structure.len() + BINDING * split.bindings.len() + FIELDS;
        if bytes <= frame::MOST {
            let structure = self.journal.structure(&split.structure);
            let entry = Entry::Batch { structure, bindings: split.bindings.into() };
            self.transmit(&entry);
            self.journal.push(entry);
        } else if items.len() > 1 {
            let (first, rest) = items.split_at(items.len() / 2);
            self.part(batch, at, first);
            self.part(batch, at + first.len(), rest);
        } else if let [Item::Run(node)] = items {
            // Its results fail by themselves; nothing else does.
            let op = node.op.name().to_string();
            let cause = Arc::new(Error::TooLong { op: op.clone(), bytes, most: frame::MOST });
            for &id in &node.outs {
                let error = Error::Failed { op: op.clone(), value: id, origin: None, cause: cause.clone() };
                if let Some(&origin) = batch.origins.get(at) {
                    self.faults.note(id, origin);
                }
                if self.failures.len() < faults::MOST {
                    self.failures.push(self.faults.located(error.clone()));
                }
                let entry = Entry::Poison { id, error };
                self.transmit(&entry);
                self.journal.push(entry);
            }
        }
    }

    /// A value from host data.
    pub fn write(&mut self, id: Id, data: Data, place: Place) {
        if self.failed.is_some() {
            return;
        }
        self.journal.upload(id, &data, place);
        let entry = Entry::Upload { id, data, place };
        self.transmit(&entry);
        self.journal.push(entry);
        self.bound();
    }

    /// Asks for a value, and for no other than one like `want`.
    pub fn read(&mut self, id: Id, want: Option<Meta>, promise: Promise<Data>) {
        if let Some(request) = self.ask(Request::Read(promise, None, want.map(|meta| (id, meta)))) {
            let entry = Entry::Read { request, id, digest: None };
            self.transmit(&entry);
            self.journal.push(entry);
        }
    }

    /// Asks to be told when everything before is executed.
    pub fn sync(&mut self, promise: Promise<()>) {
        if let Some(request) = self.ask(Request::Sync(promise)) {
            let entry = Entry::Sync { request };
            self.transmit(&entry);
            self.journal.push(entry);
        }
    }

    /// Asks about the device.
    pub fn query(&mut self, query: Query, promise: Promise<Vec<u8>>) {
        if let Some(request) = self.ask(Request::Query(promise)) {
            // What the server holds for this side counts as memory until it is acknowledged.
            self.settle = true;
            let entry = Entry::Query { request, query };
            self.transmit(&entry);
            self.journal.push(entry);
        }
    }

    /// Has the server note what its device runs, or stop and forget it. What another server runs, after this one is
    /// lost, is noted too.
    pub fn trace(&mut self, on: bool, promise: Promise<Vec<u8>>) {
        if !self.can_trace() {
            let error = Error::Unsupported { op: "trace".into(), device: self.config.peer.clone() };
            return self.answers.push(Answer::Content(promise, Err(error)));
        }
        self.traced = on;
        self.query(Query::Trace(on), promise);
    }

    /// Asks for what was noted.
    pub fn spans(&mut self, promise: Promise<Vec<u8>>) {
        match self.can_trace() {
            true => self.query(Query::Spans, promise),
            // An older server has taken the place of one that could.
            false => {
                let answer = Ok(message::encode_spans(&Spans::default()));
                self.answers.push(Answer::Content(promise, answer));
            }
        }
    }

    /// Whether the server knows of traces.
    fn can_trace(&self) -> bool {
        self.session.as_ref().is_none_or(|s| s.version >= 3)
    }

    fn ask(&mut self, request: Request) -> Option<u64> {
        if let Some(error) = &self.failed {
            let error = error.clone();
            self.answers.extend(refused(request, &error));
            return None;
        }
        let number = self.next_request;
        self.next_request += 1;
        self.requests.insert(number, request);
        Some(number)
    }

    /// Puts an entry on the link, if there is one.
    fn transmit(&mut self, entry: &Entry) {
        if self.session.is_none() {
            return;
        }
        let compress = self.session.as_ref().is_some_and(|s| s.compress);
        match entry {
            Entry::Batch { structure, bindings } => match self.sender.send(structure, bindings) {
                Sending::Define { template, forget, bindings } => {
                    if let Some(template) = forget {
                        self.task(Message::Forget { template }, false);
                    }
                    self.stats.defined += 1;
                    self.task(Message::Define { template, structure, bindings: &bindings }, compress);
                }
                Sending::Call { template, bindings } => {
                    self.stats.called += 1;
                    self.task(Message::Call { template, bindings: &bindings }, false);
                }
            },
            Entry::Upload { id, data, place } => {
                let transfer = self.next_transfer;
                self.next_transfer += 1;
                self.task(Message::Upload { transfer, id: *id, meta: data.meta, place: *place }, false);
                for (kind, body) in message::pieces(transfer, &data.bytes, compress) {
                    self.link.send(Priority::Normal, kind, body);
                }
            }
            Entry::Fetched(moved) => {
                let transfer = self.next_transfer;
                self.next_transfer += 1;
                let (Reach { url, incarnation }, Move { id, meta, place, capability, .. }) =
                    (moved.source.reach(), &**moved);
                let (id, meta, place, capability) = (*id, *meta, *place, *capability);
                let url = &url;
                let fetch = Message::Fetch { transfer, id, meta, place, incarnation, url, capability };
                self.task(fetch, false);
                self.fetching.insert(transfer, (self.tasks, moved.clone()));
            }
            // An older server does not know the value, which is an error too.
            Entry::Poison { id, error } if self.can_poison() => {
                self.task(Message::Poison { id: *id, error: error.clone() }, false)
            }
            Entry::Poison { .. } => {}
            Entry::Read { request, id, .. } => {
                self.task(Message::Read { request: *request, id: *id, background: false }, false)
            }
            Entry::Sync { request } => self.task(Message::Sync { request: *request }, false),
            Entry::Query { request, query } => {
                self.task(Message::Query { request: *request, query: *query }, false)
            }
        }
    }

    /// Sends a value that is in a file.
    fn upload_stored(&mut self, id: Id, spilled: &Spilled, place: Place) {
        let transfer = self.next_transfer;
        self.next_transfer += 1;
        self.task(Message::Upload { transfer, id, meta: spilled.meta, place }, false);
        for (kind, body) in message::stored_pieces(transfer, &spilled.part) {
            self.link.send(Priority::Normal, kind, body);
        }
    }

    fn task(&mut self, message: Message<'_>, compress: bool) {
        let (kind, body) = message.encode();
        let (kind, body) = if compress { message::compressed(kind, body) } else { (kind, body) };
        self.link.send(Priority::Normal, kind, body);
        self.tasks += 1;
    }

    /// Takes a snapshot when the journal has grown enough, and gives recovery up when it holds too much.
    fn bound(&mut self) {
        let held = self.journal.held();
        if !self.journal.is_kept() {
            return;
        }
        let (memory, files) = (self.config.most_lineage, self.config.most_stored);
        if held.bytes + held.snapshot > memory || held.stored > files {
            let (most, where_to) = if held.stored > files { (files, "files") } else { (memory, "memory") };
            self.event(format!("recovery is off: its history takes more than {most} bytes of {where_to}"));
            self.journal.abandon("its history grew past the limit");
            return;
        }
        let values = self.journal.to_store(self.config.most_snapshot);
        if !values.is_empty() {
            self.errands.push(Errand::Store(values));
        }
        let replay = self.micros.saturating_sub(self.snapshot_at);
        // The larger a snapshot, the rarer: what it costs stays a small part of the work.
        let cost = SNAPSHOT_SHARE * (held.snapshot + held.stored) as u64 / SNAPSHOT_RATE;
        if replay > self.config.replay_micros.max(cost) || held.bytes > self.config.replay_bytes {
            self.snapshot();
        }
    }

    /// Values of a snapshot were written to a file, or could not be.
    pub fn stored(&mut self, outcome: std::io::Result<Vec<(Id, Spilled)>>) {
        match outcome {
            Ok(values) => values.into_iter().for_each(|(id, stored)| self.journal.stored(id, stored)),
            Err(e) => {
                self.event(format!("recovery is off: a snapshot cannot be written to a file: {e}"));
                self.journal.abandon("its snapshot could not be written to a file");
            }
        }
    }

    /// Begins a snapshot of all live values, unless one is under way.
    pub fn snapshot(&mut self) {
        if self.session.is_none() || self.failed.is_some() {
            return;
        }
        let Some(ids) = self.journal.begin() else { return };
        self.snapshot_at = self.micros;
        for id in ids {
            let request = self.next_request;
            self.next_request += 1;
            self.requests.insert(request, Request::Snapshot(id, None));
            self.task(Message::Read { request, id, background: true }, false);
        }
        let request = self.next_request;
        self.next_request += 1;
        self.requests.insert(request, Request::Barrier);
        self.task(Message::Sync { request }, false);
    }

    // The connection.

    /// The next numbered frame to send.
    pub fn next(&mut self) -> Option<Out> {
        if self.open { self.link.next() } else { None }
    }

    /// Appends the control frames that are due; acknowledgements that could wait only if `soon`.
    pub fn controls(&mut self, soon: bool, to: &mut Vec<u8>) {
        if !self.open {
            return;
        }
        let ping = std::mem::take(&mut self.ping).then_some(Message::Ping(self.stats.replies));
        let soon = std::mem::take(&mut self.settle) || soon;
        for message in ping.into_iter().chain(self.link.acknowledge(soon)) {
            let (kind, body) = message.encode();
            to.extend(control(kind, &body.fields));
        }
    }

    /// Whether an acknowledgement waits.
    pub fn owes(&self) -> bool {
        self.open && self.link.owes()
    }

    /// Shows the server that the client lives.
    pub fn ping(&mut self) {
        self.ping = true;
    }

    /// The frame that ends the session.
    pub fn bye() -> Vec<u8> {
        control(kind::BYE, &[])
    }

    /// The connection is gone.
    pub fn disconnected(&mut self) {
        self.open = false;
    }

    /// The session is over for good.
    pub fn fail(&mut self, error: Error) {
        if self.failed.is_some() {
            return;
        }
        if self.session.is_some() && !matches!(error, Error::Closed { .. }) {
            self.tell(format!("the device has failed: {error}"), true);
        }
        self.open = false;
        self.link = Link::default();
        self.journal.abandon("the device has failed");
        self.settled.extend(self.fetching.drain().map(|(_, (_, moved))| moved));
        self.errands.clear();
        for (_, request) in std::mem::take(&mut self.requests) {
            self.answers.extend(refused(request, &error));
        }
        self.failed = Some(error);
    }

    // What others see.

    /// Whether it has failed for good.
    pub fn failure(&self) -> Option<&Error> {
        self.failed.as_ref()
    }

    /// Answers to hand over.
    pub fn answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Operations that failed since this was last asked.
    pub fn failures(&mut self) -> Vec<Error> {
        std::mem::take(&mut self.failures)
    }

    /// What happened since this was last asked, in words.
    pub fn events(&mut self) -> Vec<String> {
        std::mem::take(&mut self.events)
    }

    /// What happened since this was last asked, for the log.
    pub fn news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    fn event(&mut self, text: String) {
        self.tell(text, false);
    }

    /// Notes something that people should know.
    pub fn tell(&mut self, text: String, loud: bool) {
        // Nobody need ever ask for events; news are told soon.
        if self.events.len() < faults::MOST {
            self.events.push(text.clone());
        }
        if self.news.len() < faults::MOST {
            self.news.push(News { text, loud });
        }
    }

    /// Bytes that wait for the server or for its word that it has them.
    pub fn queued_bytes(&self) -> u64 {
        if self.failed.is_some() { 0 } else { self.link.queued_bytes() }
    }

    /// Tasks that are not known to be executed.
    pub fn unexecuted(&self) -> u64 {
        if self.failed.is_some() { 0 } else { self.tasks - self.executed.min(self.tasks) }
    }

    /// Frames that the servers have taken or sent so far: it grows where a connection is good for something.
    pub fn progress(&self) -> u64 {
        self.progress
    }

    /// The device, once there is a session.
    pub fn info(&self) -> Option<&DeviceInfo> {
        self.session.as_ref().map(|s| &s.info)
    }

    /// The servers, as errors name them.
    pub fn peer(&self) -> &str {
        &self.config.peer
    }

    /// How often the server wants to hear something.
    pub fn heartbeat(&self) -> Option<Duration> {
        self.session.as_ref().map(|s| s.heartbeat)
    }

    /// Whether the server can be told of values that were never computed.
    fn can_poison(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.version >= 2)
    }

    /// Whose lines its failures are.
    pub fn faults(&self) -> Arc<Faults> {
        self.faults.clone()
    }

    /// What the server knows, without the core's lock.
    pub fn known(&self) -> Arc<Known> {
        self.known.clone()
    }

    /// What it has seen so far.
    pub fn stats(&self) -> Stats {
        Stats { link: self.link.counts(), held: self.journal.held(), ..self.stats }
    }
}

/// Bytes of a snapshot that come in a microsecond, roughly, and one in how much of the device's time they may take.
const SNAPSHOT_RATE: u64 = 1000;
const SNAPSHOT_SHARE: u64 = 100;
/// Items of one batch on the wire.
const MOST_ITEMS: usize = 4096;
/// Bytes that a difference of bindings takes at most, and the fields before the structure.
const BINDING: usize = 14;
const FIELDS: usize = 64;
/// Batches whose origins are remembered.
const MOST_SENT: usize = 1024;

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Tokens and secrets stay out of it.
        f.debug_struct("Core").field("peer", &self.config.peer).field("stats", &self.stats()).finish()
    }
}
