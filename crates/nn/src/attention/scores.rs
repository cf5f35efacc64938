//! Masks put together, and the weights of keys where they are needed themselves.

use kiln_tensor::{DType, Tensor};

/// A mask with keys taken out that are not seen.
#[track_caller]
pub(super) fn joined(mask: Option<Tensor>, seen: &Tensor) -> Tensor {
    match mask {
        None => seen.clone(),
        Some(mask) if mask.dtype() == DType::Bool => mask.logical_and(seen),
        Some(mask) => seen.where_(&mask, &mask.detach().full_like(f64::NEG_INFINITY)),
    }
}

/// The weights of keys for each query; a query that sees none has zeros.
#[track_caller]
pub(super) fn weights(q: &Tensor, k: &Tensor, mask: Option<&Tensor>, causal: bool) -> Tensor {
    let mut scores = (q * (1.0 / (q.dim(-1) as f64).sqrt())).matmul_t(k);
    let mut hidden = match mask {
        Some(mask) if mask.dtype() == DType::Bool => Some(mask.logical_not()),
        Some(mask) => {
            scores = scores + mask.to_dtype(q.dtype());
            None
        }
        None => None,
    };
    if causal {
        let device = q.device();
        let of = |n: usize| Tensor::arange(0, n as i64, 1, &device);
        let future = of(k.dim(-2)).gt(of(q.dim(-2)).unsqueeze(1));
        hidden = Some(match hidden {
            Some(hidden) => hidden.logical_or(&future),
            None => future,
        });
    }
    if let Some(hidden) = hidden {
        scores = scores.masked_fill(&hidden, f64::NEG_INFINITY);
    }
    let blind = scores.detach().amax_keepdim(-1).eq(f64::NEG_INFINITY);
    scores.masked_fill(&blind, 0).softmax(-1).masked_fill(&blind, 0)
}
