//! The cells for one step.

use super::Kind;
use super::stack::RecurrentWeights;
use crate::layer::misfit;
use crate::module::derive::tree;
use crate::module::note;
use crate::{Module, Part, PartMut};
use kiln_tensor::{Device, Scope, Tensor};
use std::fmt::{Display, Formatter};

macro_rules! cells {
    ($($(#[$doc:meta])* $name:ident $alias:literal $kind:ident;)*) => {$(
        $(#[$doc])*
        #[doc(alias($alias))]
        #[derive(Clone)]
        pub struct $name {
            /// Weights and biases; `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh` in a state dict.
            pub weights: RecurrentWeights,
            kind: Kind,
        }

        impl $name {
            /// A cell with weights and biases uniform within ±1/√hidden.
            #[track_caller]
            pub fn new(inputs: usize, hidden: usize, device: &Device) -> $name {
                $name { weights: RecurrentWeights::drawn(Kind::$kind, inputs, hidden, true, device), kind: Kind::$kind }
            }

            /// Without biases.
            pub fn without_bias(mut self) -> $name {
                (self.weights.input_bias, self.weights.hidden_bias) = (None, None);
                self
            }

            #[track_caller]
            fn step(&self, name: &str, x: &Tensor, state: Option<&Tensor>, cell: Option<&Tensor>) -> (Tensor, Option<Tensor>) {
                let _scope = Scope::enter(stringify!($name));
                let (inputs, hidden) = (self.weights.input.dim(1), self.weights.hidden.dim(1));
                let shape = x.shape();
                if !matches!(shape.len(), 1 | 2) || shape[shape.len() - 1] != inputs {
                    misfit(name, format!("shape {shape:?} is not [batch, {inputs}]"));
                }
                let mut want = shape;
                want[shape.len() - 1] = hidden;
                if let Some(state) = [state, cell].into_iter().flatten().find(|state| state.shape() != want) {
                    misfit(name, format!("a state of shape {:?} where {want:?} is expected", state.shape()));
                }
                let zeros = || Tensor::full(want, 0, self.weights.hidden.dtype(), &x.device());
                let state = state.cloned().unwrap_or_else(zeros);
                let sums = self.weights.sums(self.kind, x);
                let product = state.linear(&self.weights.hidden, self.weights.inner_bias(self.kind));
                let (next, cell) = self.kind.step(&sums, &product, &state, cell);
                (note(self, next), cell)
            }
        }

        impl Module for $name {
            fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
                self.weights.parts("", f);
            }
            fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
                self.weights.parts_mut("", f);
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                tree(self, f)
            }
        }
    )*};
}
cells! {
    /// One step of [`crate::Rnn`].
    ///
    /// ```
    /// use kiln_nn::RnnCell;
    /// # use kiln_tensor::{Device, Tensor};
    /// # let device = Device::cpu();
    /// let cell = RnnCell::new(4, 8, &device);
    /// let h = cell.forward(&Tensor::ones([2, 4], &device), None);
    /// let h = cell.forward(&Tensor::ones([2, 4], &device), Some(&h));
    /// assert_eq!(h.shape()[..], [2, 8]);
    /// ```
    RnnCell "RNNCell" Tanh;
    /// One step of [`crate::Gru`].
    GruCell "GRUCell" Gru;
    /// One step of [`crate::Lstm`].
    LstmCell "LSTMCell" Lstm;
}

impl RnnCell {
    /// With relu instead of tanh.
    #[doc(alias("nonlinearity"))]
    pub fn relu(mut self) -> RnnCell {
        self.kind = Kind::Relu;
        self
    }

    /// The next state for an input of `[batch, inputs]` or `[inputs]`; the first state is zeros.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, state: Option<&Tensor>) -> Tensor {
        self.step("rnn_cell", x, state, None).0
    }
}

impl GruCell {
    /// The next state for an input of `[batch, inputs]` or `[inputs]`; the first state is zeros.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, state: Option<&Tensor>) -> Tensor {
        self.step("gru_cell", x, state, None).0
    }
}

impl LstmCell {
    /// The next hidden state and cell for an input of `[batch, inputs]` or `[inputs]`; the first ones are zeros.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, state: Option<(&Tensor, &Tensor)>) -> (Tensor, Tensor) {
        match self.step("lstm_cell", x, state.map(|s| s.0), state.map(|s| s.1)) {
            (h, Some(c)) => (h, c),
            (_, None) => unreachable!("an LSTM has cells"),
        }
    }
}
