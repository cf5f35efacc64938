//! A line: a pass, but for what is known only when it is bound to values, and where it reads and writes.

use super::kernel::Call;
use super::looped::Loop;
use super::pass::{Input, Output, Pass, Step};
use kiln_ir::{DType, ReduceKind};
use smallvec::SmallVec;
use std::sync::{Arc, Mutex, PoisonError};

/// A pass, but for what is known only when it is bound.
pub(super) struct Line {
    pub inputs: Vec<(Place, DType)>,
    pub outputs: Vec<Target>,
    steps: Vec<Step>,
    stores: Vec<Output>,
    loops: Mutex<Vec<(u128, u128, Arc<Loop>)>>,
}

/// Where a line reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Load(u32),
    Number(u32),
    Narrow(u32),
    Row(u32),
    Stack(u32),
}

/// Where a line writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    Result(u32),
    Narrow(u32),
    Row(u32),
    Stack(u32),
    /// The accumulators of a reduction of each row.
    Fold(ReduceKind, DType, u32),
}

impl Line {
    /// The loop for these inputs of a single element and these outputs past the cache, a bit each.
    pub fn looped(&self, splats: u128, streams: u128) -> Arc<Loop> {
        let mut loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., found)) = loops.iter().find(|l| (l.0, l.1) == (splats, streams)) {
            return found.clone();
        }
        let inputs = self.inputs.iter().enumerate();
        let inputs = inputs.map(|(i, &(_, dtype))| Input { dtype, splat: splats >> i & 1 == 1 }).collect();
        let outputs = self.stores.iter().enumerate().map(|(i, output)| match *output {
            Output::Store { value, .. } => Output::Store { value, stream: streams >> i & 1 == 1 },
            fold @ Output::Fold { .. } => fold,
        });
        let made =
            Arc::new(Loop::new(Pass { inputs, steps: self.steps.clone(), outputs: outputs.collect() }));
        loops.push((splats, streams, made.clone()));
        made
    }
}

/// The most inputs or outputs of a line, and results of a program.
pub(super) const MOST: usize = 128;

/// A line as it grows. All inputs are there before the first step.
#[derive(Default)]
pub(super) struct Draft {
    pub inputs: Vec<(Place, DType)>,
    pub steps: Vec<Step>,
    pub outputs: Vec<Target>,
    pub stores: Vec<Output>,
}

impl Draft {
    pub fn input(&mut self, place: Place, dtype: DType) {
        if self.find(place).is_none() {
            self.inputs.push((place, dtype));
        }
    }

    pub fn find(&self, place: Place) -> Option<u32> {
        self.inputs.iter().position(|(other, _)| *other == place).map(|at| at as u32)
    }

    pub fn step(&mut self, call: Call, args: SmallVec<[u32; 3]>) -> u32 {
        self.steps.push(Step { call, args });
        (self.inputs.len() + self.steps.len() - 1) as u32
    }

    pub fn store(&mut self, value: u32, target: Target) {
        self.outputs.push(target);
        self.stores.push(Output::Store { value, stream: false });
    }

    pub fn finish(self) -> Option<Line> {
        let Draft { inputs, steps, outputs, stores } = self;
        let fits = inputs.len() <= MOST && outputs.len() <= MOST;
        fits.then(|| Line { inputs, outputs, steps, stores, loops: Mutex::default() })
    }
}
