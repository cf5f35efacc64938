//! Reductions, and normalisation and losses along rows.

use super::{On, Row, Setup, Workload, forward_backward};
use kiln::prelude::*;

pub(super) const TABLE: &[Row] = &[
    ("reduce/sumsq_axis0", On::All, |s| sum_of_squares(s, 0)),
    ("reduce/sumsq_axis1", On::All, |s| sum_of_squares(s, 1)),
    ("rows/softmax_fwd", On::All, softmax),
    ("rows/softmax_fwdbwd", On::All, softmax_backward),
    ("rows/layernorm_fwd", On::All, layer_norm),
    ("rows/layernorm_fwdbwd", On::All, layer_norm_backward),
    ("rows/cross_entropy_fwdbwd", On::All, cross_entropy),
];

/// The eps of layer norm.
const EPS: f64 = 1e-5;

/// (x * x) summed, x[4096, 4096]
fn sum_of_squares(s: &Setup, axis: usize) -> Workload {
    Workload::moving([square(s)], move |[x]| vec![(x * x).sum(axis)])
}

/// softmax of each row, x[4096, 4096]
fn softmax(s: &Setup) -> Workload {
    Workload::moving([square(s)], |[x]| vec![x.softmax(1)])
}

fn softmax_backward(s: &Setup) -> Workload {
    forward_backward(s, [square(s)], |[x]| x.softmax(1))
}

/// layer norm of each row, x[8192, 1024] with weight and bias
fn layer_norm(s: &Setup) -> Workload {
    Workload::moving(norm_inputs(s), |[x, w, b]| vec![x.layer_norm(w.shape(), Some(w), Some(b), EPS)])
}

fn layer_norm_backward(s: &Setup) -> Workload {
    forward_backward(s, norm_inputs(s), |[x, w, b]| x.layer_norm(w.shape(), Some(w), Some(b), EPS))
}

/// mean cross entropy of x[2048, 8192], backward
fn cross_entropy(s: &Setup) -> Workload {
    let (rows, classes) = (s.n(2048), s.n(8192));
    let (x, y) = (s.randn([rows, classes]).requires_grad(), s.classes(classes, [rows]));
    Workload::moving([x, y], |[x, y]| {
        let loss = x.cross_entropy(y);
        let gradients = loss.backward();
        [loss.detach()].into_iter().chain(gradients.get(x).cloned()).collect()
    })
}

fn square(s: &Setup) -> Tensor {
    s.randn([s.n(4096), s.n(4096)])
}

fn norm_inputs(s: &Setup) -> [Tensor; 3] {
    let width = s.n(1024);
    [s.randn([s.n(8192), width]), s.randn([width]), s.randn([width])]
}
