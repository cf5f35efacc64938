//! The contract between the engine, those who fuse, and the device that executes.

use crate::Window;
use kiln_device::{Bytes, Data, Error, Place};
use kiln_ir::{Id, Node};
use std::sync::Arc;

/// Whether a fuser takes more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The last node was taken; more may come.
    Open,
    /// The last node was not taken; nothing more will be.
    Closed,
}

/// Collects nodes that can run as one. It is offered the nodes of a candidate set one at a time, in an order in which
/// they could be executed, and says what it would make of them.
pub trait Fuser<V>: Send {
    /// Its name, for people.
    fn name(&self) -> &'static str;

    /// Offers the node at place `at` of the window. `Closed` means that it was not taken.
    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status;

    /// Whether it would take more.
    fn status(&self) -> Status;

    /// The estimated cost saved by running what it holds as one, in bytes that need not be moved. One launch counts as
    /// [`crate::LAUNCH`] bytes.
    fn score(&self, window: &Window<'_>) -> f64;

    /// Whether what it holds can run as it is.
    fn ready(&self) -> bool;

    /// How many nodes it holds.
    fn len(&self) -> usize;

    /// Whether it holds none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets go of everything.
    fn reset(&mut self);

    /// A copy that goes its own way.
    fn boxed(&self) -> Box<dyn Fuser<V>>;

    /// What it holds as something that executes. Called only when [`Fuser::ready`] and where [`Fuser::score`] is above 0.
    ///
    /// It serves every window of the same structure, which leaves numbers, random keys, places of slices and extents
    /// open (but for which are equal, and which are 0 or 1). What it takes for granted beyond that is a guard:
    /// [`Optimization::holds`].
    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<V>>;
}

/// A group of nodes that runs as one.
pub trait Optimization<V>: Send + Sync {
    /// Its name, for people: what it fuses.
    fn name(&self) -> String;

    /// How many nodes it replaces.
    fn len(&self) -> usize;

    /// Whether it replaces none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether what its fuser took for granted beyond the structure is so for `nodes`, such as a number that must be zero or
    /// an extent. Asked at every run; where it is not so, the nodes run unfused.
    fn holds(&self, _nodes: &[&Node], _handles: &dyn Handles<V>) -> bool {
        true
    }

    /// Executes on `nodes`, the originals in the order in which they were taken: operands and results are named there,
    /// and so is everything that the plan's structure leaves open. `dying` are operands that nothing uses afterwards,
    /// and that may be written over. Results are put only if all went well; see [`Failure`] for what happens else.
    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<V>) -> Result<(), Failure>;
}

/// Why a group did not run.
#[derive(Clone, PartialEq, Debug)]
pub enum Failure {
    /// Every operand is as it was: the nodes run unfused. A panic in [`Optimization::execute`] counts as this.
    Unfit(Error),
    /// Operands may have been written over: the group's results fail for this reason.
    Spent(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Unfit(error)
    }
}

/// A device's values, by name.
pub trait Handles<V> {
    /// The value, if it is there and not poisoned.
    fn get(&self, id: Id) -> Option<&V>;

    /// Defines a value.
    fn put(&mut self, id: Id, value: V);

    /// Executes one node unfused; `dying` are operands that nothing uses afterwards.
    fn run(&mut self, place: usize, node: &Node, dying: &[Id]);

    /// A group of these nodes is about to run, the first of which is at that place: for devices that measure.
    fn begins(&mut self, _place: usize, _nodes: &[&Node]) {}

    /// The group of this name has run.
    fn ends(&mut self, _name: &str, _nodes: &[&Node]) {}

    /// Has the results of these nodes fail for that reason. `place` is that of the first.
    fn fail(&mut self, place: usize, nodes: &[&Node], error: Error);

    /// Ends a value.
    fn free(&mut self, id: Id);

    /// Where new values live.
    fn place(&self) -> Place;

    /// Where this value is to be computed, see [`kiln_device::Placing::place_output`].
    fn output_memory(&self, _id: Id) -> Option<Bytes> {
        None
    }

    /// A value's content on the host: for fusers that know nothing of the device's own form of values.
    fn read(&self, id: Id) -> Result<Data, Error> {
        Err(Error::UnknownValue(id))
    }

    /// Defines a value from host data: the other half of [`Handles::read`].
    fn write(&mut self, id: Id, _data: Data) -> Result<(), Error> {
        Err(Error::UnknownValue(id))
    }
}
