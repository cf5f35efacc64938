//! Rearrangements: each is a strided reading, copied out, or a copy with some places overwritten.

use super::array::{Array, Element, Value, with_plain};
use super::view::{View, around};
use crate::memory;
use kiln_ir::Move;
use std::borrow::Cow;

/// The elements of a rearrangement.
pub fn movement(op: &Move, ins: &[&Value]) -> Array {
    let x = ins[0];
    let whole = View::whole(&x.shape);
    match op {
        Move::Reshape(_) => x.data.copied(),
        Move::Permute(order) => read(x, &whole.permuted(order.iter().map(|&p| p as usize))),
        Move::Expand(shape) => read(x, &whole.expanded(shape)),
        Move::Slice { axis, start, end, step } => read(x, &whole.cut(*axis as usize, *start, *end, *step)),
        Move::Assign { axis, start, end, step } => {
            let places = whole.cut(*axis as usize, *start, *end, *step);
            with_plain!(&x.data, data => assign(data, &places, ins[1].data.typed()).into())
        }
        Move::Flip(axes) => read(x, &whole.flipped(*axes)),
        Move::Cat { axis } => with_plain!(&x.data, first => cat(first, ins, *axis as usize).into()),
    }
}

fn read(x: &Value, view: &View) -> Array {
    with_plain!(&x.data, data => owned(view.read(data)).into())
}

/// The elements that were read; copied where they are borrowed.
pub(super) fn owned<T: Element>(x: Cow<'_, [T]>) -> Vec<T> {
    match x {
        Cow::Borrowed(x) => memory::copied(x),
        Cow::Owned(x) => x,
    }
}

fn assign<T: Element>(x: &[T], places: &View, values: &[T]) -> Vec<T> {
    let mut out = memory::copied(x);
    let mut values = values.iter();
    places.each(|at| out[at] = *values.next().expect("as many values as places"));
    out
}

/// `_first` only names the type.
fn cat<T: Element>(_first: &[T], ins: &[&Value], axis: usize) -> Vec<T> {
    let (outer, _, inner) = around(&ins[0].shape, axis);
    let parts: Vec<(&[T], usize)> =
        memory::collect(ins.len(), ins.iter().map(|v| (v.data.typed(), v.shape[axis] * inner)));
    let mut out = memory::with_capacity(ins.iter().map(|v| v.shape.numel()).sum());
    for o in 0..outer {
        for (part, run) in &parts {
            out.extend_from_slice(&part[o * run..(o + 1) * run]);
        }
    }
    out
}
