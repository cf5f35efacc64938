//! What client and server say to each other.
//!
//! A message is one frame. Its fields are written one after another: integers as LEB128, texts and blobs with their
//! length before them. Kinds below 16 are control messages, which are neither numbered nor repeated.

use super::link::{Body, Part, Priority};
use super::{ProtocolError, fault, frame};
use kiln_device::{Bytes, Error, Memory, Place, Span, Spans};
use kiln_ir::wire::{Reader, WireError, Writer};
use kiln_ir::{Id, Meta};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of data that a piece carries at most.
pub const PIECE: usize = 256 << 10;

/// Set in a kind whose payload is compressed.
const COMPRESSED: u8 = 0x80;
/// Payloads below this are not worth compressing.
const COMPRESS_FROM: usize = 512;

/// What a value is exposed under: whoever knows it may fetch the value.
pub type Capability = [u8; 32];

/// A question about the device, or an order to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Query {
    Memory,
    Cleanup,
    Limit(Option<u64>),
    /// Begins to note what the device runs, or stops and forgets it. Since version 3.
    Trace(bool),
    /// Takes the oldest of what was noted. Since version 3.
    Spans,
}

/// A message.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)]
pub enum Message<'a> {
    /// Everything up to frame `seq` was accepted in order, and `limit` bytes may be sent in all.
    Ack { seq: u64, limit: u64 },
    /// Asks for a [`Message::Pong`] with the same number.
    Ping(u64),
    /// Answers a ping.
    Pong(u64),
    /// The session is over.
    Bye,
    /// The server will stop; the client should go elsewhere.
    Drain,
    /// So many of the client's tasks are executed, in so many microseconds of the device. A task is a numbered message
    /// that is no piece.
    Progress { tasks: u64, micros: u64 },

    /// A new batch, kept as `template`, and its first bindings.
    Define { template: u64, structure: &'a [u8], bindings: &'a [u8] },
    /// A kept batch with changed bindings.
    Call { template: u64, bindings: &'a [u8] },
    /// The template is not called any more.
    Forget { template: u64 },
    /// Defines a value from the bytes of a transfer, which follow in pieces.
    Upload { transfer: u64, id: Id, meta: Meta, place: Place },
    /// The next bytes of a transfer.
    Piece { of: u64, bytes: &'a [u8] },
    /// Asks for a value, answered by [`Message::Value`] and pieces, or [`Message::Failed`].
    /// Answers of a read in the `background` give way to all others.
    Read { request: u64, id: Id, background: bool },
    /// Asks for the checksum of a value's bytes, answered by [`Message::Answer`].
    Digest { request: u64, id: Id },
    /// Asks for [`Message::Done`] when everything before is executed.
    Sync { request: u64 },
    /// Asks about the device.
    Query { request: u64, query: Query },
    /// Lets others fetch a value.
    Expose { id: Id, capability: Capability, fetches: u64, milliseconds: u64 },
    /// Defines a value from what the server of this incarnation, at `url`, exposes.
    Fetch {
        transfer: u64,
        id: Id,
        meta: Meta,
        place: Place,
        incarnation: u64,
        url: &'a str,
        capability: Capability,
    },
    /// Asks for what this session exposes, answered like a read. It takes no place in the stream: a stream may be
    /// waiting for the very bytes that are asked for.
    Recall { request: u64, capability: Capability },
    /// There will be no bytes for a lost transfer: its value is never computed, for this reason.
    Withdraw { transfer: u64, error: Error },
    /// Defines a value as never computed, for this reason: it was so on a server that is lost. Since version 2.
    Poison { id: Id, error: Error },

    /// A value's dtype and shape; its bytes follow in pieces.
    Value { request: u64, meta: Meta },
    /// The request is fulfilled.
    Done { request: u64 },
    /// The request cannot be fulfilled.
    Failed { request: u64, error: Error },
    /// An operation has failed: the value it would have defined, and why.
    Fault { value: Id, error: Error },
    /// What was asked for.
    Answer { request: u64, content: &'a [u8] },
    /// A fetch failed; the client may send the pieces itself.
    Lost { transfer: u64, reason: &'a str },
}

/// The numbers of messages on the wire.
pub mod kind {
    #![allow(missing_docs)]
    pub const HELLO: u8 = 1;
    pub const WELCOME: u8 = 2;
    pub const REFUSED: u8 = 3;
    pub const ACK: u8 = 4;
    pub const PING: u8 = 5;
    pub const PONG: u8 = 6;
    pub const BYE: u8 = 7;
    pub const DRAIN: u8 = 8;
    pub const PROGRESS: u8 = 9;
    /// What a server looks like, as JSON, once a second for those who watch.
    pub const STATUS: u8 = 10;
    /// The server ends the session, for this reason.
    pub const ENDED: u8 = 11;
    pub const DEFINE: u8 = 16;
    pub const CALL: u8 = 17;
    pub const FORGET: u8 = 18;
    pub const UPLOAD: u8 = 19;
    pub const PIECE: u8 = 20;
    pub const READ: u8 = 21;
    pub const DIGEST: u8 = 22;
    pub const SYNC: u8 = 23;
    pub const QUERY: u8 = 24;
    pub const EXPOSE: u8 = 25;
    pub const FETCH: u8 = 26;
    /// A piece that goes outside the window.
    pub const SUPPLY: u8 = 27;
    pub const RECALL: u8 = 28;
    pub const WITHDRAW: u8 = 29;
    pub const POISON: u8 = 30;
    pub const VALUE: u8 = 48;
    pub const DONE: u8 = 49;
    pub const FAILED: u8 = 50;
    pub const FAULT: u8 = 51;
    pub const ANSWER: u8 = 52;
    pub const LOST: u8 = 53;
}

impl Message<'_> {
    /// Its kind and payload.
    pub fn encode(&self) -> (u8, Body) {
        let mut w = Writer::default();
        let kind = match self {
            Message::Ack { seq, limit } => ints(&mut w, kind::ACK, &[*seq, *limit]),
            Message::Ping(n) => ints(&mut w, kind::PING, &[*n]),
            Message::Pong(n) => ints(&mut w, kind::PONG, &[*n]),
            Message::Bye => kind::BYE,
            Message::Drain => kind::DRAIN,
            Message::Define { template, structure, bindings } => {
                w.int(*template);
                w.blob(structure);
                w.bytes.extend_from_slice(bindings);
                kind::DEFINE
            }
            Message::Call { template, bindings } => {
                w.int(*template);
                w.bytes.extend_from_slice(bindings);
                kind::CALL
            }
            Message::Forget { template } => ints(&mut w, kind::FORGET, &[*template]),
            Message::Upload { transfer, id, meta, place } => {
                ints(&mut w, 0, &[*transfer, id.0, *place as u64]);
                w.meta(meta);
                kind::UPLOAD
            }
            Message::Piece { of, bytes } => {
                w.int(*of);
                w.bytes.extend_from_slice(bytes);
                kind::PIECE
            }
            Message::Read { request, id, background } => {
                ints(&mut w, kind::READ, &[*request, id.0, *background as u64])
            }
            Message::Digest { request, id } => ints(&mut w, kind::DIGEST, &[*request, id.0]),
            Message::Sync { request } => ints(&mut w, kind::SYNC, &[*request]),
            Message::Query { request, query } => {
                let (what, amount) = match query {
                    Query::Memory => (0, 0),
                    Query::Cleanup => (1, 0),
                    Query::Limit(None) => (2, 0),
                    Query::Limit(Some(bytes)) => (3, *bytes),
                    Query::Trace(on) => (4, *on as u64),
                    Query::Spans => (5, 0),
                };
                ints(&mut w, kind::QUERY, &[*request, what, amount])
            }
            Message::Expose { id, capability, fetches, milliseconds } => {
                ints(&mut w, 0, &[id.0, *fetches, *milliseconds]);
                w.bytes.extend_from_slice(capability);
                kind::EXPOSE
            }
            Message::Fetch { transfer, id, meta, place, incarnation, url, capability } => {
                ints(&mut w, 0, &[*transfer, id.0, *place as u64]);
                w.meta(meta);
                w.text(url);
                w.bytes.extend_from_slice(capability);
                // What was added later is left out where it says nothing, so that older bytes stay as they are.
                if *incarnation != 0 {
                    w.int(*incarnation);
                }
                kind::FETCH
            }
            Message::Recall { request, capability } => {
                w.int(*request);
                w.bytes.extend_from_slice(capability);
                kind::RECALL
            }
            Message::Withdraw { transfer, error } => {
                w.int(*transfer);
                fault::encode(error, &mut w);
                kind::WITHDRAW
            }
            Message::Poison { id, error } => {
                w.int(id.0);
                fault::encode(error, &mut w);
                kind::POISON
            }
            Message::Value { request, meta } => {
                w.int(*request);
                w.meta(meta);
                kind::VALUE
            }
            Message::Done { request } => ints(&mut w, kind::DONE, &[*request]),
            Message::Failed { request, error } => {
                w.int(*request);
                fault::encode(error, &mut w);
                kind::FAILED
            }
            Message::Fault { value, error } => {
                w.int(value.0);
                fault::encode(error, &mut w);
                kind::FAULT
            }
            Message::Answer { request, content } => {
                w.int(*request);
                w.bytes.extend_from_slice(content);
                kind::ANSWER
            }
            Message::Progress { tasks, micros } => ints(&mut w, kind::PROGRESS, &[*tasks, *micros]),
            Message::Lost { transfer, reason } => {
                w.int(*transfer);
                w.text(reason);
                kind::LOST
            }
        };
        (kind, Body { fields: w.bytes, data: None, later: None })
    }

    /// The message that a frame holds. `scratch` is used for a compressed payload.
    pub fn decode<'a>(
        kind: u8,
        payload: &'a [u8],
        scratch: &'a mut Vec<u8>,
    ) -> Result<Message<'a>, ProtocolError> {
        let payload = if kind & COMPRESSED != 0 {
            *scratch = expand(payload)?;
            &scratch[..]
        } else {
            payload
        };
        let kind = plain(kind);
        let mut r = Reader::new(payload);
        let message = match kind {
            kind::ACK => Message::Ack { seq: r.int()?, limit: r.int()? },
            kind::PING => Message::Ping(r.int()?),
            kind::PONG => Message::Pong(r.int()?),
            kind::BYE => Message::Bye,
            kind::DRAIN => Message::Drain,
            kind::DEFINE => Message::Define { template: r.int()?, structure: r.blob()?, bindings: r.rest() },
            kind::CALL => Message::Call { template: r.int()?, bindings: r.rest() },
            kind::FORGET => Message::Forget { template: r.int()? },
            kind::UPLOAD => {
                let (transfer, id, place) = (r.int()?, Id(r.int()?), place(&mut r)?);
                Message::Upload { transfer, id, place, meta: meta(&mut r)? }
            }
            kind::PIECE | kind::SUPPLY => Message::Piece { of: r.int()?, bytes: r.rest() },
            kind::READ => Message::Read { request: r.int()?, id: Id(r.int()?), background: r.int()? != 0 },
            kind::DIGEST => Message::Digest { request: r.int()?, id: Id(r.int()?) },
            kind::SYNC => Message::Sync { request: r.int()? },
            kind::QUERY => {
                let (request, what, amount) = (r.int()?, r.int()?, r.int()?);
                let query = match what {
                    0 => Query::Memory,
                    1 => Query::Cleanup,
                    2 => Query::Limit(None),
                    3 => Query::Limit(Some(amount)),
                    4 => Query::Trace(amount != 0),
                    5 => Query::Spans,
                    _ => return Err(WireError::Malformed { what: "query" }.into()),
                };
                Message::Query { request, query }
            }
            kind::EXPOSE => {
                let (id, fetches, milliseconds) = (Id(r.int()?), r.int()?, r.int()?);
                Message::Expose { id, fetches, milliseconds, capability: array(&mut r)? }
            }
            kind::FETCH => {
                let (transfer, id, place) = (r.int()?, Id(r.int()?), place(&mut r)?);
                let (meta, url, capability) = (meta(&mut r)?, text(&mut r)?, array(&mut r)?);
                let incarnation = if r.is_empty() { 0 } else { r.int()? };
                Message::Fetch { transfer, id, place, meta, incarnation, url, capability }
            }
            kind::RECALL => Message::Recall { request: r.int()?, capability: array(&mut r)? },
            kind::WITHDRAW => Message::Withdraw { transfer: r.int()?, error: fault::decode(&mut r)? },
            kind::POISON => Message::Poison { id: Id(r.int()?), error: fault::decode(&mut r)? },
            kind::VALUE => Message::Value { request: r.int()?, meta: meta(&mut r)? },
            kind::DONE => Message::Done { request: r.int()? },
            kind::FAILED => Message::Failed { request: r.int()?, error: fault::decode(&mut r)? },
            kind::FAULT => Message::Fault { value: Id(r.int()?), error: fault::decode(&mut r)? },
            kind::ANSWER => Message::Answer { request: r.int()?, content: r.rest() },
            kind::PROGRESS => Message::Progress { tasks: r.int()?, micros: r.int()? },
            kind::LOST => Message::Lost { transfer: r.int()?, reason: text(&mut r)? },
            other => return Err(ProtocolError::Kind(other)),
        };
        if !r.is_empty() {
            return Err(WireError::Malformed { what: "message" }.into());
        }
        Ok(message)
    }
}

