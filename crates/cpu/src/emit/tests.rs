//! Compiled passes against the loops of the unfused device, bit by bit.

use super::body::FOLDS;
use super::graph::Target;
use super::*;
use crate::fused::kernel::{Call, Kernel, kernel};
use crate::fused::pass::{Input, Output, Step};
use crate::reference::order::INNER;
use half::{bf16, f16};
use kiln_ir::math::Num;
use kiln_ir::{Binary, DType, Domain, ReduceKind, Unary};
use proptest::prelude::*;

const TYPES: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U16,
    DType::U8,
    DType::Bool,
];

fn targets() -> Vec<Target> {
    let isas = [(Isa::Avx512, Target::Avx512), (Isa::Avx2, Target::Avx2)];
    isas.into_iter().filter(|(isa, _)| isa.supported()).map(|(_, target)| target).collect()
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[allow(dead_code)] [u64; 8]);

/// Memory for elements, aligned for any store.
#[derive(Clone)]
struct Memory(Vec<CacheLine>);

impl Memory {
    fn new(bytes: usize) -> Memory {
        // Lines more than it takes, to see what is written behind the end.
        Memory(vec![CacheLine([0x5555_5555_5555_5555; 8]); bytes / 64 + 2])
    }

    fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    fn bytes(&mut self, count: usize) -> &mut [u8] {
        let at = self.at();
        // SAFETY: two lines more than `count` were allocated.
        unsafe { std::slice::from_raw_parts_mut(at, count) }
    }
}

/// A stream of bits.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ (x >> 29)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }

    /// An element: a special one, of ordinary size, or any bits.
    fn element(&mut self, dtype: DType) -> u32 {
        const SPECIAL: [f32; 24] = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MIN_POSITIVE,
            1e-45,
            -1e-45,
            f32::MAX,
            f32::MIN,
            0.5,
            1.5,
            2.5,
            -0.5,
            89.0,
            -104.0,
            2_147_483_648.0,
            -2_147_483_649.0,
            255.0,
            256.0,
            -129.0,
            65536.0,
        ];
        let real = match self.below(4) {
            0 => SPECIAL[self.below(SPECIAL.len())],
            1 => f32::from_bits(self.next() as u32),
            _ => (self.next() as i32 as f32) * 2f32.powi(self.below(36) as i32 - 48),
        };
        let whole =
            [self.next() as u32, 0, 1, !0, 0x8000_0000, 0x7fff_ffff, self.next() as u32 % 7][self.below(7)];
        match dtype {
            DType::F32 => real.to_bits(),
            DType::F16 => f16::from_f32(real).to_bits() as u32,
            DType::BF16 => bf16::from_f32(real).to_bits() as u32,
            DType::Bool => whole & 1,
            _ => whole,
        }
    }

    fn fill(&mut self, dtype: DType, len: usize) -> Memory {
        let size = dtype.size();
        let mut memory = Memory::new(len * size);
        for i in 0..len {
            let element = self.element(dtype).to_le_bytes();
            memory.bytes(len * size)[i * size..][..size].copy_from_slice(&element[..size]);
        }
        memory
    }
}

fn step(op: Kernel, from: DType, to: DType, args: &[u32]) -> Step {
    Step { call: Call { op, from, to }, args: args.iter().copied().collect() }
}

fn dtypes(pass: &Pass) -> Vec<DType> {
    let inputs = pass.inputs.iter().map(|input| input.dtype);
    inputs.chain(pass.steps.iter().map(|step| step.call.to)).collect()
}

