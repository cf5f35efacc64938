//! Lanes: where nodes wait between being recorded and being submitted.
//!
//! Each (thread, device) has one lane, and its content depends on that thread alone. A lane is sealed, that is
//! submitted in one batch, when somebody reads or syncs, at a mark, at a cap, when another thread needs one of its
//! values, when its thread ends, and when it has waited for long and its device has nothing to do ([`idle`]). A value
//! that another lane uses is held by that lane until it is submitted; uses in the value's own lane need no hold, because
//! the `Free` comes later in the same lane.
//!
//! Lock order: a lane, then what has ended in it, then the device. Nothing that may drop a value runs under a lane's
//! lock, and a drop takes no lane's lock: somebody may be submitting under it, which takes its time.

use crate::value::{Value, draw};
use crate::{Device, Tensor, idle, period};
use kiln_device::{Batch, Fetch, Origin, Place, Urgency};
use kiln_ir::{Id, Item, Meta, Node, Op};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

/// Items that a lane holds at most.
const MOST_ITEMS: usize = 4096;
/// Bytes by which what waits in a lane may make the device's memory grow before it is computed: results that it defines,
/// less what it frees. An optimiser's step that replaces its parameters is not split, however large they are.
const MOST_BYTES: isize = 1 << 29;

/// The place of what was defined without being recorded: before the first item.
pub(crate) const BEFORE: u64 = 0;

/// A lane lives as long as the process: values point at it. When its thread ends, another takes it over.
pub(crate) struct Lane {
    pub device: Device,
    /// Everything before this place has been submitted.
    submitted: AtomicU64,
    /// Its thread has ended.
    closed: AtomicBool,
    state: Mutex<State>,
    /// Values that other threads dropped and whose last use is here, each with its bytes.
    ended: Mutex<Vec<(Id, usize)>>,
    /// Whether there are any, so that recording need not look.
    has_ended: AtomicBool,
}

#[derive(Default)]
struct State {
    items: Vec<Item>,
    origins: Vec<Origin>,
    /// Values of other lanes that the waiting items use, each with the place of the item.
    held: Vec<(u64, Arc<Value>)>,
    /// Place of the next item.
    next: u64,
    /// The names that it gives next, and where they end.
    names: (u64, u64),
    /// Bytes by which the waiting items make the device's memory grow.
    bytes: isize,
    /// How many of the waiting items are nodes.
    nodes: usize,
    marked: bool,
    /// [`idle`] looks at it from time to time.
    watched: bool,
    place: Place,
}

thread_local! {
    static LANES: Lanes = const { Lanes { all: RefCell::new(Vec::new()), freed: RefCell::new(Vec::new()) } };
    /// The lane used last; `None` once the thread's lanes are closed.
    static LAST: Cell<Option<&'static Lane>> = const { Cell::new(None) };
}

/// Lanes whose threads have ended.
static CLOSED: Mutex<Vec<&'static Lane>> = Mutex::new(Vec::new());

/// Which lane gives which names, of the last that were drawn. Its lock is the last: nothing else is locked under it.
static DRAWN: Mutex<VecDeque<((u64, u64), &'static Lane)>> = Mutex::new(VecDeque::new());

/// Ranges of names whose lanes are remembered.
const MOST_DRAWN: usize = 1024;

/// The lane in which a value was recorded, if it is remembered. Takes no lane's lock.
pub(crate) fn owner(id: Id) -> Option<&'static Lane> {
    let drawn = DRAWN.lock().unwrap_or_else(|e| e.into_inner());
    drawn.iter().rev().find(|((from, to), _)| (*from..*to).contains(&id.0)).map(|(_, lane)| *lane)
}

/// A thread's lanes; sealed when the thread ends.
struct Lanes {
    all: RefCell<Vec<&'static Lane>>,
    /// Values that this thread dropped since it last locked the lane it used last; their frees go there. Each
    /// with its bytes.
    freed: RefCell<Vec<(Id, usize)>>,
}

impl Drop for Lanes {
    fn drop(&mut self) {
        if let Some(lane) = LAST.take() {
            lane.lock().free(self.freed.get_mut());
        }
        self.all.get_mut().iter().for_each(|lane| lane.close());
    }
}

