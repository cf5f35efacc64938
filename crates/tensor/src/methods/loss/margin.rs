//! Losses that ask for a margin between scores or distances.

use super::{Reduction, reduced};
use crate::{DType, Tensor};
use kiln_device::method;

/// What [`Tensor::triplet_margin_loss`] measures with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TripletOptions {
    /// How much further the negative one shall be.
    pub margin: f64,
    /// Of which norm distances are.
    pub p: f64,
    /// Added to each difference.
    pub eps: f64,
    /// Whether the negative one's distance is the smaller of those to the anchor and to the positive one.
    pub swap: bool,
    /// Mean if not stated.
    pub reduction: Reduction,
}

impl Default for TripletOptions {
    fn default() -> TripletOptions {
        TripletOptions { margin: 1.0, p: 2.0, eps: 1e-6, swap: false, reduction: Reduction::Mean }
    }
}

/// How [`Tensor::multi_margin_loss`] counts.
#[derive(Clone, Debug)]
pub struct MarginOptions {
    /// How far the right class shall be above all others.
    pub margin: f64,
    /// The power of what is missing: 1 or 2.
    pub p: u32,
    /// A weight for each class, taken at the right one.
    pub weight: Option<Tensor>,
    /// Mean if not stated.
    pub reduction: Reduction,
}

impl Default for MarginOptions {
    fn default() -> MarginOptions {
        MarginOptions { margin: 1.0, p: 1, weight: None, reduction: Reduction::Mean }
    }
}

/// # Losses: margins
impl Tensor {
    /// Of two lists of scores, `max(0, margin - target * (x - other))`: 1 in `target` asks for x to be higher, -1 for `other`.
    #[doc(alias("MarginRankingLoss"))]
    #[track_caller]
    pub fn margin_ranking_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: Reduction,
    ) -> Tensor {
        let _method = method("margin_ranking_loss");
        reduced(((other - self) * target + margin).relu(), reduction)
    }

    /// Of distances: x where `target` is 1, `max(0, margin - x)` where it is -1.
    #[doc(alias("HingeEmbeddingLoss"))]
    #[track_caller]
    pub fn hinge_embedding_loss(&self, target: &Tensor, margin: f64, reduction: Reduction) -> Tensor {
        let _method = method("hinge_embedding_loss");
        let near = self.masked_fill(&target.eq(-1), 0);
        let far = (margin - self).relu().masked_fill(&target.eq(1), 0);
        reduced(near + far, reduction)
    }

    /// `log(1 + exp(-target * x))`, with targets 1 and -1.
    #[doc(alias("SoftMarginLoss"))]
    #[track_caller]
    pub fn soft_margin_loss(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("soft_margin_loss");
        reduced((-(self * target)).softplus(), reduction)
    }

    /// Of pairs of vectors along the last axis: 1 less their cosine where `target` is 1, what the cosine is above `margin`
    /// where it is -1.
    #[doc(alias("CosineEmbeddingLoss"))]
    #[track_caller]
    pub fn cosine_embedding_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: Reduction,
    ) -> Tensor {
        let _method = method("cosine_embedding_loss");
        // The constant that PyTorch adds.
        let size = |x: &Tensor| x.square().sum(-1) + 1e-12;
        let cosine = (self * other).sum(-1) / (size(self) * size(other)).sqrt();
        let near = (1.0 - &cosine).masked_fill(&target.ne(1), 0);
        let far = (&cosine - margin).relu().masked_fill(&target.ne(-1), 0);
        reduced(near + far, reduction)
    }

    /// Of this anchor: `max(0, d(x, positive) - d(x, negative) + margin)`, with distances along the last axis.
    #[doc(alias("TripletMarginLoss"))]
    #[track_caller]
    pub fn triplet_margin_loss(&self, positive: &Tensor, negative: &Tensor, o: &TripletOptions) -> Tensor {
        let _method = method("triplet_margin_loss");
        let near = self.pairwise_distance(positive, o.p, o.eps);
        let far = self.pairwise_distance(negative, o.p, o.eps);
        let far = match o.swap {
            true => far.minimum(positive.pairwise_distance(negative, o.p, o.eps)),
            false => far,
        };
        reduced((near - far + o.margin).relu(), o.reduction)
    }

    /// [`Tensor::triplet_margin_loss`] with distances of your own.
    #[doc(alias("TripletMarginWithDistanceLoss"))]
    #[track_caller]
    pub fn triplet_margin_with_distance_loss(
        &self,
        positive: &Tensor,
        negative: &Tensor,
        distance: impl Fn(&Tensor, &Tensor) -> Tensor,
        margin: f64,
        reduction: Reduction,
    ) -> Tensor {
        let _method = method("triplet_margin_with_distance_loss");
        let (near, far) = (distance(self, positive), distance(self, negative));
        reduced((near - far + margin).relu(), reduction)
    }

    /// Of scores `[N, C]` or `[C]` and the right classes: the sum over other classes of `max(0, margin - x[right] + x)`,
    /// divided by their number C.
    #[doc(alias("MultiMarginLoss"))]
    #[track_caller]
    pub fn multi_margin_loss(&self, target: &Tensor, options: &MarginOptions) -> Tensor {
        let _method = method("multi_margin_loss");
        let (shape, want) = (self.shape(), target.shape());
        let rank = shape.len();
        let fits = (1..=2).contains(&rank) && want[..] == shape[..rank - 1];
        assert!(fits, "multi_margin_loss: targets of shape {want:?} for scores of shape {shape:?}");
        assert!(matches!(options.p, 1 | 2), "multi_margin_loss: p is 1 or 2, not {}", options.p);
        let target = target.to_dtype(DType::I64).unsqueeze(-1);
        let missing = (self - self.gather(-1, &target) + options.margin).relu();
        let missing = if options.p == 2 { missing.square() } else { missing };
        let missing = match &options.weight {
            Some(weight) => missing * weight.to_dtype(self.dtype()).taken(0, &target),
            None => missing,
        };
        let right = Tensor::index_along([shape[rank - 1]], 0, self.value.device()).eq(&target);
        reduced(missing.masked_fill(&right, 0).mean(-1), options.reduction)
    }

    /// Of scores `[N, C]` or `[C]` and lists of right classes of that shape, which end at the first -1: the sum over right
    /// and wrong classes of `max(0, 1 - x[right] + x[wrong])`, divided by C.
    #[doc(alias("MultiLabelMarginLoss"))]
    #[track_caller]
    pub fn multilabel_margin_loss(&self, target: &Tensor, reduction: Reduction) -> Tensor {
        let _method = method("multilabel_margin_loss");
        let (shape, want) = (self.shape(), target.shape());
        let fits = (1..=2).contains(&shape.len()) && want == shape;
        assert!(fits, "multilabel_margin_loss: targets of shape {want:?} for scores of shape {shape:?}");
        let target = target.to_dtype(DType::I64);
        let ended = target.lt(0).cumsum(-1).gt(0);
        let safe = target.masked_fill(&ended, 0);
        let named = ended.logical_not().to_dtype(DType::I64);
        let right = target.zeros_like().scatter_add(-1, &safe, &named).gt(0);
        // [.., right, wrong]
        let missing = (self.unsqueeze(-2) - self.gather(-1, &safe).unsqueeze(-1) + 1.0).relu();
        let out = ended.unsqueeze(-1).bitwise_or(right.unsqueeze(-2));
        let classes = shape[shape.len() - 1].max(1);
        reduced(missing.masked_fill(&out, 0).sum([-2, -1]) / classes, reduction)
    }
}