/// A kind without the mark of a compressed payload.
pub fn plain(kind: u8) -> u8 {
    kind & !COMPRESSED
}

/// Whether messages of this kind are numbered and sent again.
pub fn is_numbered(kind: u8) -> bool {
    plain(kind) >= kind::DEFINE
}

/// The lane that a frame of this kind was sent in, as far as the window goes.
pub fn lane(kind: u8) -> Priority {
    match plain(kind) {
        kind::SUPPLY | kind::RECALL | kind::WITHDRAW | kind::EXPOSE => Priority::Urgent,
        _ => Priority::Normal,
    }
}

/// The frame that carries `data` as the next piece of `of`, without copying it.
pub fn piece(of: u64, data: Bytes) -> (u8, Body) {
    let mut fields = Writer::default();
    fields.int(of);
    (kind::PIECE, Body { fields: fields.bytes, data: Some(data), later: None })
}

/// The kind that a compressed piece is of; `None` for any other frame.
pub fn compressed_piece(kind: u8) -> Option<u8> {
    let plain = plain(kind);
    (kind & COMPRESSED != 0 && matches!(plain, kind::PIECE | kind::SUPPLY)).then_some(plain)
}

/// Whether a client may compress messages of this kind.
pub fn may_be_compressed(kind: u8) -> bool {
    kind & COMPRESSED == 0 || matches!(plain(kind), kind::PIECE | kind::SUPPLY | kind::DEFINE | kind::CALL)
}

