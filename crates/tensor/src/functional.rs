//! Derivatives of functions: products with Jacobians from either side, whole Jacobians and Hessians.
//!
//! All are made of backward walks. A product from the right is the derivative of one from the left, which is linear in
//! the vector it starts from.

use crate::{Tensor, grad};
use kiln_device::method;

/// The value of `f` at `xs`, and the product of a vector with its Jacobian: the gradients of `sum(y * vector)`.
#[track_caller]
pub fn vjp(f: impl FnOnce(&[Tensor]) -> Tensor, xs: &[&Tensor], vector: &Tensor) -> (Tensor, Vec<Tensor>) {
    let _method = method("vjp");
    let leaves = tracked("vjp", xs);
    let y = f(&leaves);
    assert!(y.meta() == vector.meta(), "vjp: the vector is {}, the result {}", vector.meta(), y.meta());
    let gradients = product(&y, &leaves, vector);
    (y.detach(), gradients.iter().map(Tensor::detach).collect())
}

/// The value of `f` at `xs`, and how it changes as they move along `directions`: the product of its Jacobian with these.
///
/// ```
/// # use kiln_tensor::*;
/// let x = Tensor::from_slice(&[1.0f32, 2.0], [2], &Device::cpu());
/// let (y, change) = jvp(|x| x[0].square(), &[&x], &[&Tensor::ones([2], &Device::cpu())]);
/// assert_eq!(y.to_vec::<f32>().unwrap(), [1.0, 4.0]);
/// assert_eq!(change.to_vec::<f32>().unwrap(), [2.0, 4.0]);
/// ```
#[track_caller]
pub fn jvp(f: impl FnOnce(&[Tensor]) -> Tensor, xs: &[&Tensor], directions: &[&Tensor]) -> (Tensor, Tensor) {
    let _method = method("jvp");
    assert!(xs.len() == directions.len(), "jvp: {} directions for {} tensors", directions.len(), xs.len());
    for (x, v) in xs.iter().zip(directions) {
        assert!(x.meta() == v.meta(), "jvp: the direction of {} is {}", x.meta(), v.meta());
    }
    let leaves = tracked("jvp", xs);
    let y = f(&leaves);
    let vector = y.detach().zeros_like().requires_grad();
    let mut along: Option<Tensor> = None;
    for (gradient, direction) in product(&y, &leaves, &vector).iter().zip(directions) {
        let part = (gradient * direction.detach()).sum(());
        along = Some(match along {
            Some(sum) => sum + part,
            None => part,
        });
    }
    let change = match along.filter(Tensor::is_tracked) {
        Some(along) => grad(&along, &[&vector]).swap_remove(0).detach(),
        // The result does not depend on what is moved.
        None => y.detach().zeros_like(),
    };
    (y.detach(), change)
}

/// The derivatives of each element of `f(x)` by each of `x`: the shape of the result, then that of `x`. One backward walk for
/// each element of the result.
///
/// ```
/// # use kiln_tensor::*;
/// let x = Tensor::from_slice(&[1.0f32, 2.0], [2], &Device::cpu());
/// let j = jacobian(|x| x.cumsum(0).square(), &x);
/// assert_eq!(j.to_vec::<f32>().unwrap(), [2.0, 0.0, 6.0, 6.0]);
/// ```
#[doc(alias("jacrev", "jacfwd"))]
#[track_caller]
pub fn jacobian(f: impl FnOnce(&Tensor) -> Tensor, x: &Tensor) -> Tensor {
    let _method = method("jacobian");
    let leaf = tracked("jacobian", &[x]).swap_remove(0);
    rows(&f(&leaf), &leaf).detach()
}

/// The second derivatives of a function with one element as result: twice the shape of `x`.
///
/// ```
/// # use kiln_tensor::*;
/// let x = Tensor::from_slice(&[1.0f32, 2.0], [2], &Device::cpu());
/// let h = hessian(|x| x.prod(()).square(), &x);
/// assert_eq!(h.to_vec::<f32>().unwrap(), [8.0, 8.0, 8.0, 2.0]);
/// ```
#[track_caller]
pub fn hessian(f: impl FnOnce(&Tensor) -> Tensor, x: &Tensor) -> Tensor {
    let _method = method("hessian");
    let leaf = tracked("hessian", &[x]).swap_remove(0);
    let y = f(&leaf);
    assert!(y.numel() == 1, "hessian: of a function with one element as result, not {}", y.meta());
    let first = match y.is_tracked() {
        true => grad(&y, &[&leaf]).swap_remove(0),
        false => leaf.detach().zeros_like(),
    };
    rows(&first, &leaf).detach()
}

/// Leaves of their own, so that what the operands depend on takes no part.
#[track_caller]
fn tracked(name: &str, xs: &[&Tensor]) -> Vec<Tensor> {
    let mut leaves = Vec::with_capacity(xs.len());
    for x in xs {
        assert!(x.dtype().is_float(), "{name}: only floats have derivatives, not {}", x.dtype());
        leaves.push(x.detach().requires_grad());
    }
    leaves
}

/// The gradients of `sum(y * vector)`, which can be differentiated by the vector.
#[track_caller]
fn product(y: &Tensor, leaves: &[Tensor], vector: &Tensor) -> Vec<Tensor> {
    if !y.is_tracked() {
        return leaves.iter().map(|x| x.detach().zeros_like()).collect();
    }
    grad(&(y * vector).sum(()), &leaves.iter().collect::<Vec<_>>())
}

#[track_caller]
fn rows(y: &Tensor, leaf: &Tensor) -> Tensor {
    let shape = [&y.shape()[..], &leaf.shape()[..]].concat();
    if !y.is_tracked() || y.numel() == 0 {
        return Tensor::full(shape, 0, leaf.dtype(), &leaf.device());
    }
    let flat = y.reshape([y.numel()]);
    let mut rows = Vec::with_capacity(y.numel());
    for i in 0..y.numel() {
        let row = flat.select(0, i as isize);
        let gradients = row.differentiate().retain_graph().run();
        rows.push(gradients.get_or_zeros(leaf));
    }
    Tensor::stack(&rows, 0).reshape(shape)
}
