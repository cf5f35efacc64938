//! The transformer's layers and stacks, with PyTorch's names and defaults, but always batch first.

mod decoder;
mod encoder;
mod layer;
mod whole;

pub use decoder::{Memory, TransformerDecoder, TransformerDecoderLayer};
pub use encoder::{TransformerEncoder, TransformerEncoderLayer};
pub use whole::Transformer;

use kiln_tensor::Tensor;

/// What stands between the two products of a layer's perceptron.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TransformerActivation {
    /// `max(x, 0)`.
    #[default]
    Relu,
    /// x times the normal distribution at x.
    Gelu,
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// x times sigmoid(x).
    Silu,
}

impl TransformerActivation {
    #[track_caller]
    fn of(self, x: &Tensor) -> Tensor {
        match self {
            TransformerActivation::Relu => x.relu(),
            TransformerActivation::Gelu => x.gelu(),
            TransformerActivation::GeluTanh => x.gelu_tanh(),
            TransformerActivation::Silu => x.silu(),
        }
    }
}
