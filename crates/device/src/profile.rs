//! `Profile`: a decorator that keeps counts, bytes and times, for a report and for a trace that Chrome's viewer and
//! Perfetto open. Two ways: it runs one operation at a time and waits for it, so that a profiled program is slower and
//! its operations do not overlap; or it has the device note what it runs, on its own clock ([`Profile::there`]): then
//! nothing runs differently, and fused groups are seen as what they are.

use crate::{
    Batch, Data, Decorator, DeviceInfo, Driver, Error, Fetch, Pending, Place, Span, Spans, Urgency, pending,
};
use kiln_ir::{Id, Item, Meta, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A device that measures another.
pub struct Profile {
    inner: Arc<dyn Driver>,
    /// The device notes what it runs.
    there: bool,
    notes: Arc<Notes>,
}

struct Notes {
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
    /// Items and values that were handed over since the device was last asked what it ran.
    unasked: usize,
    /// What the device had no room to note.
    lost: u64,
    clock: Option<Clock>,
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

    fn push(&mut self, event: &serde_json::Value, path: &Path) {
        if self.failed.is_some() {
            return;
        }
        let gap = if self.end == OPENING.len() as u64 { "\n" } else { ",\n" };
        let text = format!("{gap}{event}{CLOSING}");
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
    track: Track,
    name: String,
    origin: String,
    from: Duration,
    took: Duration,
    bytes: u64,
    nodes: u32,
}

/// Where something happened: the processes of the trace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Track {
    Program = 1,
    Device = 2,
}

impl Track {
    /// The event that names it.
    fn named(self, name: &str) -> serde_json::Value {
        serde_json::json!({ "name": "process_name", "ph": "M", "pid": self as u8, "args": { "name": name } })
    }
}

impl Event {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.name, "ph": "X", "pid": self.track as u8, "tid": 1,
            "ts": self.from.as_secs_f64() * 1e6, "dur": self.took.as_secs_f64() * 1e6,
            "args": { "bytes": self.bytes, "nodes": self.nodes, "origin": self.origin },
        })
    }
}

/// How a device's clock stands to the program's.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Clock {
    /// Program's less device's, in nanoseconds.
    ahead: i128,
    /// How far that may be off: half of the time that asking took.
    within: i128,
}

/// Items after which a device is asked what it ran, though nobody waits: fewer than it has room to note.
const ASK: usize = 1 << 14;
/// Answers that are taken in a row at most: more than a device has room for.
const ASKS: usize = 64;
/// How long a report waits for a device.
const REPORT: Duration = Duration::from_secs(10);

/// What one kind of operation cost.
#[derive(Clone, PartialEq, Debug, Default, serde::Serialize)]
pub struct OpProfile {
    /// Its name.
    pub name: String,
    /// How often it ran.
    pub count: u64,
    /// Bytes of operands and results; of a group, without those that stay inside.
    pub bytes: u64,
    /// Seconds in all.
    pub seconds: f64,
}

impl Profile {
    /// Measures `inner` one operation at a time; the trace goes to `path` as it grows.
    pub fn new(inner: Arc<dyn Driver>, path: Option<PathBuf>) -> Result<Profile, Error> {
        Ok(Profile { inner, there: false, notes: Arc::new(Notes::begin(path)?) })
    }

    /// Has `inner` note what it runs: for a device on a server, which then shows its own kernels and times. In the trace
    /// it is a process of its own, beside what the program waited for. What ran before an answer to a read or sync is in
    /// the trace when that answer is given.
    pub fn there(inner: Arc<dyn Driver>, path: Option<PathBuf>) -> Result<Profile, Error> {
        inner.trace(true)?;
        let notes = Notes::begin(path)?;
        notes.put(&Track::Program.named("program"));
        notes.put(&Track::Device.named(&inner.info().name));
        Ok(Profile { inner, there: true, notes: Arc::new(notes) })
    }

    /// What each kind of operation cost, the most expensive first; of a device that notes it itself, each kind of group too.
    pub fn rows(&self) -> Vec<OpProfile> {
        self.settle();
        let state = self.notes.state();
        let mut rows: Vec<_> = state.rows.values().cloned().collect();
        rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        rows
    }

    /// Spans that the device had no room to keep, and that are missing.
    pub fn lost(&self) -> u64 {
        self.notes.state().lost
    }

