//! Random streams. A generator lives on the recording side: each draw takes a key and the next offset into its node,
//! so that devices hold no state and a replayed node draws the same numbers.

use crate::{DType, Device, Number, Shape, Tensor};
use kiln_device::method;
use kiln_ir::{Op, RandomKind, philox};
use std::cell::RefCell;
use std::sync::Mutex;

/// A stream of random numbers, named by a seed and a path of words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generator {
    key: u64,
    offset: u64,
}

impl Generator {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Generator {
        Generator { key: philox::derive(0, &[seed]), offset: 0 }
    }

    /// The stream at a path below this one, such as `[step, shard]`: unrelated to it and to every other path.
    pub fn child(&self, path: &[u64]) -> Generator {
        Generator { key: philox::derive(self.key, path), offset: 0 }
    }

    fn next(&mut self) -> (u64, u64) {
        self.offset += 1;
        (self.key, self.offset - 1)
    }
}

/// The process's seed, and how many threads draw from it.
static SEED: Mutex<(u64, u64)> = Mutex::new((0, 0));
/// Sets the streams of threads apart from paths of a user's own.
const THREADS: u64 = 0x7468_7265_6164;

thread_local! {
    static CURRENT: RefCell<Option<Generator>> = const { RefCell::new(None) };
}

/// Starts this thread's stream from `seed`, and those of threads that have not drawn yet: each gets one of its own, by
/// the order in which they first draw. Where that order is open, give each a [`Generator`] with [`with_generator`].
/// Without a seed, the first thread that draws has the stream of seed 0.
#[doc(alias("manual_seed"))]
pub fn seed(seed: u64) {
    *SEED.lock().unwrap_or_else(|e| e.into_inner()) = (seed, 1);
    CURRENT.set(Some(Generator::new(seed)));
}

/// The stream of a thread that draws for the first time.
fn first() -> Generator {
    let mut state = SEED.lock().unwrap_or_else(|e| e.into_inner());
    let root = Generator::new(state.0);
    state.1 += 1;
    match state.1 - 1 {
        0 => root,
        thread => root.child(&[THREADS, thread]),
    }
}

/// Runs `f` with its random numbers drawn from `generator`.
pub fn with_generator<T>(generator: Generator, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<Generator>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _restore = Restore(CURRENT.replace(Some(generator)));
    f()
}

/// The state of this thread's stream.
pub(crate) fn current() -> Generator {
    CURRENT.with_borrow_mut(|current| current.get_or_insert_with(first).clone())
}

fn draw() -> (u64, u64) {
    CURRENT.with_borrow_mut(|current| current.get_or_insert_with(first).next())
}

#[track_caller]
fn random(kind: RandomKind, shape: Shape, dtype: DType, device: &Device) -> Tensor {
    let (key, offset) = draw();
    Tensor::create(Op::Random { kind, shape, dtype, key, offset }, device)
}

/// # Random numbers
impl Tensor {
    /// Uniform in [0, 1), f32.
    #[track_caller]
    pub fn rand(shape: impl Into<Shape>, device: &Device) -> Tensor {
        let _method = method("rand");
        Tensor::rand_as(shape, DType::F32, device)
    }

