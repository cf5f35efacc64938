//! `Record`: a decorator that writes the stream to a file, and `replay`, which runs such a file on any device.
//!
//! The file is a head (magic, length of what is complete, checksum of that length) and frames (length, checksum,
//! payload). The head is brought up to date after every frame, so that a file is whole however the program ends, and one
//! that was truncated, or whose bytes changed, is recognised before anything is executed. Reads are kept as digests of what they gave: a replay
//! gives equal results or says which read differs.

use crate::{
    Batch, Bytes, Data, Decorator, DeviceInfo, Driver, Error, Fetch, Pending, Place, Urgency, pending,
};
use kiln_ir::wire::{Reader, Table, WireError, Writer};
use kiln_ir::{DType, Id, Item, Meta, Scope, VerifyError};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const MAGIC: &[u8; 8] = b"KILNREC1";
const HEAD: u64 = 20;

const TABLE: u8 = 0;
const WRITE: u8 = 1;
const BATCH: u8 = 2;
const READ: u8 = 3;
const ANSWER: u8 = 4;

/// A device that writes everything asked of another to a file.
pub struct Record {
    inner: Arc<dyn Driver>,
    tape: Arc<Tape>,
}

struct Tape {
    path: PathBuf,
    table: Table,
    state: Mutex<TapeState>,
}

struct TapeState {
    file: File,
    end: u64,
    reads: u64,
    /// The first failure to write; recording stops there and the computation goes on.
    failed: Option<String>,
}

impl Record {
    /// Records what is asked of `inner` into a new file at `path`.
    pub fn new(inner: Arc<dyn Driver>, path: impl AsRef<Path>) -> Result<Record, Error> {
        let path = path.as_ref().to_path_buf();
        let open = || -> std::io::Result<File> {
            let mut file = File::create(&path)?;
            file.write_all(&head(HEAD))?;
            Ok(file)
        };
        let file = open().map_err(|e| file_error(&path, e))?;
        let state = TapeState { file, end: HEAD, reads: 0, failed: None };
        let tape = Tape { path, table: Table::local(), state: Mutex::new(state) };
        let mut w = frame(TABLE);
        tape.table.encode(&mut w);
        tape.append(&w.bytes);
        Ok(Record { inner, tape: Arc::new(tape) })
    }
}

impl Tape {
    fn append(&self, payload: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        self.append_to(&mut state, payload);
    }

    fn append_to(&self, state: &mut TapeState, payload: &[u8]) {
        if state.failed.is_some() {
            return;
        }
        let mut write = || -> std::io::Result<()> {
            let mut prefix = [0; 12];
            prefix[..8].copy_from_slice(&(payload.len() as u64).to_le_bytes());
            prefix[8..].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
            state.file.write_all(&prefix)?;
            state.file.write_all(payload)?;
            state.end += 12 + payload.len() as u64;
            finish(state)
        };
        if let Err(e) = write() {
            eprintln!("kiln: recording to {} stopped: {e}", self.path.display());
            state.failed = Some(e.to_string());
        }
    }
}

fn finish(state: &mut TapeState) -> std::io::Result<()> {
    state.file.seek(SeekFrom::Start(0))?;
    state.file.write_all(&head(state.end))?;
    state.file.seek(SeekFrom::Start(state.end))?;
    state.file.flush()
}

fn head(end: u64) -> [u8; HEAD as usize] {
    let mut head = [0; HEAD as usize];
    head[..8].copy_from_slice(MAGIC);
    head[8..16].copy_from_slice(&end.to_le_bytes());
    head[16..].copy_from_slice(&crc32fast::hash(&end.to_le_bytes()).to_le_bytes());
    head
}

fn frame(kind: u8) -> Writer {
    Writer { bytes: vec![kind] }
}

fn file_error(path: &Path, e: std::io::Error) -> Error {
    Error::File { path: path.display().to_string(), message: e.to_string() }
}

/// What a read gave, in 32 bytes: the data's digest, or zeros for a failure.
fn digest(answer: &Result<Data, Error>) -> [u8; 32] {
    match answer {
        Ok(data) => {
            let mut hash = Sha256::new();
            hash.update(data.meta.to_string());
            hash.update(without_nan_payloads(data));
            hash.finalize().into()
        }
        Err(_) => [0; 32],
    }
}