    /// Writes the trace in Chrome's format.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        self.settle();
        let state = self.notes.state();
        let events: Vec<_> = state.events.iter().map(Event::json).collect();
        let trace = serde_json::json!({ "traceEvents": events, "displayTimeUnit": "ms" });
        std::fs::write(path, trace.to_string()).map_err(|e| file_error(path, e.to_string()))
    }

    /// Takes what the device has noted, and waits for it. What cannot be had is missing.
    fn settle(&self) {
        if self.there {
            let (promise, taken) = pending(None);
            take(self.inner.clone(), self.notes.clone(), ASKS, Box::new(move || promise.answer(Ok(()))));
            let _ = taken.wait_timeout(REPORT);
        }
    }

    /// Counts what is handed over, and asks the device before it would run out of room.
    fn handed_over(&self, items: usize) {
        let due = {
            let mut state = self.notes.state();
            state.unasked += items;
            state.unasked >= ASK
        };
        if due {
            take(self.inner.clone(), self.notes.clone(), ASKS, Box::new(|| {}));
        }
    }

    /// The answer of a device that notes what it runs: given when what ran before it is taken over.
    fn after<T: Send + 'static>(&self, name: &'static str, answer: Pending<T>) -> Pending<T> {
        if !self.there {
            return answer;
        }
        let (promise, given) = pending(None);
        let (inner, notes, from) = (self.inner.clone(), self.notes.clone(), self.notes.start.elapsed());
        answer.on_answer(move |answer| {
            let took = notes.start.elapsed().saturating_sub(from);
            let (name, origin) = (name.to_string(), String::new());
            let event = Event { track: Track::Program, name, origin, from, took, bytes: 0, nodes: 0 };
            notes.event(&mut notes.state(), event);
            take(inner, notes, ASKS, Box::new(move || promise.answer(answer)));
        });
        given
    }

    fn note(&self, name: String, origin: String, from: Instant, bytes: u64) {
        let (took, from) = (from.elapsed(), from.duration_since(self.notes.start));
        let event = Event { track: Track::Program, name, origin, from, took, bytes, nodes: 1 };
        self.notes.count(&mut self.notes.state(), event);
    }

    /// Bytes of a node's operands and results; remembers the results' metas.
    fn account(&self, item: &Item) -> u64 {
        let mut state = self.notes.state();
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

/// Takes what a device has noted, answer after answer, then does the rest.
fn take(inner: Arc<dyn Driver>, notes: Arc<Notes>, most: usize, then: Box<dyn FnOnce() + Send>) {
    notes.state().unasked = 0;
    let asked = notes.start.elapsed();
    inner.clone().spans(usize::MAX).on_answer(move |answer| {
        let more = answer.is_ok_and(|spans| notes.taken(spans, asked));
        if more && most > 1 { take(inner, notes, most - 1, then) } else { then() }
    });
}

impl Notes {
    fn begin(path: Option<PathBuf>) -> Result<Notes, Error> {
        let trace = match &path {
            Some(path) => Some(Trace::create(path).map_err(|e| file_error(path, e.to_string()))?),
            None => None,
        };
        let state = State { trace, ..State::default() };
        Ok(Notes { path, start: Instant::now(), state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Keeps what a device has noted. True if it has more.
    fn taken(&self, spans: Spans, asked: Duration) -> bool {
        let Spans { spans, left, lost, now } = spans;
        let mut state = self.state();
        let clock = Clock::seen(state.clock, asked, self.start.elapsed(), now);
        state.clock = Some(clock);
        state.lost = state.lost.saturating_add(lost);
        for Span { name, nodes, bytes, from, took } in spans {
            let (name, origin, from) = (name.to_string(), String::new(), clock.here(from));
            self.count(&mut state, Event { track: Track::Device, name, origin, from, took, bytes, nodes });
        }
        left > 0
    }

    fn count(&self, state: &mut State, event: Event) {
        let row = state
            .rows
            .entry(event.name.clone())
            .or_insert_with(|| OpProfile { name: event.name.clone(), ..Default::default() });
        row.count += 1;
        row.bytes = row.bytes.saturating_add(event.bytes);
        row.seconds += event.took.as_secs_f64();
        self.event(state, event);
    }

    fn event(&self, state: &mut State, event: Event) {
        self.write(state, &event.json());
        state.events.push(event);
    }

    fn put(&self, event: &serde_json::Value) {
        self.write(&mut self.state(), event);
    }

    fn write(&self, state: &mut State, event: &serde_json::Value) {
        if let (Some(trace), Some(path)) = (&mut state.trace, &self.path) {
            trace.push(event, path);
        }
    }
}

impl Clock {
    /// What an answer tells of a device's clock, beside what was known: the quicker answer is the better one, unless
    /// they contradict each other, as they do when another server has taken over.
    fn seen(known: Option<Clock>, asked: Duration, answered: Duration, now: Duration) -> Clock {
        let nanos = |time: Duration| time.as_nanos() as i128;
        let within = (nanos(answered) - nanos(asked)) / 2;
        let clock = Clock { ahead: nanos(asked) + within - nanos(now), within };
        let holds = |known: &Clock| {
            known.within <= within && (known.ahead - clock.ahead).abs() <= known.within + within
        };
        known.filter(holds).unwrap_or(clock)
    }

    /// A time of the device's on the program's clock.
    fn here(&self, time: Duration) -> Duration {
        let nanos = (time.as_nanos() as i128 + self.ahead).clamp(0, u64::MAX.into());
        Duration::from_nanos(nanos as u64)
    }
}

impl Decorator for Profile {
    fn inner(&self) -> &dyn Driver {
        &*self.inner
    }

    fn info(&self) -> DeviceInfo {
        let info = self.inner.info();
        DeviceInfo { name: format!("profile<{}>", info.name), ..info }
    }

    fn submit(&self, batch: Batch) {
        if self.there {
            let items = batch.items.len();
            self.inner.submit(batch);
            return self.handed_over(items);
        }
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
        if self.there {
            self.inner.write(id, data, place);
            return self.handed_over(1);
        }
        let bytes = data.bytes.len() as u64;
        self.notes.state().metas.insert(id, data.meta);
        let from = Instant::now();
        self.inner.write(id, data, place);
        self.note("write".into(), String::new(), from, bytes);
    }

    fn read(&self, id: Id, known: Option<Meta>) -> Pending<Data> {
        let read = match known {
            Some(meta) => self.inner.read_as(id, meta),
            None => self.inner.read(id),
        };
        self.after("read", read)
    }

    fn fetch(&self, fetch: Fetch<'_>) -> bool {
        let (begun, id, meta) = (Instant::now(), fetch.id, fetch.meta);
        let fetched = self.inner.fetch(fetch);
        if fetched && self.there {
            self.handed_over(1);
        } else if fetched {
            self.notes.state().metas.insert(id, meta);
            self.note("fetch".into(), String::new(), begun, meta.bytes() as u64);
        }
        fetched
    }

    fn sync(&self) -> Pending<()> {
        self.after("sync", self.inner.sync())
    }

    fn flush(&self) -> Result<(), Error> {
        self.settle();
        let failed = self.notes.state().trace.as_ref().and_then(|trace| trace.failed.clone());
        match (failed, &self.notes.path) {
            (Some(message), Some(path)) => Err(file_error(path, message)),
            _ => self.inner.flush(),
        }
    }
}

fn file_error(path: &Path, message: String) -> Error {
    Error::File { path: path.display().to_string(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quickest_answer_sets_the_clock_until_another_device_answers() {
        let ms = Duration::from_millis;
        let first = Clock::seen(None, ms(100), ms(120), ms(10));
        assert_eq!(first, Clock { ahead: 100_000_000, within: 10_000_000 });
        assert_eq!(first.here(ms(5)), ms(105));
        // Slower, and within what both may be off.
        assert_eq!(Clock::seen(Some(first), ms(200), ms(260), ms(125)), first);
        let quick = Clock::seen(Some(first), ms(300), ms(302), ms(198));
        assert_eq!(quick, Clock { ahead: 103_000_000, within: 1_000_000 });
        // A clock that was begun anew.
        assert_eq!(Clock::seen(Some(quick), ms(400), ms(440), ms(3)).here(ms(0)), ms(417));
        assert_eq!(Clock { ahead: -5_000_000, within: 0 }.here(ms(1)), Duration::ZERO);
    }
}
