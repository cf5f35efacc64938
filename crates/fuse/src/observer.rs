//! Looking on while the engine works.

use kiln_device::Error;

/// Is told what an engine does. Every method has a default that does nothing. Called on whichever thread executes, in
/// order, with the device held: an observer must not use the device it observes.
pub trait Observer: Send {
    /// A plan was made for a structure that was new, or read from the cache on disk.
    fn planned(&mut self, _plan: &NewPlan<'_>) {}

    /// A window is about to run by the plan of the structure with this hash.
    fn window(&mut self, _hash: u64, _items: usize) {}

    /// A group ran as one.
    fn group(&mut self, _name: &str, _nodes: usize) {}

    /// What a group takes for granted is not so this time, and its nodes ran by themselves.
    fn guarded(&mut self, _name: &str, _nodes: usize) {}

    /// A group could not run as one. Its nodes ran by themselves, or its results failed, see [`crate::Failure`].
    fn fallback(&mut self, _name: &str, _error: &Error) {}
}

/// A plan that has just been made.
pub struct NewPlan<'a> {
    /// Hash of the structure it is for.
    pub hash: u64,
    /// How many groups it has.
    pub groups: usize,
    /// How many steps, frees aside.
    pub launches: usize,
    /// Whether it came from the disk rather than from a search.
    pub loaded: bool,
    /// A line per step: what each group fuses, and the nodes that run alone.
    pub text: &'a str,
}

/// Prints plans to standard error: `KILN_PLAN=1`.
pub(crate) struct Print;

impl Observer for Print {
    fn planned(&mut self, plan: &NewPlan<'_>) {
        eprintln!("plan {:016x}\n{}", plan.hash, plan.text);
    }
}