/// The bytes with every NaN made the same: which of several NaNs survives an operation is not promised.
fn without_nan_payloads(data: &Data) -> std::borrow::Cow<'_, [u8]> {
    // Sign and mantissa are free in a NaN; its exponent is all ones.
    let infinity: u64 = match data.meta.dtype {
        DType::F64 => 0x7ff0_0000_0000_0000,
        DType::F32 => 0x7f80_0000,
        DType::F16 => 0x7c00,
        DType::BF16 => 0x7f80,
        _ => return (&data.bytes[..]).into(),
    };
    let size = data.meta.dtype.size();
    let magnitude = !(1u64 << (8 * size - 1));
    let mut bytes = data.bytes.to_vec();
    for element in bytes.chunks_exact_mut(size) {
        let mut word = [0; 8];
        word[..size].copy_from_slice(element);
        if u64::from_le_bytes(word) & magnitude > infinity {
            element.copy_from_slice(&(infinity | 1).to_le_bytes()[..size]);
        }
    }
    bytes.into()
}

impl Decorator for Record {
    fn inner(&self) -> &dyn Driver {
        &*self.inner
    }

    fn info(&self) -> DeviceInfo {
        let info = self.inner.info();
        DeviceInfo { name: format!("record<{}>", info.name), peers: None, ..info }
    }

    fn submit(&self, batch: Batch) {
        let mut w = frame(BATCH);
        w.bytes.push((batch.place == Place::Persistent) as u8);
        self.tape.table.items(&batch.items, &mut w);
        self.tape.append(&w.bytes);
        self.inner.submit(batch);
    }

    fn write(&self, id: Id, data: Data, place: Place) {
        let mut w = frame(WRITE);
        w.int(id.0);
        w.bytes.push((place == Place::Persistent) as u8);
        w.meta(&data.meta);
        w.blob(&data.bytes);
        self.tape.append(&w.bytes);
        self.inner.write(id, data, place);
    }

    fn read(&self, id: Id, known: Option<Meta>) -> Pending<Data> {
        let number = {
            let mut state = self.tape.state.lock().unwrap_or_else(|e| e.into_inner());
            let mut w = frame(READ);
            w.int(id.0);
            self.tape.append_to(&mut state, &w.bytes);
            state.reads += 1;
            state.reads - 1
        };
        let tape = self.tape.clone();
        let read = match known {
            Some(meta) => self.inner.read_as(id, meta),
            None => self.inner.read(id),
        };
        read.then(move |answer| {
            let mut w = frame(ANSWER);
            w.int(number);
            w.bytes.extend_from_slice(&digest(answer));
            tape.append(&w.bytes);
        })
    }

    fn sync(&self) -> Pending<()> {
        let _ = self.flush();
        self.inner.sync()
    }

    /// A value that comes from elsewhere would be missing in the file.
    fn fetch(&self, _: Fetch<'_>) -> bool {
        false
    }

    fn flush(&self) -> Result<(), Error> {
        let mut state = self.tape.state.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(message) = &state.failed {
            return Err(Error::File { path: self.tape.path.display().to_string(), message: message.clone() });
        }
        finish(&mut state).map_err(|e| file_error(&self.tape.path, e))?;
        self.inner.flush()
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let _ = Decorator::flush(self);
    }
}

/// What a replay did.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Replayed {
    /// Operations and frees executed.
    pub items: u64,
    /// Values written from the file.
    pub writes: u64,
    /// Reads made.
    pub reads: u64,
    /// Reads whose result differs from the recorded one, by number.
    pub differing: Vec<u64>,
}

/// Runs the recording at `path` on `device` and compares every read. The whole file is checked before anything runs: its
/// sums, its form, and that it is a stream as a recording side writes it.
pub fn replay(path: impl AsRef<Path>, device: &dyn Driver) -> Result<Replayed, Error> {
    let path = path.as_ref();
    let mut bytes = Vec::new();
    File::open(path).and_then(|mut f| f.read_to_end(&mut bytes)).map_err(|e| file_error(path, e))?;
    let frames = split(&bytes)?;
    check(&frames)?;
    let mut done = Replayed { items: 0, writes: 0, reads: 0, differing: Vec::new() };
    let mut given: Vec<Pending<Data>> = Vec::new();
    let mut wanted: Vec<(usize, [u8; 32])> = Vec::new();
    walk(&frames, &mut |_, frame| {
        match frame {
            Frame::Write { id, meta, content, place } => {
                device.write(id, Data::new(meta, Bytes::new(content.to_vec())), place);
                done.writes += 1;
            }
            Frame::Batch { items, place } => {
                done.items += items.len() as u64;
                device.submit(Batch { items, origins: Vec::new(), place, urgency: Urgency::Awaited });
            }
            Frame::Read(id) => {
                given.push(device.read(id));
                done.reads += 1;
            }
            Frame::Answer(number, digest) => wanted.push((number, digest)),
        }
        Ok(())
    })?;
    let given: Vec<[u8; 32]> = given.into_iter().map(|read| digest(&read.wait())).collect();
    for (number, digest) in wanted {
        if given.get(number) != Some(&digest) {
            done.differing.push(number as u64);
        }
    }
    device.sync().wait()?;
    Ok(done)
}

