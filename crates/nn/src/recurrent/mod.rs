//! Networks that go through a sequence step by step: layers over whole sequences, and cells for one step. Names in a state
//! dict are PyTorch's (`weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, then `_reverse`, then the next layer).
//! Deliberately absent: projections of the hidden state (`proj_size`).

mod cell;
mod scan;
mod sequence;
mod stack;

pub use cell::{GruCell, LstmCell, RnnCell};
pub use sequence::{Gru, Lstm, Rnn};
pub use stack::RecurrentWeights;

use kiln_tensor::Tensor;

/// What is done at each step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Tanh,
    Relu,
    Lstm,
    Gru,
}

impl Kind {
    /// How many times the hidden width a step's sums are wide.
    pub fn gates(self) -> usize {
        match self {
            Kind::Tanh | Kind::Relu => 1,
            Kind::Lstm => 4,
            Kind::Gru => 3,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Tanh | Kind::Relu => "rnn",
            Kind::Lstm => "lstm",
            Kind::Gru => "gru",
        }
    }

    /// The next hidden state, and the next cell of an LSTM, from what the input and the hidden state come to.
    #[track_caller]
    pub fn step(
        self,
        x: &Tensor,
        h: &Tensor,
        last: &Tensor,
        cell: Option<&Tensor>,
    ) -> (Tensor, Option<Tensor>) {
        let width = last.dim(-1);
        let gate = |t: &Tensor, i: usize| t.narrow(-1, (i * width) as isize, width);
        match (self, cell) {
            (Kind::Tanh, _) => ((x + h).tanh(), None),
            (Kind::Relu, _) => ((x + h).relu(), None),
            (Kind::Gru, _) => {
                let reset = (gate(x, 0) + gate(h, 0)).sigmoid();
                let update = (gate(x, 1) + gate(h, 1)).sigmoid();
                let new = (gate(x, 2) + reset * gate(h, 2)).tanh();
                let next = &new + update * (last - &new);
                (next, None)
            }
            (Kind::Lstm, cell) => {
                let sums = x + h;
                let (take, keep) = (gate(&sums, 0).sigmoid(), gate(&sums, 1).sigmoid());
                let (new, show) = (gate(&sums, 2).tanh(), gate(&sums, 3).sigmoid());
                let next = match cell {
                    Some(cell) => keep * cell + take * new,
                    None => take * new,
                };
                (show * next.tanh(), Some(next))
            }
        }
    }
}
