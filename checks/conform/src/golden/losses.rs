//! Losses: PyTorch's names and attributes to our methods.

use super::attrs::Attrs;
use super::options::*;
use kiln_tensor::{CtcOptions, MarginOptions, PoissonOptions, Reduction, Tensor, TripletOptions};

/// The loss, or `None` if it is not one of these.
pub(super) fn apply(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>, String> {
    for family in [pointwise, margins, classes_of] {
        if let Some(loss) = family(op, a, inputs)? {
            return Ok(Some(vec![loss]));
        }
    }
    Ok(None)
}

type Loss = Result<Option<Tensor>, String>;

/// One input after another, and how many there may be.
fn inputs_of<const N: usize>(inputs: &[Tensor]) -> Result<[&Tensor; N], String> {
    let all: Vec<&Tensor> = inputs.iter().collect();
    all.try_into().map_err(|_| format!("{} inputs instead of {N}", inputs.len()))
}

fn pointwise(op: &str, a: &Attrs, inputs: &[Tensor]) -> Loss {
    let real = |key: &str, default: f64| Ok::<f64, String>(a.real(key)?.unwrap_or(default));
    let flag = |key: &str, default: bool| Ok::<bool, String>(a.flag(key)?.unwrap_or(default));
    Ok(Some(match op {
        "smooth_l1_loss" => {
            let [x, y] = inputs_of(inputs)?;
            x.smooth_l1_loss(y, real("beta", 1.0)?, reduction(a)?)
        }
        "binary_cross_entropy" if inputs.len() == 3 => {
            let losses = inputs[0].binary_cross_entropy(&inputs[1], Reduction::None);
            reduced(losses * &inputs[2], reduction(a)?)
        }
        "binary_cross_entropy" => {
            let [x, y] = inputs_of(inputs)?;
            x.binary_cross_entropy(y, reduction(a)?)
        }
        "poisson_nll_loss" => {
            let [x, y] = inputs_of(inputs)?;
            let options = PoissonOptions {
                log_input: flag("log_input", true)?,
                full: flag("full", false)?,
                eps: real("eps", 1e-8)?,
                reduction: reduction(a)?,
            };
            x.poisson_nll_loss(y, &options)
        }
        "gaussian_nll_loss" => {
            let [x, y, var] = inputs_of(inputs)?;
            x.gaussian_nll_loss(y, var, flag("full", false)?, real("eps", 1e-6)?, reduction(a)?)
        }
        "kl_div_log_target" => {
            let [x, y] = inputs_of(inputs)?;
            x.kl_div_log(y, reduction(a)?)
        }
        _ => return Ok(None),
    }))
}

fn margins(op: &str, a: &Attrs, inputs: &[Tensor]) -> Loss {
    let margin = |default: f64| Ok::<f64, String>(a.real("margin")?.unwrap_or(default));
    Ok(Some(match op {
        "margin_ranking_loss" => {
            let [x, y, target] = inputs_of(inputs)?;
            x.margin_ranking_loss(y, target, margin(0.0)?, reduction(a)?)
        }
        "hinge_embedding_loss" => {
            let [x, target] = inputs_of(inputs)?;
            x.hinge_embedding_loss(target, margin(1.0)?, reduction(a)?)
        }
        "soft_margin_loss" => {
            let [x, target] = inputs_of(inputs)?;
            x.soft_margin_loss(target, reduction(a)?)
        }
        "cosine_embedding_loss" => {
            let [x, y, target] = inputs_of(inputs)?;
            x.cosine_embedding_loss(y, target, margin(0.0)?, reduction(a)?)
        }
        "triplet_margin_loss" => {
            let [x, positive, negative] = inputs_of(inputs)?;
            let options = TripletOptions {
                margin: margin(1.0)?,
                p: a.real("p")?.unwrap_or(2.0),
                eps: a.real("eps")?.unwrap_or(1e-6),
                swap: a.flag("swap")?.unwrap_or(false),
                reduction: reduction(a)?,
            };
            x.triplet_margin_loss(positive, negative, &options)
        }
        _ => return Ok(None),
    }))
}

fn classes_of(op: &str, a: &Attrs, inputs: &[Tensor]) -> Loss {
    Ok(Some(match (op, inputs) {
        ("cross_entropy_weighted", [x, target, _]) => x.cross_entropy_with(target, &classes(a, inputs)?),
        ("cross_entropy_probabilities", [x, target, ..]) => {
            x.cross_entropy_with(target, &classes(a, inputs)?)
        }
        ("multi_margin_loss", [x, target, weight @ ..]) => {
            let options = MarginOptions {
                margin: a.real("margin")?.unwrap_or(1.0),
                p: a.size("p")?.unwrap_or(1) as u32,
                weight: weight.first().cloned(),
                reduction: reduction(a)?,
            };
            x.multi_margin_loss(target, &options)
        }
        ("multilabel_margin_loss", [x, target]) => x.multilabel_margin_loss(target, reduction(a)?),
        ("multilabel_soft_margin_loss", [x, target, weight @ ..]) => {
            x.multilabel_soft_margin_loss(target, weight.first(), reduction(a)?)
        }
        ("ctc_loss", [x, targets, input_lengths, target_lengths]) => {
            let options = CtcOptions {
                blank: a.size("blank")?.unwrap_or(0),
                reduction: reduction(a)?,
                zero_infinity: a.flag("zero_infinity")?.unwrap_or(false),
            };
            x.log_softmax(-1).ctc_loss(targets, input_lengths, target_lengths, &options)
        }
        _ => return Ok(None),
    }))
}

pub(super) fn reduced(losses: Tensor, reduction: Reduction) -> Tensor {
    match reduction {
        Reduction::None => losses,
        Reduction::Mean => losses.mean(()),
        Reduction::Sum => losses.sum(()),
    }
}
