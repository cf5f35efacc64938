//! What host memory allows: plain copies and sums over as many bytes as a benchmark moves, by as many threads as
//! compute. Each thread passes over its own part again and again without meeting the others, so that neither starting
//! threads nor waiting for them is measured: a bound to hold kernels against, not a kernel.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

/// Gigabytes per second.
#[derive(Clone, Copy)]
pub struct Bandwidth {
    /// Of a copy, bytes read and bytes written both counted.
    pub copy: f64,
    /// Of a sum.
    pub read: f64,
}

/// Bandwidth over `bytes` of memory.
pub fn of(bytes: usize) -> Bandwidth {
    let threads = kiln::threads();
    let words = (bytes / 16).max(threads);
    let mut memory = vec![1u64; words * 2];
    let part = words.div_ceil(threads);
    let (from, to) = memory.split_at_mut(words);
    let pairs = from.chunks(part).zip(to.chunks_mut(part)).collect();
    let copy = best(words * 16, pairs, &|(from, to)| {
        to.copy_from_slice(black_box(from));
        black_box(to);
    });
    let parts = memory.chunks(part * 2).collect();
    let read = best(words * 16, parts, &|part| {
        black_box(black_box(part).iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
    });
    Bandwidth { copy, read }
}

/// Bytes to move in one round, so that a round over few bytes is not over before all threads are in it.
const ROUND: usize = 1 << 28;
const ROUNDS: usize = 5;

/// The best rate of some rounds, each of several passes of one thread over each part, `bytes` a pass in all.
fn best<T: Send>(bytes: usize, mut parts: Vec<T>, pass: &(impl Fn(&mut T) + Sync)) -> f64 {
    let passes = (ROUND / bytes).max(1);
    let mut seconds = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Barrier::new(parts.len());
        let slowest = thread::scope(|scope| {
            let begin = |part| {
                let start = &start;
                scope.spawn(move || {
                    let part: &mut T = part;
                    start.wait();
                    let start = Instant::now();
                    for _ in 0..passes {
                        pass(part);
                    }
                    start.elapsed().as_secs_f64()
                })
            };
            let running: Vec<_> = parts.iter_mut().map(begin).collect();
            running.into_iter().map(|thread| thread.join().unwrap_or(f64::INFINITY)).fold(0.0, f64::max)
        });
        seconds = seconds.min(slowest);
    }
    (bytes * passes) as f64 / seconds / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_has_a_bandwidth() {
        for bytes in [4, 1000, 1 << 20] {
            let Bandwidth { copy, read } = of(bytes);
            assert!(copy.is_finite() && copy > 0.0 && read.is_finite() && read > 0.0, "{bytes} bytes");
        }
    }
}