    /// Uniform in [0, 1), of a float dtype.
    #[track_caller]
    pub fn rand_as(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Tensor {
        let _method = method("rand_as");
        random(RandomKind::Uniform, shape.into(), dtype, device)
    }

    /// Standard normal, f32.
    #[track_caller]
    pub fn randn(shape: impl Into<Shape>, device: &Device) -> Tensor {
        let _method = method("randn");
        Tensor::randn_as(shape, DType::F32, device)
    }

    /// Standard normal, of a float dtype.
    #[track_caller]
    pub fn randn_as(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Tensor {
        let _method = method("randn_as");
        random(RandomKind::Normal, shape.into(), dtype, device)
    }

    /// Integers in `low..high`, i64.
    ///
    /// # Panics
    /// If the range is empty.
    #[track_caller]
    pub fn randint(low: i64, high: i64, shape: impl Into<Shape>, device: &Device) -> Tensor {
        let _method = method("randint");
        assert!(low < high, "randint: the range {low}..{high} is empty");
        let bits = random(RandomKind::Bits, shape.into(), DType::U64, device);
        // The bias of the remainder is below 2^-32 for ranges below 2^32. The range may be wider than i64: it is taken as
        // u64, and the sum wraps back into it.
        let span = high.wrapping_sub(low);
        bits.remainder(Number::Int(span)).to_dtype(DType::I64) + low
    }

    /// True with probability `p`, bool.
    #[track_caller]
    pub fn bernoulli(p: f64, shape: impl Into<Shape>, device: &Device) -> Tensor {
        let _method = method("bernoulli");
        Tensor::rand(shape, device).lt(p)
    }

    /// True with the probability that each element is, bool.
    #[doc(alias("bernoulli"))]
    #[track_caller]
    pub fn bernoulli_each(&self) -> Tensor {
        let _method = method("bernoulli_each");
        let p = self.detach();
        Tensor::rand(p.shape(), p.value.device()).lt(&p)
    }

    /// Uniform in [0, 1), in this tensor's shape, dtype and device.
    #[track_caller]
    pub fn rand_like(&self) -> Tensor {
        let _method = method("rand_like");
        Tensor::rand_as(self.shape(), self.dtype(), self.value.device())
    }

    /// Standard normal, in this tensor's shape, dtype and device.
    #[track_caller]
    pub fn randn_like(&self) -> Tensor {
        let _method = method("randn_like");
        Tensor::randn_as(self.shape(), self.dtype(), self.value.device())
    }

    /// Integers in `low..high`, in this tensor's shape, dtype and device.
    #[track_caller]
    pub fn randint_like(&self, low: i64, high: i64) -> Tensor {
        let _method = method("randint_like");
        Tensor::randint(low, high, self.shape(), self.value.device()).to_dtype(self.dtype())
    }

    /// The integers below `n` in random order, i64.
    #[track_caller]
    pub fn randperm(n: usize, device: &Device) -> Tensor {
        let _method = method("randperm");
        // Of equal bits, which 2^32 of them hardly have, the lower comes first.
        random(RandomKind::Bits, [n].into(), DType::U64, device).argsort(0, false)
    }

    /// Indices of the last axis drawn `count` times, i64, with chances that are in proportion to these weights: with
    /// replacement, or each at most once.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let weights = Tensor::from_slice(&[0.0f32, 3.0, 0.0], [3], &Device::cpu());
    /// assert_eq!(weights.multinomial(2, true).to_vec::<i64>().unwrap(), [1, 1]);
    /// ```
    ///
    /// # Panics
    /// If these are no floats, or fewer than `count` and none is replaced.
    #[doc(alias("Categorical"))]
    #[track_caller]
    pub fn multinomial(&self, count: usize, replacement: bool) -> Tensor {
        let _method = method("multinomial");
        let shape = self.shape();
        let fits = (1..=2).contains(&shape.len()) && self.dtype().is_float();
        assert!(fits, "multinomial: {} is not [N] or [B, N] of floats", self.meta());
        let (n, device) = (self.dim(-1), self.value.device());
        assert!(n > 0, "multinomial: no weights in shape {shape:?}");
        let weights = self.detach().to_dtype(DType::F64);
        let mut drawn = shape;
        drawn[shape.len() - 1] = count;
        if replacement {
            let sums = weights.cumsum(-1);
            let at = Tensor::rand_as(drawn, DType::F64, device) * sums.narrow(-1, n as isize - 1, 1);
            return sums.searchsorted(&at, true).minimum(n - 1);
        }
        assert!(count <= n, "multinomial: {count} of {n} without replacement");
        // The order of exponential waiting times. What has no weight comes last, as if it never came.
        let wait = -(1.0 - Tensor::rand_as(shape, DType::F64, device)).log();
        (wait / weights).topk(count, -1, false).1
    }
}
