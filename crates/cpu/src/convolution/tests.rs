//! All three kinds against the interpreter, bit for bit, over geometries, types, strides and threads.

use super::conv;
use crate::arena::Arena;
use crate::cpu::Context;
use crate::pool;
use crate::reference::{self, Value};
use crate::view::View;
use half::bf16;
use kiln_device::Place;
use kiln_ir::{Conv, ConvKind, DType, Dims, Meta, Op, Shape};

#[test]
fn kernels_have_the_bits_of_the_interpreter() {
    let mut rng = Rng(1);
    for round in 0..400 {
        let rank = 1 + rng.below(3);
        let mut draw = |least: u64, n: usize| {
            std::array::from_fn(|i| if i < rank { least + rng.below(n) as u64 } else { least })
        };
        let kernel: [u64; 3] = draw(1, 4);
        let conv = Conv {
            stride: draw(1, 3).map(|v: u64| v as u32),
            low: draw(0, 4).map(|v: u64| v as u32),
            high: draw(0, 4).map(|v: u64| v as u32),
            dilation: draw(1, 3).map(|v: u64| v as u32),
            extent: [0; 3],
            groups: 1 + rng.below(4) as u32,
        };
        let spatial: Vec<usize> = (0..rank).map(|_| rng.below([40, 14, 7][rank - 1])).collect();
        let (batch, inner, share) = (1 + rng.below(3), 1 + rng.below(3), 1 + rng.below(4));
        let kernel: Vec<usize> = kernel[..rank].iter().map(|&k| k as usize).collect();
        check(&mut rng, round, batch, inner, share, &spatial, &kernel, conv);
    }
}

