//! `Profile`: a decorator that runs one operation at a time and keeps counts, bytes and times, for a report and for a
//! trace that Chrome's viewer and Perfetto open. Timing an operation means waiting for it, so a profiled program is
//! slower and its operations do not overlap.

use crate::{Batch, Data, Device, DeviceInfo, Error, Keep, Pending, Place, Urgency};
use kiln_ir::{Id, Item, Meta, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A device that measures another.
pub struct Profile {
    inner: Arc<dyn Device>,
    path: Option<PathBuf>,
    start: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    metas: FxHashMap<Id, Meta>,
    rows: FxHashMap<String, OpProfile>,
    events: Vec<Event>,
    trace: Option<Trace>,
}

/// The trace's file. It is whole after each event, so that it is there however the program ends.
struct Trace {
    file: File,
    /// Where the next event goes, over what closes the list.
    end: u64,
    /// The first failure to write; the trace stops there and the computation goes on.
    failed: Option<String>,
}

const OPENING: &str = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
const CLOSING: &str = "\n]}";

impl Trace {
    fn create(path: &Path) -> std::io::Result<Trace> {
        let mut file = File::create(path)?;
        file.write_all(OPENING.as_bytes())?;
        file.write_all(CLOSING.as_bytes())?;
        Ok(Trace { file, end: OPENING.len() as u64, failed: None })
    }

    fn push(&mut self, event: &Event, path: &Path) {
        if self.failed.is_some() {
            return;
        }
        let gap = if self.end == OPENING.len() as u64 { "\n" } else { ",\n" };
        let text = format!("{gap}{}{CLOSING}", event.json());
        let written =
            self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(text.as_bytes()));
        match written {
            Ok(()) => self.end += (text.len() - CLOSING.len()) as u64,
            Err(e) => {
                eprintln!("kiln: the trace in {} stopped: {e}", path.display());
                self.failed = Some(e.to_string());
            }
        }
    }
}

struct Event {
    name: String,
    origin: String,
    from: Duration,
    took: Duration,
    bytes: u64,
}

impl Event {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.name, "ph": "X", "pid": 1, "tid": 1,
            "ts": self.from.as_secs_f64() * 1e6, "dur": self.took.as_secs_f64() * 1e6,
            "args": { "bytes": self.bytes, "origin": self.origin },
        })
    }
}

/// What one kind of operation cost.
#[derive(Clone, PartialEq, Debug, Default, serde::Serialize)]
pub struct OpProfile {
    /// Its name.
    pub name: String,
    /// How often it ran.
    pub count: u64,
    /// Bytes of operands and results.
    pub bytes: u64,
    /// Seconds in all.
    pub seconds: f64,
}

impl Profile {
    /// Measures `inner`; the trace goes to `path` as it grows.
    pub fn new(inner: Arc<dyn Device>, path: Option<PathBuf>) -> Result<Profile, Error> {
        let trace = match &path {
            Some(path) => Some(Trace::create(path).map_err(|e| file_error(path, e.to_string()))?),
            None => None,
        };
        let state = State { trace, ..State::default() };
        Ok(Profile { inner, path, start: Instant::now(), state: Mutex::new(state) })
    }

    /// What each kind of operation cost, the dearest first.
    pub fn rows(&self) -> Vec<OpProfile> {
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let mut rows: Vec<_> = state.rows.values().cloned().collect();
        rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        rows
    }

    /// Writes the trace in Chrome's format.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let events: Vec<_> = state.events.iter().map(Event::json).collect();
        let trace = serde_json::json!({ "traceEvents": events, "displayTimeUnit": "ms" });
        std::fs::write(path, trace.to_string()).map_err(|e| file_error(path, e.to_string()))
    }

    fn note(&self, name: String, origin: String, from: Instant, bytes: u64) {
        let took = from.elapsed();
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let row = state
            .rows
            .entry(name.clone())
            .or_insert_with(|| OpProfile { name: name.clone(), ..Default::default() });
        row.count += 1;
        row.bytes += bytes;
        row.seconds += took.as_secs_f64();
        let event = Event { name, origin, from: from.duration_since(self.start), took, bytes };
        if let (Some(trace), Some(path)) = (&mut state.trace, &self.path) {
            trace.push(&event, path);
        }
        state.events.push(event);
    }

    /// Bytes of a node's operands and results; remembers the results' metas.
    fn account(&self, item: &Item) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        match item {
            Item::Free(id) => {
                state.metas.remove(id);
                0
            }
            Item::Run(node) => {
                let ins: Option<SmallVec<[Meta; 4]>> =
                    node.ins.iter().map(|id| state.metas.get(id).copied()).collect();
                let Some(Ok(outs)) = ins.as_ref().map(|ins| infer(&node.op, ins)) else { return 0 };
                state.metas.extend(node.outs.iter().copied().zip(outs.iter().copied()));
                ins.iter().flatten().chain(&outs).map(|m| m.bytes() as u64).sum()
            }
        }
    }
}

impl Device for Profile {
    fn info(&self) -> DeviceInfo {
        let info = self.inner.info();
        DeviceInfo { name: format!("profile<{}>", info.name), ..info }
    }

    fn submit(&self, batch: Batch) {
        // Frees travel with the operation before them, so that the device can still reuse buffers in place.
        let mut at = 0;
        while at < batch.items.len() {
            let end =
                at + 1 + batch.items[at + 1..].iter().take_while(|i| matches!(i, Item::Free(_))).count();
            let bytes = batch.items[at..end].iter().map(|item| self.account(item)).sum();
            let part = Batch {
                items: batch.items[at..end].to_vec(),
                origins: batch.origins.get(at..end).map(<[_]>::to_vec).unwrap_or_default(),
                place: batch.place,
                urgency: Urgency::Awaited,
            };
            let from = Instant::now();
            self.inner.submit(part);
            let _ = self.inner.sync().wait();
            if let Item::Run(node) = &batch.items[at] {
                let origin = batch.origins.get(at).map(|o| o.to_string()).unwrap_or_default();
                self.note(node.op.name().to_string(), origin, from, bytes);
            }
            at = end;
        }
    }

    fn write(&self, id: Id, data: Data, place: Place) {
        let bytes = data.bytes.len() as u64;
        self.state.lock().unwrap_or_else(|e| e.into_inner()).metas.insert(id, data.meta);
        let from = Instant::now();
        self.inner.write(id, data, place);
        self.note("write".into(), String::new(), from, bytes);
    }

    fn read(&self, id: Id) -> Pending<Data> {
        self.inner.read(id)
    }

    fn fetch(&self, id: Id, meta: Meta, place: Place, source: &dyn Device, from: Id, keep: Keep) -> bool {
        let begun = Instant::now();
        let fetched = self.inner.fetch(id, meta, place, source, from, keep);
        if fetched {
            self.state.lock().unwrap_or_else(|e| e.into_inner()).metas.insert(id, meta);
            self.note("fetch".into(), String::new(), begun, meta.bytes() as u64);
        }
        fetched
    }

    fn sync(&self) -> Pending<()> {
        self.inner.sync()
    }

    crate::before::handed_on!();

    fn flush(&self) -> Result<(), Error> {
        let failed = {
            let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
            state.trace.as_ref().and_then(|trace| trace.failed.clone())
        };
        match (failed, &self.path) {
            (Some(message), Some(path)) => Err(file_error(path, message)),
            _ => self.inner.flush(),
        }
    }
}

fn file_error(path: &Path, message: String) -> Error {
    Error::File { path: path.display().to_string(), message }
}
