//! Layers one after another, in one or both directions.

use super::Kind;
use super::scan::{Operands, Scan};
use crate::init::uniform;
use crate::layer::misfit;
use crate::{Mode, Part, PartMut};
use kiln_tensor::{DType, Device, Tensor};

/// The weights of one direction of one layer.
#[derive(Clone)]
pub struct RecurrentWeights {
    /// `[gates * hidden, inputs]`. The gates of an LSTM are those for the input, to forget, for the cell and for the output;
    /// those of a GRU are to reset, to update and for what is new.
    pub input: Tensor,
    /// `[gates * hidden, hidden]`.
    pub hidden: Tensor,
    /// `[gates * hidden]`.
    pub input_bias: Option<Tensor>,
    /// `[gates * hidden]`.
    pub hidden_bias: Option<Tensor>,
}

impl RecurrentWeights {
    #[track_caller]
    pub(super) fn drawn(kind: Kind, inputs: usize, hidden: usize, bias: bool, device: &Device) -> Self {
        let rows = kind.gates() * hidden;
        let draw = |shape: &[usize]| uniform(shape, hidden, device);
        RecurrentWeights {
            input: draw(&[rows, inputs]),
            hidden: draw(&[rows, hidden]),
            input_bias: bias.then(|| draw(&[rows])),
            hidden_bias: bias.then(|| draw(&[rows])),
        }
    }

    /// What inputs come to, for all steps. Where both biases are only added, both are in it.
    #[track_caller]
    pub(super) fn sums(&self, kind: Kind, x: &Tensor) -> Tensor {
        let both;
        let bias = match (&self.input_bias, &self.hidden_bias, kind) {
            (Some(input), Some(hidden), Kind::Tanh | Kind::Relu | Kind::Lstm) => {
                both = input + hidden;
                Some(&both)
            }
            (None, Some(hidden), Kind::Tanh | Kind::Relu | Kind::Lstm) => Some(hidden),
            (input, _, _) => input.as_ref(),
        };
        x.linear(&self.input, bias)
    }

    /// The bias that only the hidden state gets.
    pub(super) fn inner_bias(&self, kind: Kind) -> Option<&Tensor> {
        self.hidden_bias.as_ref().filter(|_| kind == Kind::Gru)
    }

    pub(super) fn parts(&self, end: &str, f: &mut dyn FnMut(&str, Part<'_>)) {
        f(&format!("weight_ih{end}"), Part::Parameter(&self.input));
        f(&format!("weight_hh{end}"), Part::Parameter(&self.hidden));
        let biases = [("bias_ih", &self.input_bias), ("bias_hh", &self.hidden_bias)];
        for (name, bias) in biases {
            bias.iter().for_each(|bias| f(&format!("{name}{end}"), Part::Parameter(bias)));
        }
    }

    pub(super) fn parts_mut(&mut self, end: &str, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        f(&format!("weight_ih{end}"), PartMut::Parameter(&mut self.input));
        f(&format!("weight_hh{end}"), PartMut::Parameter(&mut self.hidden));
        let biases = [("bias_ih", &mut self.input_bias), ("bias_hh", &mut self.hidden_bias)];
        for (name, bias) in biases {
            bias.iter_mut().for_each(|bias| f(&format!("{name}{end}"), PartMut::Parameter(bias)));
        }
    }
}

/// What `Rnn`, `Lstm` and `Gru` are.
#[derive(Clone)]
pub(super) struct Stack {
    pub kind: Kind,
    pub inputs: usize,
    pub hidden: usize,
    /// Layer after layer, forward before backward.
    pub weights: Vec<RecurrentWeights>,
    pub bidirectional: bool,
    pub dropout: f64,
    pub batch_first: bool,
    pub mode: Mode,
}

/// A sequence of states, and the last ones, `[layers * directions, batch, hidden]`.
pub(super) struct Passed {
    pub y: Tensor,
    pub h: Tensor,
    pub c: Option<Tensor>,
}

impl Stack {
    #[track_caller]
    pub fn new(kind: Kind, inputs: usize, hidden: usize, device: &Device) -> Stack {
        if hidden == 0 {
            misfit(kind.name(), "a hidden state of width 0 keeps nothing".into());
        }
        let weights = vec![RecurrentWeights::drawn(kind, inputs, hidden, true, device)];
        let mode = Mode::default();
        Stack { kind, inputs, hidden, weights, bidirectional: false, dropout: 0.0, batch_first: false, mode }
    }

    fn directions(&self) -> usize {
        1 + self.bidirectional as usize
    }

    pub fn layers(&self) -> usize {
        self.weights.len() / self.directions()
    }

    /// The same with other numbers of layers and directions. Weights that would be of another shape are drawn anew.
    #[track_caller]
    pub fn arranged(mut self, layers: usize, bidirectional: bool) -> Stack {
        if layers == 0 {
            misfit(self.kind.name(), "0 layers pass nothing on".into());
        }
        let first = &self.weights[0];
        let (bias, device) = (first.input_bias.is_some(), first.input.device());
        let directions = 1 + bidirectional as usize;
        let mut old = std::mem::take(&mut self.weights).into_iter();
        for at in 0..layers * directions {
            let inputs = if at < directions { self.inputs } else { self.hidden * directions };
            let kept = old.next().filter(|weights| weights.input.dim(1) == inputs);
            self.weights.push(
                kept.unwrap_or_else(|| {
                    RecurrentWeights::drawn(self.kind, inputs, self.hidden, bias, &device)
                }),
            );
        }
        self.bidirectional = bidirectional;
        self
    }

