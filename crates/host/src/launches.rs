//! What was launched on an asynchronous device and may still fail. Faults come as places in its stream; here they become
//! errors of the values launched there, of what was computed from them meanwhile, and of reads under way.
//!
//! Deliberately absent: waiting, and the table of values, which whoever executes brings up to date.

use crate::Faults;
use kiln_device::{Error, Origin};
use kiln_ir::Id;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// Launches that are not known to be done, in order.
#[derive(Default)]
pub(crate) struct Launches {
    open: VecDeque<Launch>,
    /// Values that have failed, and that the table does not know of yet.
    poison: FxHashMap<Id, Arc<Error>>,
}

/// A node, a group, an upload or a read.
pub(crate) struct Launch {
    /// The last place of the stream that belongs to it.
    pub until: u64,
    pub op: String,
    pub origin: Option<Origin>,
    pub ins: SmallVec<[Id; 4]>,
    pub outs: SmallVec<[Id; 2]>,
    pub failed: Failed,
}

/// Why a launch came to nothing, once that is known; a read looks at it when its bytes are there.
pub(crate) type Failed = Arc<OnceLock<Arc<Error>>>;

impl Launches {
    /// Notes what has just been launched.
    pub fn push(&mut self, launch: Launch) {
        // An operand may have failed since it was looked up.
        if let Some(error) = launch.ins.iter().find_map(|id| self.poison.get(id)).cloned() {
            self.poison.extend(launch.outs.iter().map(|&id| (id, error.clone())));
            let _ = launch.failed.set(error);
        }
        self.open.push_back(launch);
    }

    /// Takes news of the stream in. Gives the failures that are nobody else's consequence.
    pub fn settle(&mut self, faults: Faults) -> Vec<Arc<Error>> {
        let mut news = Vec::new();
        for (at, cause) in faults.failed {
            let launch = self.open.iter().find(|launch| launch.until >= at);
            let (op, value, origin) = match launch {
                Some(launch) => (&launch.op[..], launch.outs.first().copied(), launch.origin),
                None => ("launch", None, None),
            };
            let error = failed(op, value.unwrap_or(Id::NONE), origin, cause);
            // What already failed with an operand is that operand's affair.
            if launch.is_none_or(|launch| launch.failed.set(error.clone()).is_ok()) {
                news.push(error);
            }
        }
        if !news.is_empty() {
            self.pass_on();
        }
        while self.open.front().is_some_and(|launch| launch.until <= faults.done) {
            self.open.pop_front();
        }
        news
    }

    /// Whatever was computed from what failed fails for the same reason.
    fn pass_on(&mut self) {
        for launch in &self.open {
            if launch.failed.get().is_none()
                && let Some(error) = launch.ins.iter().find_map(|id| self.poison.get(id))
            {
                let _ = launch.failed.set(error.clone());
            }
            if let Some(error) = launch.failed.get() {
                self.poison.extend(launch.outs.iter().map(|&id| (id, error.clone())));
            }
        }
    }

    /// Whether everything is known to be done.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Why a value has failed, if the table does not know of it yet.
    pub fn poison(&self, id: Id) -> Option<Arc<Error>> {
        self.poison.get(&id).cloned()
    }

    /// What the table is to be told.
    pub fn take_poison(&mut self) -> FxHashMap<Id, Arc<Error>> {
        std::mem::take(&mut self.poison)
    }
}

/// The failure of an operation.
pub(crate) fn failed(op: &str, value: Id, origin: Option<Origin>, cause: Error) -> Arc<Error> {
    Arc::new(Error::Failed { op: op.to_string(), value, origin, cause: Arc::new(cause) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(until: u64, ins: &[u64], outs: &[u64]) -> Launch {
        let ids = |ids: &[u64]| ids.iter().map(|&id| Id(id)).collect::<Vec<_>>();
        let (ins, outs) = (ids(ins).into(), ids(outs).into());
        Launch { until, op: format!("op{until}"), origin: None, ins, outs, failed: Failed::default() }
    }

    fn fault(at: u64, done: u64) -> Faults {
        Faults { done, failed: vec![(at, Error::Stopped)] }
    }

    #[test]
    fn what_was_computed_from_a_failed_value_fails_with_it_and_nothing_else() {
        let mut launches = Launches::default();
        launches.push(launch(1, &[], &[1]));
        launches.push(launch(3, &[1], &[2]));
        // A view launches nothing of its own.
        launches.push(launch(3, &[2], &[3]));
        launches.push(launch(4, &[1], &[4]));
        let read = launch(5, &[3], &[]);
        let answer = read.failed.clone();
        launches.push(read);
        let news = launches.settle(fault(2, 3));
        let want = failed("op3", Id(2), None, Error::Stopped);
        assert_eq!(news, std::slice::from_ref(&want));
        assert_eq!(answer.get(), Some(&want));
        // Launched before the table knew, from an operand that had failed.
        launches.push(launch(6, &[3], &[5]));
        let mut poison: Vec<Id> = launches.take_poison().into_keys().collect();
        poison.sort_unstable();
        assert_eq!(poison, [Id(2), Id(3), Id(5)]);
        assert_eq!(launches.open.len(), 3, "what is done is forgotten");
        // A fault of what failed already is no news, one of an unknown launch is.
        assert_eq!(launches.settle(fault(6, 6)).len(), 0);
        assert_eq!(launches.settle(fault(7, 7)), [failed("launch", Id::NONE, None, Error::Stopped)]);
        assert!(launches.open.is_empty());
    }
}
