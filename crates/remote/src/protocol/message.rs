//! What client and server say to each other.
//!
//! A message is one frame. Its fields are written one after another: integers as LEB128, texts and blobs with their
//! length before them. Kinds below 16 are control messages, which are neither numbered nor repeated.

use super::link::{Body, Lane};
use super::{ProtocolError, fault, frame};
use kiln_device::{Bytes, DeviceInfo, Error, Memory, Place, Usage};
use kiln_ir::wire::{Reader, WireError, Writer};
use kiln_ir::{DType, Id, Meta};

/// Bytes of data that a piece carries at most.
pub const PIECE: usize = 256 << 10;

/// Set in a kind whose payload is compressed.
const COMPRESSED: u8 = 0x80;
/// Payloads below this are not worth compressing.
const COMPRESS_FROM: usize = 512;

/// What a value is exposed under: whoever knows it may fetch the value.
pub type Capability = [u8; 32];

/// What a client wants of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A new session with the device of this name; empty for the first.
    Open {
        /// The device.
        device: String,
    },
    /// To go on with a session.
    Resume {
        /// The session.
        session: u64,
        /// What only its client knows.
        secret: [u8; 32],
        /// Counts the connections of a session; an older one is cut off.
        epoch: u64,
        /// The last frame that the client has received.
        received: u64,
    },
    /// To fetch a value that a session has exposed.
    Fetch {
        /// What the value was exposed under.
        capability: Capability,
        /// Names the transfer, so that asking again is no second fetch.
        transfer: u64,
        /// Bytes that are there already.
        from: u64,
    },
    /// To look at the server.
    Watch,
}

/// The client's first frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The oldest and newest version it speaks.
    pub versions: (u64, u64),
    /// Proves that it may connect.
    pub token: Vec<u8>,
    /// What it wants.
    pub purpose: Purpose,
    /// It understands compressed payloads, and sends them if the server does too.
    pub compress: bool,
    /// The program's name, for people who look at the server.
    pub program: String,
    /// Its operation table, see [`kiln_ir::wire::Table`].
    pub table: Vec<u8>,
}

/// The server's answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Welcome {
    /// The version that both speak.
    pub version: u64,
    /// Names the session.
    pub session: u64,
    /// What the client needs to resume it.
    pub secret: [u8; 32],
    /// Another number after every start of the server.
    pub incarnation: u64,
    /// The last frame that the server has received, if the session went on.
    pub resumed: Option<u64>,
    /// How long the session outlives a lost connection, in milliseconds.
    pub lease: u64,
    /// How often each side speaks at least, in milliseconds.
    pub heartbeat: u64,
    /// Compressed payloads may be sent.
    pub compress: bool,
    /// The device.
    pub info: DeviceInfo,
    /// The server's operation table.
    pub table: Vec<u8>,
    /// How other servers reach it; empty if they take the way that the client has taken.
    pub advertise: String,
}

/// Why a server does not take a connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("it speaks protocol versions {0} to {1}")]
    Version(u64, u64),
    #[error("the token is wrong")]
    Token,
    #[error("the session is not known, or its lease has ended")]
    Session,
    #[error("a newer connection has taken the session over")]
    Fenced,
    #[error("it has no device `{0}`")]
    Device(String),
    #[error("it serves {0} sessions, which is its limit")]
    Full(u64),
    #[error("it is shutting down")]
    Draining,
    #[error("the value is not exposed, or no more")]
    Capability,
    #[error("{0}")]
    Other(String),
}

/// A question about the device, or an order to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Query {
    Memory,
    Cleanup,
    Limit(Option<u64>),
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
        (kind, Body { fields: w.bytes, data: None })
    }

    /// The message that a frame holds. `room` is used for a compressed payload.
    pub fn decode<'a>(
        kind: u8,
        payload: &'a [u8],
        room: &'a mut Vec<u8>,
    ) -> Result<Message<'a>, ProtocolError> {
        let payload = if kind & COMPRESSED != 0 {
            *room = expand(payload)?;
            &room[..]
        } else {
            payload
        };
        let kind = kind & !COMPRESSED;
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

/// The lane that a frame of this kind was sent in, as far as the window goes.
pub fn lane(kind: u8) -> Lane {
    match kind & !COMPRESSED {
        kind::SUPPLY | kind::RECALL | kind::WITHDRAW | kind::EXPOSE => Lane::Urgent,
        _ => Lane::Normal,
    }
}

