//! Models as trees of parameters.

use kiln_tensor::{DType, Tensor};
use std::collections::{HashMap, HashSet};

/// A part of a model: something with parameters at paths such as `blocks.3.weight`.
pub trait Module {
    /// Calls `f` with each parameter and its path below `path`, always in the same order.
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Tensor));

    /// Like [`Module::visit`], with parameters that may be replaced.
    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Tensor));

    /// All parameters with their paths. One that stands in several places, as tied weights do, is listed at each.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        let mut all = Vec::new();
        self.visit("", &mut |path, tensor| all.push((path.to_string(), tensor.clone())));
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

    /// How many numbers the model has to learn; tied weights count once.
    fn parameter_count(&self) -> usize {
        self.distinct().iter().map(|(_, tensor)| tensor.numel()).sum()
    }
}

/// A layer that computes in `dtype`, while the parameters of `layer` stay what they are and get the gradients.
pub fn cast<M: Module + Clone>(layer: &M, dtype: DType) -> M {
    let mut layer = layer.clone();
    layer.visit_mut("", &mut |_, parameter| *parameter = parameter.to_dtype(dtype));
    layer
}

/// `name` below `path`.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}

/// A parameter is a module of one.
impl Module for Tensor {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Tensor)) {
        f(path, self);
    }
    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Tensor)) {
        f(path, self);
    }
}

/// A part that may be missing has no parameters then.
impl<M: Module> Module for Option<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Tensor)) {
        if let Some(module) = self {
            module.visit(path, f);
        }
    }
    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Tensor)) {
        if let Some(module) = self {
            module.visit_mut(path, f);
        }
    }
}

/// The parts of a list are named by number.
impl<M: Module> Module for Vec<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Tensor)) {
        self.iter().enumerate().for_each(|(i, module)| module.visit(&join(path, &i.to_string()), f));
    }
    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Tensor)) {
        self.iter_mut().enumerate().for_each(|(i, module)| module.visit_mut(&join(path, &i.to_string()), f));
    }
}

/// Implements [`Module`] for a struct by listing the fields that are modules.
///
/// ```
/// use kiln_nn::{Linear, Module, module};
/// struct Mlp { first: Linear, second: Linear }
/// module!(Mlp { first, second });
/// ```
#[macro_export]
macro_rules! module {
    ($type:ty { $($field:ident),* $(,)? }) => {
        impl $crate::Module for $type {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &$crate::Tensor)) {
                $($crate::Module::visit(&self.$field, &$crate::join(path, stringify!($field)), f);)*
            }
            fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut $crate::Tensor)) {
                $($crate::Module::visit_mut(&mut self.$field, &$crate::join(path, stringify!($field)), f);)*
            }
        }
    };
}
