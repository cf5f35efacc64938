//! Losses. Each is computed element by element and then reduced.

mod ctc;
mod likelihood;
mod margin;

pub use ctc::CtcOptions;
pub use likelihood::PoissonOptions;
pub use margin::{MarginOptions, TripletOptions};

use crate::{DType, Shape, Tensor};
use kiln_device::method;

/// What becomes of the losses of single elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reduction {
    /// They are given as they are.
    None,
    /// Their mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// How classes count in [`Tensor::cross_entropy_with`] and [`Tensor::nll_loss_with`].
#[derive(Clone, Debug)]
pub struct ClassOptions {
    /// Mean if not stated. Where classes have weights, the mean is weighted by those of the targets.
    pub reduction: Reduction,
    /// The part of each target that is spread evenly over all classes; of cross entropy only.
    pub label_smoothing: f64,
    /// A target that is left out, and does not count in the mean.
    pub ignore_index: i64,
    /// A weight for each class.
    pub weight: Option<Tensor>,
}

impl Default for ClassOptions {
    fn default() -> ClassOptions {
        ClassOptions { reduction: Reduction::Mean, label_smoothing: 0.0, ignore_index: -100, weight: None }
    }
}

/// # Losses
///
/// All of PyTorch's but `AdaptiveLogSoftmaxWithLoss`, which is a module of its own kind.
impl Tensor {
    /// The squared distance from `target`.
    #[doc(alias("MSELoss"))]
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("mse_loss");
        reduced((self - target).square(), reduction)
    }

    /// The distance from `target`.
    #[doc(alias("L1Loss"))]
    #[track_caller]
    pub fn l1_loss(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("l1_loss");
        reduced((self - target).abs(), reduction)
    }

    /// Half the squared distance from `target` up to `delta`, and linear with slope `delta` from there on.
    #[doc(alias("HuberLoss"))]
    #[track_caller]
    pub fn huber_loss(&self, target: &Tensor, delta: f64, reduction: Reduction) -> Tensor {
        let _method = method("huber_loss");
        assert!(delta > 0.0, "huber_loss: delta {delta} is not positive");
        let distance = (self - target).abs();
        // Only what is below delta is squared, so that a far outlier has a finite gradient.
        let near = distance.minimum(delta);
        reduced(near.square() * 0.5 + (distance - near) * delta, reduction)
    }

    /// [`Tensor::huber_loss`] divided by its `delta`, which is called `beta` here: linear with slope 1 from there on. At a
    /// `beta` of 0 it is [`Tensor::l1_loss`].
    #[doc(alias("SmoothL1Loss"))]
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &Tensor, beta: f64, reduction: Reduction) -> Tensor {
        let _method = method("smooth_l1_loss");
        assert!(beta >= 0.0, "smooth_l1_loss: beta {beta} is negative");
        match beta == 0.0 {
            true => self.l1_loss(target, reduction),
            false => self.huber_loss(target, beta, reduction) / beta,
        }
    }

    /// The mean cross entropy of classes along axis 1 (0 for rank 1), given as logits. Targets are integer classes
    /// without that axis, or float probabilities with it.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let device = Device::cpu();
    /// let logits = Tensor::from_slice(&[2.0f32, 0.0, 0.0, 3.0], [2, 2], &device);
    /// let target = Tensor::from_slice(&[0i64, 1], [2], &device);
    /// let loss = logits.cross_entropy(&target).item::<f32>().unwrap();
    /// assert!((loss - 0.08776).abs() < 1e-4);
    /// ```
    #[doc(alias("CrossEntropyLoss"))]
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Tensor {
        let _method = method("cross_entropy");
        self.cross_entropy_with(target, &ClassOptions::default())
    }

    /// [`Tensor::cross_entropy`] with options.
    #[track_caller]
    pub fn cross_entropy_with(&self, target: &Tensor, options: &ClassOptions) -> Tensor {
        let _method = method("cross_entropy_with");
        assert!(self.rank() > 0, "cross_entropy: a number has no classes");
        let axis = class_axis(self);
        let log = self.log_softmax(axis as isize);
        if target.dtype().is_float() {
            assert!(
                target.shape() != self.shape().removed(axis) || target.shape() == self.shape(),
                "cross_entropy: class numbers must be integers, not {}; probabilities have the shape of the logits, {:?}",
                target.meta(),
                self.shape()
            );
            return soft_targets(&log, target, axis, options);
        }
        let share = options.label_smoothing;
        let chosen = class_loss("cross_entropy", &log, target, axis, options);
        if share == 0.0 {
            return chosen;
        }
        let classes = log.shape()[axis] as f64;
        let all = match &options.weight {
            Some(weight) => &log * along(weight, &log, axis),
            None => log,
        };
        let (valid, counts) = counted(target, options);
        let spread = (-all.sum(axis)).masked_fill(&valid.logical_not(), 0);
        let spread = weighted(spread, counts, options.reduction);
        chosen * (1.0 - share) + spread * (share / classes)
    }

    /// The mean negative log-probability of the targets, with classes along axis 1 (0 for rank 1).
    #[doc(alias("NLLLoss"))]
    #[track_caller]
    pub fn nll_loss(&self, target: &Tensor) -> Tensor {
        let _method = method("nll_loss");
        self.nll_loss_with(target, &ClassOptions::default())
    }

    /// [`Tensor::nll_loss`] with options.
    #[track_caller]
    pub fn nll_loss_with(&self, target: &Tensor, options: &ClassOptions) -> Tensor {
        let _method = method("nll_loss_with");
        assert!(self.rank() > 0, "nll_loss: a number has no classes");
        class_loss("nll_loss", self, target, class_axis(self), options)
    }

    /// The cross entropy of a yes-or-no decision given as a logit; `target` is the probability of yes.
    #[doc(alias("BCEWithLogitsLoss"))]
    #[track_caller]
    pub fn binary_cross_entropy_with_logits(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("binary_cross_entropy_with_logits");
        reduced((1.0 - target) * self - self.log_sigmoid(), reduction)
    }

    /// The divergence `target * (log(target) - x)` of log-probabilities x from the probabilities `target`. The mean is
    /// over all elements; divide the sum by the batch's size for the mathematical one.
    #[doc(alias("KLDivLoss", "batchmean"))]
    #[track_caller]
    pub fn kl_div(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("kl_div");
        let zero = target.eq(0);
        let entropy = target * target.masked_fill(&zero, 1).log();
        reduced(entropy - target * self, reduction)
    }
}

