//! What a module keeps besides its parameters: state that is not trained, and whether it trains.

use crate::{Module, Part, PartMut};
use kiln_tensor::{Step, Tensor};
use std::sync::{Arc, Mutex, MutexGuard};

/// A tensor that belongs to a module's state but is not trained, such as a running mean. Layers update it while they
/// compute, which is why a shared reference is enough. An optimiser's step that is refused puts back what it was after the
/// last one, see [`crate::Optimizer::step`].
pub struct Buffer(Arc<Mutex<State>>);

struct State {
    now: Tensor,
    /// What it was after the last step, where it was updated since.
    before: Option<Tensor>,
}

impl Buffer {
    /// A buffer that holds a tensor.
    pub fn new(tensor: Tensor) -> Buffer {
        Buffer(Arc::new(Mutex::new(State { now: tensor.detach(), before: None })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// This buffer under another handle: what is set in one is seen in both, unlike with a clone.
    pub fn handle(&self) -> Buffer {
        Buffer(self.0.clone())
    }

    /// What it holds.
    pub fn get(&self) -> Tensor {
        self.state().now.clone()
    }

    /// An update while the model computes: what a refused step takes back.
    pub fn set(&self, tensor: Tensor) {
        let mut state = self.state();
        let old = std::mem::replace(&mut state.now, tensor.detach());
        state.before.get_or_insert(old);
    }

    /// A new value that no step takes back, such as a loaded one.
    pub fn load(&self, tensor: Tensor) {
        *self.state() = State { now: tensor.detach(), before: None };
    }

    /// Keeps the updates since the last step if this one is applied.
    pub(crate) fn commit(&self, step: &Step) {
        let mut state = self.state();
        if let Some(before) = state.before.take() {
            state.now = step.commit(state.now.clone(), &before);
        }
    }
}

impl Clone for Buffer {
    /// A buffer of its own with the same content.
    fn clone(&self) -> Buffer {
        Buffer::new(self.get())
    }
}

impl Module for Buffer {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        f("", Part::Buffer(self));
    }
    fn parts_mut(&mut self, _: &mut dyn FnMut(&str, PartMut<'_>)) {}
}

/// Whether a layer trains or is evaluated; a field of layers that do not do the same in both. New ones train, and
/// [`Module::train`] and [`Module::eval`] set all of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mode(bool);

impl Default for Mode {
    fn default() -> Mode {
        Mode(true)
    }
}

impl Mode {
    /// Whether the layer trains.
    pub fn is_training(self) -> bool {
        self.0
    }

    /// Sets whether the layer trains.
    pub fn set(&mut self, training: bool) {
        self.0 = training;
    }
}

impl Module for Mode {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        f("", Part::Mode(self));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        f("", PartMut::Mode(self));
    }
}
