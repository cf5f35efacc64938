//! Lanes: where nodes wait between being recorded and being submitted.
//!
//! Each (thread, device) has one lane, and its content depends on that thread alone. A lane is sealed, that is
//! submitted in one batch, when somebody reads or syncs, at a mark, at a cap, when another thread needs one of its
//! values, and when its thread ends. A value that another lane uses is held by that lane until it is submitted; uses in
//! the value's own lane need no hold, because the `Free` comes later in the same lane.
//!
//! Lock order: a lane, then the device. Nothing that may drop a value runs under a lane's lock.

use crate::Device;
use crate::device::flag;
use crate::value::{Value, fresh};
use kiln_device::{Batch, Origin, Place, Urgency};
use kiln_ir::{Id, Item, Meta, Node, Op};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

/// Nodes that a lane holds at most.
const MOST_NODES: usize = 2048;
/// Bytes of results that a lane holds at most before they are computed.
const MOST_BYTES: usize = 1 << 29;

/// The place of what was defined without being recorded: before the first item.
const BEFORE: u64 = 0;

pub(crate) struct Lane {
    pub device: Device,
    /// Everything before this place has been submitted.
    submitted: AtomicU64,
    /// Its thread has ended.
    closed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    items: Vec<Item>,
    origins: Vec<Origin>,
    /// Values of other lanes that the waiting items use.
    held: Vec<Arc<Value>>,
    /// Place of the next item.
    next: u64,
    bytes: usize,
    marked: bool,
    place: Place,
}

thread_local! {
    static LANES: RefCell<Lanes> = const { RefCell::new(Lanes(Vec::new())) };
}

/// A thread's lanes; sealed when the thread ends.
struct Lanes(Vec<Arc<Lane>>);

impl Drop for Lanes {
    fn drop(&mut self) {
        for lane in &self.0 {
            lane.closed.store(true, Ordering::Release);
            lane.seal(Urgency::Background);
        }
    }
}

impl Lane {
    fn new(device: &Device) -> Lane {
        let state = State { next: BEFORE + 1, ..State::default() };
        let (submitted, closed) = (AtomicU64::new(state.next), AtomicBool::new(false));
        Lane { device: device.clone(), submitted, closed, state: Mutex::new(state) }
    }

    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Submits everything that waits.
    fn seal(&self, urgency: Urgency) {
        let state = self.lock();
        let end = state.next;
        self.seal_to(state, end, urgency);
        if !self.device.orphans().is_empty() {
            self.send(Vec::new(), vec![Origin::here()], Place::Reuse, urgency);
        }
    }

    /// Submits everything before place `end`.
    fn seal_to(&self, mut state: MutexGuard<'_, State>, end: u64, urgency: Urgency) {
        let held = self.cut(&mut state, end, urgency);
        drop(state);
        drop(held);
    }

    /// Takes everything before place `end` out of the lane and submits it. Gives back what was held for it, to be
    /// dropped after the lock.
    fn cut(&self, state: &mut State, end: u64, urgency: Urgency) -> Vec<Arc<Value>> {
        let from = self.submitted();
        if end <= from || state.items.is_empty() {
            return Vec::new();
        }
        let count = (end - from) as usize;
        state.bytes = 0;
        let (items, origins) = if count >= state.items.len() {
            // The next window is most often as long as this one.
            let room = state.items.len();
            (
                std::mem::replace(&mut state.items, Vec::with_capacity(room)),
                std::mem::replace(&mut state.origins, Vec::with_capacity(room)),
            )
        } else {
            (state.items.drain(..count).collect(), state.origins.drain(..count).collect())
        };
        self.send(items, origins, state.place, urgency);
        self.submitted.store(end, Ordering::Release);
        // Items that still wait may use held values too.
        if state.items.is_empty() { std::mem::take(&mut state.held) } else { Vec::new() }
    }

    fn send(&self, mut items: Vec<Item>, mut origins: Vec<Origin>, place: Place, urgency: Urgency) {
        let mut orphans = self.device.orphans();
        if let Some(last) = origins.last().copied() {
            items.extend(orphans.drain(..).map(Item::Free));
            origins.resize(items.len(), last);
        }
        drop(orphans);
        if *PRINT {
            print(&items, &origins);
        }
        self.device.driver().submit(Batch { items, origins, place, urgency });
    }

    fn push(&self, state: &mut State, item: Item, origin: Origin) -> u64 {
        state.items.push(item);
        state.origins.push(origin);
        state.next += 1;
        state.next - 1
    }
}

/// Records `op` on `ins` in this thread's lane and gives its results.
pub(crate) fn record(
    device: &Device,
    op: Op,
    ins: &[&Arc<Value>],
    outs: &[Meta],
    origin: Origin,
) -> SmallVec<[Arc<Value>; 2]> {
    with_lane(device, |lane| {
        // Sealing other lanes happens before this lane is locked: two lanes are never locked at once.
        for value in ins {
            if !Arc::ptr_eq(&value.lane, lane) && value.is_pending() {
                value.lane.seal_to(value.lane.lock(), value.defined + 1, Urgency::Background);
            }
        }
        let mut released = Vec::new();
        let mut state = lane.lock();
        if state.marked {
            state.marked = false;
            let end = state.next;
            released = lane.cut(&mut state, end, Urgency::Background);
        }
        let at = state.next;
        for value in ins {
            if Arc::ptr_eq(&value.lane, lane) {
                value.last.store(at, Ordering::Relaxed);
            } else {
                state.held.push((*value).clone());
            }
        }
        let values: SmallVec<[Arc<Value>; 2]> = outs
            .iter()
            .map(|&meta| {
                state.bytes = state.bytes.saturating_add(meta.bytes());
                Arc::new(Value {
                    id: fresh(),
                    meta,
                    lane: lane.clone(),
                    last: AtomicU64::new(at),
                    defined: at,
                })
            })
            .collect();
        let node =
            Node { op, ins: ins.iter().map(|v| v.id).collect(), outs: values.iter().map(|v| v.id).collect() };
        lane.push(&mut state, Item::Run(node), origin);
        let eager = lane.device.is_eager();
        if eager || state.items.len() >= MOST_NODES || state.bytes > MOST_BYTES {
            let end = state.next;
            let urgency = if eager { Urgency::Now } else { Urgency::Background };
            released.extend(lane.cut(&mut state, end, urgency));
        }
        drop(state);
        drop(released);
        values
    })
}

