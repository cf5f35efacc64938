//! GFLOP/s of square products, GB/s of thin ones, and the cost of a fork-join and of an allocation:
//! `cargo bench -p kiln-cpu --bench gemm`.

use kiln_cpu::arena::{Arena, Place};
use kiln_cpu::gemm::{GemmScalar, Half, Mat, MatMut, gemm, gemm_half, isa};
use kiln_cpu::pool;
use std::time::Instant;

fn main() {
    println!("isa {}, {} cores", isa().name(), pool::threads());
    for n in [64, 128, 256, 512, 1024, 2048] {
        let rate = |threads| {
            let (a, b, mut c) = (noise(n * n), noise(n * n), vec![0.0f32; n * n]);
            flops(n, n, n, threads, || square(n, &a, &b, &mut c))
        };
        println!("f32   n {n:5}: 1 thread {:6.1} GFLOP/s, 2 threads {:6.1}", rate(1), rate(2));
    }
    for n in [512, 1024] {
        let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<_>>();
        let (a, b, mut c) = (wide(noise(n * n)), wide(noise(n * n)), vec![0.0f64; n * n]);
        let mut rate = |threads| flops(n, n, n, threads, || square(n, &a, &b, &mut c));
        println!("f64   n {n:5}: 1 thread {:6.1} GFLOP/s, 2 threads {:6.1}", rate(1), rate(2));
        let (one, two) = (halves::<half::bf16>(n, 1), halves::<half::bf16>(n, 2));
        println!("bf16  n {n:5}: 1 thread {one:6.1} GFLOP/s, 2 threads {two:6.1}");
        let (one, two) = (halves::<half::f16>(n, 1), halves::<half::f16>(n, 2));
        println!("f16   n {n:5}: 1 thread {one:6.1} GFLOP/s, 2 threads {two:6.1}");
    }
    for (m, n, k) in [(1, 4096, 4096), (4, 4096, 4096), (1, 512, 512), (32, 4096, 1024)] {
        for transposed in [false, true] {
            let rate = |threads| thin(m, n, k, transposed, threads);
            let name = if transposed { "along k" } else { "along n" };
            println!(
                "thin {m:3} x {n} x {k}, {name}: 1 thread {:6.1} GB/s, 2 threads {:6.1}",
                rate(1),
                rate(2)
            );
        }
    }
    pool::set_threads(2);
    println!("fork-join of 2 chunks: {:.2} us", 1e6 * best(2000, || pool::parallel(2, &|_| ())));
    let arena = Arena::new(None);
    let pair = best(2000, || (0..100).for_each(|_| drop(arena.alloc(4096, Place::Reuse)))) / 100.0;
    println!("alloc and free, cached: {:.1} ns", 1e9 * pair);
}

fn noise(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect()
}

fn square<T: GemmScalar>(n: usize, a: &[T], b: &[T], c: &mut [T]) {
    let rs = n as isize;
    let (a, b) = (Mat { ptr: a.as_ptr(), rs, cs: 1 }, Mat { ptr: b.as_ptr(), rs, cs: 1 });
    // SAFETY: three slices of n · n.
    unsafe { gemm(n, n, n, a, b, MatMut { ptr: c.as_mut_ptr(), rs, cs: 1 }) }
}

fn halves<H: Half + num::Round>(n: usize, threads: usize) -> f64 {
    let round = |x: Vec<f32>| x.into_iter().map(H::round).collect::<Vec<_>>();
    let (a, b, mut c) = (round(noise(n * n)), round(noise(n * n)), round(noise(n * n)));
    let rs = n as isize;
    flops(n, n, n, threads, || {
        let (a, b) = (Mat { ptr: a.as_ptr(), rs, cs: 1 }, Mat { ptr: b.as_ptr(), rs, cs: 1 });
        // SAFETY: three vectors of n · n.
        unsafe { gemm_half(n, n, n, a, b, MatMut { ptr: c.as_mut_ptr(), rs, cs: 1 }) }
    })
}

mod num {
    /// How to make a half.
    pub trait Round {
        /// The nearest.
        fn round(x: f32) -> Self;
    }
    impl Round for half::f16 {
        fn round(x: f32) -> Self {
            Self::from_f32(x)
        }
    }
    impl Round for half::bf16 {
        fn round(x: f32) -> Self {
            Self::from_f32(x)
        }
    }
}

fn thin(m: usize, n: usize, k: usize, transposed: bool, threads: usize) -> f64 {
    pool::set_threads(threads);
    let (a, b, mut c) = (noise(m * k), noise(k * n), vec![0.0f32; m * n]);
    let (rs, cs) = if transposed { (1, k as isize) } else { (n as isize, 1) };
    let time = best(30, || {
        let a = Mat { ptr: a.as_ptr(), rs: k as isize, cs: 1 };
        let b = Mat { ptr: b.as_ptr(), rs, cs };
        // SAFETY: the vectors have m · k, k · n and m · n.
        unsafe { gemm(m, n, k, a, b, MatMut { ptr: c.as_mut_ptr(), rs: n as isize, cs: 1 }) }
    });
    (n * k * 4) as f64 / time / 1e9
}

fn flops(m: usize, n: usize, k: usize, threads: usize, f: impl FnMut()) -> f64 {
    pool::set_threads(threads);
    let work = 2.0 * (m * n * k) as f64;
    let repeats = (4e9 / work).clamp(5.0, 2000.0) as usize;
    work / best(repeats, f) / 1e9
}

/// Seconds of the fastest run: the machine is shared.
fn best(repeats: usize, mut f: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..repeats + 2).map(time).fold(f64::INFINITY, f64::min)
}