/// What a frame says.
enum Frame<'a> {
    Write {
        id: Id,
        meta: Meta,
        content: &'a [u8],
        place: Place,
    },
    Batch {
        items: Vec<Item>,
        place: Place,
    },
    Read(Id),
    /// The number of a read, and the digest of what it gave.
    Answer(usize, [u8; 32]),
}

/// Checks the names of a recording: each stands for one value, and none is of those that devices give.
fn check(frames: &[(u64, &[u8])]) -> Result<(), Error> {
    let mut scope = Scope::default();
    let mut items = 0;
    walk(frames, &mut |at, frame| {
        let bad = |e: VerifyError| Error::Recording { at, reason: e.to_string() };
        match frame {
            Frame::Write { id, meta, .. } => scope.define(items, id, meta).map_err(bad),
            Frame::Batch { items: batch, .. } => batch.iter().try_for_each(|item| {
                items += 1;
                scope.admit(items - 1, item).map_err(bad)
            }),
            Frame::Read(_) | Frame::Answer(..) => Ok(()),
        }
    })
}

/// Calls `f(at, frame)` for the frames of a recording.
fn walk(
    frames: &[(u64, &[u8])],
    f: &mut dyn FnMut(u64, Frame<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut table = None;
    for &(at, payload) in frames {
        let bad = |e: WireError| Error::Recording { at, reason: e.to_string() };
        let damaged = |reason: &str| Error::Recording { at, reason: reason.into() };
        let mut r = Reader::new(payload);
        let kind = r.byte().map_err(bad)?;
        if kind == TABLE {
            table = Some(Table::decode(&mut r).map_err(bad)?);
            continue;
        }
        let table = table.as_ref().ok_or_else(|| damaged("the operation table is missing"))?;
        let frame = match kind {
            WRITE => {
                let id = Id(r.int().map_err(bad)?);
                let place = place(r.byte().map_err(bad)?);
                let meta = r.meta().map_err(bad)?;
                meta.check()?;
                let content = r.blob().map_err(bad)?;
                if content.len() != meta.bytes() {
                    return Err(damaged("a value has the wrong number of bytes"));
                }
                Frame::Write { id, meta, content, place }
            }
            BATCH => {
                let place = place(r.byte().map_err(bad)?);
                Frame::Batch { items: table.read_items(&mut r).map_err(bad)?, place }
            }
            READ => Frame::Read(Id(r.int().map_err(bad)?)),
            ANSWER => {
                let number = r.int().map_err(bad)? as usize;
                let digest = r.take(32).map_err(bad)?.try_into().map_err(|_| damaged("bad digest"))?;
                Frame::Answer(number, digest)
            }
            _ => return Err(damaged("unknown kind of frame")),
        };
        f(at, frame)?;
    }
    Ok(())
}

fn place(byte: u8) -> Place {
    if byte == 0 { Place::Reuse } else { Place::Persistent }
}

/// The frames of a file, each checked.
fn split(bytes: &[u8]) -> Result<Vec<(u64, &[u8])>, Error> {
    let damaged = |at: u64, reason: &str| Error::Recording { at, reason: reason.into() };
    let word = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let sum = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    if bytes.get(..8) != Some(MAGIC) {
        return Err(damaged(0, "this is not a recording"));
    }
    let (Some(end), Some(check)) = (word(8), sum(16)) else {
        return Err(damaged(8, "the head is truncated"));
    };
    if crc32fast::hash(&end.to_le_bytes()) != check {
        return Err(damaged(8, "the head's checksum is wrong"));
    }
    if (bytes.len() as u64) < end {
        return Err(damaged(
            bytes.len() as u64,
            &format!("the file is truncated: {end} bytes were recorded"),
        ));
    }
    let mut at = HEAD;
    let mut frames = Vec::new();
    while at < end {
        let place = at as usize;
        let (Some(len), Some(check)) = (word(place), sum(place + 8)) else {
            return Err(damaged(at, "a frame is truncated"));
        };
        let payload = (at + 12)
            .checked_add(len)
            .filter(|&stop| stop <= end)
            .map(|stop| &bytes[place + 12..stop as usize]);
        let Some(payload) = payload else { return Err(damaged(at, "a frame is longer than the file")) };
        if crc32fast::hash(payload) != check {
            return Err(damaged(at, "a frame's checksum is wrong"));
        }
        frames.push((at, payload));
        at += 12 + len;
    }
    Ok(frames)
}

impl<T: Send + 'static> Pending<T> {
    /// The same answer, seen by `f` on its way. If it never comes, `f` never runs.
    fn then(self, f: impl FnOnce(&Result<T, Error>) + Send + 'static) -> Pending<T> {
        let (promise, pending) = pending(self.helper());
        self.on_answer(move |answer| {
            f(&answer);
            promise.answer(answer);
        });
        pending
    }
}
