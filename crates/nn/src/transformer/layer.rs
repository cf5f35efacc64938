//! What encoder and decoder layers have in common.

/// The settings of a transformer layer as methods; those that change weights draw them anew.
macro_rules! settings {
    ($type:ident, attentions [$($attention:ident)*], norms [$($norm:ident)*], dropouts [$($dropout:ident)*]) => {
        impl $type {
            /// With a perceptron of this width. Its weights are drawn anew.
            #[doc(alias("dim_feedforward"))]
            #[track_caller]
            pub fn feedforward(self, width: usize) -> $type {
                let (inputs, device) = (self.linear1.weight.dim(1), self.linear1.weight.device());
                let biased = self.linear1.bias.is_some();
                let [linear1, linear2] = [(inputs, width), (width, inputs)].map(|(from, to)| {
                    let layer = $crate::Linear::new(from, to, &device);
                    if biased { layer } else { layer.without_bias() }
                });
                $type { linear1, linear2, ..self }
            }

            /// With this probability of being dropped, for results as for weights of attention.
            #[track_caller]
            pub fn dropout(mut self, p: f64) -> $type {
                $(self.$attention = self.$attention.dropout(p);)*
                $(self.$dropout = $crate::Dropout::new(p);)*
                self
            }

            /// With this between the products of the perceptron.
            pub fn activation(self, activation: $crate::TransformerActivation) -> $type {
                $type { activation, ..self }
            }

            /// With each part working on its normalised input, instead of the sum being normalised.
            pub fn norm_first(self) -> $type {
                $type { norm_first: true, ..self }
            }

            /// With this added to variances.
            #[doc(alias("layer_norm_eps"))]
            pub fn eps(mut self, eps: f64) -> $type {
                $(self.$norm = self.$norm.eps(eps);)*
                self
            }

            /// Without biases.
            pub fn without_bias(mut self) -> $type {
                $(self.$attention = self.$attention.without_bias();)*
                $(self.$norm = self.$norm.without_bias();)*
                self.linear1 = self.linear1.without_bias();
                self.linear2 = self.linear2.without_bias();
                self
            }

            #[track_caller]
            fn perceptron(&self, x: &kiln_tensor::Tensor) -> kiln_tensor::Tensor {
                let hidden = self.dropout.forward(&self.activation.of(&self.linear1.forward(x)));
                self.linear2.forward(&hidden)
            }

            /// `x` with what a part makes of it added, and the norm before or after.
            #[track_caller]
            fn added(
                &self,
                x: &kiln_tensor::Tensor,
                norm: &$crate::LayerNorm,
                dropout: &$crate::Dropout,
                part: impl FnOnce(&kiln_tensor::Tensor) -> kiln_tensor::Tensor,
            ) -> kiln_tensor::Tensor {
                match self.norm_first {
                    true => x + dropout.forward(&part(&norm.forward(x))),
                    false => norm.forward(&(x + dropout.forward(&part(x)))),
                }
            }
        }
    };
}
pub(super) use settings;
