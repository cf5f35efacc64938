//! Models as trees of parts.
//!
//! A type says what its parts are ([`Module::parts`], which `#[derive(Module)]` writes); everything else is a walk over
//! them: parameters by path, buffers, modes, state dicts (`state.rs`), printing (`tree.rs`).

mod buffer;
mod containers;
mod pattern;
mod probe;
mod state;
mod tree;

pub use buffer::{Buffer, Mode};
pub use pattern::matches;
pub use probe::Setting;
pub use state::{LoadError, LoadReport};

pub(crate) use tree::note;

/// What `#[derive(Module)]` writes calls to.
#[doc(hidden)]
pub mod derive {
    pub use super::probe::{Is, IsMut, IsNot, IsNotMut, Probe, ProbeMut, Shows};
    pub use super::tree::tree;
}

use kiln_tensor::{DType, Device, Error, Tensor, no_grad};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Display;

/// A part of a module.
pub enum Part<'a> {
    /// A tensor that is trained, or was before it was frozen.
    Parameter(&'a Tensor),
    /// State that is not trained.
    Buffer(&'a Buffer),
    /// Whether it trains.
    Mode(&'a Mode),
    /// A module inside it.
    Module(&'a dyn Module),
    /// A number or an option that is shown when the module is printed.
    Setting(&'a dyn Display),
}

/// A part of a module that may be replaced.
pub enum PartMut<'a> {
    /// As in [`Part`].
    Parameter(&'a mut Tensor),
    /// As in [`Part`].
    Mode(&'a mut Mode),
    /// As in [`Part`].
    Module(&'a mut dyn Module),
}

/// A model, or a part of one: something with parameters at paths such as `blocks.3.weight`.
///
/// Derived, every field that is a module is a part: tensors (which are parameters), [`Buffer`]s, layers, structs that
/// derive it themselves, and lists, arrays, options, boxes, maps and tuples of those. Fields of other types are skipped
/// without a word; print the model to see what it is made of.
///
/// ```
/// use kiln_nn::*;
/// use kiln_tensor::{Device, Tensor};
///
/// #[derive(Module)]
/// struct Mlp { layers: Vec<Linear>, dropout: Dropout, scale: f64 }
///
/// let device = Device::cpu();
/// let layers = vec![Linear::new(4, 8, &device), Linear::new(8, 2, &device)];
/// let mut model = Mlp { layers, dropout: Dropout::new(0.5), scale: 0.5 };
/// let paths: Vec<String> = model.parameters().into_iter().map(|(path, _)| path).collect();
/// assert_eq!(paths, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]);
/// assert_eq!(model.freeze("layers.0.*"), 2);
/// println!("{model}");
/// ```
pub trait Module {
    /// Calls `f` with each part and its name, always in the same order. A part without a name stands for the whole.
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>));

    /// Like [`Module::parts`], for what may be replaced.
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>));

    /// What it is called when it is printed: the name of its type. A part that is missing has none.
    fn kind(&self) -> String {
        tree::kind_of::<Self>()
    }

    /// Calls `f` with each parameter and its path below `path`, always in the same order.
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Tensor)) {
        self.parts(&mut |name, part| match part {
            Part::Parameter(tensor) => f(&join(path, name), tensor),
            Part::Module(module) => module.visit(&join(path, name), f),
            Part::Buffer(_) | Part::Mode(_) | Part::Setting(_) => {}
        });
    }

    /// Like [`Module::visit`], with parameters that may be replaced.
    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Tensor)) {
        self.parts_mut(&mut |name, part| match part {
            PartMut::Parameter(tensor) => f(&join(path, name), tensor),
            PartMut::Module(module) => module.visit_mut(&join(path, name), f),
            PartMut::Mode(_) => {}
        });
    }

    /// Calls `f` with each buffer and its path below `path`, always in the same order.
    fn visit_buffers(&self, path: &str, f: &mut dyn FnMut(&str, &Buffer)) {
        self.parts(&mut |name, part| match part {
            Part::Buffer(buffer) => f(&join(path, name), buffer),
            Part::Module(module) => module.visit_buffers(&join(path, name), f),
            Part::Parameter(_) | Part::Mode(_) | Part::Setting(_) => {}
        });
    }

    /// Calls `f` with the mode of each part that has one.
    fn visit_modes(&mut self, f: &mut dyn FnMut(&mut Mode)) {
        self.parts_mut(&mut |_, part| match part {
            PartMut::Mode(mode) => f(mode),
            PartMut::Module(module) => module.visit_modes(f),
            PartMut::Parameter(_) => {}
        });
    }

    /// All parameters with their paths. One that stands in several places, as tied weights do, is listed at each.
    #[doc(alias("named_parameters"))]
    fn parameters(&self) -> Vec<(String, Tensor)> {
        let mut all = Vec::new();
        self.visit("", &mut |path, tensor| all.push((path.to_string(), tensor.clone())));
        all
    }

    /// All buffers with their paths, as they are now.
    #[doc(alias("named_buffers"))]
    fn buffers(&self) -> Vec<(String, Tensor)> {
        let mut all = Vec::new();
        self.visit_buffers("", &mut |path, buffer| all.push((path.to_string(), buffer.get())));
        all
    }

    /// Each parameter once, under the first of its paths: tied weights are one parameter.
    fn distinct(&self) -> Vec<(String, Tensor)> {
        let (mut all, mut known) = (Vec::new(), HashSet::new());
        self.visit("", &mut |path, tensor| {
            if known.insert(tensor.identity()) {
                all.push((path.to_string(), tensor.clone()));
            }
        });
        all
    }

    /// Puts what `f` gives in the place of each parameter; `None` leaves it. `f` is asked once for each parameter, with
    /// the first of its paths, so that tied weights stay tied.
    fn replace(&mut self, f: &mut dyn FnMut(&str, &Tensor) -> Option<Tensor>) {
        let mut known: HashMap<_, Option<Tensor>> = HashMap::new();
        self.visit_mut("", &mut |path, tensor| {
            if let Some(new) = known.entry(tensor.identity()).or_insert_with(|| f(path, tensor)) {
                *tensor = new.clone();
            }
        });
    }

    /// How many numbers the model has to learn or has learnt; tied weights count once.
    fn parameter_count(&self) -> usize {
        self.distinct().iter().map(|(_, tensor)| tensor.numel()).sum()
    }

    /// Keeps the parameters whose path matches a pattern from being trained, see [`matches()`]. Gives how many there are; tied
    /// weights match by any of their paths.
    ///
    /// # Panics
    /// If no path matches.
    #[doc(alias("requires_grad_"))]
    #[track_caller]
    fn freeze(&mut self, pattern: &str) -> usize {
        let found = self.matching("freeze", pattern);
        self.replace(&mut |_, tensor| found.contains(&tensor.identity()).then(|| tensor.detach()));
        found.len()
    }

    /// Has the parameters whose path matches a pattern trained again.
    ///
    /// # Panics
    /// If no path matches.
    #[track_caller]
    fn unfreeze(&mut self, pattern: &str) -> usize {
        let found = self.matching("unfreeze", pattern);
        self.replace(&mut |_, tensor| {
            let due = found.contains(&tensor.identity()) && !tensor.is_leaf();
            due.then(|| tensor.detach().requires_grad())
        });
        found.len()
    }

    /// The parameters whose path matches a pattern.
    #[doc(hidden)]
    #[track_caller]
    fn matching(&self, method: &str, pattern: &str) -> HashSet<(u64, Option<u64>)> {
        let mut found = HashSet::new();
        self.visit("", &mut |path, tensor| {
            if matches(pattern, path) {
                found.insert(tensor.identity());
            }
        });
        if found.is_empty() {
            let paths: Vec<String> = self.distinct().into_iter().map(|(path, _)| path).take(5).collect();
            panic!("{method}: no parameter matches '{pattern}'; there are {} ..", paths.join(", "));
        }
        found
    }

    /// Sets whether all parts of the model train: only then are numbers dropped and running statistics updated. New layers
    /// do.
    fn train(&mut self, training: bool) {
        self.visit_modes(&mut |mode| mode.set(training));
    }

    /// Runs `f` with the model in evaluation mode, and nothing kept for backward; then every part has its mode of before.
    /// For gradients in evaluation mode there is [`Module::train`]`(false)`.
    ///
    /// ```
    /// # use kiln_nn::*;
    /// # use kiln_tensor::{Device, Tensor};
    /// let device = Device::cpu();
    /// let mut model = Sequential::new().then(Linear::new(4, 2, &device)).then(Dropout::new(0.5));
    /// let x = Tensor::ones([1, 4], &device);
    /// let [a, b] = model.eval(|m| [m.forward(&x), m.forward(&x)]);
    /// assert_eq!(a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
    /// ```
    fn eval<T>(&mut self, f: impl FnOnce(&Self) -> T) -> T
    where
        Self: Sized,
    {
        /// Puts the modes back, also when `f` panics.
        struct Restore<'a, M: Module>(&'a mut M, Vec<bool>);
        impl<M: Module> Drop for Restore<'_, M> {
            fn drop(&mut self) {
                let mut modes = self.1.iter();
                self.0.visit_modes(&mut |mode| mode.set(modes.next().is_none_or(|&training| training)));
            }
        }
        let mut modes = Vec::new();
        self.visit_modes(&mut |mode| {
            modes.push(mode.is_training());
            mode.set(false);
        });
        let restore = Restore(self, modes);
        no_grad(|| f(restore.0))
    }

    /// Moves all parameters and buffers to a device. On an error the model is as it was.
    #[doc(alias("to", "cuda", "cpu"))]
    fn to_device(&mut self, device: &Device) -> Result<(), Error> {
        let moved = |tensor: &Tensor| device.persistent(|| tensor.detach().to_device(device));
        let mut parameters = Vec::new();
        for (_, tensor) in self.distinct() {
            let new = moved(&tensor)?;
            parameters.push(if tensor.is_leaf() { new.requires_grad() } else { new });
        }
        let buffers =
            self.buffers().iter().map(|(_, tensor)| moved(tensor)).collect::<Result<Vec<_>, _>>()?;
        let (mut parameters, mut buffers) = (parameters.into_iter(), buffers.into_iter());
        self.replace(&mut |_, _| parameters.next());
        self.visit_buffers("", &mut |_, buffer| buffers.next().into_iter().for_each(|new| buffer.load(new)));
        Ok(())
    }

    /// Brings all parameters and buffers of float dtypes to a float dtype.
    ///
    /// # Panics
    /// If `dtype` is not a float.
    #[doc(alias("to", "half", "double", "bfloat16"))]
    #[track_caller]
    fn to_dtype(&mut self, dtype: DType) {
        assert!(dtype.is_float(), "to_dtype: parameters are floats, not {dtype}");
        self.replace(&mut |_, tensor| {
            let new = tensor.device().persistent(|| tensor.detach().to_dtype(dtype));
            tensor.dtype().is_float().then(|| if tensor.is_leaf() { new.requires_grad() } else { new })
        });
        self.visit_buffers("", &mut |_, buffer| {
            let now = buffer.get();
            if now.dtype().is_float() {
                buffer.load(now.to_dtype(dtype));
            }
        });
    }

    /// All parameters and buffers by path, untracked: what is saved of a model. Tied weights are at each of their paths, as
    /// in PyTorch.
    fn state_dict(&self) -> BTreeMap<String, Tensor> {
        state::state_dict(self)
    }

    /// Takes over parameters and buffers by path, on the model's own devices and in its own dtypes. Floats are converted.
    /// If something is missing, unused or of another shape, the model is left as it was; the error says what.
    ///
    /// ```
    /// # use kiln_nn::*;
    /// # use kiln_tensor::Device;
    /// let device = Device::cpu();
    /// let (a, mut b) = (Linear::new(4, 2, &device), Linear::new(4, 2, &device));
    /// b.load_state_dict(&a.state_dict()).unwrap();
    /// assert_eq!(a.weight.to_vec::<f32>().unwrap(), b.weight.to_vec::<f32>().unwrap());
    /// let error = Linear::new(4, 3, &device).load_state_dict(&a.state_dict()).unwrap_err();
    /// println!("{error}");
    /// ```
    fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<LoadReport, LoadError> {
        let plan = state::plan(self, state);
        if !plan.report.is_clean() {
            return Err(LoadError::Misfit(plan.report));
        }
        state::load(self, plan)
    }

    /// Like [`Module::load_state_dict`], with whatever fits; the report says what did not.
    #[doc(alias("strict"))]
    fn load_state_dict_partial(&mut self, state: &BTreeMap<String, Tensor>) -> Result<LoadReport, LoadError> {
        let plan = state::plan(self, state);
        state::load(self, plan)
    }

    /// The model printed as a tree, with the shape of what each layer gave last while `run` ran. Nothing is kept for
    /// backward, and buffers are put back.
    ///
    /// ```
    /// # use kiln_nn::*;
    /// # use kiln_tensor::{Device, Tensor};
    /// let device = Device::cpu();
    /// let model = Linear::new(4, 2, &device);
    /// println!("{}", model.summary(|m| m.forward(&Tensor::ones([8, 4], &device))));
    /// ```
    fn summary<T>(&self, run: impl FnOnce(&Self) -> T) -> String
    where
        Self: Sized,
    {
        let buffers = self.buffers();
        let text = tree::summary(self, || drop(no_grad(|| run(self))));
        let mut buffers = buffers.into_iter();
        self.visit_buffers("", &mut |_, buffer| buffers.next().into_iter().for_each(|(_, t)| buffer.load(t)));
        text
    }
}

/// A layer that computes in `dtype`, while the parameters of `layer` stay what they are and get the gradients.
pub fn cast<M: Module + Clone>(layer: &M, dtype: DType) -> M {
    let mut layer = layer.clone();
    layer.visit_mut("", &mut |_, parameter| *parameter = (*parameter).to_dtype(dtype));
    layer
}

/// `name` below `path`.
pub fn join(path: &str, name: &str) -> String {
    match (path.is_empty(), name.is_empty()) {
        (true, _) => name.to_string(),
        (_, true) => path.to_string(),
        (false, false) => format!("{path}.{name}"),
    }
}
