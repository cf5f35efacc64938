//! Derivatives of the user's own making: `custom_grad`, and `checkpoint`, which recomputes instead of keeping.

use crate::random;
use crate::tape::{self, CustomRule, Edge, GradRule, GradStep, Metas, SavedValues};
use crate::{Gradients, Tensor};
use kiln_device::Origin;
use smallvec::SmallVec;
use std::sync::{Arc, Mutex};

/// The result of `f`, of which nothing inside is kept for backward: it runs once more there. Random numbers are drawn
/// again as they were. `f` may capture tracked tensors such as weights; they get their gradients too.
///
/// ```
/// # use kiln_tensor::*;
/// let x = Tensor::from_vec(vec![0.5f32, 1.0], [2], &Device::cpu()).requires_grad();
/// let y = checkpoint(&x, |x| x.exp().sin());
/// let grads = y.sum(()).backward();
/// assert!(grads.get(&x).is_some());
/// ```
#[track_caller]
pub fn checkpoint(x: &Tensor, f: impl Fn(&Tensor) -> Tensor + Send + Sync + 'static) -> Tensor {
    let origin = Origin::here();
    let generator = random::current();
    let y = f(x);
    if !tape::is_grad_enabled() {
        return y.detach();
    }
    let Some(edge) = &y.edge else { return y };
    let edges = frontier(edge, x.edge.as_ref());
    let x = x.clone();
    let again = Box::new(move || random::with_generator(generator.clone(), || f(&x)));
    attach_rule(edges, &[], y.detach(), GradRule::Recompute(again), origin)
}

/// `y`, with `derivative` giving the gradients of `inputs` (in order; `None` for none) from the gradient of `y`. Compute
/// `y` under [`crate::no_grad`], or from detached tensors.
///
/// ```
/// # use kiln_tensor::*;
/// let x = Tensor::from_vec(vec![-1.0f32, 2.0], [2], &Device::cpu()).requires_grad();
/// // Rounding whose gradient passes straight through.
/// let y = custom_grad(&[&x], x.detach().round(), |g| vec![Some(g.clone())]);
/// assert_eq!(y.sum(()).backward().get(&x).unwrap().to_vec::<f32>().unwrap(), [1.0, 1.0]);
/// ```
#[track_caller]
pub fn custom_grad(
    inputs: &[&Tensor],
    y: Tensor,
    derivative: impl Fn(&Tensor) -> Vec<Option<Tensor>> + Send + Sync + 'static,
) -> Tensor {
    let count = inputs.len();
    attach(
        inputs,
        y,
        Box::new(move |grads| match &grads[0] {
            Some(gradient) => derivative(gradient),
            None => vec![None; count],
        }),
    )
}

/// `y` as the result of a step with this rule.
#[track_caller]
pub(crate) fn attach(inputs: &[&Tensor], y: Tensor, rule: CustomRule) -> Tensor {
    let edges: SmallVec<[Option<Edge>; 2]> = inputs.iter().map(|t| t.edge.clone()).collect();
    if !tape::is_grad_enabled() || edges.iter().all(Option::is_none) {
        return y.detach();
    }
    attach_rule(edges, inputs, y.detach(), GradRule::Custom(rule), Origin::here())
}

fn attach_rule(
    edges: SmallVec<[Option<Edge>; 2]>,
    inputs: &[&Tensor],
    y: Tensor,
    rule: GradRule,
    origin: Origin,
) -> Tensor {
    let step = GradStep {
        number: tape::number(&edges),
        rule,
        edges,
        metas: Metas::new(inputs, std::slice::from_ref(&y.value)),
        device: y.value.device(),
        origin,
        saved: Mutex::new(Some(SavedValues::default())),
    };
    Tensor { value: y.value, edge: Some(Edge::Step(Arc::new(step), 0)) }
}

/// The links at which the graph below `root` leaves a checkpointed function: leaves, and the function's operand.
fn frontier(root: &Edge, operand: Option<&Edge>) -> SmallVec<[Option<Edge>; 2]> {
    let mut seen = rustc_hash::FxHashSet::default();
    let mut out: SmallVec<[Option<Edge>; 2]> = SmallVec::new();
    let mut edges = vec![root];
    let stop = match operand {
        Some(Edge::Step(step, _)) => Arc::as_ptr(step) as usize,
        _ => 0,
    };
    while let Some(edge) = edges.pop() {
        match edge {
            Edge::Leaf(leaf) => {
                if seen.insert(Arc::as_ptr(leaf) as usize) {
                    out.push(Some(edge.clone()));
                }
            }
            Edge::Step(step, _) => {
                let key = Arc::as_ptr(step) as usize;
                if seen.insert(key) {
                    if key == stop {
                        out.push(Some(edge.clone()));
                    } else {
                        edges.extend(step.edges.iter().flatten());
                    }
                }
            }
        }
    }
    out
}

impl Gradients {
    /// The gradient of a leaf, or zeros if the differentiated tensor does not depend on it.
    pub fn get_or_zeros(&self, of: &Tensor) -> Tensor {
        self.get(of).cloned().unwrap_or_else(|| of.detach().zeros_like())
    }
}
