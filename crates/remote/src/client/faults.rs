//! Whose line it was: where in the user's program the operations stand that have failed.
//!
//! A value that failed may be read on another device, where it was moved. That device asks the one it came from.

use kiln_device::{Error, Origin};
use kiln_ir::Id;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Failures that are remembered.
pub const MOST: usize = 256;

/// The failures of one device. Its lock is held for a look only: no other is taken under it.
#[derive(Default)]
pub struct Faults {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    told: VecDeque<(Id, Origin)>,
    /// Where values came from.
    sources: Vec<Weak<Faults>>,
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether this failure has been told.
    pub fn knows(&self, value: Id) -> bool {
        self.lock().told.iter().any(|(id, _)| *id == value)
    }

    /// Remembers who recorded what would have given this value.
    pub fn note(&self, value: Id, origin: Origin) {
        let told = &mut self.lock().told;
        if told.len() == MOST {
            told.pop_front();
        }
        told.push_back((value, origin));
    }

    /// Values of another device come here.
    pub fn follow(&self, source: &Arc<Faults>) {
        let sources = &mut self.lock().sources;
        if !sources.iter().any(|s| std::ptr::eq(s.as_ptr(), Arc::as_ptr(source))) {
            sources.retain(|s| s.strong_count() > 0);
            sources.push(Arc::downgrade(source));
        }
    }

    /// The error with the user's line, if it is known here or where values came from.
    pub fn located(self: &Arc<Faults>, error: Error) -> Error {
        let Error::Failed { op, value, origin: None, cause } = error else { return error };
        let cause = match &*cause {
            // What a step was refused for has a line of its own.
            Error::StepRefused { at, path, origin, cause: Some(failed) } => {
                let failed = Arc::new(self.located((**failed).clone()));
                Arc::new(Error::StepRefused {
                    at: *at,
                    path: path.clone(),
                    origin: *origin,
                    cause: Some(failed),
                })
            }
            _ => cause,
        };
        let mut asked = vec![self.clone()];
        let mut origin = None;
        for next in 0.. {
            let Some(faults) = asked.get(next).cloned() else { break };
            let state = faults.lock();
            origin = state.told.iter().rev().find(|(id, _)| *id == value).map(|(_, o)| *o);
            if origin.is_some() {
                break;
            }
            let new = |s: &Arc<Faults>| !asked.iter().any(|a| Arc::ptr_eq(a, s));
            let sources: Vec<_> = state.sources.iter().filter_map(Weak::upgrade).filter(new).collect();
            asked.extend(sources);
        }
        Error::Failed { op, value, origin, cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_through_devices_that_exchange_values() {
        let [a, b, c] = [0; 3].map(|_| Arc::new(Faults::default()));
        // A circle, and the line at its far end.
        b.follow(&a);
        a.follow(&b);
        c.follow(&b);
        let failed = |value| {
            let cause = Arc::new(Error::Stopped);
            Error::Failed { op: "take".into(), value: Id(value), origin: None, cause }
        };
        a.note(Id(7), Origin::here());
        for faults in [&a, &b, &c] {
            assert!(matches!(faults.located(failed(7)), Error::Failed { origin: Some(_), .. }));
            assert!(matches!(faults.located(failed(8)), Error::Failed { origin: None, .. }));
        }
        drop(a);
        assert!(matches!(c.located(failed(7)), Error::Failed { origin: None, .. }));
    }
}
