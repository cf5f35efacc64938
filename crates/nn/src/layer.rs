//! What layers of one tensor have in common, and how they tell that an input does not fit.

use crate::Module;
use kiln_tensor::{Origin, Tensor};

/// A module that makes one tensor of one tensor: what [`crate::Sequential`] is made of.
pub trait Layer: Module {
    /// The layer's result for `x`.
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Tensor;
}

impl<L: Layer + ?Sized> Layer for Box<L> {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Tensor {
        (**self).forward(x)
    }
}

/// Implements [`Layer`] by the method `forward` of each type.
macro_rules! layers {
    ($($type:ident $(<const $n:ident>)?)*) => {$(
        impl $(<const $n: usize>)? $crate::Layer for $type $(<$n>)? {
            #[track_caller]
            fn forward(&self, x: &kiln_tensor::Tensor) -> kiln_tensor::Tensor {
                $type::forward(self, x)
            }
        }
    )*};
}
pub(crate) use layers;

/// Panics with a layer's name, the line that called it and what would be right.
#[track_caller]
pub(crate) fn misfit(layer: &str, what: String) -> ! {
    let line = Origin::here().line;
    panic!("{layer} at {}:{}: {what}", line.file(), line.line())
}

/// What an input lacks that has not `want` channels on axis 1: told also where they stand last, as in `[N, H, W, C]`.
#[track_caller]
pub(crate) fn channels(layer: &str, x: &Tensor, axis: usize, want: usize) {
    let shape = x.shape();
    let got = shape.get(axis).copied().unwrap_or(0);
    if got != want {
        let last = match shape.last() == Some(&want) {
            true => "; channels come before the spatial axes",
            false => "",
        };
        misfit(layer, format!("input has {got} channels where {want} are expected (shape {shape:?}){last}"));
    }
}