/// What the loops of the unfused device make of it.
fn interpreted(pass: &Pass, inputs: &mut [Memory], len: usize) -> Vec<Memory> {
    let dtypes = dtypes(pass);
    let mut values: Vec<Memory> = Vec::new();
    for (input, memory) in pass.inputs.iter().zip(inputs) {
        let size = input.dtype.size();
        let mut value = Memory::new(len * size);
        for i in 0..len {
            let from = if input.splat { 0 } else { i * size };
            let element = memory.bytes(from + size)[from..].to_vec();
            value.bytes(len * size)[i * size..][..size].copy_from_slice(&element);
        }
        values.push(value);
    }
    for step in &pass.steps {
        let mut out = Memory::new(len * step.call.to.size());
        for from in (0..len).step_by(512) {
            let args: Vec<*const u8> = step
                .args
                .iter()
                .map(|&a| values[a as usize].at().wrapping_add(from * dtypes[a as usize].size()).cast_const())
                .collect();
            let to = out.at().wrapping_add(from * step.call.to.size());
            // SAFETY: every value has `len` elements.
            unsafe { kernel(&step.call, &args, to, (len - from).min(512)) };
        }
        values.push(out);
    }
    pass.outputs
        .iter()
        .map(|output| match *output {
            Output::Store { value, .. } => values[value as usize].clone(),
            Output::Fold { value, kind } => {
                let bytes = len * dtypes[value as usize].size();
                lanes(values[value as usize].bytes(bytes), dtypes[value as usize], kind)
            }
        })
        .collect()
}