/// The frames that carry `bytes` as transfer `of`, without copying them.
pub fn pieces(of: u64, bytes: &Bytes, compress: bool) -> impl Iterator<Item = (u8, Body)> {
    let mut fields = Writer::default();
    fields.int(of);
    (0..bytes.len()).step_by(PIECE).map(move |at| {
        let data = bytes.slice(at..(at + PIECE).min(bytes.len()));
        let body = Body { fields: fields.bytes.clone(), data: Some(data), later: None };
        if compress { compressed(kind::PIECE, body) } else { (kind::PIECE, body) }
    })
}

/// The frames that carry what is not in memory as transfer `of`. It is read, and not compressed, when they are sent.
pub fn stored_pieces(of: u64, whole: &Part) -> impl Iterator<Item = (u8, Body)> {
    let mut fields = Writer::default();
    fields.int(of);
    let whole = whole.clone();
    (0..whole.len).step_by(PIECE).map(move |from| {
        let (at, len) = (whole.at + from as u64, PIECE.min(whole.len - from));
        let part = Part { stored: whole.stored.clone(), at, len };
        (kind::PIECE, Body { fields: fields.bytes.clone(), data: None, later: Some(part) })
    })
}

/// Bytes of a value beyond which its checksum is of parts: a result that differs does so nearly everywhere.
const DIGEST_ALL: usize = 4 << 20;
/// Of every so many bytes the first sixteenth is looked at.
const DIGEST_STEP: usize = 64 << 10;