impl Lane {
    /// A lane for `device` that no thread has.
    fn open(device: &Device) -> &'static Lane {
        let mut closed = CLOSED.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(at) = closed.iter().position(|lane| lane.device == *device) {
            let lane = closed.swap_remove(at);
            lane.closed.store(false, Ordering::Release);
            return lane;
        }
        let state = State { next: BEFORE + 1, ..State::default() };
        Box::leak(Box::new(Lane {
            device: device.clone(),
            submitted: AtomicU64::new(state.next),
            closed: AtomicBool::new(false),
            state: Mutex::new(state),
            ended: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }))
    }

    fn close(&'static self) {
        self.closed.store(true, Ordering::Release);
        self.seal(Urgency::Background);
        // What ended while it was sealed: all uses are submitted now, so any lane will do. What ends from now on sees
        // that too.
        let ended = std::mem::take(&mut *self.ended());
        self.device.orphans().extend(ended.into_iter().map(|(id, _)| id));
        CLOSED.lock().unwrap_or_else(|e| e.into_inner()).push(self);
    }

    /// Whether its thread has ended.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn ended(&self) -> MutexGuard<'_, Vec<(Id, usize)>> {
        self.ended.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Locks it, with what was freed meanwhile in it: by this thread, if it is the lane used last, and by others.
    fn lock_own(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        if LAST.get().is_some_and(|last| std::ptr::eq(last, self)) {
            let _ = LANES.try_with(|lanes| state.free(&mut lanes.freed.borrow_mut()));
        }
        if self.has_ended.load(Ordering::Acquire) {
            let mut ended = self.ended();
            self.has_ended.store(false, Ordering::Relaxed);
            state.free(&mut ended);
        }
        state
    }

    /// Submits everything that waits.
    fn seal(&self, urgency: Urgency) {
        let state = self.lock_own();
        let end = state.next;
        self.seal_to(state, end, urgency);
        if !self.device.orphans().is_empty() {
            self.send(Vec::new(), vec![Origin::here()], Place::Reuse, urgency);
        }
    }

    /// Submits everything before place `end`.
    fn seal_to(&self, mut state: MutexGuard<'_, State>, end: u64, urgency: Urgency) {
        let held = self.submit_to(&mut state, end, urgency);
        drop(state);
        drop(held);
    }

    /// Takes everything before place `end` out of the lane and submits it. Gives back what was held for it, to be
    /// dropped after the lock.
    fn submit_to(&self, state: &mut State, end: u64, urgency: Urgency) -> Vec<(u64, Arc<Value>)> {
        let from = self.submitted();
        if end <= from || state.items.is_empty() {
            return Vec::new();
        }
        let count = (end - from) as usize;
        let (items, origins) = if count >= state.items.len() {
            let spare = Batch::recycled();
            (state.nodes, state.bytes, state.marked) = (0, 0, false);
            (
                std::mem::replace(&mut state.items, spare.items),
                std::mem::replace(&mut state.origins, spare.origins),
            )
        } else {
            // About what those that stay make memory grow by.
            state.bytes = state.bytes / state.items.len() as isize * (state.items.len() - count) as isize;
            let first: Vec<Item> = state.items.drain(..count).collect();
            state.nodes -= first.iter().filter(|item| matches!(item, Item::Run(_))).count();
            (first, state.origins.drain(..count).collect())
        };
        self.send(items, origins, state.place, urgency);
        self.submitted.store(end, Ordering::Release);
        if state.items.is_empty() {
            return std::mem::take(&mut state.held);
        }
        let used = state.held.partition_point(|(at, _)| *at < end);
        state.held.drain(..used).collect()
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
}

impl State {
    fn push(&mut self, item: Item, origin: Origin) {
        self.items.push(item);
        self.origins.push(origin);
        self.next += 1;
    }

    /// Puts the frees of what `ended` behind what is there, in the order in which the values were named: maps of tensors are
    /// dropped in any order, and a recurring step must look the same.
    fn free(&mut self, ended: &mut Vec<(Id, usize)>) {
        match ended.len() {
            0 => return,
            1 => {}
            _ => ended.sort_unstable(),
        }
        let origin = self.origins.last().copied().unwrap_or_else(Origin::here);
        for (id, bytes) in ended.drain(..) {
            self.end(id, bytes, origin);
        }
    }

    fn end(&mut self, id: Id, bytes: usize, origin: Origin) {
        self.bytes = self.bytes.saturating_sub_unsigned(bytes);
        self.push(Item::Free(id), origin);
    }

    /// A name that no other value of this process has.
    fn fresh(&mut self, lane: &'static Lane) -> Id {
        if self.names.0 == self.names.1 {
            self.names = draw();
            let mut drawn = DRAWN.lock().unwrap_or_else(|e| e.into_inner());
            if drawn.len() == MOST_DRAWN {
                drawn.pop_front();
            }
            drawn.push_back((self.names, lane));
        }
        self.names.0 += 1;
        Id(self.names.0 - 1)
    }