/// The lanes of every chunk.
fn lanes(bytes: &[u8], dtype: DType, kind: ReduceKind) -> Memory {
    let values: Vec<f32> = bytes
        .chunks(dtype.size())
        .map(|x| match dtype {
            DType::F16 => f16::from_le_bytes([x[0], x[1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([x[0], x[1]]).to_f32(),
            _ => f32::from_le_bytes([x[0], x[1], x[2], x[3]]),
        })
        .collect();
    let mut all = Vec::new();
    for chunk in values.chunks(INNER.chunk) {
        let start = match kind {
            ReduceKind::Prod => 1.0,
            ReduceKind::Max => f32::NEG_INFINITY,
            ReduceKind::Min => f32::INFINITY,
            _ => 0.0,
        };
        let mut lanes = [start; INNER.lanes];
        for (i, &x) in chunk.iter().enumerate() {
            let lane = &mut lanes[i % INNER.lanes];
            *lane = match kind {
                ReduceKind::Prod => *lane * x,
                ReduceKind::Max => Num::maximum(*lane, x),
                ReduceKind::Min => Num::minimum(*lane, x),
                _ => *lane + x,
            };
        }
        all.extend(lanes.iter().flat_map(|lane| lane.to_le_bytes()));
    }
    let mut memory = Memory::new(all.len());
    memory.bytes(all.len()).copy_from_slice(&all);
    memory
}

/// Bytes of an output, and its dtype.
fn extent(pass: &Pass, output: &Output, len: usize) -> (usize, DType) {
    match *output {
        Output::Store { value, .. } => {
            let dtype = dtypes(pass)[value as usize];
            (len * dtype.size(), dtype)
        }
        Output::Fold { .. } => (len.div_ceil(INNER.chunk) * 64, DType::F32),
    }
}

/// Elements' bits, every NaN as one.
fn bits(bytes: &[u8], dtype: DType) -> Vec<u32> {
    let element = |x: &[u8]| x.iter().rev().fold(0, |bits, &byte| bits << 8 | byte as u32);
    let canonical = |bits: u32| match dtype {
        DType::F32 if f32::from_bits(bits).is_nan() => 0x7fc0_0000,
        DType::F16 if f16::from_bits(bits as u16).is_nan() => 0x7e00,
        DType::BF16 if bf16::from_bits(bits as u16).is_nan() => 0x7fc0,
        _ => bits,
    };
    bytes.chunks(dtype.size()).map(|x| canonical(element(x))).collect()
}

/// Runs a pass both ways on each target that has a form of it; how many have.
fn check(pass: &Pass, lengths: impl IntoIterator<Item = usize> + Clone, seed: u64) -> usize {
    let mut compiled = 0;
    for target in targets() {
        let Some(code) = Code::new(pass, target) else { continue };
        compiled += 1;
        for len in lengths.clone() {
            let mut noise = Noise(seed ^ len as u64);
            let mut inputs: Vec<Memory> = pass
                .inputs
                .iter()
                .map(|input| noise.fill(input.dtype, if input.splat { 1 } else { len }))
                .collect();
            let mut want = interpreted(pass, &mut inputs, len);
            let mut outputs: Vec<Memory> =
                pass.outputs.iter().map(|output| Memory::new(extent(pass, output, len).0)).collect();
            let addresses: Vec<*mut u8> = inputs.iter_mut().chain(&mut outputs).map(Memory::at).collect();
            // SAFETY: every address has room for `len` elements.
            unsafe { code.run(&addresses, len) };
            for (k, output) in pass.outputs.iter().enumerate() {
                let (bytes, dtype) = extent(pass, output, len);
                let (got, want) = (bits(outputs[k].bytes(bytes), dtype), bits(want[k].bytes(bytes), dtype));
                if let Some(i) = (0..got.len()).find(|&i| got[i] != want[i]) {
                    let of = inputs.iter_mut().zip(&pass.inputs).map(|(memory, input)| {
                        let size = input.dtype.size();
                        let at = if input.splat { 0 } else { i.min(len - 1) * size };
                        let bits = bits(&memory.bytes(at + size)[at..], input.dtype)[0];
                        format!("{bits:#x} ({:e})", f32::from_bits(bits))
                    });
                    let of: Vec<String> = of.collect();
                    let (got, want) = (got[i], want[i]);
                    panic!(
                        "{got:#x}, not {want:#x}: element {i} of {len} on {target:?} from {of:?}: {pass:#?}"
                    );
                }
                let behind = &outputs[k].bytes(bytes + 60)[bytes..];
                assert!(behind.iter().all(|&byte| byte == 0x55), "wrote behind {len} elements: {pass:?}");
            }
        }
    }
    compiled
}

fn unary_pass(op: Kernel, from: DType, to: DType) -> Pass {
    Pass {
        inputs: vec![Input { dtype: from, splat: false }],
        steps: vec![step(op, from, to, &[0])],
        outputs: vec![Output::Store { value: 1, stream: false }],
    }
}

/// The dtype of a result, if the operation takes that dtype.
fn result(domain: Domain, dtype: DType) -> Option<DType> {
    match domain {
        Domain::Float => dtype.is_float().then_some(dtype),
        Domain::Num => (dtype != DType::Bool).then_some(dtype),
        Domain::Test => (dtype != DType::Bool).then_some(DType::Bool),
        Domain::Compare => Some(DType::Bool),
        Domain::Bits => (!dtype.is_float()).then_some(dtype),
    }
}

#[test]
fn every_operation_of_one_operand() {
    let mut missing = Vec::new();
    for (i, &op) in Unary::ALL.iter().enumerate() {
        for dtype in TYPES {
            let Some(to) = result(op.domain(), dtype) else { continue };
            let pass = unary_pass(Kernel::Unary(op), dtype, to);
            let compiled = check(&pass, (0..70).chain([500, 3000]), i as u64 + 77);
            if compiled < targets().len() && dtype == DType::F32 {
                missing.push(op.name());
            }
        }
    }
    println!("not compiled: {missing:?}");
    let known = ["sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"];
    assert!(missing.iter().all(|name| known.contains(name)), "{missing:?}");
}

#[test]
fn every_operation_of_two_operands() {
    let mut missing = Vec::new();
    for (i, &op) in Binary::ALL.iter().enumerate() {
        for dtype in TYPES {
            let Some(to) = result(op.domain(), dtype) else { continue };
            if op.divides() && dtype.is_int() {
                continue;
            }
            for splat in [false, true] {
                let pass = Pass {
                    inputs: vec![Input { dtype, splat: false }, Input { dtype, splat }],
                    steps: vec![step(Kernel::Binary(op), dtype, to, &[0, 1])],
                    outputs: vec![Output::Store { value: 2, stream: false }],
                };
                let compiled = check(&pass, (0..70).chain([3000]), i as u64 + 1);
                if compiled < targets().len() {
                    missing.push((op.name(), dtype));
                }
            }
        }
    }
    let known = ["pow", "floor_divide", "remainder", "fmod", "atan2"];
    assert!(missing.iter().all(|(name, _)| known.contains(name)), "{missing:?}");
}

#[test]
fn casts_and_selections() {
    for from in TYPES {
        for to in TYPES.into_iter().filter(|&to| to != from) {
            let pass = unary_pass(Kernel::Cast, from, to);
            assert_eq!(check(&pass, (0..40).chain([3000]), 5), targets().len(), "{from} to {to}");
        }
        for splat in 0..8 {
            let input = |i: u32, dtype| Input { dtype, splat: splat >> i & 1 == 1 };
            let pass = Pass {
                inputs: vec![input(0, DType::Bool), input(1, from), input(2, from)],
                steps: vec![step(Kernel::Select, from, from, &[0, 1, 2])],
                outputs: vec![Output::Store { value: 3, stream: true }],
            };
            assert_eq!(check(&pass, 0..70, splat as u64), targets().len(), "{from}");
        }
    }
}

#[test]
fn folds_have_the_lanes_of_the_order() {
    use ReduceKind::*;
    for kind in [Sum, Mean, Prod, Max, Min] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let square = Kernel::Unary(Unary::Square);
            let pass = Pass {
                inputs: vec![Input { dtype, splat: false }],
                steps: vec![step(square, dtype, dtype, &[0])],
                outputs: vec![
                    Output::Fold { value: 0, kind },
                    Output::Store { value: 1, stream: false },
                    Output::Fold { value: 1, kind: Sum },
                ],
            };
            let lengths = (0..40).chain([511, 512, 513, 1023, 1024, 1100, 2047, 2048, 2049, 4096, 5000]);
            assert_eq!(check(&pass, lengths, 3), targets().len(), "{kind:?} of {dtype}");
        }
    }
}

#[test]
fn outputs_may_take_the_place_of_inputs() {
    // Swaps two operands.
    let pass = Pass {
        inputs: vec![Input { dtype: DType::F32, splat: false }; 2],
        steps: vec![],
        outputs: vec![Output::Store { value: 1, stream: false }, Output::Store { value: 0, stream: false }],
    };
    for target in targets() {
        let code = Code::new(&pass, target).expect("copies are compiled");
        for len in 0..100 {
            let (mut a, mut b): (Vec<f32>, Vec<f32>) = (0..len).map(|i| (i as f32, -(i as f32))).unzip();
            let (pa, pb) = (a.as_mut_ptr().cast(), b.as_mut_ptr().cast());
            // SAFETY: both have `len` elements.
            unsafe { code.run(&[pa, pb, pa, pb], len) };
            assert!((0..len).all(|i| a[i] == -(i as f32) && b[i] == i as f32), "{len}");
        }
    }
}

/// A pass of that many inputs and steps, of any operations and types that fit.
fn any_pass(noise: &mut Noise, inputs: usize, steps: usize) -> Pass {
    let mut pass = Pass { inputs: Vec::new(), steps: Vec::new(), outputs: Vec::new() };
    for _ in 0..inputs {
        let dtype = if noise.below(2) == 0 { DType::F32 } else { TYPES[noise.below(TYPES.len())] };
        pass.inputs.push(Input { dtype, splat: noise.below(3) == 0 });
    }
    let mut tries = 0;
    while pass.steps.len() < steps && tries < 1000 {
        tries += 1;
        let dtypes = dtypes(&pass);
        let a = noise.below(dtypes.len());
        let from = dtypes[a];
        let of_type = |noise: &mut Noise, dtype| {
            let fit: Vec<usize> = (0..dtypes.len()).filter(|&i| dtypes[i] == dtype).collect();
            if fit.is_empty() { None } else { Some(fit[noise.below(fit.len())] as u32) }
        };
        let found = match noise.below(8) {
            0 | 1 => {
                let op = Unary::ALL[noise.below(Unary::ALL.len())];
                result(op.domain(), from).map(|to| step(Kernel::Unary(op), from, to, &[a as u32]))
            }
            2 => {
                let to = TYPES[noise.below(TYPES.len())];
                (to != from).then(|| step(Kernel::Cast, from, to, &[a as u32]))
            }
            3 => of_type(noise, DType::Bool).map(|condition| {
                let b = of_type(noise, from).unwrap_or(a as u32);
                step(Kernel::Select, from, from, &[condition, a as u32, b])
            }),
            _ => {
                let op = Binary::ALL[noise.below(Binary::ALL.len())];
                let b = of_type(noise, from).unwrap_or(a as u32);
                let divides = op.divides() && from.is_int();
                let to = result(op.domain(), from).filter(|_| !divides);
                to.map(|to| step(Kernel::Binary(op), from, to, &[a as u32, b]))
            }
        };
        // What has no form would leave the whole pass to the interpreter.
        pass.steps.extend(found);
        let last = pass.steps.len();
        if last > 0 && !targets().iter().all(|&target| lower::lower(&pass, target).is_some()) {
            pass.steps.truncate(last - 1);
        }
    }
    let dtypes = dtypes(&pass);
    for value in (0..dtypes.len()).rev().take(1 + noise.below(5)) {
        let value = value as u32;
        pass.outputs.push(match noise.below(4) {
            0 if dtypes[value as usize].is_float() => {
                use ReduceKind::*;
                Output::Fold { value, kind: [Sum, Prod, Max, Min, Mean][noise.below(5)] }
            }
            other => Output::Store { value, stream: other == 1 },
        });
    }
    pass
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_pass_has_the_same_bits(seed: u64, inputs in 1usize..14, steps in 0usize..60, len in 0usize..1500) {
        let pass = any_pass(&mut Noise(seed), inputs, steps);
        let compiled = check(&pass, [len, len % 70], seed);
        let folds = pass.outputs.iter().filter(|output| matches!(output, Output::Fold { .. })).count();
        // Very many values do not fit AVX2's registers and stack: such a pass may be left to the interpreter.
        let count = |avx2: bool| targets().iter().filter(|&&t| t == Target::Avx512 || avx2).count();
        let fits = folds <= FOLDS;
        prop_assert!((count(fits && pass.steps.len() < 30)..=count(fits)).contains(&compiled));
    }
}

/// A number with any mantissa, of about 2 to that power.
fn ordinary(noise: &mut Noise, power: i32) -> f32 {
    let bits = noise.next() as u32 & 0x807f_ffff | 0x3f80_0000;
    f32::from_bits(bits) * 2f32.powi(power)
}

/// x / c, (x / c) / c and so on: enough of them that they are not divided for.
fn quotients(outputs: Vec<Output>) -> Pass {
    let input = |splat| Input { dtype: DType::F32, splat };
    let div = |x| step(Kernel::Binary(Binary::Div), DType::F32, DType::F32, &[x, 1]);
    Pass { inputs: vec![input(false), input(true)], steps: vec![div(0), div(2), div(3)], outputs }
}

fn memory_of(values: &[f32]) -> Memory {
    let mut memory = Memory::new(values.len() * 4);
    for (to, x) in memory.bytes(values.len() * 4).chunks_mut(4).zip(values) {
        to.copy_from_slice(&x.to_le_bytes());
    }
    memory
}

#[test]
fn quotients_by_one_number_are_as_if_divided_for() {
    const LEN: usize = 4 * 64;
    let stored = |value| Output::Store { value, stream: false };
    let folded = Output::Fold { value: 3, kind: ReduceKind::Sum };
    let special = [0.0, -0.0, f32::INFINITY, f32::NAN, 1e-45, f32::MIN_POSITIVE, f32::MAX, 1e-30];
    let edges = [1.0, 3.0, 0.3, 0.5, -7.0, 1.999_999_9, 2f32.powi(20), 2f32.powi(-20), 0.999_999_94];
    let mut noise = Noise(5);
    for outputs in [vec![stored(2), stored(4)], vec![stored(2), stored(4), folded]] {
        let pass = quotients(outputs);
        for target in targets() {
            let Some(code) = Code::new(&pass, target) else { continue };
            for turn in 0..20_000 {
                let by = match turn {
                    0..8 => special[turn],
                    8..17 => edges[turn - 8],
                    17..1000 => ordinary(&mut noise, turn as i32 % 60 - 30),
                    _ => ordinary(&mut noise, 0),
                };
                // Sometimes one of which no product is right: a turn of the loop divides, others do not.
                let rare = if turn % 3 == 0 { noise.below(LEN) } else { LEN };
                let x = |i| match i {
                    _ if i == rare => special[noise.below(special.len())],
                    _ if turn % 7 == 0 && i % 5 == 0 => [0.0, -0.0][i % 2],
                    // Next to what is halfway between two quotients.
                    _ if i % 4 == 0 => {
                        (ordinary(&mut noise, 0) as f64 * (1.0 + 2f64.powi(-24)) * by as f64) as f32
                    }
                    _ => ordinary(&mut noise, turn as i32 % 64 - 32),
                };
                let xs: Vec<f32> = (0..LEN).map(x).collect();
                let mut want: [Vec<f32>; 3] = [xs.iter().map(|x| x / by).collect(), vec![], vec![]];
                want[1] = want[0].iter().map(|x| x / by).collect();
                want[2] = want[1].iter().map(|x| x / by).collect();
                // The second output takes the input's place.
                let mut memory = [memory_of(&xs), memory_of(&[by]), Memory::new(LEN * 4), Memory::new(64)];
                let [x, number, first, sums] = memory.each_mut().map(Memory::at);
                let addresses = [x, number, first, x, sums];
                // SAFETY: every address has room.
                unsafe { code.run(&addresses[..pass.inputs.len() + pass.outputs.len()], LEN) };
                let [mut last, _, mut first, mut sums] = memory;
                let checked = [(&mut first, memory_of(&want[0])), (&mut last, memory_of(&want[2]))];
                for (got, mut want) in checked {
                    let (got, want) =
                        (bits(got.bytes(LEN * 4), DType::F32), bits(want.bytes(LEN * 4), DType::F32));
                    let wrong = (0..LEN).find(|&i| got[i] != want[i]);
                    assert!(
                        wrong.is_none(),
                        "{wrong:?} of {xs:?} by {by:e} on {target:?}: {got:x?}, not {want:x?}"
                    );
                }
                if pass.outputs.len() == 3 {
                    let mut want = lanes(memory_of(&want[1]).bytes(LEN * 4), DType::F32, ReduceKind::Sum);
                    assert_eq!(bits(sums.bytes(64), DType::F32), bits(want.bytes(64), DType::F32));
                }
            }
        }
    }
}

#[test]
fn ordinary_quotients_are_not_divided_for() {
    if !Isa::Avx512.supported() {
        return;
    }
    let pass = quotients(vec![Output::Store { value: 4, stream: false }]);
    let code = Code::new(&pass, Target::Avx512).unwrap();
    let divided = |xs: &[f32], by: f32| {
        let mut memory = [memory_of(xs), memory_of(&[by]), memory_of(xs)];
        let addresses = memory.each_mut().map(Memory::at);
        let lanes: u32;
        // SAFETY: every address has room. The code leaves the lanes of its last turn in k6.
        unsafe {
            code.run(&addresses, xs.len());
            std::arch::asm!("kmovw {0:e}, k6", out(reg) lanes);
        }
        lanes != 0
    };
    let mut noise = Noise(6);
    let mut xs: Vec<f32> = (0..256).map(|i| ordinary(&mut noise, i % 100 - 50)).collect();
    xs[255] = -0.0;
    assert!(!divided(&xs, 0.3));
    assert!(divided(&xs, 1e-30));
    xs[255] = f32::INFINITY;
    assert!(divided(&xs, 0.3));
}