/// The checksum of a value's content that [`Message::Digest`] asks for.
pub fn digest(bytes: &[u8]) -> u32 {
    if bytes.len() <= DIGEST_ALL {
        return crc32fast::hash(bytes);
    }
    let mut sum = crc32fast::Hasher::new();
    bytes.chunks(DIGEST_STEP).for_each(|part| sum.update(&part[..part.len().min(DIGEST_STEP / 16)]));
    sum.finalize()
}

/// The kind of a piece that goes outside the window.
pub fn supply(kind: u8) -> u8 {
    kind & COMPRESSED | kind::SUPPLY
}

/// The frame with its payload compressed, if that makes it shorter.
pub fn compressed(kind: u8, body: Body) -> (u8, Body) {
    let data = body.data.as_deref().unwrap_or(&[]);
    let whole = [&body.fields[..], data].concat();
    if whole.len() < COMPRESS_FROM {
        return (kind, body);
    }
    let packed = lz4_flex::compress_prepend_size(&whole);
    match packed.len() < whole.len() {
        true => (kind | COMPRESSED, Body { fields: packed, data: None, later: None }),
        false => (kind, body),
    }
}

/// What a compressed payload was.
pub fn expand(payload: &[u8]) -> Result<Vec<u8>, ProtocolError> {
    let bad = ProtocolError::Wire(WireError::Malformed { what: "compressed payload" });
    // The size stands first and is believed only up to what a frame may hold.
    let (size, packed) = lz4_flex::block::uncompressed_size(payload).map_err(|_| bad.clone())?;
    if size > frame::MOST {
        return Err(ProtocolError::TooLong { len: size, most: frame::MOST });
    }
    lz4_flex::decompress(packed, size).map_err(|_| bad)
}

