//! The layers over whole sequences.

use super::Kind;
use super::stack::{RecurrentWeights, Stack};
use crate::layer::misfit;
use crate::module::derive::tree;
use crate::module::note;
use crate::{Module, Part, PartMut};
use kiln_tensor::{Device, Scope, Tensor};
use std::fmt::{Display, Formatter};

macro_rules! sequences {
    ($($(#[$doc:meta])* $name:ident $alias:literal $scope:literal $kind:ident;)*) => {$(
        $(#[$doc])*
        #[doc(alias($alias))]
        #[derive(Clone)]
        pub struct $name(Stack);

        impl $name {
            /// One layer that goes forward, over `[time, batch, inputs]`, with weights and biases uniform within ±1/√hidden.
            #[track_caller]
            pub fn new(inputs: usize, hidden: usize, device: &Device) -> $name {
                $name(Stack::new(Kind::$kind, inputs, hidden, device))
            }

            /// With this many layers, each going over the states of the one before.
            #[doc(alias("num_layers"))]
            #[track_caller]
            pub fn layers(self, layers: usize) -> $name {
                let both = self.0.bidirectional;
                $name(self.0.arranged(layers, both))
            }

            /// With each layer going over the sequence backward too: its states are twice as wide.
            #[track_caller]
            pub fn bidirectional(self) -> $name {
                let layers = self.0.layers();
                $name(self.0.arranged(layers, true))
            }

            /// With states dropped between layers while training.
            ///
            /// # Panics
            /// If `p` is not within 0 and 1.
            #[track_caller]
            pub fn dropout(mut self, p: f64) -> $name {
                if !(0.0..=1.0).contains(&p) {
                    misfit($scope, format!("a probability of {p} is not within 0 and 1"));
                }
                self.0.dropout = p;
                self
            }

            /// Without biases.
            pub fn without_bias(self) -> $name {
                $name(self.0.without_bias())
            }

            /// For sequences of `[batch, time, inputs]`; states keep their order.
            pub fn batch_first(mut self) -> $name {
                self.0.batch_first = true;
                self
            }

            /// The weights: layer after layer, forward before backward.
            pub fn weights(&self) -> &[RecurrentWeights] {
                &self.0.weights
            }

            /// The weights, to be replaced.
            pub fn weights_mut(&mut self) -> &mut [RecurrentWeights] {
                &mut self.0.weights
            }
        }

        impl Module for $name {
            fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
                self.0.parts(f);
            }
            fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
                self.0.parts_mut(f);
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                tree(self, f)
            }
        }
    )*};
}
sequences! {
    /// A plain recurrent network: `h = tanh(W_ih x + b_ih + W_hh h + b_hh)` at each step.
    ///
    /// ```
    /// use kiln_nn::Rnn;
    /// # use kiln_tensor::{Device, Tensor};
    /// # let device = Device::cpu();
    /// let (y, h) = Rnn::new(8, 16, &device).forward(&Tensor::randn([5, 2, 8], &device));
    /// assert_eq!((&y.shape()[..], &h.shape()[..]), (&[5, 2, 16][..], &[1, 2, 16][..]));
    /// ```
    Rnn "RNN" "rnn" Tanh;
    /// A network of gated recurrent units, PyTorch's: the reset gate is applied behind the product with the hidden state.
    ///
    /// ```
    /// use kiln_nn::Gru;
    /// # use kiln_tensor::{Device, Tensor};
    /// # let device = Device::cpu();
    /// let layer = Gru::new(8, 16, &device).bidirectional().batch_first();
    /// let (y, h) = layer.forward(&Tensor::randn([2, 5, 8], &device));
    /// assert_eq!((&y.shape()[..], &h.shape()[..]), (&[2, 5, 32][..], &[2, 2, 16][..]));
    /// ```
    Gru "GRU" "gru" Gru;
    /// A network with long short-term memory.
    ///
    /// ```
    /// use kiln_nn::Lstm;
    /// # use kiln_tensor::{Device, Tensor};
    /// # let device = Device::cpu();
    /// let layer = Lstm::new(8, 16, &device).layers(2).dropout(0.1).batch_first();
    /// let x = Tensor::randn([2, 5, 8], &device);
    /// let (y, (h, c)) = layer.forward(&x);
    /// assert_eq!((&y.shape()[..], &h.shape()[..]), (&[2, 5, 16][..], &[2, 2, 16][..]));
    /// // On from there, with samples of 5 and 3 steps.
    /// let lengths = Tensor::from_vec(vec![5i64, 3], [2], &device);
    /// let (y, _) = layer.forward_with(&x, Some((&h, &c)), Some(&lengths));
    /// # assert_eq!(y.index((1, 3..)).abs().amax(()).item::<f32>()?, 0.0);
    /// # Ok::<(), kiln_tensor::Error>(())
    /// ```
    Lstm "LSTM" "lstm" Lstm;
}

impl Rnn {
    /// With relu instead of tanh.
    #[doc(alias("nonlinearity"))]
    pub fn relu(mut self) -> Rnn {
        self.0.kind = Kind::Relu;
        self
    }
}

macro_rules! hidden_alone {
    ($($name:ident $scope:literal;)*) => {$(
        impl $name {
            /// The states of the last layer at each step, and the last states of all layers, `[layers, batch, hidden]`, from
            /// zeros on. A sequence without batch, `[time, inputs]`, has states without one.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> (Tensor, Tensor) {
                self.forward_with(x, None, None)
            }

            /// Like `forward`, from states that an earlier call gave, and with as many steps for each sample as `lengths` says,
            /// integers `[batch]`: behind its end a sample's results are zeros and its state stays, and backward it begins at
            /// its own end.
            #[doc(alias("pack_padded_sequence"))]
            #[track_caller]
            pub fn forward_with(
                &self,
                x: &Tensor,
                state: Option<&Tensor>,
                lengths: Option<&Tensor>,
            ) -> (Tensor, Tensor) {
                let _scope = Scope::enter($scope);
                let passed = self.0.forward(x, state, None, lengths);
                (note(self, passed.y), passed.h)
            }
        }
    )*};
}
hidden_alone! {
    Rnn "rnn";
    Gru "gru";
}

impl Lstm {
    /// The states of the last layer at each step, and the last hidden states and cells of all layers, `[layers, batch, hidden]`,
    /// from zeros on. A sequence without batch, `[time, inputs]`, has states without one.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> (Tensor, (Tensor, Tensor)) {
        self.forward_with(x, None, None)
    }

    /// Like `forward`, from states that an earlier call gave, and with as many steps for each sample as `lengths` says, integers
    /// `[batch]`: behind its end a sample's results are zeros and its state stays, and backward it begins at its own end.
    #[doc(alias("pack_padded_sequence"))]
    #[track_caller]
    pub fn forward_with(
        &self,
        x: &Tensor,
        state: Option<(&Tensor, &Tensor)>,
        lengths: Option<&Tensor>,
    ) -> (Tensor, (Tensor, Tensor)) {
        let _scope = Scope::enter("lstm");
        let passed = self.0.forward(x, state.map(|s| s.0), state.map(|s| s.1), lengths);
        let c = passed.c.unwrap_or_else(|| unreachable!("an LSTM has cells"));
        (note(self, passed.y), (passed.h, c))
    }
}
