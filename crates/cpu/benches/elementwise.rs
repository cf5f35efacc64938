//! GB/s (read and written) of elementwise loops over f32 on one thread, tile by tile as the device runs
//! them: `KILN_ISA=avx512|avx2|interp cargo bench -p kiln-cpu --bench elementwise`.

use kiln_cpu::gemm::isa;
use kiln_cpu::slices;
use kiln_ir::{Binary, Unary};
use std::hint::black_box;
use std::time::Instant;

const TILE: usize = 1024;

const UNARY: &[Unary] = &[
    Unary::Exp,
    Unary::Expm1,
    Unary::Log,
    Unary::Log1p,
    Unary::Log2,
    Unary::Tanh,
    Unary::Erf,
    Unary::Sigmoid,
    Unary::Silu,
    Unary::Softplus,
    Unary::LogSigmoid,
    Unary::Mish,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Sin,
    Unary::Cos,
    Unary::Sqrt,
    Unary::Rsqrt,
];

fn main() {
    println!("isa {}, 1 thread, GB/s read and written", isa().name());
    println!("{:12} {:>8} {:>8}", "", "64k", "1M");
    let sizes = [1 << 16, 1 << 20];
    for op in [Binary::Add, Binary::Mul] {
        line(op.name(), sizes.map(|n| binary(n, &|a, b, y| slices::binary_num::<f32>(op, a, b, y))));
    }
    line("div", sizes.map(|n| binary(n, &|a, b, y| slices::binary_float::<f32>(Binary::Div, a, b, y))));
    line("maximum", sizes.map(|n| binary(n, &|a, b, y| slices::binary_num::<f32>(Binary::Maximum, a, b, y))));
    line("pow", sizes.map(|n| binary(n, &|a, b, y| slices::binary_num::<f32>(Binary::Pow, a, b, y))));
    line("select", sizes.map(select));
    for &op in UNARY {
        line(op.name(), sizes.map(|n| unary(n, &|x, y| slices::unary_float::<f32>(op, x, y))));
    }
    line("relu", sizes.map(|n| unary(n, &|x, y| slices::unary_num::<f32>(Unary::Relu, x, y))));
}

fn line(name: &str, rates: [f64; 2]) {
    println!("{name:12} {:8.1} {:8.1}", rates[0], rates[1]);
}

/// A loop over tiles of two operands.
type Zip<'a> = dyn Fn(&[f32], &[f32], &mut [f32]) + 'a;

/// Positive numbers up to 10, so that logarithms and powers take their usual path.
fn noise(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 2_654_435_761) % 1_000_003) as f32 / 100_000.3).collect()
}

fn unary(n: usize, f: &dyn Fn(&[f32], &mut [f32])) -> f64 {
    let (x, mut y) = (noise(n), vec![0.0; n]);
    rate(8 * n, || x.chunks(TILE).zip(y.chunks_mut(TILE)).for_each(|(x, y)| f(black_box(x), y)))
}

fn binary(n: usize, f: &Zip<'_>) -> f64 {
    let (a, b, mut y) = (noise(n), noise(n + 7)[7..].to_vec(), vec![0.0; n]);
    let pairs = || a.chunks(TILE).zip(b.chunks(TILE));
    rate(12 * n, || pairs().zip(y.chunks_mut(TILE)).for_each(|((a, b), y)| f(black_box(a), b, y)))
}

fn select(n: usize) -> f64 {
    let (a, b, mut y) = (noise(n), noise(n), vec![0.0; n]);
    let cond: Vec<u8> = (0..n).map(|i| (i % 3 == 0) as u8).collect();
    let tiles = || cond.chunks(TILE).zip(a.chunks(TILE)).zip(b.chunks(TILE));
    rate(13 * n, || {
        tiles().zip(y.chunks_mut(TILE)).for_each(|(((c, a), b), y)| slices::select(black_box(c), a, b, y))
    })
}

/// The best of many short runs: the machine is shared.
fn rate(bytes: usize, mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < 5 || start.elapsed().as_millis() < 120 {
        let from = Instant::now();
        run();
        best = best.min(from.elapsed().as_secs_f64());
        rounds += 1;
    }
    bytes as f64 / best / 1e9
}