/// The frames that carry `bytes` as transfer `of`, without copying them.
pub fn pieces(of: u64, bytes: &Bytes, compress: bool) -> impl Iterator<Item = (u8, Body)> {
    let mut fields = Writer::default();
    fields.int(of);
    (0..bytes.len()).step_by(PIECE).map(move |at| {
        let data = bytes.slice(at..(at + PIECE).min(bytes.len()));
        let body = Body { fields: fields.bytes.clone(), data: Some(data) };
        if compress { compressed(kind::PIECE, body) } else { (kind::PIECE, body) }
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
        true => (kind | COMPRESSED, Body { fields: packed, data: None }),
        false => (kind, body),
    }
}

fn expand(payload: &[u8]) -> Result<Vec<u8>, ProtocolError> {
    let bad = ProtocolError::Wire(WireError::Malformed { what: "compressed payload" });
    // The size stands first and is believed only up to what a frame may hold.
    let (size, packed) = lz4_flex::block::uncompressed_size(payload).map_err(|_| bad.clone())?;
    if size > frame::MOST {
        return Err(ProtocolError::TooLong { len: size, most: frame::MOST });
    }
    lz4_flex::decompress(packed, size).map_err(|_| bad)
}

fn ints(w: &mut Writer, kind: u8, ints: &[u64]) -> u8 {
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

fn array<const N: usize>(r: &mut Reader<'_>) -> Result<[u8; N], ProtocolError> {
    r.take(N)?.try_into().map_err(|_| WireError::Truncated.into())
}

fn text<'a>(r: &mut Reader<'a>) -> Result<&'a str, ProtocolError> {
    std::str::from_utf8(r.blob()?).map_err(|_| WireError::Malformed { what: "text" }.into())
}

fn flag(r: &mut Reader<'_>) -> Result<bool, ProtocolError> {
    match r.byte()? {
        byte @ (0 | 1) => Ok(byte == 1),
        _ => Err(WireError::Malformed { what: "flag" }.into()),
    }
}

impl Hello {
    /// Its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        ints(&mut w, 0, &[self.versions.0, self.versions.1]);
        w.blob(&self.token);
        match &self.purpose {
            Purpose::Open { device } => {
                w.int(0);
                w.text(device);
            }
            Purpose::Resume { session, secret, epoch, received } => {
                ints(&mut w, 0, &[1, *session, *epoch, *received]);
                w.bytes.extend_from_slice(secret);
            }
            Purpose::Fetch { capability, transfer, from: 0 } => {
                ints(&mut w, 0, &[2, *transfer]);
                w.bytes.extend_from_slice(capability);
            }
            Purpose::Fetch { capability, transfer, from } => {
                ints(&mut w, 0, &[4, *transfer, *from]);
                w.bytes.extend_from_slice(capability);
            }
            Purpose::Watch => w.int(3),
        }
        w.bytes.push(self.compress as u8);
        w.text(&self.program);
        w.blob(&self.table);
        w.bytes
    }

    /// Reads one. Of another version only the versions are looked at.
    pub fn decode(payload: &[u8]) -> Result<Hello, ProtocolError> {
        let mut r = Reader::new(payload);
        let versions = (r.int()?, r.int()?);
        if common(versions).is_none() {
            let (token, program, table) = (Vec::new(), String::new(), Vec::new());
            return Ok(Hello { versions, token, purpose: Purpose::Watch, compress: false, program, table });
        }
        let token = r.blob()?.to_vec();
        let purpose = match r.int()? {
            0 => Purpose::Open { device: r.text()? },
            1 => {
                let (session, epoch, received) = (r.int()?, r.int()?, r.int()?);
                Purpose::Resume { session, epoch, received, secret: array(&mut r)? }
            }
            2 => Purpose::Fetch { transfer: r.int()?, from: 0, capability: array(&mut r)? },
            4 => Purpose::Fetch { transfer: r.int()?, from: r.int()?, capability: array(&mut r)? },
            3 => Purpose::Watch,
            _ => return Err(WireError::Malformed { what: "purpose" }.into()),
        };
        let compress = flag(&mut r)?;
        Ok(Hello { versions, token, purpose, compress, program: r.text()?, table: r.blob()?.to_vec() })
    }
}

/// The newest version that both sides speak.
pub fn common(versions: (u64, u64)) -> Option<u64> {
    let newest = versions.1.min(super::VERSIONS.1);
    (newest >= versions.0.max(super::VERSIONS.0)).then_some(newest)
}

