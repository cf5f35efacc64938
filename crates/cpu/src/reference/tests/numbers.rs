//! Rounding, orders and conversions.

use super::*;
use half::{bf16, f16};
use kiln_ir::math::Float;
use kiln_ir::{AxisSet, Binary, Conv, ConvKind, ReduceKind, Unary};

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

fn one(op: Op, ins: &[&Value]) -> Value {
    eval(&op, ins).unwrap().remove(0)
}

fn floats(n: usize) -> Vec<f32> {
    uneven(n).into_iter().map(|x| x as f32 * 1.1).collect()
}

#[test]
fn conversions_saturate_wrap_and_round() {
    let cast = |from: &str, to: &str, x: &[f64], want: &[f64]| {
        let text = format!("a = input {from}[{n}]\nb = cast a dtype={to}", n = x.len());
        check(&text, &[x], &[(&format!("{to}[{}]", x.len()), want)]);
    };
    cast("f32", "i8", &[-1.9, 300., -INF, NAN], &[-1., 127., -128., 0.]);
    cast("f64", "u16", &[-1., 65535.9, 1e9], &[0., 65535., 65535.]);
    cast("bf16", "u8", &[-1., 255., 1000.], &[0., 255., 255.]);
    cast("i32", "i8", &[200., -129., 256.], &[-56., 127., 0.]);
    cast("i8", "u32", &[-1.], &[u32::MAX as f64]);
    cast("f16", "bool", &[0., -0., NAN, 0.5], &[0., 0., 1., 1.]);
    cast("bool", "f16", &[0., 1.], &[0., 1.]);
    cast("f32", "f16", &[2049., 2051., 65504., 65520.], &[2048., 2052., 65504., INF]);
    cast("f32", "bf16", &[257., 259., 1.], &[256., 260., 1.]);
    cast("i64", "f16", &[2049., -3.], &[2048., -3.]);
    // Through f32: the tail that would round up is lost on the way, and the tie goes to even.
    cast("f64", "f16", &[2049.0 + 2f64.powi(-20)], &[2048.]);
    cast("f64", "bf16", &[257.0 + 2f64.powi(-20)], &[256.]);
}

#[test]
fn quantised_values_unpack_to_what_the_blocks_say() {
    let x = uneven(64);
    for q in ["q8", "q4"] {
        let packed = format!("a = input f32[2,32]\nb = cast a dtype={q}\nc = cast b dtype=f32\n");
        let back = results(&packed, &[&x]).unwrap().remove(0).1;
        assert!(x.iter().zip(&back).all(|(a, b)| (a - b).abs() <= 25.0), "{q}");
        let wide: Vec<f64> = uneven(96);
        for a in ["f64", "f32", "bf16"] {
            let product = format!(
                "a = input f32[2,32]\nx = input {a}[3,32]\nb = cast a dtype={q}\ny = dot x b transpose=true"
            );
            let wide_type = if a == "f64" { a } else { "f32" };
            let plain = format!(
                "b = input {wide_type}[2,32]\nx = input {wide_type}[3,32]\ny = dot x b transpose=true\nz = cast y dtype={a}"
            );
            let got = results(&product, &[&x, &wide]).unwrap().remove(0).1;
            let want = results(&plain, &[&back, &wide]).unwrap().remove(0).1;
            assert_eq!(got, want, "{q} {a}");
        }
    }
}

#[test]
fn halves_round_once_a_node() {
    // Each intermediate of mish is far from a half; only the result is rounded.
    let x: Vec<f64> = (-20..20).map(|i| i as f64 / 4.0).collect();
    let wide = Value::new([40], x.iter().map(|&x| x as f32).collect());
    for op in [Unary::Mish, Unary::GeluTanh, Unary::Rsqrt] {
        let exact = one(Op::Unary(op), &[&wide]);
        for dtype in [DType::F16, DType::BF16] {
            let half = one(Op::Unary(op), &[&value(Meta::new(dtype, [40]), &x)]);
            assert_eq!(half.to_bytes(), one(Op::Cast(dtype), &[&exact]).to_bytes(), "{op:?} {dtype}");
        }
    }
    let a = Value::new([1], vec![f16::from_f32(2048.0)]);
    let b = Value::new([1], vec![f16::from_f32(1.0)]);
    assert_eq!(one(Op::Binary(Binary::Add), &[&a, &b]).slice::<f16>().unwrap(), [f16::from_f32(2048.0)]);
}

#[test]
fn sums_follow_the_order_of_their_axes() {
    let shape = [5, 130, 7];
    let x = Value::new(shape, floats(5 * 130 * 7));
    let data = x.slice::<f32>().unwrap().to_vec();
    let at = |i: usize, j: usize, k: usize| data[(i * 130 + j) * 7 + k];
    let plus = |a: f32, b: f32| a + b;
    let sum = |axes: AxisSet| one(Op::Reduce { kind: ReduceKind::Sum, axes, keep: false }, &[&x]);

    let got = sum(AxisSet::one(1));
    for i in 0..5 {
        for k in 0..7 {
            let column: Vec<f32> = (0..130).map(|j| at(i, j, k)).collect();
            let partials: Vec<f32> = column.chunks(64).map(|c| c.iter().fold(0.0, |s, x| s + x)).collect();
            let want = (partials[0] + partials[1]) + partials[2];
            assert_eq!(got.slice::<f32>().unwrap()[i * 7 + k].to_bits(), want.to_bits());
        }
    }
    let got = sum(AxisSet::one(0).with(2));
    for j in 0..130 {
        let row: Vec<f32> =
            (0..5).flat_map(|i| (0..7).map(move |k| (i, k))).map(|(i, k)| at(i, j, k)).collect();
        let want = order::fold(&row, order::INNER, 0.0, |x| x, plus);
        assert_eq!(got.slice::<f32>().unwrap()[j].to_bits(), want.to_bits());
    }
    let want = order::fold(&data, order::INNER, 0.0, |x| x, plus);
    assert_eq!(sum(AxisSet::all(3)).slice::<f32>().unwrap()[0].to_bits(), want.to_bits());
}

