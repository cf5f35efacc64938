//! Reads and writes by index, shared out among threads. What has an index out of range is left to the interpreter,
//! which tells of it.

use crate::cpu::Context;
use crate::elementwise::{self, with_type};
use crate::memory;
use crate::pool;
use crate::reference::Number;
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_host::Arg;
use kiln_ir::math::Num;
use kiln_ir::{DType, Meta, ScatterKind};

/// Bytes that a thread moves at a time.
const SHARE: usize = 1 << 16;

/// Whole slices of the first axis; `None` if an index is out of range.
pub(crate) fn take(cx: &Context<'_>, x: &View, index: &View, out: Meta) -> Result<Option<View>, Error> {
    let Some(indices) = checked(cx, index, x.shape[0])? else { return Ok(None) };
    let x = cx.dense(x)?;
    let y = cx.fresh(out)?;
    let bytes = x.shape[1..].iter().product::<usize>() * x.dtype.size();
    let (from, to) = (Base(x.address()), Base(y.address()));
    let share = (SHARE / bytes.max(1)).max(1);
    pool::parallel(indices.len().div_ceil(share), &|part| {
        let first = part * share;
        for (i, &at) in indices[first..indices.len().min(first + share)].iter().enumerate() {
            // SAFETY: indices were checked; each row of the fresh result is written once.
            unsafe {
                let (from, to) = (from.at(at * bytes), to.at((first + i) * bytes));
                std::ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
    });
    Ok(Some(y))
}

/// Whether [`scatter`] does this: sums in the dtype itself, along the last axis of rows that pair up, or of whole slices
/// of the first.
pub(crate) fn has_scatter(kind: ScatterKind, axis: u8, ins: &[Arg<View>]) -> bool {
    let (x, index) = (&*ins[0], &*ins[1]);
    let own = !matches!(x.dtype, DType::F16 | DType::BF16 | DType::Bool | DType::Q8 | DType::Q4);
    let last = x.shape.len() - 1;
    own && match kind {
        ScatterKind::Each => false,
        ScatterKind::EachAdd => axis as usize == last && x.shape[..last] == index.shape[..last],
        ScatterKind::TakeAdd => axis == 0,
    }
}

/// Adds `source` to a copy of `x` at the indices, in their order; `None` if one is out of range.
pub(crate) fn scatter(
    cx: &Context<'_>,
    kind: ScatterKind,
    x: &View,
    index: &View,
    source: &View,
) -> Result<Option<View>, Error> {
    let (each, length) = match kind {
        ScatterKind::EachAdd => (true, x.shape[x.shape.len() - 1]),
        ScatterKind::Each | ScatterKind::TakeAdd => (false, x.shape[0]),
    };
    let Some(indices) = checked(cx, index, length)? else { return Ok(None) };
    let y = elementwise::copy(cx, x)?;
    let source = cx.dense(source)?;
    with_type!(x.dtype, number T => {
        let (from, to) = (Base(source.ptr::<T>()), Base(y.ptr::<T>()));
        if each {
            let width = index.shape[index.shape.len() - 1];
            rows::<T>(&indices, width, length, y.numel() / length.max(1), from, to);
        } else {
            slices::<T>(&indices, y.numel() / length.max(1), from, to);
        }
    });
    Ok(Some(y))
}

/// Each row of `to` gets what its row of `from` has, at the places its row of indices names.
fn rows<T: Number>(indices: &[usize], width: usize, length: usize, count: usize, from: Base<T>, to: Base<T>) {
    let share = (SHARE / size_of::<T>() / (width + length).max(1)).max(1);
    pool::parallel(count.div_ceil(share), &|part| {
        for row in part * share..count.min((part + 1) * share) {
            for (i, &at) in indices[row * width..(row + 1) * width].iter().enumerate() {
                // SAFETY: indices were checked, and the rows are this thread's.
                unsafe { add(to.at(row * length + at), from.at(row * width + i)) };
            }
        }
    });
}

/// Slice `indices[i]` of `to` gets slice i of `from`; threads have columns of their own, so that the order stays.
fn slices<T: Number>(indices: &[usize], width: usize, from: Base<T>, to: Base<T>) {
    let parts = pool::threads().min(width.div_ceil(64)).max(1);
    pool::parallel(parts, &|part| {
        let (first, end) = (part * width / parts, (part + 1) * width / parts);
        for (i, &at) in indices.iter().enumerate() {
            for column in first..end {
                // SAFETY: indices were checked, and the columns are this thread's.
                unsafe { add(to.at(at * width + column), from.at(i * width + column)) };
            }
        }
    });
}

/// # Safety
/// Both are elements, and `to` is this thread's alone.
#[inline(always)]
unsafe fn add<T: Number>(to: *mut T, from: *const T) {
    // SAFETY: the caller's promise.
    unsafe { *to = T::narrow((*to).widen().add((*from).widen())) };
}

/// The indices in row-major order; `None` if one is out of range.
fn checked(cx: &Context<'_>, index: &View, length: usize) -> Result<Option<Vec<usize>>, Error> {
    let index = cx.dense(index)?;
    let n = index.numel();
    Ok(with_type!(index.dtype, integer T => {
        // SAFETY: the view is dense and has n elements of its dtype.
        let all = unsafe { std::slice::from_raw_parts(index.ptr::<T>().cast_const(), n) };
        let mut indices = memory::with_capacity(n);
        for &i in all {
            match usize::try_from(i as i128) {
                Ok(i) if i < length => indices.push(i),
                _ => return Ok(None),
            }
        }
        Some(indices)
    }))
}

/// An address that threads share.
#[derive(Clone, Copy)]
struct Base<T>(*mut T);
// SAFETY: threads read operands and write disjoint parts of results.
unsafe impl<T> Sync for Base<T> {}

impl<T> Base<T> {
    /// # Safety
    /// The element is in the buffer.
    #[inline(always)]
    unsafe fn at(self, i: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(i) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::reference::{self, Value};
    use kiln_device::Place;
    use kiln_ir::{GatherKind, Op};

    fn floats(cx: &Context<'_>, shape: &[usize]) -> View {
        let n: usize = shape.iter().product();
        let bytes: Vec<u8> =
            (0..n).flat_map(|i| ((i * 7919 % 1013) as f32 / 7.0 - 60.0).to_le_bytes()).collect();
        cx.filled(Meta::new(DType::F32, shape), &bytes).unwrap()
    }

    fn indices(cx: &Context<'_>, shape: &[usize], below: i64) -> View {
        let n: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..n as i64).flat_map(|i| (i * 31 % below).to_le_bytes()).collect();
        cx.filled(Meta::new(DType::I64, shape), &bytes).unwrap()
    }

    #[test]
    fn reads_and_sums_have_the_bits_of_the_interpreter() {
        let arena = Arena::new(None);
        let cx = Context { arena: &arena, place: Place::Reuse };
        let value = |x: &View| Value::from_bytes(x.meta(), x.bytes());
        let eval = |op: Op, ins: &[&View]| {
            let values: Vec<Value> = ins.iter().map(|x| value(x)).collect();
            reference::eval(&op, &values.iter().collect::<Vec<_>>()).unwrap().remove(0)
        };
        for threads in [1, 2, 3] {
            pool::set_threads(threads);
            let (x, index) = (floats(&cx, &[50, 130]), indices(&cx, &[7, 90], 50));
            let op = Op::Gather { kind: GatherKind::Take, axis: 0 };
            let want = eval(op, &[&x, &index]);
            let got = take(&cx, &x, &index, want.meta()).unwrap().unwrap();
            assert_eq!(got.bytes(), want.to_bytes());
            let source = floats(&cx, &[7, 90, 130]);
            let op = Op::Scatter { kind: ScatterKind::TakeAdd, axis: 0 };
            let got = scatter(&cx, ScatterKind::TakeAdd, &x, &index, &source).unwrap().unwrap();
            assert_eq!(got.bytes(), eval(op, &[&x, &index, &source]).to_bytes());
            let (index, source) = (indices(&cx, &[50, 300], 130), floats(&cx, &[50, 300]));
            let op = Op::Scatter { kind: ScatterKind::EachAdd, axis: 1 };
            let got = scatter(&cx, ScatterKind::EachAdd, &x, &index, &source).unwrap().unwrap();
            assert_eq!(got.bytes(), eval(op, &[&x, &index, &source]).to_bytes());
        }
    }

    #[test]
    fn an_index_out_of_range_is_left_to_the_interpreter() {
        let arena = Arena::new(None);
        let cx = Context { arena: &arena, place: Place::Reuse };
        let (x, index) = (floats(&cx, &[4, 3]), indices(&cx, &[5], 5));
        assert!(take(&cx, &x, &index, Meta::new(DType::F32, [5, 3])).unwrap().is_none());
        let source = floats(&cx, &[5, 3]);
        assert!(scatter(&cx, ScatterKind::TakeAdd, &x, &index, &source).unwrap().is_none());
    }
}