/// Defines a value from host data.
pub(crate) fn write(device: &Device, data: kiln_device::Data) -> Arc<Value> {
    with_lane(device, |lane| {
        let place = lane.lock().place;
        let (id, meta) = (fresh(), data.meta);
        lane.device.driver().write(id, data, place);
        Arc::new(Value { id, meta, lane: lane.clone(), last: AtomicU64::new(BEFORE), defined: BEFORE })
    })
}

/// Defines a value from one on another device, if the two have a way of their own.
pub(crate) fn fetch(device: &Device, from: &Arc<Value>) -> Option<Arc<Value>> {
    if !device.is_remote() || !from.device().is_remote() {
        return None;
    }
    seal_for(from);
    with_lane(device, |lane| {
        let place = lane.lock().place;
        let (id, meta, source) = (fresh(), from.meta, from.device().driver());
        let fetched = lane.device.driver().fetch(id, meta, place, &**source, from.id, from.clone());
        fetched.then(|| {
            Arc::new(Value { id, meta, lane: lane.clone(), last: AtomicU64::new(BEFORE), defined: BEFORE })
        })
    })
}

/// Ends a value whose last use or definition in its own lane is at place `last`.
pub(crate) fn free(id: Id, lane: &Arc<Lane>, last: u64) {
    let own = LANES.try_with(|lanes| {
        let lanes = lanes.try_borrow().ok()?;
        lanes.0.iter().find(|l| l.device == lane.device).cloned()
    });
    let own = own.ok().flatten();
    // While its own lane still uses it, the free must follow there; afterwards any lane will do.
    let target = if last >= lane.submitted() { Some(lane) } else { own.as_ref() };
    if let Some(target) = target {
        let mut state = target.lock();
        if !target.closed.load(Ordering::Acquire) {
            let origin = state.origins.last().copied().unwrap_or_else(Origin::here);
            target.push(&mut state, Item::Free(id), origin);
            return;
        }
        let end = state.next;
        target.seal_to(state, end, Urgency::Background);
    }
    lane.device.orphans().push(id);
}

/// Makes sure that a value's definition is submitted, and everything this thread recorded.
pub(crate) fn seal_for(value: &Arc<Value>) {
    seal(value.device());
    if value.is_pending() {
        value.lane.seal_to(value.lane.lock(), value.defined + 1, Urgency::Awaited);
    }
}

/// Submits what this thread recorded, for somebody who is about to wait.
pub(crate) fn seal(device: &Device) {
    with_lane(device, |lane| lane.seal(Urgency::Awaited));
}

/// Submits what this thread recorded, to be executed meanwhile.
pub(crate) fn seal_background(device: &Device) {
    with_lane(device, |lane| lane.seal(Urgency::Background));
}

/// The next node starts a new batch.
pub(crate) fn mark(device: &Device) {
    with_lane(device, |lane| lane.lock().marked = true);
}

/// Sets where values live until the guard is dropped.
pub(crate) fn place(device: &Device, place: Place) -> PlaceScope {
    with_lane(device, |lane| {
        lane.seal(Urgency::Background);
        let outer = std::mem::replace(&mut lane.lock().place, place);
        PlaceScope { lane: lane.clone(), outer }
    })
}

pub(crate) struct PlaceScope {
    lane: Arc<Lane>,
    outer: Place,
}

impl Drop for PlaceScope {
    fn drop(&mut self) {
        self.lane.seal(Urgency::Background);
        self.lane.lock().place = self.outer;
    }
}

fn with_lane<T>(device: &Device, f: impl FnOnce(&Arc<Lane>) -> T) -> T {
    let lane = LANES.try_with(|lanes| {
        let mut lanes = lanes.borrow_mut();
        match lanes.0.iter().find(|l| l.device == *device) {
            Some(lane) => lane.clone(),
            None => {
                let lane = Arc::new(Lane::new(device));
                lanes.0.push(lane.clone());
                lane
            }
        }
    });
    match lane {
        Ok(lane) => f(&lane),
        // The thread is ending: what it still records goes straight to the device.
        Err(_) => {
            let lane = Arc::new(Lane::new(device));
            let out = f(&lane);
            lane.closed.store(true, Ordering::Release);
            lane.seal(Urgency::Background);
            out
        }
    }
}

static PRINT: LazyLock<bool> = LazyLock::new(|| flag("KILN_GRAPH"));

fn print(items: &[Item], origins: &[Origin]) {
    use std::fmt::Write;
    let mut text = String::new();
    for (item, origin) in items.iter().zip(origins) {
        let _ = match item {
            Item::Run(_) => writeln!(text, "{item}  # {origin}"),
            Item::Free(_) => writeln!(text, "{item}"),
        };
    }
    eprintln!("{text}");
}