    pub fn without_bias(mut self) -> Stack {
        for weights in &mut self.weights {
            (weights.input_bias, weights.hidden_bias) = (None, None);
        }
        self
    }

    /// What PyTorch calls the weights at a place.
    fn end(&self, at: usize) -> String {
        let reverse = if at % self.directions() == 1 { "_reverse" } else { "" };
        format!("_l{}{reverse}", at / self.directions())
    }

    pub fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        for (at, weights) in self.weights.iter().enumerate() {
            weights.parts(&self.end(at), f);
        }
        f("mode", Part::Mode(&self.mode));
        f("inputs", Part::Setting(&self.inputs));
        f("hidden", Part::Setting(&self.hidden));
        if self.layers() > 1 {
            f("layers", Part::Setting(&self.layers()));
        }
        if self.bidirectional {
            f("bidirectional", Part::Setting(&true));
        }
        if self.dropout > 0.0 {
            f("dropout", Part::Setting(&self.dropout));
        }
        if self.batch_first {
            f("batch_first", Part::Setting(&true));
        }
    }

    pub fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        for at in 0..self.weights.len() {
            let end = self.end(at);
            self.weights[at].parts_mut(&end, f);
        }
        f("mode", PartMut::Mode(&mut self.mode));
    }

    #[track_caller]
    pub fn forward(
        &self,
        x: &Tensor,
        h: Option<&Tensor>,
        c: Option<&Tensor>,
        lengths: Option<&Tensor>,
    ) -> Passed {
        if x.rank() != 2 {
            return self.batched(x, h, c, lengths);
        }
        let axis = if self.batch_first { 0 } else { 1 };
        let lift = |t: Option<&Tensor>| t.map(|t| t.unsqueeze(1));
        let (h, c) = (lift(h), lift(c));
        let passed = self.batched(&x.unsqueeze(axis), h.as_ref(), c.as_ref(), lengths);
        Passed { y: passed.y.squeeze(axis), h: passed.h.squeeze(1), c: passed.c.map(|c| c.squeeze(1)) }
    }

    #[track_caller]
    fn batched(
        &self,
        x: &Tensor,
        h: Option<&Tensor>,
        c: Option<&Tensor>,
        lengths: Option<&Tensor>,
    ) -> Passed {
        let time = if self.batch_first { 1 } else { 0 };
        let batch = self.checked(x, [h, c], lengths);
        let lengths = lengths.map(|lengths| lengths.to_dtype(DType::I64).reshape([batch, 1]));
        let steps = x.dim(time);
        let (mut y, mut lasts, mut cells) = (x.clone(), Vec::new(), Vec::new());
        for (layer, weights) in self.weights.chunks(self.directions()).enumerate() {
            if layer > 0 && self.mode.is_training() {
                y = y.dropout(self.dropout);
            }
            let mut found = Vec::new();
            for (direction, weights) in weights.iter().enumerate() {
                let at = (layer * self.directions() + direction) as isize;
                let zeros = || Tensor::full([batch, self.hidden], 0, weights.hidden.dtype(), &x.device());
                let first = |t: Option<&Tensor>| t.map_or_else(zeros, |t| t.select(0, at));
                let operands = Operands {
                    sums: weights.sums(self.kind, &y),
                    weight: weights.hidden.clone(),
                    bias: weights.inner_bias(self.kind).cloned(),
                    h: first(h),
                    c: (self.kind == Kind::Lstm).then(|| first(c)),
                };
                let reverse = direction == 1;
                let scan = Scan { kind: self.kind, time, reverse, lengths: lengths.clone() };
                let all = scan.run(&operands);
                let end = if reverse { 0 } else { steps - 1 };
                let last = if lengths.is_some() { steps } else { end };
                lasts.push(all.select(time, last as isize));
                cells.extend(operands.c.map(|_| all.select(time, -1)));
                found.push(all.narrow(time, 0, steps));
            }
            y = if found.len() == 1 { found.remove(0) } else { Tensor::cat(&found, 2) };
        }
        let c = (!cells.is_empty()).then(|| Tensor::stack(&cells, 0));
        Passed { y, h: Tensor::stack(&lasts, 0), c }
    }

    /// How many samples there are.
    #[track_caller]
    fn checked(&self, x: &Tensor, states: [Option<&Tensor>; 2], lengths: Option<&Tensor>) -> usize {
        let (name, shape) = (self.kind.name(), x.shape());
        let order = if self.batch_first { "[batch, time, inputs]" } else { "[time, batch, inputs]" };
        if shape.len() != 3 {
            misfit(name, format!("shape {shape:?} is not {order}"));
        }
        if shape[2] != self.inputs {
            let (given, want) = (shape[2], self.inputs);
            misfit(
                name,
                format!("input has {given} features where {want} are expected ({shape:?} is {order})"),
            );
        }
        let (steps, batch) = if self.batch_first { (shape[1], shape[0]) } else { (shape[0], shape[1]) };
        if steps == 0 {
            misfit(name, format!("shape {shape:?} has no steps ({order})"));
        }
        let want = [self.weights.len(), batch, self.hidden];
        if let Some(state) = states.into_iter().flatten().find(|state| state.shape()[..] != want) {
            let given = state.shape();
            misfit(
                name,
                format!("a state of shape {given:?} where {want:?} is expected (layers, batch, hidden)"),
            );
        }
        if let Some(lengths) = lengths.filter(|t| t.shape()[..] != [batch] || t.dtype().is_float()) {
            misfit(
                name,
                format!("lengths are {}, not one integer for each of {batch} samples", lengths.meta()),
            );
        }
        batch
    }
}