#[test]
fn large_convolutions_are_cut_without_a_trace() {
    let unit =
        Conv { stride: [1; 3], low: [0; 3], high: [0; 3], dilation: [1; 3], extent: [0; 3], groups: 1 };
    let same = Conv { low: [1, 1, 0], high: [1, 1, 0], ..unit };
    type Case<'a> = (usize, usize, usize, &'a [usize], &'a [usize], Conv);
    let cases: &[Case] = &[
        (3, 60, 5, &[9, 9], &[3, 3], same),
        (2, 7, 9, &[30, 31], &[3, 3], same),
        (2, 3, 530, &[4, 5], &[3, 3], Conv { stride: [2, 1, 1], ..same }),
        (1, 2, 2, &[180, 181], &[3, 3], same),
        (1, 3, 2, &[40000], &[5], Conv { stride: [2, 1, 1], low: [3, 0, 0], ..unit }),
        (1, 1, 2, &[9, 50, 60], &[3, 3, 2], Conv { stride: [1, 2, 1], ..same }),
        (3, 1, 1, &[28, 28], &[3, 3], Conv { groups: 19, ..same }),
        (2, 1, 2, &[24, 25], &[5, 3], Conv { groups: 9, stride: [1, 2, 1], dilation: [2, 1, 1], ..same }),
        (2, 1, 1, &[30, 30], &[25, 25], Conv { groups: 2, ..same }),
        (5, 33, 34, &[11, 12], &[1, 1], Conv { groups: 2, ..unit }),
        (2, 3, 5, &[17, 19], &[1, 1], Conv { stride: [2, 3, 1], ..unit }),
        (2, 5, 3, &[13, 12], &[4, 4], Conv { stride: [5, 3, 1], low: [0, 7, 0], high: [6, 0, 0], ..unit }),
    ];
    let mut rng = Rng(2);
    for (round, &(batch, inner, share, spatial, kernel, conv)) in cases.iter().enumerate() {
        for turn in 0..2 {
            check(&mut rng, 3 * turn + round, batch, inner, share, spatial, kernel, conv);
        }
    }
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n
    }

    /// Numbers whose sums depend on the order, with zeros of both signs and some that underflow.
    fn number(&mut self) -> f64 {
        let sign = [1.0, -1.0][self.below(2)];
        match self.below(40) {
            0 => sign * 0.0,
            1 => sign * 1e-30,
            _ => sign * (self.below(1 << 20) as f64 + 0.5) * 2f64.powi(self.below(8) as i32 - 24),
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn check(
    rng: &mut Rng,
    round: usize,
    batch: usize,
    inner: usize,
    share: usize,
    spatial: &[usize],
    kernel: &[usize],
    conv: Conv,
) {
    let groups = conv.groups as usize;
    let shape =
        |a: usize, b: usize, rest: &[usize]| Shape::collect([a, b].into_iter().chain(rest.iter().copied()));
    let dtype = [DType::F32, DType::F64, DType::BF16][round % 3];
    let x = Meta { dtype, shape: shape(batch, groups * inner, spatial) };
    let w = Meta { dtype, shape: shape(groups * share, inner, kernel) };
    let Ok(outs) = kiln_ir::infer(&Op::Conv { kind: ConvKind::Forward, conv }, &[x, w]) else { return };
    let y = outs[0];
    let extent = |sizes: &[usize]| std::array::from_fn(|i| sizes.get(i).map_or(0, |&s| s as u32));
    one(rng, ConvKind::Forward, conv, x, w);
    one(rng, ConvKind::Input, Conv { extent: extent(spatial), ..conv }, y, w);
    one(rng, ConvKind::Weight, Conv { extent: extent(kernel), ..conv }, x, y);
}

/// Groups of one channel whose kernel sees nothing but padding: found by `cargo xtask fuzz --target grammar`.
#[test]
fn padding_longer_than_what_is_reached() {
    let mut rng = Rng(7);
    for low in [5, 9, 60] {
        let conv = Conv {
            stride: [100, 1, 1],
            low: [low, 0, 0],
            high: [0; 3],
            dilation: [1; 3],
            extent: [2, 0, 0],
            groups: 3,
        };
        let (x, y) = (Meta::new(DType::F32, [2, 3, 4]), Meta::new(DType::F32, [2, 3, 1]));
        one(&mut rng, ConvKind::Weight, conv, x, y);
        let w = Meta::new(DType::F32, [3, 1, 2]);
        let high = [low, 0, 0];
        one(&mut rng, ConvKind::Forward, Conv { high, extent: [0; 3], ..conv }, x, w);
    }
}

fn one(rng: &mut Rng, kind: ConvKind, geometry: Conv, a: Meta, b: Meta) {
    let op = Op::Conv { kind, conv: geometry };
    let out = kiln_ir::infer(&op, &[a, b]).expect("fits")[0];
    let arena = Arena::new(None);
    let cx = Context { arena: &arena, place: Place::Reuse };
    let (a, b) = (operand(&cx, rng, a), operand(&cx, rng, b));
    let value = |x: &View| {
        let dense = cx.dense(x).expect("memory");
        Value::from_bytes(dense.meta(), dense.bytes())
    };
    let want = reference::eval(&op, &[&value(&a), &value(&b)]).expect("evaluates").remove(0).to_bytes();
    for threads in [1, 3] {
        pool::set_threads(threads);
        let got = conv(&cx, kind, &geometry, &a, &b, out).expect("memory");
        if got.bytes() != want {
            let size = out.dtype.size();
            let at = got.bytes().chunks(size).zip(want.chunks(size)).position(|(a, b)| a != b);
            panic!("{op} of {} {} differs at {at:?} of {}", a.meta(), b.meta(), out.shape.numel());
        }
    }
}

/// A value whose axes lie in some order in memory, or are all one place.
fn operand(cx: &Context<'_>, rng: &mut Rng, meta: Meta) -> View {
    let rank = meta.shape.len();
    let mut order: Vec<usize> = (0..rank).collect();
    if rng.below(2) == 0 {
        (1..rank).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
    }
    let laid = Meta { dtype: meta.dtype, shape: Shape::collect(order.iter().map(|&i| meta.shape[i])) };
    let mut bytes = Vec::with_capacity(meta.bytes());
    for _ in 0..meta.shape.numel() {
        let x = rng.number();
        match meta.dtype {
            DType::F32 => bytes.extend((x as f32).to_ne_bytes()),
            DType::F64 => bytes.extend(x.to_ne_bytes()),
            _ => bytes.extend(bf16::from_f64(x).to_ne_bytes()),
        }
    }
    let dense = cx.filled(laid, &bytes).expect("memory");
    let mut strides = Dims::repeat(0isize, rank);
    order.iter().enumerate().for_each(|(at, &axis)| strides[axis] = dense.strides[at]);
    if rng.below(10) == 0 {
        strides = Dims::repeat(0isize, rank);
    }
    View { shape: meta.shape, strides, ..dense }
}
