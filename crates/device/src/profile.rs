//! `Profile`: a decorator that runs one operation at a time and keeps counts, bytes and times, for a report and for a
//! trace that Chrome's viewer and Perfetto open. Timing an operation means waiting for it, so a profiled program is
//! slower and its operations do not overlap.

use crate::{Batch, Data, Device, DeviceInfo, Error, Pending, Place, Urgency};
use kiln_ir::{Id, Item, Meta, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
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
}

struct Event {
    name: String,
    origin: String,
    from: Duration,
    took: Duration,
    bytes: u64,
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
    /// Measures `inner`; the trace goes to `path` at every flush and at the end.
    pub fn new(inner: Arc<dyn Device>, path: Option<PathBuf>) -> Profile {
        Profile { inner, path, start: Instant::now(), state: Mutex::default() }
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
        let events: Vec<_> = state
            .events
            .iter()
            .map(|e| {
                serde_json::json!({
                    "name": e.name, "ph": "X", "pid": 1, "tid": 1,
                    "ts": e.from.as_secs_f64() * 1e6, "dur": e.took.as_secs_f64() * 1e6,
                    "args": { "bytes": e.bytes, "origin": e.origin },
                })
            })
            .collect();
        let trace = serde_json::json!({ "traceEvents": events, "displayTimeUnit": "ms" });
        std::fs::write(path, trace.to_string())
            .map_err(|e| Error::File { path: path.display().to_string(), message: e.to_string() })
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
        state.events.push(Event { name, origin, from: from.duration_since(self.start), took, bytes });
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

    fn sync(&self) -> Pending<()> {
        self.inner.sync()
    }

    crate::before::handed_on!();

    fn flush(&self) -> Result<(), Error> {
        if let Some(path) = &self.path {
            self.save(path)?;
        }
        self.inner.flush()
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}
