//! Passes that are worth timing, for `benches/emit.rs`: compiled, and tile by tile with the unfused loops.

use super::{Code, compile};
use crate::fused::kernel::{Call, Kernel, kernel};
use crate::fused::pass::{Input, Output, Pass, Step};
use crate::reduction;
use crate::tile::TILE;
use kiln_ir::{Binary, DType, ReduceKind, Unary};
use std::sync::Arc;

/// A pass over f32.
pub struct Trial {
    /// What it computes.
    pub name: &'static str,
    pass: Pass,
    code: Option<Arc<Code>>,
}

/// All of them.
pub fn trials() -> Vec<Trial> {
    use Binary::{Add, Div, Mul, Sub};
    let two = |op, a, b| (Kernel::Binary(op), vec![a, b]);
    let one = |op, x| (Kernel::Unary(op), vec![x]);
    let store = |value| Output::Store { value, stream: false };
    let fold = |value, kind| Output::Fold { value, kind };
    let trial = |name, streams: usize, numbers: usize, steps: Vec<(Kernel, Vec<u32>)>, outputs| {
        let inputs = (0..streams + numbers).map(|i| Input { dtype: DType::F32, splat: i >= streams });
        let steps = steps.into_iter().map(|(op, args)| Step {
            call: Call { op, from: DType::F32, to: DType::F32 },
            args: args.into_iter().collect(),
        });
        let pass = Pass { inputs: inputs.collect(), steps: steps.collect(), outputs };
        Trial { name, code: compile(&pass), pass }
    };
    vec![
        trial(
            "relu(x * a + b) * c + r",
            2,
            3,
            vec![two(Mul, 0, 2), two(Add, 5, 3), one(Unary::Relu, 6), two(Mul, 7, 4), two(Add, 8, 1)],
            vec![store(9)],
        ),
        trial(
            "gelu_tanh(x + b) + r",
            2,
            1,
            vec![two(Add, 0, 2), one(Unary::GeluTanh, 3), two(Add, 4, 1)],
            vec![store(5)],
        ),
        // p, g, m, v; b1, 1 - b1, b2, 1 - b2, rate, epsilon, and both corrections.
        trial(
            "adam",
            4,
            8,
            vec![
                two(Mul, 2, 4),
                two(Mul, 1, 5),
                two(Add, 12, 13),
                two(Mul, 3, 6),
                one(Unary::Square, 1),
                two(Mul, 16, 7),
                two(Add, 15, 17),
                two(Div, 14, 10),
                two(Div, 18, 11),
                one(Unary::Sqrt, 20),
                two(Add, 21, 9),
                two(Div, 19, 22),
                two(Mul, 23, 8),
                two(Sub, 0, 24),
            ],
            vec![store(14), store(18), store(25)],
        ),
        trial("max of x", 1, 0, vec![], vec![fold(0, ReduceKind::Max)]),
        trial(
            "sums of x and x * x",
            1,
            0,
            vec![one(Unary::Square, 0)],
            vec![fold(0, ReduceKind::Sum), fold(1, ReduceKind::Sum)],
        ),
        trial(
            "exp(x - m) and its sum",
            1,
            1,
            vec![two(Sub, 0, 1), one(Unary::Exp, 2)],
            vec![store(3), fold(3, ReduceKind::Sum)],
        ),
    ]
}

impl Trial {
    /// Bytes read and written for each element.
    pub fn bytes(&self) -> usize {
        let stores = self.pass.outputs.iter().filter(|output| matches!(output, Output::Store { .. }));
        4 * (self.pass.inputs.iter().filter(|input| !input.splat).count() + stores.count())
    }

    /// Vectors of `len` elements for inputs and outputs.
    pub fn operands(&self, len: usize) -> Vec<Vec<f32>> {
        let count = self.pass.inputs.len() + self.pass.outputs.len();
        let value = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f32 / 200_000.0;
        (0..count).map(|k| (0..len.max(16)).map(|i| value(i + k) + 0.1).collect()).collect()
    }

    /// Compiles it anew.
    pub fn compile(&self) -> bool {
        let target = self.code.as_ref().map(|code| code.target);
        target.is_some_and(|target| Code::new(&self.pass, target).is_some())
    }

    /// Runs the compiled pass over what [`Trial::operands`] gave; whether there is one.
    pub fn run(&self, operands: &mut [Vec<f32>]) -> bool {
        let len = operands[0].len();
        let addresses: Vec<*mut u8> = operands.iter_mut().map(|x| x.as_mut_ptr().cast()).collect();
        let Some(code) = &self.code else { return false };
        assert_eq!(addresses.len(), self.pass.inputs.len() + self.pass.outputs.len());
        assert!(operands.iter().all(|x| x.len() == len));
        // SAFETY: every operand has `len` elements, which is more than the lanes of a fold take.
        unsafe { code.run(&addresses, len) };
        true
    }

    /// Runs it tile by tile.
    pub fn interpret(&self, operands: &mut [Vec<f32>]) {
        let (len, inputs) = (operands[0].len(), self.pass.inputs.len());
        let mut tiles = vec![vec![0f32; TILE]; inputs + self.pass.steps.len()];
        for (k, input) in self.pass.inputs.iter().enumerate().filter(|(_, input)| input.splat) {
            debug_assert_eq!(input.dtype, DType::F32);
            tiles[k].fill(operands[k][0]);
        }
        for at in (0..len).step_by(TILE) {
            let count = TILE.min(len - at);
            let place = |tiles: &mut [Vec<f32>], operands: &mut [Vec<f32>], value: usize| -> *mut f32 {
                match self.pass.inputs.get(value) {
                    Some(input) if !input.splat => operands[value][at..].as_mut_ptr(),
                    _ => tiles[value].as_mut_ptr(),
                }
            };
            for (i, step) in self.pass.steps.iter().enumerate() {
                let args: Vec<*const u8> = step
                    .args
                    .iter()
                    .map(|&a| place(&mut tiles, operands, a as usize).cast_const().cast())
                    .collect();
                let out = place(&mut tiles, operands, inputs + i);
                // SAFETY: tiles and what is left of operands have `count` elements, and no value is two.
                unsafe { kernel(&step.call, &args, out.cast(), count) };
            }
            for (k, output) in self.pass.outputs.iter().enumerate() {
                match *output {
                    Output::Store { value, .. } => {
                        operands[inputs + k][at..at + count].copy_from_slice(&tiles[value as usize][..count]);
                    }
                    Output::Fold { value, kind } => {
                        let x = place(&mut tiles, operands, value as usize);
                        let lanes =
                            operands[inputs + k][at / reduction::CHUNK * reduction::LANES..].as_mut_ptr();
                        // SAFETY: `x` has `count` elements, and there are more elements than lanes.
                        unsafe { reduction::lanes(kind, DType::F32, x.cast(), count, lanes.cast()) };
                    }
                }
            }
        }
    }
}