    /// A value that the next item defines.
    fn define(&mut self, lane: &'static Lane, meta: Meta) -> Arc<Value> {
        let bytes = meta.bytes();
        self.bytes = self.bytes.saturating_add_unsigned(bytes);
        let (id, at) = (self.fresh(lane), self.next);
        Arc::new(Value { id, meta, bytes, lane, last: AtomicU64::new(at), defined: at })
    }
}

/// Records `op` on `ins` in this thread's lane and gives its results.
pub(crate) fn record(
    device: &Device,
    op: Op,
    ins: &[&Tensor],
    outs: &[Meta],
    origin: Origin,
) -> SmallVec<[Arc<Value>; 2]> {
    with_lane(device, |lane| {
        let mut state = lane.begin(ins);
        let values: SmallVec<[Arc<Value>; 2]> = outs.iter().map(|&meta| state.define(lane, meta)).collect();
        let outs = values.iter().map(|v| v.id).collect();
        let node = Node { op, ins: ins.iter().map(|t| t.value.id).collect(), outs };
        state.nodes += 1;
        state.push(Item::Run(node), origin);
        lane.end(state);
        values
    })
}

/// Like [`record`], for an operation with one result.
pub(crate) fn record_one(device: &Device, op: Op, ins: &[&Tensor], out: Meta, origin: Origin) -> Arc<Value> {
    with_lane(device, |lane| {
        let mut state = lane.begin(ins);
        let value = state.define(lane, out);
        let mut names = SmallVec::new();
        ins.iter().for_each(|t| names.push(t.value.id));
        let mut outs = SmallVec::new();
        outs.push(value.id);
        state.nodes += 1;
        state.push(Item::Run(Node { op, ins: names, outs }), origin);
        lane.end(state);
        value
    })
}

impl Lane {
    /// Locks the lane for a node with these operands.
    fn begin(&'static self, ins: &[&Tensor]) -> MutexGuard<'static, State> {
        // Sealing other lanes happens before this lane is locked: two lanes are never locked at once.
        for value in ins.iter().map(|t| &t.value) {
            if !std::ptr::eq(value.lane, self) && value.is_pending() {
                value.lane.seal_to(value.lane.lock(), value.defined + 1, Urgency::Background);
            }
        }
        let mut state = self.lock_own();
        if state.marked {
            state = self.next_step(state);
        }
        let at = state.next;
        for value in ins.iter().map(|t| &t.value) {
            if std::ptr::eq(value.lane, self) {
                value.last.store(at, Ordering::Relaxed);
            } else {
                state.held.push((at, value.clone()));
            }
        }
        state
    }

    /// Submits what was there before a mark.
    #[cold]
    fn next_step(&'static self, mut state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
        state.marked = false;
        // Frees alone can wait for the next step.
        if state.nodes == 0 {
            return state;
        }
        let end = state.next;
        self.seal_to(state, end, Urgency::Background);
        self.lock_own()
    }

    /// Lets go of the lane after a node, and seals it where it is full. What came before a mark has gone by then; of
    /// rounds without marks whole ones go, so that the next time it is full it looks the same.
    fn end(&'static self, mut state: MutexGuard<'_, State>) {
        let end = state.next;
        if self.device.is_eager() {
            self.seal_to(state, end, Urgency::Now);
        } else if state.items.len() >= MOST_ITEMS || state.bytes > MOST_BYTES {
            let begun = period::begun(&state.items) as u64;
            self.seal_to(state, end - begun, Urgency::Background);
        } else if !state.watched && self.device.is_asynchronous() {
            state.watched = true;
            idle::watch(self, self.submitted());
        }
    }

    /// Seals the lane if its device has nothing to do and nothing was sealed since it stood at `seen`. Gives where it
    /// stands, or `None` if nothing waits.
    pub fn seal_if_idle(&'static self, seen: u64) -> Option<u64> {
        // Whoever has the lock records or submits: the lane is not old.
        let Ok(mut state) = self.state.try_lock() else { return Some(seen) };
        if state.nodes == 0 {
            state.watched = false;
            return None;
        }
        if self.submitted() == seen && self.device.driver().is_idle() {
            let end = state.next;
            self.seal_to(state, end, Urgency::Background);
        }
        Some(self.submitted())
    }
}

/// Defines a value from host data.
pub(crate) fn write(device: &Device, data: kiln_device::Data) -> Arc<Value> {
    with_lane(device, |lane| {
        let (place, id) = {
            let mut state = lane.lock();
            (state.place, state.fresh(lane))
        };
        let meta = data.meta;
        lane.device.driver().write(id, data, place);
        Arc::new(Value::before(id, meta, lane))
    })
}

/// Defines a value from one on another device, if the two have a way of their own.
pub(crate) fn fetch(device: &Device, from: &Arc<Value>) -> Option<Arc<Value>> {
    if !device.is_peer_of(from.device()) {
        return None;
    }
    seal_for(from);
    with_lane(device, |lane| {
        let (place, id) = {
            let mut state = lane.lock();
            (state.place, state.fresh(lane))
        };
        let (meta, source) = (from.meta, &**from.device().driver());
        let fetch = Fetch { id, meta, place, source, from: from.id, keep: from.clone() };
        let fetched = lane.device.driver().fetch(fetch);
        fetched.then(|| Arc::new(Value::before(id, meta, lane)))
    })
}

/// Ends a value of so many bytes whose last use or definition in its own lane is at place `last`.
pub(crate) fn free(id: Id, lane: &'static Lane, last: u64, bytes: usize) {
    // While its own lane still uses it, the free must follow there; afterwards any lane will do.
    let target = if last >= lane.submitted() { Some(lane) } else { own_lane(&lane.device) };
    let Some(target) = target else { return lane.device.orphans().push(id) };
    if LAST.get().is_some_and(|last| std::ptr::eq(last, target)) {
        let waits = LANES.try_with(|lanes| lanes.freed.borrow_mut().push((id, bytes)));
        if waits.is_err() {
            lane.device.orphans().push(id);
        }
        return;
    }
    let mut ended = target.ended();
    // Its thread has ended, and has submitted everything.
    if target.closed.load(Ordering::Acquire) && last < lane.submitted() {
        drop(ended);
        return lane.device.orphans().push(id);
    }
    ended.push((id, bytes));
    target.has_ended.store(true, Ordering::Release);
}

/// `device` as this thread's lane has it, for as long as the process lives.
pub(crate) fn own(device: &Device) -> &'static Device {
    with_lane(device, |lane| &lane.device)
}

