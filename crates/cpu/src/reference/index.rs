//! Reads and writes by index. Every index is checked before anything is computed; a negative one is out of range.

use super::EvalError;
use super::array::{Array, Element, Value, with_ints, with_numbers, with_plain};
use super::number::{Number, narrow, widen};
use super::view::{View, around};
use crate::memory;
use kiln_ir::math::Num;
use kiln_ir::{GatherKind, Op, ScatterKind, Shape};

/// The elements of an indexed read.
pub fn gather(kind: GatherKind, axis: usize, x: &Value, index: &Value) -> Result<Array, EvalError> {
    let indices = checked(&Op::Gather { kind, axis: axis as u8 }, index, x.shape[axis])?;
    let places = match kind {
        GatherKind::Each => each(&x.shape, axis, &index.shape, &indices),
        GatherKind::Take => take(&x.shape, axis, &indices),
    };
    Ok(with_plain!(&x.data, x => pick(x, &places).into()))
}

/// The elements of an indexed write into a copy of `x`, by ascending place in `source`.
pub fn scatter(
    kind: ScatterKind,
    axis: usize,
    x: &Value,
    index: &Value,
    source: &Value,
) -> Result<Array, EvalError> {
    let indices = checked(&Op::Scatter { kind, axis: axis as u8 }, index, x.shape[axis])?;
    let places = match kind {
        ScatterKind::Each | ScatterKind::EachAdd => each(&x.shape, axis, &index.shape, &indices),
        ScatterKind::TakeAdd => take(&x.shape, axis, &indices),
    };
    Ok(match kind {
        ScatterKind::Each => with_plain!(&x.data, x => put(x, &places, source.data.typed()).into()),
        ScatterKind::EachAdd | ScatterKind::TakeAdd => {
            with_numbers!(&x.data, x => add(x, &places, source.data.typed()).into())
        }
    })
}

fn pick<T: Element>(x: &[T], places: &[usize]) -> Vec<T> {
    memory::collect(places.len(), places.iter().map(|&at| x[at]))
}

fn put<T: Element>(x: &[T], places: &[usize], source: &[T]) -> Vec<T> {
    let mut out = memory::copied(x);
    for (&at, &v) in places.iter().zip(source) {
        out[at] = v;
    }
    out
}

/// f16 and bf16 are added up in f32 and rounded once.
fn add<T: Number>(x: &[T], places: &[usize], source: &[T]) -> Vec<T> {
    let mut out = widen(x);
    for (&at, v) in places.iter().zip(source) {
        out[at] = out[at].add(v.widen());
    }
    narrow(&out)
}

/// The place in x of each index: its own coordinates, but the index along the axis.
fn each(x: &Shape, axis: usize, index: &Shape, indices: &[usize]) -> Vec<usize> {
    let mut view = View::whole(x);
    let stride = view.strides[axis] as usize;
    view.shape = *index;
    view.strides[axis] = 0;
    let mut places = view.offsets();
    places.iter_mut().zip(indices).for_each(|(at, i)| *at += i * stride);
    places
}

/// The places in x of whole slices.
fn take(x: &Shape, axis: usize, indices: &[usize]) -> Vec<usize> {
    let (outer, length, inner) = around(x, axis);
    let mut places = memory::with_capacity(outer * indices.len() * inner);
    for o in 0..outer {
        for i in indices {
            let start = (o * length + i) * inner;
            places.extend(start..start + inner);
        }
    }
    places
}

fn checked(op: &Op, index: &Value, length: usize) -> Result<Vec<usize>, EvalError> {
    let check = |wide: i128| match usize::try_from(wide) {
        Ok(i) if i < length => Ok(i),
        _ => {
            let index = wide.min(i64::MAX as i128) as i64;
            Err(EvalError::Index { op: op.name().to_string(), index, length })
        }
    };
    let mut indices = memory::with_capacity(index.shape.numel());
    with_ints!(&index.data, x => for &i in x {
        indices.push(check(i as i128)?);
    },);
    Ok(indices)
}