#[test]
fn halves_are_summed_in_f32_and_rounded_once() {
    let x: Vec<bf16> = floats(3000).into_iter().map(bf16::from_f32).collect();
    let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let sum = order::fold(&wide, order::INNER, 0.0, |x| x, |a, b| a + b);
    let x = Value::new([3000], x);
    let reduce = |kind| one(Op::Reduce { kind, axes: AxisSet::one(0), keep: false }, &[&x]);
    assert_eq!(reduce(ReduceKind::Sum).slice::<bf16>().unwrap(), [bf16::from_f32(sum)]);
    assert_eq!(reduce(ReduceKind::Mean).slice::<bf16>().unwrap(), [bf16::from_f32(sum / 3000.0)]);
}

#[test]
fn products_are_chains_by_panels() {
    let k = 1300;
    let (a, b) = (floats(k), floats(k + 7)[7..].to_vec());
    let mut want = None;
    for start in (0..k).step_by(512) {
        let mut acc = 0f32;
        for l in start..k.min(start + 512) {
            acc = a[l].fma(b[l], acc);
        }
        want = Some(want.map_or(acc, |sum: f32| sum + acc));
    }
    let (a, b) = (Value::new([1, k], a), Value::new([k, 1], b));
    let got = one(Op::Dot { transpose: false }, &[&a, &b]);
    assert_eq!(got.slice::<f32>().unwrap()[0].to_bits(), want.unwrap().to_bits());
}

#[test]
fn convolutions_are_one_chain_that_padding_is_part_of() {
    let conv =
        Conv { stride: [1; 3], low: [1, 0, 0], high: [1, 0, 0], dilation: [1; 3], extent: [0; 3], groups: 1 };
    let (x, w) = (floats(2 * 9), floats(6));
    let (vx, vw) = (Value::new([1, 2, 9], x.clone()), Value::new([1, 2, 3], w.clone()));
    let y = one(Op::Conv { kind: ConvKind::Forward, conv }, &[&vx, &vw]);
    for p in 0..9 {
        let mut acc = 0f32;
        for c in 0..2 {
            for k in 0..3 {
                let at = (p + k as usize).checked_sub(1).filter(|&at| at < 9);
                acc = at.map_or(0.0, |at| x[c * 9 + at]).mul_add(w[c * 3 + k as usize], acc);
            }
        }
        assert_eq!(y.slice::<f32>().unwrap()[p].to_bits(), acc.to_bits());
    }
    let grad = one(Op::Conv { kind: ConvKind::Weight, conv: Conv { extent: [3, 0, 0], ..conv } }, &[&vx, &y]);
    let y = y.slice::<f32>().unwrap();
    let want = (1..9).fold(0f32, |acc, p| x[9 + p - 1].mul_add(y[p], acc));
    assert_eq!(grad.slice::<f32>().unwrap()[3].to_bits(), want.to_bits());
}

#[test]
fn integers_wrap() {
    let text = |op: &str| format!("a = input u8[2]\nb = input u8[2]\nc = {op} a b");
    check(&text("add"), &[&[255., 7.], &[1., 250.]], &[("u8[2]", &[0., 1.])]);
    check(&text("sub"), &[&[0., 7.], &[1., 8.]], &[("u8[2]", &[255., 255.])]);
    check(&text("pow"), &[&[2., 3.], &[8., 0.]], &[("u8[2]", &[0., 1.])]);
    check("a = input i8[1]\nb = abs a", &[&[-128.]], &[("i8[1]", &[-128.])]);
    check("a = input i16[3]\nb = sum a axes=[0] keep=false", &[&[32767., 1., 1.]], &[("i16[]", &[-32767.])]);
    check(
        "a = input i8[1,2]\nb = input i8[2,1]\nc = dot a b transpose=false",
        &[&[100., 2.], &[3., 1.]],
        &[("i8[1,1]", &[46.])],
    );
}

#[test]
fn comparisons_take_every_plain_dtype() {
    check("a = input bool[2]\nb = input bool[]\nc = lt a b", &[&[0., 1.], &[1.]], &[("bool[2]", &[1., 0.])]);
    check(
        "a = input f16[3]\nb = input f16[3]\nc = ge a b",
        &[&[NAN, 0., 2.], &[1., -0., 3.]],
        &[("bool[3]", &[0., 1., 0.])],
    );
    check(
        "a = input f64[2]\nb = input f64[2]\nc = ne a b",
        &[&[NAN, 0.], &[NAN, -0.]],
        &[("bool[2]", &[1., 0.])],
    );
}
