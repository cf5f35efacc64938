//! Matrix products of views: strides go straight to the packed kernels, batches are shared out among threads.

use crate::cpu::Context;
use crate::elementwise;
use crate::gemm::{After, Block, Mat, MatMut, Share, gemm_half_then, gemm_int, gemm_then};
use crate::pool;
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_host::Arg;
use kiln_ir::{DType, Dims, Meta, Shape, quant};

/// Multiply-adds up to which a product of a batch is one thread's.
const SMALL: usize = 1 << 21;
/// The same where there are many of them.
const LARGE: usize = 1 << 25;
/// Multiply-adds of a whole batch below which it is the caller's alone.
const FEW: usize = 1 << 17;
/// Runs of products that each thread has to take, so that all end together.
const RUNS: usize = 8;

pub(crate) fn dot(cx: &Context<'_>, transpose: bool, a: &View, b: &View, out: Meta) -> Result<View, Error> {
    if b.dtype.is_quantised() {
        return packed(cx, transpose, a, b, out);
    }
    let target = cx.fresh(out)?;
    dot_into(transpose, a, b, &target, &|_| ())?;
    Ok(target)
}

/// The product of plain matrices into a dense target of its shape, which nobody else uses. `after` is told of each block
/// that is complete, with the rows of all batches as those of one matrix.
pub(crate) fn dot_into(
    transpose: bool,
    a: &View,
    b: &View,
    target: &View,
    after: After<'_>,
) -> Result<(), Error> {
    let out = target.meta();
    let b = if transpose { swapped(b) } else { b.clone() };
    let rank = out.shape.len();
    let batch: Shape = Dims::collect(out.shape[..rank - 2].iter().copied());
    let (m, n, k) = (out.shape[rank - 2], out.shape[rank - 1], a.shape[a.shape.len() - 1]);
    let (a, b) = (batched(a, &batch), batched(&b, &batch));
    // Rows of all batches of a row-major left operand are the rows of one matrix.
    let flat = a.is_dense() && b.strides[..rank - 2].iter().zip(&batch[..]).all(|(&s, &d)| s == 0 || d == 1);
    let (m, batch) = if flat { (m * batch.numel(), Shape::default()) } else { (m, batch) };
    let count = batch.numel();
    // Where a matrix of the batch begins.
    let at = |x: &View, i: usize| {
        let (mut offset, mut rest) = (0, i);
        for (&extent, &stride) in batch[..].iter().zip(&x.strides[..batch.len()]).rev() {
            offset += (rest % extent) as isize * stride;
            rest /= extent;
        }
        offset
    };
    // Products of a run follow each other on one thread, so that each can fetch what the next one needs.
    let work = m.saturating_mul(n).saturating_mul(k);
    let alone = count > 1 && (work <= SMALL || work <= LARGE && count >= RUNS * pool::threads());
    let run = if alone { count.div_ceil(RUNS * pool::threads()) } else { count };
    let columns = (b.strides[rank - 2], b.strides[rank - 1]);
    let dense = columns == (n as isize, 1) || columns == (1, k as isize);
    let share = |i: usize| {
        let next = i + 1;
        if !alone || !dense || next == count || next.is_multiple_of(run) {
            return Share { alone, ..Share::WHOLE };
        }
        let size = out.dtype.size();
        let from = b.address().wrapping_offset(at(&b, next) * size as isize);
        Share { alone, next: from.cast_const(), bytes: n * k * size }
    };
    macro_rules! products {
        ($kernel:ident $T:ty $(, $after:ident)?) => {{
            let (pa, pb, pc) = (Base(a.ptr::<$T>()), Base(b.ptr::<$T>()), Base(target.ptr::<$T>()));
            let one = |i: usize| {
                let (pa, pb, pc) = (pa, pb, pc);
                let left = Mat { ptr: pa.0.wrapping_offset(at(&a, i)).cast_const(), rs: a.strides[rank - 2], cs: a.strides[rank - 1] };
                let right = Mat { ptr: pb.0.wrapping_offset(at(&b, i)).cast_const(), rs: b.strides[rank - 2], cs: b.strides[rank - 1] };
                let to = MatMut { ptr: pc.0.wrapping_add(i * m * n), rs: n as isize, cs: 1 };
                $(let $after = |block: Block| after(Block { i: i * m + block.i, ..block });)?
                // SAFETY: the strides are those of views of a's, b's and the fresh target's buffers, so every element
                // lies within them; products of different batches write different elements.
                unsafe { $kernel::<$T>(m, n, k, left, right, to $(, share(i), &$after)?) }
            };
            if alone && work.saturating_mul(count) >= FEW {
                pool::parallel(count.div_ceil(run), &|at| (at * run..count.min((at + 1) * run)).for_each(&one));
            } else {
                (0..count).for_each(&one);
            }
        }};
    }
    match out.dtype {
        DType::F64 => products!(gemm_then f64, told),
        DType::F32 => products!(gemm_then f32, told),
        DType::F16 => products!(gemm_half_then f16, told),
        DType::BF16 => products!(gemm_half_then bf16, told),
        DType::I64 => products!(gemm_int i64),
        DType::I32 => products!(gemm_int i32),
        DType::I16 => products!(gemm_int i16),
        DType::I8 => products!(gemm_int i8),
        DType::U64 => products!(gemm_int u64),
        DType::U32 => products!(gemm_int u32),
        DType::U16 => products!(gemm_int u16),
        DType::U8 => products!(gemm_int u8),
        DType::Bool | DType::Q8 | DType::Q4 => {
            return Err(Error::Unsupported { op: "dot".into(), device: "cpu".into() });
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Base<T>(*mut T);
// SAFETY: products of different batches use disjoint results and only read their operands.
unsafe impl<T> Sync for Base<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Base<T> {}

/// The product with a quantised right operand: unpacked to f32 (f64 beside f64), the result rounded once.
fn packed(cx: &Context<'_>, transpose: bool, a: &View, b: &View, out: Meta) -> Result<View, Error> {
    let plain = cx.fresh(Meta { dtype: DType::F32, shape: b.shape })?;
    let blocks = b.bytes();
    // SAFETY: the buffer is fresh and holds this many f32.
    quant::dequantize(b.dtype, blocks, unsafe {
        std::slice::from_raw_parts_mut(plain.ptr::<f32>(), plain.numel())
    });
    let wide = if a.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let cast = |x: View, dtype: DType| {
        let meta = Meta { dtype, shape: x.shape };
        elementwise::cast(cx, &mut [Arg::Shared(x)], meta)
    };
    let product = dot(
        cx,
        transpose,
        &cast(a.clone(), wide)?,
        &cast(plain, wide)?,
        Meta { dtype: wide, shape: out.shape },
    )?;
    cast(product, out.dtype)
}

fn swapped(x: &View) -> View {
    let mut view = x.clone();
    let rank = view.shape.len();
    view.shape.swap(rank - 2, rank - 1);
    view.strides.swap(rank - 2, rank - 1);
    view
}

/// The view with its batch axes broadcast.
fn batched(x: &View, batch: &Shape) -> View {
    let rank = x.shape.len();
    let shape = Dims::collect(batch.iter().copied().chain(x.shape[rank - 2..].iter().copied()));
    x.expanded(&shape)
}
