//! The elementwise operations: operands are broadcast, then the operation's own loop in [`crate::slices`] fills the
//! result. The loops are the tables' value column and nothing else, which the tests here pin down by value.

use super::EvalError;
use super::array::{Array, Element, Value, with_floats, with_ints, with_numbers, with_plain};
use super::view::View;
use crate::memory;
use crate::slices;
use kiln_ir::{Binary, Domain, Shape, Unary};
use std::borrow::Cow;

/// The elements of a one-operand operation.
pub fn unary(op: Unary, x: &Array) -> Array {
    match op.domain() {
        Domain::Float => with_floats!(x, x => filled(x.len(), &|y| slices::unary_float(op, x, y))),
        Domain::Num => with_numbers!(x, x => filled(x.len(), &|y| slices::unary_num(op, x, y))),
        Domain::Bits => with_ints!(x,
            x => filled(x.len(), &|y| slices::unary_bits(op, x, y)),
            Array::Bool(x) => filled(x.len(), &|y| slices::unary_bits(op, x, y)),
        ),
        Domain::Test => with_numbers!(x, x => tested(x.len(), &|y| slices::unary_test(op, x, y))),
        Domain::Compare => unreachable!("comparisons take two operands"),
    }
}

/// The elements of a two-operand operation whose operands broadcast to `shape`.
pub fn binary(op: Binary, a: &Value, b: &Value, shape: &Shape) -> Result<Array, EvalError> {
    let n = shape.numel();
    Ok(match op.domain() {
        Domain::Float => with_floats!(&a.data, x => {
            let (x, y) = both(x, a, b, shape);
            filled(n, &|z| slices::binary_float(op, &x, &y, z))
        }),
        Domain::Num => with_numbers!(&a.data, x => {
            let (x, y) = both(x, a, b, shape);
            if op.divides() {
                slices::check_divisors(op, &x, &y)
                    .map_err(|error| EvalError::Divide { op: op.name().into(), error })?;
            }
            filled(n, &|z| slices::binary_num(op, &x, &y, z))
        }),
        Domain::Bits => with_ints!(&a.data,
            x => {
                let (x, y) = both(x, a, b, shape);
                filled(n, &|z| slices::binary_bits(op, &x, &y, z))
            },
            Array::Bool(x) => {
                let (x, y) = both(x, a, b, shape);
                filled(n, &|z| slices::binary_bits(op, &x, &y, z))
            },
        ),
        Domain::Compare => with_plain!(&a.data, x => {
            let (x, y) = both(x, a, b, shape);
            tested(n, &|z| slices::binary_compare(op, &x, &y, z))
        }),
        Domain::Test => unreachable!("tests take one operand"),
    })
}

/// Where `cond` holds `a`, else `b`; all broadcast to `shape`.
pub fn select(cond: &Value, a: &Value, b: &Value, shape: &Shape) -> Array {
    let cond = expanded(cond.data.typed::<bool>(), &cond.shape, shape);
    with_plain!(&a.data, x => {
        let (x, y) = both(x, a, b, shape);
        filled(shape.numel(), &|z| slices::select(bytemuck::cast_slice(&cond), &x, &y, z))
    })
}

/// Whether no element is infinite or NaN; only floats can be.
pub fn all_finite(x: &Array) -> bool {
    match x {
        Array::F64(x) => x.iter().all(|x| x.is_finite()),
        Array::F32(x) => x.iter().all(|x| x.is_finite()),
        Array::F16(x) => x.iter().all(|x| x.is_finite()),
        Array::BF16(x) => x.iter().all(|x| x.is_finite()),
        _ => true,
    }
}

/// An array of `n` elements that `fill` writes.
pub fn filled<T: Element>(n: usize, fill: &dyn Fn(&mut [T])) -> Array {
    let mut out = memory::filled(n, T::default());
    fill(&mut out);
    out.into()
}

/// An array of `n` bools that `fill` writes as bytes.
pub fn tested(n: usize, fill: &dyn Fn(&mut [u8])) -> Array {
    let mut out = memory::filled(n, 0u8);
    fill(&mut out);
    out.into_iter().map(|byte| byte != 0).collect::<Vec<bool>>().into()
}

fn both<'a, T: Element>(x: &'a [T], a: &Value, b: &'a Value, shape: &Shape) -> (Cow<'a, [T]>, Cow<'a, [T]>) {
    (expanded(x, &a.shape, shape), expanded(b.data.typed(), &b.shape, shape))
}

fn expanded<'a, T: Element>(x: &'a [T], from: &Shape, to: &Shape) -> Cow<'a, [T]> {
    View::whole(from).expanded(to).read(x)
}
