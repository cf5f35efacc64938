//! `Trace`: what a device has run and when, on its own clock. Bounded: what nobody takes in time is counted, not kept.

use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Something that a device ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// An operation's name, or a group's and those of the operations that ran as one.
    pub name: Arc<str>,
    /// How many operations.
    pub nodes: u32,
    /// Bytes that it read from outside itself and left behind.
    pub bytes: u64,
    /// When it began, since the trace was begun.
    pub from: Duration,
    /// How long it ran.
    pub took: Duration,
}

/// What was taken out of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spans {
    /// In the order in which they ended.
    pub spans: Vec<Span>,
    /// How many are left to be taken.
    pub left: u64,
    /// How many there was no room for since this was last asked.
    pub lost: u64,
    /// The device's clock when this was answered.
    pub now: Duration,
}

/// Spans that wait to be taken at most.
const MOST_SPANS: usize = 1 << 15;
/// Names that are kept at most, and bytes of one.
const MOST_NAMES: usize = 1 << 10;
const MOST_NAME: usize = 240;

/// Keeps what a device has run, while that is wanted.
#[derive(Default)]
pub struct Trace {
    on: AtomicBool,
    state: Mutex<Option<State>>,
}

struct State {
    start: Instant,
    spans: VecDeque<Span>,
    lost: u64,
    names: FxHashSet<Arc<str>>,
}

impl Trace {
    /// The most bytes that a trace takes.
    pub const BYTES: usize = 4 << 20;

    /// Begins a trace, or ends it and lets go of what it holds.
    pub fn set(&self, on: bool) {
        let mut state = self.state();
        *state = on.then(|| State {
            start: Instant::now(),
            spans: VecDeque::new(),
            lost: 0,
            names: FxHashSet::default(),
        });
        self.on.store(on, Ordering::Release);
    }

    /// When what runs now begins; `None` while no trace is wanted.
    pub fn begin(&self) -> Option<Instant> {
        self.on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// Keeps what has begun then and ends now.
    pub fn end(&self, begun: Option<Instant>, name: &str, nodes: u32, bytes: u64) {
        let Some(begun) = begun else { return };
        let took = begun.elapsed();
        let mut state = self.state();
        let Some(state) = &mut *state else { return };
        if state.spans.len() >= MOST_SPANS {
            state.lost += 1;
            return;
        }
        let name = state.name(name);
        // A trace may have been begun again meanwhile.
        let from = begun.saturating_duration_since(state.start);
        state.spans.push_back(Span { name, nodes, bytes, from, took });
    }

    /// Takes the oldest spans, at most so many.
    pub fn take(&self, most: usize) -> Spans {
        let mut state = self.state();
        let Some(state) = &mut *state else { return Spans::default() };
        let count = most.min(state.spans.len());
        Spans {
            spans: state.spans.drain(..count).collect(),
            left: state.spans.len() as u64,
            lost: std::mem::take(&mut state.lost),
            now: state.start.elapsed(),
        }
    }

    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl State {
    /// The name as it is kept: truncated if it is long, and the same for all when there are too many.
    fn name(&mut self, name: &str) -> Arc<str> {
        let end = (0..=MOST_NAME.min(name.len())).rev().find(|&end| name.is_char_boundary(end));
        let name = &name[..end.unwrap_or(0)];
        if let Some(known) = self.names.get(name) {
            return known.clone();
        }
        let name: Arc<str> = if self.names.len() < MOST_NAMES { name.into() } else { "others".into() };
        self.names.insert(name.clone());
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_bounded_and_says_what_it_lost() {
        let trace = Trace::default();
        assert_eq!(trace.begin(), None);
        trace.end(None, "add", 1, 8);
        assert_eq!(trace.take(9), Spans::default());
        trace.set(true);
        let long = "é".repeat(MOST_NAME);
        for i in 0..MOST_SPANS + 7 {
            let begun = trace.begin();
            assert!(begun.is_some());
            trace.end(begun, &format!("{i}{long}"), 2, 16);
        }
        let first = trace.take(10);
        assert_eq!((first.spans.len(), first.left, first.lost), (10, MOST_SPANS as u64 - 10, 7));
        assert!(first.spans.iter().all(|s| s.name.len() <= MOST_NAME && s.nodes == 2 && s.bytes == 16));
        assert!(first.spans.iter().all(|s| s.from + s.took <= first.now));
        let rest = trace.take(usize::MAX);
        assert_eq!((rest.spans.len(), rest.left, rest.lost), (MOST_SPANS - 10, 0, 0));
        assert_eq!(&*rest.spans[MOST_NAMES].name, "others");
        let names = MOST_NAMES * (MOST_NAME + 2 * size_of::<Arc<str>>() + 16);
        assert!(MOST_SPANS.next_power_of_two() * size_of::<Span>() + names <= Trace::BYTES);
        trace.set(false);
        assert_eq!((trace.begin(), trace.take(1)), (None, Spans::default()));
    }
}
