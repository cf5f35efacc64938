//! Connectionist temporal classification: the likelihood of a sequence of labels over all ways to align it.

use super::{Reduction, reduced};
use crate::{DType, Tensor};
use kiln_device::method;

/// How [`Tensor::ctc_loss`] counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CtcOptions {
    /// The class that stands for no label; 0 if not stated.
    pub blank: usize,
    /// The mean divides each loss by the number of its labels first, as in PyTorch.
    pub reduction: Reduction,
    /// Whether the loss of labels that cannot be aligned is 0 instead of infinite.
    pub zero_infinity: bool,
}

/// Stands for the logarithm of 0: its differences are finite, so that no gradient becomes NaN.
const NEVER: f64 = -1e30;

/// # Losses: sequences
impl Tensor {
    /// The negative log-likelihood of labels, given log-probabilities `[T, N, C]` (or `[T, C]`) of classes at each time.
    /// Labels are `[N, S]`, of which each row counts up to its length, or all rows after one another; better `[N, S]` for
    /// speed. Lengths are integers `[N]`; a time beyond T does not count.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let device = Device::cpu();
    /// let log = Tensor::zeros([2, 1, 2], &device).log_softmax(-1);
    /// let ints = |x: &[i64], shape: &[usize]| Tensor::from_slice(x, shape, &device);
    /// let loss = log.ctc_loss(&ints(&[1], &[1, 1]), &ints(&[2], &[1]), &ints(&[1], &[1]), &CtcOptions::default());
    /// // Three of four ways to spend two times give the label: -log(3 / 4).
    /// assert!((loss.item::<f32>().unwrap() - 0.2877).abs() < 1e-4);
    /// ```
    #[doc(alias("CTCLoss"))]
    #[track_caller]
    pub fn ctc_loss(
        &self,
        targets: &Tensor,
        input_lengths: &Tensor,
        target_lengths: &Tensor,
        options: &CtcOptions,
    ) -> Tensor {
        let _method = method("ctc_loss");
        let single = self.rank() == 2;
        assert!(single || self.rank() == 3, "ctc_loss: shape {:?} is not [T, N, C]", self.shape());
        let log = if single { self.unsqueeze(1) } else { self.clone() };
        let log = log.widened().maximum(NEVER);
        let (n, classes) = (log.shape()[1], log.shape()[2]);
        let (times, counts) = (lengths("input", input_lengths, n), lengths("target", target_lengths, n));
        assert!(options.blank < classes, "ctc_loss: blank {} of {classes} classes", options.blank);
        assert!(log.shape()[0] > 0, "ctc_loss: no times in shape {:?}", self.shape());
        let labels = Labels::new(targets, &counts, n, options.blank);
        let last = paths(&log, &labels, &times);
        let (end, before) = (&counts * 2, &counts * 2 - 1);
        let none = before.lt(0);
        let before = last.gather(1, &before.masked_fill(&none, 0)).masked_fill(&none, NEVER);
        let losses = -last.gather(1, &end).logaddexp(&before).reshape([n]);
        let instead = if options.zero_infinity { 0.0 } else { f64::INFINITY };
        let losses = losses.masked_fill(&losses.gt(-NEVER / 10.0), instead);
        let losses = match options.reduction {
            Reduction::Mean => losses / counts.reshape([n]).maximum(1).to_dtype(log.dtype()),
            Reduction::None | Reduction::Sum => losses,
        };
        let losses = reduced(losses, options.reduction).to_dtype(self.dtype().unpacked());
        if single && options.reduction == Reduction::None { losses.reshape(()) } else { losses }
    }
}

/// A length for each sequence, `[N, 1]`.
#[track_caller]
fn lengths(what: &str, x: &Tensor, n: usize) -> Tensor {
    let fits = x.dtype().is_int() && x.numel() == n;
    assert!(fits, "ctc_loss: {what} lengths {} for {n} sequences", x.meta());
    x.to_dtype(DType::I64).reshape([n, 1])
}

/// Labels with blanks around each: `[N, L]`, and where a path may step over the blank before a label.
struct Labels {
    classes: Tensor,
    skips: Tensor,
}

impl Labels {
    #[track_caller]
    fn new(targets: &Tensor, counts: &Tensor, n: usize, blank: usize) -> Labels {
        assert!(targets.dtype().is_int(), "ctc_loss: labels are integers, not {}", targets.dtype());
        let targets = targets.to_dtype(DType::I64);
        let (shape, device) = (targets.shape(), targets.value.device());
        let most = if shape.len() == 1 { targets.numel() } else { targets.dim(-1) };
        let place = Tensor::index_along([1, most], 1, device);
        let rows = match shape.len() {
            2 if shape[0] == n => targets,
            1 if most == 0 => targets.reshape([1, 0]).broadcast_to([n, 0]),
            1 => {
                let starts = counts.cumsum(0) - counts;
                targets.taken(0, &(starts + &place).minimum(most - 1))
            }
            _ => panic!("ctc_loss: labels of shape {shape:?} for {n} sequences"),
        };
        // What is behind a row's length need not be a class.
        let rows = rows.masked_fill(&place.ge(counts), blank).unsqueeze(-1);
        let pairs = Tensor::cat(&[rows.full_like(blank), rows], 2).reshape([n, 2 * most]);
        let end = Tensor::full([n, 1], blank, DType::I64, device);
        let classes = Tensor::cat(&[pairs, end], 1);
        let length = 2 * most + 1;
        let skips = match length {
            1 => Tensor::full([n, 1], 0, DType::Bool, device),
            _ => {
                let (here, two_before) = (classes.narrow(1, 2, length - 2), classes.narrow(1, 0, length - 2));
                let may = here.ne(blank).bitwise_and(here.ne(&two_before));
                Tensor::cat(&[Tensor::full([n, 2], 0, DType::Bool, device), may], 1)
            }
        };
        Labels { classes, skips }
    }
}

/// The logarithm of the likelihood of all paths that have come to each place at their sequence's end: `[N, L]`.
#[track_caller]
fn paths(log: &Tensor, labels: &Labels, times: &Tensor) -> Tensor {
    let (t, n, length) = (log.shape()[0], log.shape()[1], labels.classes.dim(-1));
    let device = log.value.device();
    let given = log.gather(2, &labels.classes.unsqueeze(0).broadcast_to([t, n, length]));
    let start = Tensor::index_along([1, length], 1, device).lt(2);
    let mut now = start.where_(&given.select(0, 0), &given.constant(NEVER));
    let outside = Tensor::full([n, 2], NEVER, log.dtype(), device);
    for time in 1..t {
        let before = Tensor::cat(&[&outside, &now], 1);
        let stay = &now;
        let step = before.narrow(1, 1, length);
        let skip = before.narrow(1, 0, length).masked_fill(&labels.skips.logical_not(), NEVER);
        // The shift cancels, so it takes no part in the derivative.
        let most = stay.detach().maximum(step.detach()).maximum(skip.detach());
        let sum = (stay - &most).exp() + (step - &most).exp() + (skip - &most).exp();
        let next = sum.log() + most + given.select(0, time as isize);
        now = times.gt(time).where_(&next, &now);
    }
    now
}
