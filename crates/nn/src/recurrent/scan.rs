//! One direction of one layer, step by step. What the inputs come to is one product for the whole sequence, so a step is
//! a product with the hidden state and the fused pass behind it. So is a step of backward: the gradient of the hidden
//! weight is not summed up step by step, but is one product over all of them in the end.

use super::Kind;
use kiln_tensor::{Tensor, custom_grad, is_grad_enabled};
use std::sync::{Arc, Mutex, PoisonError};

/// How a sequence is gone through.
#[derive(Clone)]
pub(super) struct Scan {
    pub kind: Kind,
    /// The axis of time, 0 or 1; the other one is the batch.
    pub time: isize,
    pub reverse: bool,
    /// How many steps each sample has, `[batch, 1]`.
    pub lengths: Option<Tensor>,
}

/// What a direction uses: what the inputs come to, `[time, batch, gates * width]` or batch first; the hidden weight
/// `[gates * width, width]`; a GRU's bias of the hidden state; the first state.
#[derive(Clone)]
pub(super) struct Operands {
    pub sums: Tensor,
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub h: Tensor,
    pub c: Option<Tensor>,
}

impl Operands {
    fn list(&self) -> Vec<&Tensor> {
        [Some(&self.sums), Some(&self.weight), self.bias.as_ref(), Some(&self.h), self.c.as_ref()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The same values without links, as leaves where backward through the steps gives a gradient that is used.
    fn apart(&self, kind: Kind) -> Operands {
        let leaf = |t: &Tensor, due: bool| if due { t.detach().requires_grad() } else { t.detach() };
        Operands {
            sums: leaf(&self.sums, true),
            weight: self.weight.detach(),
            bias: self.bias.as_ref().map(Tensor::detach),
            // A GRU's first product is noted too.
            h: leaf(&self.h, self.h.is_tracked() || kind == Kind::Gru),
            c: self.c.as_ref().map(|c| leaf(c, c.is_tracked())),
        }
    }
}

/// What each step's product was and what its gradient is.
#[derive(Default)]
struct Notes {
    /// The hidden states that steps began with, in the order of time.
    lasts: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
}

type Shared = Arc<Mutex<Notes>>;

fn lock(notes: &Shared) -> std::sync::MutexGuard<'_, Notes> {
    notes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scan {
    /// The states of all steps along the axis of time, zeros behind a sample's end; then the last hidden state if samples
    /// have lengths; then the last cell of an LSTM.
    #[track_caller]
    pub fn run(&self, given: &Operands) -> Tensor {
        let operands = given.list();
        if !is_grad_enabled() || !operands.iter().any(|t| t.is_tracked()) {
            return self.steps(given, None);
        }
        let (apart, notes) = (given.apart(self.kind), Shared::default());
        let y = self.steps(&apart, Some(&notes));
        let result = y.detach();
        let (scan, whole) = (self.clone(), given.clone());
        custom_grad(&operands, result, move |g| match is_grad_enabled() {
            true => scan.differentiable(&whole, g),
            false => scan.gradients(&whole, &apart, &y, &notes, g),
        })
    }

    /// Each step recorded as what it is.
    #[track_caller]
    fn steps(&self, given: &Operands, notes: Option<&Shared>) -> Tensor {
        let count = given.sums.dim(self.time);
        let (mut h, mut c) = (given.h.clone(), given.c.clone());
        let mut states: Vec<Option<Tensor>> = vec![None; count];
        let mut lasts = vec![h.clone(); count];
        if let Some(notes) = notes {
            lock(notes).gradients = vec![None; count];
        }
        let order: Box<dyn Iterator<Item = usize>> =
            if self.reverse { Box::new((0..count).rev()) } else { Box::new(0..count) };
        for t in order {
            let x = given.sums.select(self.time, t as isize);
            lasts[t] = h.detach();
            let product = self.noted(h.linear(&given.weight, given.bias.as_ref()), t, notes);
            let (next, cell) = self.kind.step(&x, &product, &h, c.as_ref());
            match &self.lengths {
                None => {
                    (h, c) = (next, cell);
                    states[t] = Some(h.clone());
                }
                Some(lengths) => {
                    let within = lengths.gt(t as i64);
                    states[t] = Some(next.masked_fill(&within.logical_not(), 0));
                    h = within.where_(&next, &h);
                    c = cell.zip(c).map(|(new, old)| within.where_(&new, &old));
                }
            }
        }
        if let Some(notes) = notes {
            lock(notes).lasts = lasts;
        }
        let mut all: Vec<Tensor> = states.into_iter().flatten().collect();
        if self.lengths.is_some() {
            all.push(h);
        }
        all.extend(c);
        Tensor::stack(&all, self.time)
    }

    /// A GRU's product, whose gradient is noted: it is not that of the inputs' sums.
    #[track_caller]
    fn noted(&self, product: Tensor, t: usize, notes: Option<&Shared>) -> Tensor {
        let Some(notes) = notes.filter(|_| self.kind == Kind::Gru && product.is_tracked()) else {
            return product;
        };
        let notes = Arc::downgrade(notes);
        custom_grad(&[&product], product.detach(), move |g| {
            if let Some(notes) = notes.upgrade() {
                lock(&notes).gradients[t] = Some(g.clone());
            }
            vec![Some(g.clone())]
        })
    }

    /// The gradients of the operands, backward through the recorded steps.
    fn gradients(
        &self,
        whole: &Operands,
        apart: &Operands,
        y: &Tensor,
        notes: &Shared,
        g: &Tensor,
    ) -> Vec<Option<Tensor>> {
        let mut found = y.differentiate().with_gradient(g).retain_graph().run();
        let sums = found.remove(&apart.sums);
        let mut products = sums.clone();
        let mut notes = lock(notes);
        let Notes { lasts, gradients } = &mut *notes;
        if self.kind == Kind::Gru {
            let missing = |h: &Tensor| h.full_like(0).repeat([1, self.kind.gates()]);
            let steps: Vec<Tensor> = (gradients.iter_mut().zip(&*lasts))
                .map(|(g, h)| g.take().unwrap_or_else(|| missing(h)))
                .collect();
            products = Some(Tensor::stack(&steps, self.time));
        }
        let flat = |t: &Tensor| t.reshape([-1, t.dim(-1) as isize]);
        let mut all = vec![sums];
        all.push(
            products
                .as_ref()
                .filter(|_| whole.weight.is_tracked())
                .map(|products| flat(products).t().matmul(&flat(&Tensor::stack(lasts, self.time)))),
        );
        if whole.bias.is_some() {
            all.push(products.map(|products| flat(&products).sum(0)));
        }
        all.push(found.remove(&apart.h));
        all.extend(apart.c.as_ref().map(|c| found.remove(c)));
        all
    }

    /// Gradients that can be differentiated again: of the steps recorded anew, with their links.
    fn differentiable(&self, whole: &Operands, g: &Tensor) -> Vec<Option<Tensor>> {
        let operands = whole.list();
        let tracked: Vec<&Tensor> = operands.iter().copied().filter(|t| t.is_tracked()).collect();
        let y = self.steps(whole, None);
        let found = y.differentiate().with_gradient(g).create_graph().with_respect_to(&tracked).run();
        operands.iter().map(|t| found.get(t).cloned()).collect()
    }
}
