//! Rearrangements: views where strides can say it, copies where they cannot.

use crate::cpu::Context;
use crate::elementwise;
use crate::view::View;
use kiln_device::Error;
use kiln_host::Arg;
use kiln_ir::{Dims, Meta, Move};

pub(crate) fn movement(cx: &Context<'_>, op: &Move, ins: &mut [Arg<View>], out: Meta) -> Result<View, Error> {
    let x: &View = &ins[0];
    match op {
        Move::Reshape(shape) => match x.reshaped(shape) {
            Some(view) => Ok(view),
            None => Ok(View::whole(elementwise::copy(cx, x)?.buffer, out)),
        },
        Move::Permute(order) => Ok(View {
            shape: out.shape,
            strides: Dims::collect(order.iter().map(|&i| x.strides[i as usize])),
            ..x.clone()
        }),
        Move::Expand(shape) => Ok(x.expanded(shape)),
        Move::Slice { axis, start, step, .. } => {
            Ok(slice(x, *axis as usize, *start, *step, out.shape[*axis as usize]))
        }
        Move::Flip(axes) => {
            let mut view = x.clone();
            // Where there are no elements there is no last one to start from.
            for axis in axes.iter().filter(|_| x.numel() > 0) {
                view.start += view.strides[axis] * (view.shape[axis] as isize - 1);
                view.strides[axis] = -view.strides[axis];
            }
            Ok(view)
        }
        Move::Assign { axis, start, step, .. } => {
            let whole = match &ins[0] {
                Arg::Owned(x) if x.is_dense() && x.buffer.is_sole() => x.clone(),
                Arg::Owned(x) | Arg::Shared(x) => elementwise::copy(cx, x)?,
            };
            let axis = *axis as usize;
            let part = slice(&whole, axis, *start, *step, ins[1].shape[axis]);
            elementwise::write(&ins[1], &part);
            Ok(whole)
        }
        Move::Cat { axis } => {
            let whole = cx.fresh(out)?;
            let axis = *axis as usize;
            let mut at = 0;
            for x in ins.iter() {
                let length = x.shape[axis];
                elementwise::write(x, &slice(&whole, axis, at, 1, length));
                at += length;
            }
            Ok(whole)
        }
    }
}

fn slice(x: &View, axis: usize, start: usize, step: usize, length: usize) -> View {
    let mut view = x.clone();
    view.shape[axis] = length;
    // A view of nothing starts where its buffer does, which may be empty too.
    if view.numel() > 0 {
        view.start += start as isize * view.strides[axis];
    }
    // A step may be too large to multiply with; it then leaves one element, whose stride is never used.
    view.strides[axis] = if length > 1 { view.strides[axis] * step as isize } else { 0 };
    view
}
