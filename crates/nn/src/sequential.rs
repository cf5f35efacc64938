//! Layers one after another.

use crate::module::derive::tree;
use crate::{Layer, Module, Part, PartMut};
use kiln_tensor::{Origin, Tensor};
use std::fmt::{Display, Formatter};
use std::panic::Location;

/// Layers one after another, named by number as in PyTorch.
///
/// ```
/// use kiln_nn::*;
/// use kiln_tensor::{Device, Tensor};
///
/// let device = Device::cpu();
/// let model = Sequential::new()
///     .then(Linear::new(4, 8, &device))
///     .then(Relu)
///     .map(|x| x * 2.0)
///     .then(Linear::new(8, 2, &device));
/// let y = model.forward(&Tensor::ones([3, 4], &device));
/// assert_eq!(y.shape()[..], [3, 2]);
/// assert_eq!(model.parameters()[2].0, "3.weight");
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Layer + Send + Sync>>,
}

impl Sequential {
    /// No layers: what comes in goes out.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// With another layer at the end.
    pub fn then(mut self, layer: impl Layer + Send + Sync + 'static) -> Sequential {
        self.layers.push(Box::new(layer));
        self
    }

    /// With a function at the end, which counts as a layer without parameters.
    pub fn map(self, f: impl Fn(&Tensor) -> Tensor + Send + Sync + 'static) -> Sequential {
        self.then(Map(f))
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layers, in order.
    pub fn layers(&self) -> impl Iterator<Item = &dyn Layer> {
        self.layers.iter().map(|layer| &**layer as &dyn Layer)
    }

    /// The last layer's result, each layer working on that of the one before.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        // A call through a pointer does not know its caller.
        let _line = Origin::hold(Location::caller());
        self.layers.iter().fold(x.clone(), |x, layer| layer.forward(&x))
    }
}

crate::layer::layers!(Sequential);

impl Module for Sequential {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        self.layers.parts(f);
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        self.layers.parts_mut(f);
    }
}

impl Display for Sequential {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        tree(self, f)
    }
}

/// A function as a layer.
struct Map<F>(F);

impl<F> Module for Map<F> {
    fn parts(&self, _: &mut dyn FnMut(&str, Part<'_>)) {}
    fn parts_mut(&mut self, _: &mut dyn FnMut(&str, PartMut<'_>)) {}
    fn kind(&self) -> String {
        "Map".into()
    }
}

impl<F: Fn(&Tensor) -> Tensor> Layer for Map<F> {
    fn forward(&self, x: &Tensor) -> Tensor {
        (self.0)(x)
    }
}