/// This thread's lane for `device`, if it has one.
pub(crate) fn own_lane(device: &Device) -> Option<&'static Lane> {
    if let Some(lane) = LAST.get().filter(|lane| lane.device == *device) {
        return Some(lane);
    }
    let find =
        |lanes: &Lanes| lanes.all.try_borrow().ok()?.iter().copied().find(|lane| lane.device == *device);
    LANES.try_with(find).ok().flatten()
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
    with_lane(device, |lane| lane.lock_own().marked = true);
}

/// Sets where values live until the guard is dropped.
pub(crate) fn place(device: &Device, place: Place) -> PlaceScope {
    with_lane(device, |lane| {
        lane.seal(Urgency::Background);
        let outer = std::mem::replace(&mut lane.lock().place, place);
        PlaceScope { lane, outer, thread: PhantomData }
    })
}

/// Sets where values live back when it is dropped.
#[must_use = "the scope ends when the guard is dropped"]
pub struct PlaceScope {
    lane: &'static Lane,
    outer: Place,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for PlaceScope {
    fn drop(&mut self) {
        self.lane.seal(Urgency::Background);
        self.lane.lock().place = self.outer;
    }
}

fn with_lane<T>(device: &Device, f: impl FnOnce(&'static Lane) -> T) -> T {
    match LAST.get() {
        // A value's device is its lane's: then there is no need to look at it.
        Some(lane) if std::ptr::eq(&lane.device, device) || lane.device == *device => f(lane),
        _ => with_other_lane(device, f),
    }
}

#[cold]
fn with_other_lane<T>(device: &Device, f: impl FnOnce(&'static Lane) -> T) -> T {
    let lane = LANES.try_with(|lanes| {
        // What was freed belongs to the lane used so far.
        if let Some(last) = LAST.take() {
            last.lock().free(&mut lanes.freed.borrow_mut());
        }
        let lanes = &mut lanes.all.borrow_mut();
        lanes.iter().copied().find(|lane| lane.device == *device).unwrap_or_else(|| {
            lanes.push(Lane::open(device));
            lanes[lanes.len() - 1]
        })
    });
    match lane {
        Ok(lane) => {
            LAST.set(Some(lane));
            f(lane)
        }
        // The thread is ending: what it still records goes straight to the device.
        Err(_) => {
            let lane = Lane::open(device);
            let out = f(lane);
            lane.close();
            out
        }
    }
}

static PRINT: LazyLock<bool> = LazyLock::new(|| kiln_env::GRAPH.is_on());

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
