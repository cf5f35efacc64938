//! Recording and differentiating from many threads: the bits of one thread, and nothing left behind.

use kiln_tensor::{Device, Tensor};
use std::sync::{Arc, Barrier, Mutex};

const THREADS: usize = 8;
const ROUNDS: usize = 50;
const OPS: usize = 200;
const GIVEN: usize = 3;

/// A small generator of its own, so that every run makes the same choices.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

fn bits(t: &Tensor) -> Vec<u32> {
    t.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// One thread's part of one round: operations on what all threads gave in the round before. Results stay in [-1, 1].
fn part(thread: usize, round: usize, pool: &[Tensor], bin: &Mutex<Vec<Tensor>>) -> Vec<Tensor> {
    let mut dice = Dice((thread * 1000 + round + 1) as u64 * 0x9e37_79b9);
    let mut own: Vec<Tensor> = pool.to_vec();
    for _ in 0..OPS {
        let a = own[dice.roll(own.len())].clone();
        let b = own[dice.roll(own.len())].clone();
        let made = match dice.roll(10) {
            0 => (&a + &b) * 0.5,
            1 => &a * &b,
            2 => a.maximum(&b),
            3 => a.t(),
            4 => a.matmul(&b) * 0.25,
            5 => a.sum_keepdim(1) * 0.25 * b,
            6 => a.tanh(),
            7 => a.flip(0),
            8 => (a - &b).sin(),
            _ => a.softmax(1),
        };
        let at = dice.roll(own.len());
        let old = std::mem::replace(&mut own[at], made);
        // Some values end here, others on whichever thread empties the bin.
        if dice.roll(4) == 0 {
            let mut bin = bin.lock().unwrap();
            bin.push(old);
            if bin.len() > 40 {
                let all = std::mem::take(&mut *bin);
                drop(bin);
                drop(all);
            }
        }
        if dice.roll(500) == 0 {
            bits(&own[at]);
        }
    }
    own.truncate(GIVEN);
    own
}

fn start(device: &Device) -> Vec<Tensor> {
    let numbers = |k: usize| (0..16).map(|i| ((i * 7 + k * 5) % 13) as f32 / 7.0 - 0.9).collect::<Vec<_>>();
    (0..THREADS * GIVEN).map(|k| Tensor::from_vec(numbers(k), [4, 4], device)).collect()
}

#[test]
fn eight_threads_share_tensors_and_give_the_bits_of_one() {
    let device = Device::open("cpu:7").unwrap();
    device.sync().unwrap();
    let before = device.memory();
    let want: Vec<Vec<u32>> = {
        let bin = Mutex::default();
        let mut pool = start(&device);
        for round in 0..ROUNDS {
            pool = (0..THREADS).flat_map(|thread| part(thread, round, &pool, &bin)).collect();
        }
        pool.iter().map(bits).collect()
    };
    let got: Vec<Vec<u32>> = {
        let bin = Arc::new(Mutex::default());
        let pool = Arc::new(Mutex::new(start(&device)));
        let next = Arc::new(Mutex::new(vec![Vec::new(); THREADS]));
        let barrier = Arc::new(Barrier::new(THREADS));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (bin, pool, next, barrier) = (bin.clone(), pool.clone(), next.clone(), barrier.clone());
                std::thread::spawn(move || {
                    for round in 0..ROUNDS {
                        let given = pool.lock().unwrap().clone();
                        let made = part(thread, round, &given, &bin);
                        next.lock().unwrap()[thread] = made;
                        barrier.wait();
                        if thread == 0 {
                            let made: Vec<Tensor> =
                                next.lock().unwrap().iter_mut().flat_map(std::mem::take).collect();
                            *pool.lock().unwrap() = made;
                        }
                        barrier.wait();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        let pool = pool.lock().unwrap();
        pool.iter().map(bits).collect()
    };
    assert_eq!(got, want);
    device.sync().unwrap();
    let after = device.memory();
    assert_eq!((after.values, after.live_bytes), (before.values, before.live_bytes), "{after:?}");
}

#[test]
fn values_of_ended_threads_live_and_end_with_their_holders() {
    let device = Device::open("cpu:8").unwrap();
    device.sync().unwrap();
    let before = device.memory();
    let tensors: Vec<Tensor> = (0..20)
        .map(|i| {
            let device = device.clone();
            std::thread::spawn(move || Tensor::full([3], i, kiln_tensor::DType::F32, &device).exp() * 1.0)
                .join()
                .unwrap()
        })
        .collect();
    let sum = tensors.iter().skip(1).fold(tensors[0].clone(), |sum, t| sum + t);
    let want = (0..20).fold(0f32, |sum, i| if i == 0 { (i as f32).exp() } else { sum + (i as f32).exp() });
    let got = sum.to_vec::<f32>().unwrap()[0];
    assert!((got - want).abs() <= want * 1e-5, "{got} {want}");
    // Dropped by a thread that never used the device.
    std::thread::spawn(move || drop((tensors, sum))).join().unwrap();
    device.sync().unwrap();
    let after = device.memory();
    assert_eq!((after.values, after.live_bytes), (before.values, before.live_bytes), "{after:?}");
}

#[test]
fn backward_from_eight_threads_on_shared_leaves() {
    let device = Device::open("cpu:9").unwrap();
    let numbers = |k: usize| (0..16).map(|i| ((i * 3 + k) % 11) as f32 / 11.0 - 0.4).collect::<Vec<_>>();
    let w = Tensor::from_vec(numbers(1), [4, 4], &device).requires_grad();
    let b = Tensor::from_vec(numbers(2)[..4].to_vec(), [4], &device).requires_grad();
    let shared = (w.matmul(&w) + &b).tanh();
    let one = |w: &Tensor, b: &Tensor, shared: &Tensor, k: usize| {
        let x = Tensor::from_vec(numbers(k), [4, 4], &device);
        let mut h = x.matmul(w) + b;
        for _ in 0..20 {
            h = (h.matmul(w) + b).tanh() * shared;
        }
        let grads = h.square().mean(()).differentiate().retain_graph().run();
        (bits(grads.get(w).unwrap()), bits(grads.get(b).unwrap()))
    };
    let want: Vec<_> = (0..THREADS).map(|k| one(&w, &b, &shared, k)).collect();
    for _ in 0..5 {
        let got: Vec<_> = std::thread::scope(|s| {
            let (w, b, shared, one) = (&w, &b, &shared, &one);
            let threads: Vec<_> = (0..THREADS).map(|k| s.spawn(move || one(w, b, shared, k))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(got, want);
    }
}