impl Welcome {
    /// Its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        ints(&mut w, 0, &[self.version, self.session, self.incarnation]);
        w.bytes.extend_from_slice(&self.secret);
        // One more than the number, so that 0 can stand for none.
        w.int(self.resumed.map_or(0, |seq| seq + 1));
        ints(&mut w, 0, &[self.lease, self.heartbeat]);
        w.bytes.push(self.compress as u8);
        info(&self.info, &mut w);
        w.blob(&self.table);
        if !self.advertise.is_empty() {
            w.text(&self.advertise);
        }
        w.bytes
    }

    /// Reads one.
    pub fn decode(payload: &[u8]) -> Result<Welcome, ProtocolError> {
        let mut r = Reader::new(payload);
        let (version, session, incarnation) = (r.int()?, r.int()?, r.int()?);
        let secret = array(&mut r)?;
        let resumed = r.int()?.checked_sub(1);
        let (lease, heartbeat, compress) = (r.int()?, r.int()?, flag(&mut r)?);
        let (info, table) = (read_info(&mut r)?, r.blob()?.to_vec());
        let advertise = if r.is_empty() { String::new() } else { r.text()? };
        Ok(Welcome {
            version,
            session,
            secret,
            incarnation,
            resumed,
            lease,
            heartbeat,
            compress,
            info,
            table,
            advertise,
        })
    }
}

fn info(info: &DeviceInfo, w: &mut Writer) {
    w.text(&info.name);
    w.text(&info.numerics);
    ints(w, 0, &[info.count as u64, info.threads as u64, info.usage.len() as u64]);
    for (dtype, usage) in &info.usage {
        w.text(dtype.name());
        w.bytes.push(usage.bits());
    }
}

fn read_info(r: &mut Reader<'_>) -> Result<DeviceInfo, ProtocolError> {
    let (name, numerics) = (r.text()?, r.text()?);
    let (count, threads) = (r.int()? as usize, r.int()? as usize);
    let dtypes = r.length(2)?;
    let mut usage = Vec::new();
    for _ in 0..dtypes {
        let (name, bits) = (r.text()?, r.byte()?);
        // A dtype that this build does not know cannot be used from here.
        usage.extend(DType::from_name(&name).map(|dtype| (dtype, Usage::from_bits(bits))));
    }
    Ok(DeviceInfo { name, count, usage, numerics, threads })
}

impl Refusal {
    /// Its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Refusal::Version(oldest, newest) => drop(ints(&mut w, 0, &[0, *oldest, *newest])),
            Refusal::Token => w.int(1),
            Refusal::Session => w.int(2),
            Refusal::Fenced => w.int(3),
            Refusal::Device(name) => {
                w.int(4);
                w.text(name);
            }
            Refusal::Full(most) => drop(ints(&mut w, 0, &[5, *most])),
            Refusal::Draining => w.int(6),
            Refusal::Capability => w.int(7),
            Refusal::Other(reason) => {
                w.int(8);
                w.text(reason);
            }
        }
        w.bytes
    }

    /// Reads one.
    pub fn decode(payload: &[u8]) -> Result<Refusal, ProtocolError> {
        let mut r = Reader::new(payload);
        Ok(match r.int()? {
            0 => Refusal::Version(r.int()?, r.int()?),
            1 => Refusal::Token,
            2 => Refusal::Session,
            3 => Refusal::Fenced,
            4 => Refusal::Device(r.text()?),
            5 => Refusal::Full(r.int()?),
            6 => Refusal::Draining,
            7 => Refusal::Capability,
            8 => Refusal::Other(r.text()?),
            // A later version may have more reasons.
            code => Refusal::Other(format!("refused with code {code}")),
        })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_later_reads_back_and_is_absent_where_it_says_nothing() {
        let meta = Meta::new(DType::F32, [2, 3]);
        let sizes = [0, 77].map(|incarnation| {
            let (transfer, id, place, url, capability) = (1, Id(2), Place::Reuse, "kiln://a", [7; 32]);
            let fetch = Message::Fetch { transfer, id, meta, place, incarnation, url, capability };
            let (kind, body) = fetch.encode();
            let mut room = Vec::new();
            assert_eq!(Message::decode(kind, &body.fields, &mut room), Ok(fetch));
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
            assert_eq!(lane(kind), Lane::Urgent);
            let mut room = Vec::new();
            assert_eq!(Message::decode(kind, &body.fields, &mut room), Ok(message));
        }
    }
}