/// Writes integers; gives the kind back.
pub(super) fn ints(w: &mut Writer, kind: u8, ints: &[u64]) -> u8 {
    ints.iter().for_each(|&x| w.int(x));
    kind
}

fn place(r: &mut Reader<'_>) -> Result<Place, ProtocolError> {
    match r.int()? {
        0 => Ok(Place::Reuse),
        1 => Ok(Place::Persistent),
        _ => Err(WireError::Malformed { what: "place" }.into()),
    }
}

/// A meta whose size can be trusted.
fn meta(r: &mut Reader<'_>) -> Result<Meta, ProtocolError> {
    let meta = r.meta()?;
    meta.check().map_err(|_| WireError::Malformed { what: "shape" })?;
    Ok(meta)
}

pub(super) fn array<const N: usize>(r: &mut Reader<'_>) -> Result<[u8; N], ProtocolError> {
    r.take(N)?.try_into().map_err(|_| WireError::Truncated.into())
}

fn text<'a>(r: &mut Reader<'a>) -> Result<&'a str, ProtocolError> {
    std::str::from_utf8(r.blob()?).map_err(|_| WireError::Malformed { what: "text" }.into())
}

/// A device's memory as the content of an answer.
pub fn encode_memory(m: &Memory) -> Vec<u8> {
    let mut w = Writer::default();
    let sizes = [m.live_bytes, m.live_buffers, m.values, m.cached_bytes, m.persistent_bytes, m.peak_bytes];
    sizes.iter().for_each(|&x| w.int(x as u64));
    ints(&mut w, 0, &[m.system_allocs, m.limit.map_or(0, |x| x as u64 + 1)]);
    w.bytes
}

/// Reads what [`encode_memory`] wrote.
pub fn decode_memory(content: &[u8]) -> Result<Memory, ProtocolError> {
    let mut r = Reader::new(content);
    let mut size = || r.int().map(|x| x as usize);
    Ok(Memory {
        live_bytes: size()?,
        live_buffers: size()?,
        values: size()?,
        cached_bytes: size()?,
        persistent_bytes: size()?,
        peak_bytes: size()?,
        system_allocs: size()? as u64,
        limit: size()?.checked_sub(1),
    })
}

/// Spans that one answer holds at most: their names are long at worst, and an answer is one frame.
pub const MOST_SPANS: usize = 1024;

/// What a device has run as the content of an answer: its clock, what was lost, the names, and the spans. Times are in
/// nanoseconds; spans follow one another in the order in which they ended, each with the time since the last end.
pub fn encode_spans(spans: &Spans) -> Vec<u8> {
    let mut w = Writer::default();
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let mut names: Vec<&str> = Vec::new();
    let mut numbers: FxHashMap<&str, usize> = FxHashMap::default();
    for span in &spans.spans {
        numbers.entry(&span.name).or_insert_with(|| {
            names.push(&span.name);
            names.len() - 1
        });
    }
    ints(&mut w, 0, &[nanos(spans.now), spans.left, spans.lost, names.len() as u64]);
    names.iter().for_each(|name| w.text(name));
    w.int(spans.spans.len() as u64);
    for span in &spans.spans {
        let name = numbers[&*span.name] as u64;
        ints(&mut w, 0, &[name, span.nodes.into(), span.bytes, nanos(span.from), nanos(span.took)]);
    }
    w.bytes
}