#[track_caller]
fn reduced(losses: Tensor, reduction: Reduction) -> Tensor {
    match reduction {
        Reduction::None => losses,
        Reduction::Mean => losses.mean(()),
        Reduction::Sum => losses.sum(()),
    }
}

fn class_axis(x: &Tensor) -> usize {
    if x.rank() == 1 { 0 } else { 1 }
}

/// A weight for each class, along the class axis.
#[track_caller]
fn along(weight: &Tensor, log: &Tensor, axis: usize) -> Tensor {
    let mut shape = Shape::repeat(1, log.rank() - axis);
    shape[0] = log.shape()[axis];
    weight.to_dtype(log.dtype()).reshape(shape)
}

/// Which targets count, and how much each: nothing where all count as 1.
#[track_caller]
fn counted(target: &Tensor, options: &ClassOptions) -> (Tensor, Tensor) {
    let valid = target.ne(options.ignore_index);
    let counts = match &options.weight {
        Some(weight) => {
            let safe = target.masked_fill(&valid.logical_not(), 0);
            weight.taken(0, &safe).masked_fill(&valid.logical_not(), 0)
        }
        None => valid.to_dtype(DType::F32),
    };
    (valid, counts)
}

#[track_caller]
fn class_loss(name: &str, log: &Tensor, target: &Tensor, axis: usize, options: &ClassOptions) -> Tensor {
    let dtype = target.dtype();
    assert!(dtype.is_int(), "{name}: class numbers must be integers, not {dtype}");
    let fits = target.shape() == log.shape().removed(axis);
    assert!(fits, "{name}: targets {} do not fit classes {}", target.meta(), log.meta());
    let (valid, counts) = counted(target, options);
    // An ignored target need not be a class.
    let ignored = valid.logical_not();
    let index = target.masked_fill(&ignored, 0).unsqueeze(axis as isize);
    let mut losses = -log.gather(axis as isize, &index).squeeze(axis as isize);
    if options.weight.is_some() {
        losses = losses * &counts;
    }
    weighted(losses.masked_fill(&ignored, 0), counts, options.reduction)
}

/// Losses reduced, their mean over the sum of `counts`.
#[track_caller]
fn weighted(losses: Tensor, counts: Tensor, reduction: Reduction) -> Tensor {
    match reduction {
        Reduction::None => losses,
        Reduction::Sum => losses.sum(()),
        Reduction::Mean => {
            let (dtype, losses) = (losses.dtype(), losses.widened());
            (losses.sum(()) / counts.sum(()).to_dtype(losses.dtype())).to_dtype(dtype)
        }
    }
}

#[track_caller]
fn soft_targets(log: &Tensor, target: &Tensor, axis: usize, options: &ClassOptions) -> Tensor {
    let (lhs, rhs) = (log.shape(), target.shape());
    assert!(lhs == rhs, "cross_entropy: probabilities of shape {rhs:?} for classes of shape {lhs:?}");
    let share = options.label_smoothing;
    let target = match share == 0.0 {
        true => target.clone(),
        false => target * (1.0 - share) + share / lhs[axis] as f64,
    };
    let products = match &options.weight {
        Some(weight) => log * target * along(weight, log, axis),
        None => log * target,
    };
    let losses = -products.sum(axis);
    reduced(losses, options.reduction)
}
