//! GB/s (read and written) of fused passes over f32 in the cache on one thread, compiled and tile by tile, and the time to
//! compile one: `KILN_ISA=avx512|avx2 cargo bench -p kiln-cpu --bench emit`.

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("no code is emitted for this machine");
}

#[cfg(target_arch = "x86_64")]
fn main() {
    println!("isa {}, 1 thread, GB/s read and written", kiln_cpu::gemm::isa().name());
    println!("{:24} {:>8} {:>8} {:>8} {:>8} {:>10}", "", "1k", "32k", "1k tiles", "32k", "compile");
    for trial in kiln_cpu::emit::trial::trials() {
        let rate = |len: usize, run: &mut dyn FnMut(&mut [Vec<f32>])| {
            let mut operands = trial.operands(len);
            let seconds = best(&mut || run(&mut operands));
            (len * trial.bytes()) as f64 / seconds / 1e9
        };
        let sizes = [1 << 10, 1 << 15];
        let [a, b] = sizes.map(|len| rate(len, &mut |operands| assert!(trial.run(operands))));
        let [c, d] = sizes.map(|len| rate(len, &mut |operands| trial.interpret(operands)));
        let compiled = best(&mut || assert!(trial.compile()));
        println!("{:24} {a:8.1} {b:8.1} {c:8.1} {d:8.1} {:7.1} µs", trial.name, compiled * 1e6);
    }
}

/// Seconds of the fastest of many calls, over some 50 ms.
#[cfg(target_arch = "x86_64")]
fn best(run: &mut dyn FnMut()) -> f64 {
    use std::time::Instant;
    let mut best = f64::INFINITY;
    let began = Instant::now();
    while began.elapsed().as_millis() < 50 {
        let start = Instant::now();
        (0..8).for_each(|_| run());
        best = best.min(start.elapsed().as_secs_f64() / 8.0);
    }
    best
}
