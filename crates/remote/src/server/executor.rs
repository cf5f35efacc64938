//! The half of a session that computes: it verifies every operation before the device sees it, and answers.

use super::moves::Shown;
use super::names::Names;
use super::session::{Expose, Quota, Task};
use crate::protocol::message::{self, Message, Query};
use crate::protocol::template::Receiver;
use crate::protocol::{Body, ProtocolError, fault};
use kiln_device::{Batch, Budget, Bytes, Data, Driver, Error, Place, Share, Trace, Urgency};
use kiln_ir::wire::{Table, Writer};
use kiln_ir::{DType, Id, Item, Meta, Node, Op, Scalar, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// What a task gives back to the client.
pub enum Reply {
    /// A message.
    Message(u8, Body),
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
    /// This message.
    pub fn of(message: Message<'_>) -> Reply {
        let (kind, body) = message.encode();
        Reply::Message(kind, body)
    }
}

/// About how many bytes an error takes.
fn weight(error: &Error) -> usize {
    let mut w = Writer::default();
    fault::encode(error, &mut w);
    size_of::<Error>() + 2 * w.bytes.len()
}

/// The half of a session that computes.
pub struct Executor {
    device: Arc<dyn Driver>,
    table: Table,
    templates: Receiver,
    /// Dtype and shape of each value, or why there is none.
    values: FxHashMap<Id, Result<Meta, Arc<Error>>>,
    names: Names,
    bytes: usize,
    /// Bytes of the errors among them.
    errors: usize,
    quota: Quota,
    /// What the client asked for, see [`Query::Limit`].
    limit: usize,
    /// Bytes that tables take beyond what is free, when they were last settled: they are no room for values.
    settled: usize,
    /// The same as the process sees it.
    share: Option<Share>,
    /// What the device runs is noted.
    traced: bool,
    operations: u64,
}

/// What naming a value takes here and in the device.
const ENTRY: usize = 640;
/// Bytes of tables, templates and errors that a session has besides its quota.
const FREE: usize = 8 << 20;
/// Changes of the tables that are worth settling.
const STEP: usize = 1 << 20;

impl Executor {
    /// An executor on a device of its own, for a client with this table.
    pub fn new(device: Arc<dyn Driver>, table: Table, quota: Quota) -> Executor {
        device.limit((quota.bytes != usize::MAX).then_some(quota.bytes));
        let (templates, values) = (Receiver::default(), FxHashMap::default());
        let share = Budget::process().take(0).ok();
        let (limit, settled) = (quota.bytes, 0);
        Executor {
            device,
            table,
            templates,
            values,
            names: Names::default(),
            bytes: 0,
            errors: 0,
            quota,
            limit,
            settled,
            share,
            traced: false,
            operations: 0,
        }
    }

    /// Bytes that tables, templates and errors take, beyond what every session has.
    fn tables(&self) -> usize {
        let taken = self.values.len() * ENTRY + self.errors + 2 * self.templates.held().0;
        taken.saturating_sub(FREE)
    }

    /// What the tables take is no room for values any more.
    fn settle(&mut self) -> Result<(), ProtocolError> {
        let tables = self.tables();
        if tables.abs_diff(self.settled) < STEP && (tables > 0) == (self.settled > 0) {
            return Ok(());
        }
        if tables > self.quota.bytes {
            return Err(ProtocolError::Misuse("more values than the quota allows"));
        }
        let tracing = self.tracing();
        if self.share.as_mut().is_some_and(|share| share.resize(tables + tracing).is_err()) {
            return Err(ProtocolError::Misuse("more values than the server has memory for"));
        }
        self.settled = tables;
        self.bound();
        Ok(())
    }

    /// Bytes that a trace may take.
    fn tracing(&self) -> usize {
        if self.traced { Trace::BYTES } else { 0 }
    }

    /// Tells the device how much it may hold.
    fn bound(&self) {
        let limit = self.limit.min(self.quota.bytes);
        let quota = self.quota.bytes.saturating_sub(self.settled + self.tracing());
        let left = self.limit.saturating_sub(self.settled).min(quota);
        self.device.limit((limit != usize::MAX).then_some(left));
    }

    /// Does a task. An error means that the client does not keep to the protocol: the session ends.
    pub fn run(
        &mut self,
        task: &Task,
        upload: Option<Result<Bytes, Error>>,
    ) -> Result<(Vec<Reply>, u64), ProtocolError> {
        let start = Instant::now();
        let mut scratch = Vec::new();
        let mut replies = Vec::new();
        match Message::decode(task.kind, &task.payload, &mut scratch)? {
            Message::Define { template, structure, bindings } => {
                let batch = self.templates.define(&self.table, template, structure, bindings)?;
                self.batch(batch, &mut replies)?;
            }
            Message::Call { template, bindings } => {
                let batch = self.templates.call(&self.table, template, bindings)?;
                self.batch(batch, &mut replies)?;
            }
            Message::Poison { id, error } => {
                let error = self.failed(error);
                self.define(id, Err(error))?;
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
                replies.push(match self.query(query) {
                    Ok(content) => Reply::of(Message::Answer { request, content: &content }),
                    Err(error) => Reply::of(Message::Failed { request, error }),
                });
            }
            _ => return Err(ProtocolError::Kind(task.kind)),
        }
        self.settle()?;
        for error in self.device.failures() {
            if let Error::Failed { value, .. } = error {
                replies.push(Reply::of(Message::Fault { value, error }));
            }
        }
        Ok((replies, start.elapsed().as_micros() as u64))
    }

    /// The content of the answer to a question.
    fn query(&mut self, query: Query) -> Result<Vec<u8>, Error> {
        match query {
            Query::Memory => {}
            Query::Cleanup => self.device.cleanup(),
            Query::Limit(limit) => {
                self.limit = limit.map_or(usize::MAX, |x| usize::try_from(x).unwrap_or(usize::MAX));
                self.bound();
            }
            Query::Trace(on) => {
                let held = self.device.memory().live_bytes.saturating_add(self.settled);
                let (asked, limit) = (Trace::BYTES, self.quota.bytes);
                let free = limit.saturating_sub(held);
                if on && free < asked {
                    return Err(Error::OutOfMemory { asked, free, limit });
                }
                if let Some(share) = &mut self.share {
                    share.resize(self.settled + if on { asked } else { 0 })?;
                }
                self.device.trace(on)?;
                self.traced = on;
                self.bound();
            }
            Query::Spans => {
                return Ok(message::encode_spans(&self.device.spans(message::MOST_SPANS).wait()?));
            }
        }
        Ok(message::encode_memory(&self.device.memory()))
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
        if let Some(due_now) = self.step(node, due, place, replies)? {
            return Ok(due_now);
        }
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
                    Some(error) => self.failed(error),
                    None => self.fault(node.op.name(), value, cause.into(), replies),
                };
                node.outs.iter().try_for_each(|id| self.define(*id, Err(error.clone())))?;
                Ok(false)
            }
        }
    }

    /// What a guard and a commit come to where one of their operands has failed before the device saw it: they do not
    /// fail with it, and the device does not know of it. `None` for all other nodes.
    fn step(
        &mut self,
        node: &Node,
        due: &mut Vec<Item>,
        place: Place,
        replies: &mut Vec<Reply>,
    ) -> Result<Option<bool>, ProtocolError> {
        let failed = |id: &Id| match self.values.get(id) {
            Some(Err(error)) => Some(error.clone()),
            Some(Ok(_)) | None => None,
        };
        let (op, ins) = match (&node.op, &node.ins[..], &node.outs[..]) {
            (Op::Guard { .. }, ins, [value]) => {
                let first = ins.iter().enumerate().find_map(|(at, id)| Some((at, failed(id)?)));
                let Some((at, cause)) = first else { return Ok(None) };
                let refused =
                    Error::StepRefused { at, path: String::new(), origin: None, cause: Some(cause) };
                let told = self.fault(node.op.name(), *value, refused, replies);
                self.let_go(told);
                (Op::Full { shape: [].into(), value: Scalar::from_bits(DType::Bool, 0) }, None)
            }
            (Op::Commit, [ok, new, old], [_]) if failed(ok).is_some() || failed(new).is_some() => {
                let accepted = failed(ok).is_none() && {
                    self.submit(std::mem::take(due), place);
                    self.device.read(*ok).wait().is_ok_and(|data| data.bytes.first() == Some(&1))
                };
                match self.values.get(old) {
                    // The same value under another name.
                    Some(Ok(meta)) if !accepted => (Op::Cast(meta.dtype), Some(*old)),
                    Some(_) | None => return Ok(None),
                }
            }
            _ => return Ok(None),
        };
        let instead = Node { op, ins: ins.into_iter().collect(), outs: node.outs.clone() };
        let admitted = self.admit(&Item::Run(instead.clone()), due, place, replies)?;
        if admitted {
            due.push(Item::Run(instead));
        }
        Ok(Some(false))
    }

    fn fault(&mut self, op: &str, value: Id, cause: Error, replies: &mut Vec<Reply>) -> Arc<Error> {
        let error = Error::Failed { op: op.into(), value, origin: None, cause: Arc::new(cause) };
        replies.push(Reply::of(Message::Fault { value, error: error.clone() }));
        self.failed(error)
    }

    /// An error that is kept for values, and counted.
    fn failed(&mut self, error: Error) -> Arc<Error> {
        self.errors += weight(&error);
        Arc::new(error)
    }

    /// An error that a value had, perhaps the last one that failed for this reason.
    fn let_go(&mut self, error: Arc<Error>) {
        if Arc::strong_count(&error) == 1 {
            self.errors = self.errors.saturating_sub(weight(&error));
        }
    }

    fn define(&mut self, id: Id, value: Result<Meta, Arc<Error>>) -> Result<(), ProtocolError> {
        if self.values.len() >= self.quota.values || self.tables() > self.quota.bytes {
            return Err(ProtocolError::Misuse("more values than the quota allows"));
        }
        if id.is_reserved() {
            return Err(ProtocolError::Misuse("a name that only the server's device may give"));
        }
        if !self.names.add(id) {
            return Err(ProtocolError::Misuse("a name that was used before"));
        }
        self.bytes = self.bytes.saturating_add(value.as_ref().map_or(0, |meta| meta.bytes()));
        self.values.insert(id, value);
        Ok(())
    }

    fn free(&mut self, id: Id) -> Result<bool, ProtocolError> {
        match self.values.remove(&id) {
            Some(Ok(meta)) => {
                self.bytes = self.bytes.saturating_sub(meta.bytes());
                Ok(true)
            }
            Some(Err(error)) => {
                self.let_go(error);
                Ok(false)
            }
            None => Ok(false),
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
            Some(Err(error @ Error::Failed { .. })) => {
                let error = self.failed(error);
                self.define(id, Err(error))
            }
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

    /// Looks for values to be exposed: those that the stream has come to, and those that are to come. One that it has
    /// freed is unknown.
    pub fn show(&self, exposes: Vec<Expose>) -> (Vec<Shown>, Vec<Expose>) {
        let come = |id: Id| self.values.contains_key(&id) || self.names.has(id);
        let (there, later): (Vec<_>, Vec<_>) = exposes.into_iter().partition(|expose| come(expose.id));
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
    pub fn device(&self) -> &Arc<dyn Driver> {
        &self.device
    }
}