/// Reads what [`encode_spans`] wrote.
pub fn decode_spans(content: &[u8]) -> Result<Spans, ProtocolError> {
    let mut r = Reader::new(content);
    let (now, left, lost) = (Duration::from_nanos(r.int()?), r.int()?, r.int()?);
    let names: Vec<Arc<str>> =
        (0..r.length(1)?).map(|_| Ok(text(&mut r)?.into())).collect::<Result<_, ProtocolError>>()?;
    let count = r.length(5)?;
    let mut spans = Vec::with_capacity(count);
    for _ in 0..count {
        let name = usize::try_from(r.int()?).ok().and_then(|at| names.get(at));
        let name = name.ok_or(WireError::Malformed { what: "span" })?.clone();
        let nodes = u32::try_from(r.int()?).map_err(|_| WireError::Malformed { what: "span" })?;
        let (bytes, from, took) = (r.int()?, Duration::from_nanos(r.int()?), Duration::from_nanos(r.int()?));
        spans.push(Span { name, nodes, bytes, from, took });
    }
    if !r.is_empty() {
        return Err(WireError::Malformed { what: "spans" }.into());
    }
    Ok(Spans { spans, left, lost, now })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::greeting::{Hello, Purpose};
    use kiln_ir::DType;

    #[test]
    fn spans_read_back_and_damaged_ones_are_refused() {
        let span = |name: &str, nodes, bytes, from, took| Span {
            name: name.into(),
            nodes,
            bytes,
            from: Duration::from_nanos(from),
            took: Duration::from_micros(took),
        };
        let all =
            vec![span("rows: exp sum", 2, 800, 5, 7), span("dot", 1, 9, 9, 0), span("dot", 1, 9, 70, 1)];
        let spans = Spans { spans: all, left: 4, lost: 3, now: Duration::from_secs(2) };
        let bytes = encode_spans(&spans);
        assert_eq!(decode_spans(&bytes), Ok(spans));
        for len in 0..bytes.len() {
            assert!(decode_spans(&bytes[..len]).is_err(), "{len}");
        }
        // A name that is not listed, and more spans than there are bytes.
        assert!(decode_spans(&[0, 0, 0, 0, 1, 0, 0, 0, 0, 0]).is_err());
        assert!(decode_spans(&[0, 0, 0, 0, 255, 255, 255, 255, 15]).is_err());
        // The largest answer is a frame.
        let long = |i: usize| span(&format!("{i:0>240}"), u32::MAX, u64::MAX, u64::MAX, u64::MAX / 1000);
        let spans =
            Spans { spans: (0..MOST_SPANS).map(long).collect(), left: 0, lost: u64::MAX, now: Duration::MAX };
        assert!(encode_spans(&spans).len() < frame::MOST / 2);
    }

    #[test]
    fn what_was_added_later_reads_back_and_is_absent_where_it_says_nothing() {
        let meta = Meta::new(DType::F32, [2, 3]);
        let sizes = [0, 77].map(|incarnation| {
            let (transfer, id, place, url, capability) = (1, Id(2), Place::Reuse, "kiln://a", [7; 32]);
            let fetch = Message::Fetch { transfer, id, meta, place, incarnation, url, capability };
            let (kind, body) = fetch.encode();
            let mut scratch = Vec::new();
            assert_eq!(Message::decode(kind, &body.fields, &mut scratch), Ok(fetch));
            body.fields.len()
        });
        assert_eq!(sizes[1], sizes[0] + 1);
        let sizes = [0, 100].map(|from| {
            let purpose = Purpose::Fetch { capability: [7; 32], transfer: 5, from };
            let (token, program, table) = (Vec::new(), String::new(), Vec::new());
            let hello = Hello { versions: (1, 1), token, purpose, compress: false, program, table };
            let bytes = hello.encode();
            assert_eq!(Hello::decode(&bytes), Ok(hello));
            bytes.len()
        });
        assert_eq!(sizes[1], sizes[0] + 1);
        let urgent = [
            Message::Recall { request: 3, capability: [9; 32] },
            Message::Withdraw { transfer: 4, error: Error::Stopped },
        ];
        for message in urgent {
            let (kind, body) = message.encode();
            assert_eq!(lane(kind), Priority::Urgent);
            let mut scratch = Vec::new();
            assert_eq!(Message::decode(kind, &body.fields, &mut scratch), Ok(message));
        }
    }
}
