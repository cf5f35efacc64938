//! Every operation of the tables over f32 on every instruction set, against the value column itself.

use super::*;
use crate::gemm::Isa;
use crate::reference::{Value, eval};
use kiln_ir::{Domain, Op};

fn here() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.supported())
}

/// Random bit patterns, ordinary numbers and special ones. An odd number of them, so that vectors leave a rest.
fn numbers(seed: u64) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1e-39,
        f32::MIN_POSITIVE,
        1.0,
        -1.0,
        0.5,
        2.0,
        3.0,
        -2.5,
        20.0,
        88.7,
        -87.4,
        -103.9,
        104.0,
        131_071.99,
        131_072.0,
        -1e10,
        16_777_216.0,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
        f32::from_bits(0x7fc0_1234),
        f32::from_bits(0xffc0_0f0f),
    ];
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let mut all = special.to_vec();
    for _ in 0..700 {
        all.push(f32::from_bits(next()));
        all.push((next() as f32 / 4e9 - 0.5) * 40.0);
        all.push(next() as f32 / 4e9 - 0.5);
    }
    let cut = next() as usize % special.len();
    all.rotate_left(cut);
    all
}

/// Every NaN is the same: which of two operands' NaNs comes out is nobody's promise.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

#[test]
fn one_operand_has_the_same_bits_everywhere() {
    // Near 0 throughout, and with numbers that sine and cosine reduce otherwise.
    let wild = numbers(1);
    let tame: Vec<f32> = wild.iter().copied().filter(|x| x.is_nan() || x.abs() < 1e5).collect();
    for x in [&wild, &tame] {
        for &op in Unary::ALL {
            let (mut y, mut truth) = (vec![0f32; x.len()], vec![0u8; x.len()]);
            // SAFETY: only what this machine has is tried.
            let mut run = |isa, x: &[f32]| unsafe {
                let (y, truth) = (&mut y[..x.len()], &mut truth[..x.len()]);
                match op.domain() {
                    Domain::Float => f32_unary_float::on(isa, op, x, y),
                    Domain::Num => f32_unary_num::on(isa, op, x, y),
                    Domain::Test => f32_unary_test::on(isa, op, x, truth),
                    Domain::Bits | Domain::Compare => {}
                }
                (bits(y), truth.to_vec())
            };
            // One at a time nothing is a vector.
            let single: Vec<_> = x.iter().map(|x| run(Isa::Interp, std::slice::from_ref(x))).collect();
            let want: (Vec<u32>, Vec<u8>) = (
                single.iter().flat_map(|(y, _)| y.iter().copied()).collect(),
                single.iter().flat_map(|(_, t)| t.iter().copied()).collect(),
            );
            for isa in here() {
                let got = run(isa, x);
                let at = got.0.iter().zip(&want.0).position(|(a, b)| a != b);
                assert!(
                    got == want,
                    "{} on {}: {:?}",
                    op.name(),
                    isa.name(),
                    at.map(|i| (x[i], f32::from_bits(got.0[i]), f32::from_bits(want.0[i])))
                );
            }
        }
    }
}

#[test]
fn two_operands_have_the_same_bits_everywhere() {
    let (a, b) = (numbers(2), numbers(3));
    for &op in Binary::ALL {
        let run = |isa| {
            let (mut y, mut truth) = (vec![0f32; a.len()], vec![0u8; a.len()]);
            // SAFETY: only what this machine has is tried.
            unsafe {
                match op.domain() {
                    Domain::Float => f32_binary_float::on(isa, op, &a, &b, &mut y),
                    Domain::Num => f32_binary_num::on(isa, op, &a, &b, &mut y),
                    Domain::Compare => f32_binary_compare::on(isa, op, &a, &b, &mut truth),
                    Domain::Bits | Domain::Test => {}
                }
            }
            (bits(&y), truth)
        };
        for isa in here() {
            assert!(run(isa) == run(Isa::Interp), "{} on {}", op.name(), isa.name());
        }
    }
}

#[test]
fn integers_and_selections_have_the_same_bits_everywhere() {
    let ints = |seed| numbers(seed).iter().map(|x| x.to_bits() as i32).collect::<Vec<_>>();
    let (a, b) =
        (ints(4), ints(5).into_iter().map(|x| if x % 5 == 0 { x % 7 } else { x }).collect::<Vec<_>>());
    for op in
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Pow, Binary::Maximum, Binary::Minimum, Binary::Fmod]
    {
        let run = |isa| {
            let mut y = vec![0; a.len()];
            // SAFETY: only what this machine has is tried.
            unsafe { i32_binary_num::on(isa, op, &a, &b, &mut y) };
            y
        };
        assert!(here().all(|isa| run(isa) == run(Isa::Interp)), "{}", op.name());
    }
    let cond: Vec<u8> = a.iter().map(|x| (x % 3 == 0) as u8).collect();
    for isa in here() {
        let mut y = vec![0; a.len()];
        // SAFETY: only what this machine has is tried.
        unsafe { select_versions::on::<i32>(isa, &cond, &a, &b, &mut y) };
        assert!((0..y.len()).all(|i| y[i] == if cond[i] != 0 { a[i] } else { b[i] }));
    }
}

#[test]
fn halves_are_widened_and_rounded_as_one_by_one() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let (mut wide, mut back) = (vec![0f32; all.len()], vec![bf16::ZERO; all.len()]);
    let halves: Vec<bf16> = all.iter().map(|&x| bf16::from_bits(x)).collect();
    widen_bf16(&halves, &mut wide);
    assert!(halves.iter().zip(&wide).all(|(h, w)| h.to_f32().to_bits() == w.to_bits()));
    for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
        let x: Vec<f32> = all.iter().map(|&x| f32::from_bits((x as u32) << 16 | low)).collect();
        narrow_bf16(&x, &mut back);
        assert!(x.iter().zip(&back).all(|(x, y)| bf16::from_f32(*x).to_bits() == y.to_bits()));
    }
    let halves: Vec<f16> = all.iter().map(|&x| f16::from_bits(x)).collect();
    let mut back = vec![f16::ZERO; all.len()];
    widen_f16(&halves, &mut wide);
    assert!(halves.iter().zip(&wide).all(|(h, w)| h.to_f32().to_bits() == w.to_bits()));
    for x in [
        wide.clone(),
        wide.iter().map(|x| x * 1.000_488_3).collect(),
        wide.iter().map(|x| x * 0.001).collect(),
    ] {
        narrow_f16(&x, &mut back);
        assert!(x.iter().zip(&back).all(|(x, y)| f16::from_f32(*x).to_bits() == y.to_bits()));
    }
}

/// The interpreter's operations are the same loops, whatever the length of what they are given.
#[test]
fn reference_has_the_same_bits() {
    let x = numbers(6);
    for &op in Unary::ALL.iter().filter(|op| op.domain() == Domain::Float) {
        let whole = eval(&Op::Unary(op), &[&Value::new([x.len()], x.clone())]).unwrap().remove(0);
        let mut tiles = vec![0f32; x.len()];
        x.chunks(100).zip(tiles.chunks_mut(100)).for_each(|(x, y)| unary_float(op, x, y));
        assert_eq!(bits(whole.slice::<f32>().unwrap()), bits(&tiles), "{}", op.name());
    }
}
