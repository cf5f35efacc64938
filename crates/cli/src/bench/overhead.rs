//! Many operations on almost no data: what recording, submitting and starting an operation cost.

use super::{On, Row, Setup, Workload};
use kiln::prelude::*;

pub(super) const TABLE: &[Row] =
    &[("overhead/add16x1000", On::All, add), ("overhead/add16x1000_grad", On::All, add_grad)];

/// z = x, then a thousand times z = z + y.
fn add(s: &Setup) -> Workload {
    let (x, y) = (s.randn([16]), s.randn([16]));
    Workload::new(move || vec![chain(&x, &y)])
}

/// The same with x requiring a gradient, then the sum of z backward.
fn add_grad(s: &Setup) -> Workload {
    let (x, y) = (s.randn([16]).requires_grad(), s.randn([16]));
    Workload::new(move || {
        let gradients = chain(&x, &y).sum(()).backward();
        gradients.get(&x).cloned().into_iter().collect()
    })
}

fn chain(x: &Tensor, y: &Tensor) -> Tensor {
    (0..1000).fold(x.clone(), |z, _| z + y)
}
