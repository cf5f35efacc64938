//! Losses that are negative log-likelihoods of what was observed.

use super::{Reduction, reduced};
use crate::{Tensor, custom_grad, no_grad};
use kiln_device::method;
use std::f64::consts::PI;

/// How [`Tensor::poisson_nll_loss`] reads its operands.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PoissonOptions {
    /// Whether x is the logarithm of the rate, or the rate itself.
    pub log_input: bool,
    /// Whether the part that does not depend on x is there too, by Stirling's formula.
    pub full: bool,
    /// Added to a rate before its logarithm is taken.
    pub eps: f64,
    /// Mean if not stated.
    pub reduction: Reduction,
}

impl Default for PoissonOptions {
    fn default() -> PoissonOptions {
        PoissonOptions { log_input: true, full: false, eps: 1e-8, reduction: Reduction::Mean }
    }
}

/// # Losses: likelihoods
impl Tensor {
    /// The cross entropy of a yes-or-no decision given as a probability; `target` is the probability of yes. Logarithms
    /// count as at least -100. Logits give more exact results: [`Tensor::binary_cross_entropy_with_logits`].
    #[doc(alias("BCELoss"))]
    #[track_caller]
    pub fn binary_cross_entropy(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("binary_cross_entropy");
        let (ours, theirs) = (self.shape(), target.shape());
        assert!(ours == theirs, "binary_cross_entropy: shapes {ours:?} and {theirs:?} differ");
        let (p, t) = (self.clone(), target.to_dtype(self.dtype()));
        let log = |p: Tensor| p.log().maximum(-100.0);
        let losses = no_grad(|| &t * (log(1.0 - &p) - log(p.clone())) - log(1.0 - &p));
        let inputs = [self, &t.clone()];
        let losses = custom_grad(&inputs, losses, move |g| {
            let slope = (&p - &t) / (&p * (1.0 - &p)).maximum(1e-12);
            vec![Some(g * slope), Some(g * (log(1.0 - &p) - log(p.clone())))]
        });
        reduced(losses, reduction)
    }

    /// [`Tensor::binary_cross_entropy_with_logits`] with a weight for each decision, and one for what is to be yes.
    #[doc(alias("BCEWithLogitsLoss", "pos_weight"))]
    #[track_caller]
    pub fn binary_cross_entropy_with_logits_weighted(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        pos_weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Tensor {
        let _method = method("binary_cross_entropy_with_logits_weighted");
        let losses = match pos_weight {
            Some(pos) => (1.0 - target) * self - ((pos - 1.0) * target + 1.0) * self.log_sigmoid(),
            None => self.binary_cross_entropy_with_logits(target, Reduction::None),
        };
        reduced(if let Some(weight) = weight { losses * weight } else { losses }, reduction)
    }

    /// The mean over classes (the last axis) of yes-or-no cross entropies, given as logits.
    #[doc(alias("MultiLabelSoftMarginLoss"))]
    #[track_caller]
    pub fn multilabel_soft_margin_loss(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Tensor {
        let _method = method("multilabel_soft_margin_loss");
        let losses = self.binary_cross_entropy_with_logits_weighted(target, weight, None, Reduction::None);
        reduced(losses.mean(-1), reduction)
    }

    /// The negative log-likelihood of counts `target` from Poisson distributions: `exp(x) - target * x`.
    #[doc(alias("PoissonNLLLoss"))]
    #[track_caller]
    pub fn poisson_nll_loss(&self, target: &Tensor, options: &PoissonOptions) -> Tensor {
        let _method = method("poisson_nll_loss");
        let losses = match options.log_input {
            true => self.exp() - target * self,
            false => self - target * (self + options.eps).log(),
        };
        let losses = match options.full {
            true => {
                let small = target.le(1);
                let t = target.masked_fill(&small, 1);
                let rest = &t * t.log() - &t + (&t * (2.0 * PI)).log() * 0.5;
                losses + rest.masked_fill(&small, 0)
            }
            false => losses,
        };
        reduced(losses, options.reduction)
    }

    /// The negative log-likelihood of `target` from normal distributions around x: `(log(var) + (x - target)² / var) / 2`,
    /// and with `full` the constant too. Variances count as at least `eps`; their gradient does not stop there.
    #[doc(alias("GaussianNLLLoss"))]
    #[track_caller]
    pub fn gaussian_nll_loss(
        &self,
        target: &Tensor,
        var: &Tensor,
        full: bool,
        eps: f64,
        reduction: Reduction,
    ) -> Tensor {
        let _method = method("gaussian_nll_loss");
        let (shape, given) = (self.shape(), var.shape());
        // One variance for each row may come without the last axis.
        let var = match given.len() + 1 == shape.len() && given[..] == shape[..given.len()] {
            true => var.unsqueeze(-1),
            false => var.clone(),
        };
        let held = var.detach().maximum(eps);
        let var = (&var - var.detach()) + held;
        let losses = (var.log() + (self - target).square() / &var) * 0.5;
        reduced(if full { losses + 0.5 * (2.0 * PI).ln() } else { losses }, reduction)
    }

    /// [`Tensor::kl_div`] from probabilities that are given as logarithms too.
    #[doc(alias("kl_div", "log_target"))]
    #[track_caller]
    pub fn kl_div_log(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("kl_div_log");
        reduced(target.exp() * (target - self), reduction)
    }
}
