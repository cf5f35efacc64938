//! Random streams: named by seed and path, the same everywhere, with the right moments.

use kiln_tensor::{DType, Device, Generator, Tensor, seed, set_threads, with_generator};

/// The seed of threads that have not drawn yet is the process's: tests that set it take turns.
static SEEDING: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn draws(device: &Device) -> Vec<Vec<u8>> {
    let tensors = [
        Tensor::rand([1000], device),
        Tensor::randn_as([7, 3], DType::F64, device),
        Tensor::rand_as([33], DType::BF16, device),
        Tensor::randn([70_001], device),
        Tensor::randint(-5, 9, [100], device),
        Tensor::bernoulli(0.3, [65], device),
        Tensor::rand([0], device),
    ];
    tensors.iter().map(|t| t.to_data().unwrap().bytes.to_vec()).collect()
}

#[test]
fn a_seed_gives_the_same_bits_on_every_device_and_thread_count() {
    let _turn = SEEDING.lock().unwrap_or_else(|e| e.into_inner());
    let (cpu, reference) = (Device::cpu(), Device::reference());
    seed(42);
    let first = draws(&cpu);
    assert_ne!(first, draws(&cpu), "the stream goes on");
    for threads in 1..=3 {
        set_threads(threads);
        seed(42);
        assert!(first == draws(&cpu), "{threads} threads");
    }
    seed(42);
    assert!(first == draws(&reference));
    seed(43);
    assert!(first != draws(&cpu));
}

#[test]
fn paths_are_independent_streams() {
    let device = Device::cpu();
    let root = Generator::new(7);
    let draw =
        |g: &Generator| with_generator(g.clone(), || Tensor::rand([64], &device).to_vec::<f32>().unwrap());
    let streams = [
        root.clone(),
        root.child(&[0]),
        root.child(&[1]),
        root.child(&[0, 0]),
        root.child(&[0, 1]),
        Generator::new(8),
    ];
    let all: Vec<Vec<f32>> = streams.iter().map(draw).collect();
    for (i, a) in all.iter().enumerate() {
        assert_eq!(*a, draw(&streams[i]));
        for b in &all[i + 1..] {
            assert!(a.iter().zip(b).filter(|(x, y)| x == y).count() < 4);
        }
    }
    assert_eq!(root.child(&[3, 4]), root.child(&[3]).child(&[4]));
}

#[test]
fn with_generator_restores_the_stream_even_after_a_panic() {
    let _turn = SEEDING.lock().unwrap_or_else(|e| e.into_inner());
    let device = Device::cpu();
    let draw = || Tensor::rand([4], &device).to_vec::<f32>().unwrap();
    seed(5);
    let (a, b) = (draw(), draw());
    seed(5);
    assert_eq!(draw(), a);
    with_generator(Generator::new(1), || {
        draw();
        with_generator(Generator::new(2), draw);
    });
    let caught = std::panic::catch_unwind(|| with_generator(Generator::new(3), || panic!("on purpose")));
    assert!(caught.is_err());
    assert_eq!(draw(), b);
}

#[test]
fn moments_are_those_of_the_distributions() {
    let device = Device::cpu();
    let n = 200_000;
    let moments = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        (mean, x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64)
    };
    let f64s = |t: Tensor| t.to_dtype(DType::F64).to_vec::<f64>().unwrap();
    with_generator(Generator::new(11), || {
        let x = f64s(Tensor::rand([n], &device));
        let (mean, var) = moments(&x);
        assert!((mean - 0.5).abs() < 0.005 && (var - 1.0 / 12.0).abs() < 0.002, "{mean} {var}");
        assert!(x.iter().all(|v| (0.0..1.0).contains(v)));
        let (mean, var) = moments(&f64s(Tensor::randn([n], &device)));
        assert!(mean.abs() < 0.01 && (var - 1.0).abs() < 0.02, "{mean} {var}");
        let x = f64s(Tensor::randint(-2, 3, [n], &device));
        let (mean, var) = moments(&x);
        assert!(mean.abs() < 0.02 && (var - 2.0).abs() < 0.03, "{mean} {var}");
        assert!((-2..3).all(|v| x.contains(&(v as f64))) && x.iter().all(|v| (-2.0..3.0).contains(v)));
        let (mean, _) = moments(&f64s(Tensor::bernoulli(0.3, [n], &device)));
        assert!((mean - 0.3).abs() < 0.005, "{mean}");
        assert_eq!(Tensor::bernoulli(0.0, [99], &device).to_vec::<bool>().unwrap(), [false; 99]);
        assert_eq!(Tensor::bernoulli(1.0, [99], &device).to_vec::<bool>().unwrap(), [true; 99]);
        let wide = Tensor::randint(i64::MIN, i64::MAX, [1000], &device).to_vec::<i64>().unwrap();
        assert!(wide.iter().any(|&v| v < 0) && wide.iter().any(|&v| v > 0), "the whole range is drawn from");
        let high = Tensor::randint(i64::MAX - 2, i64::MAX, [100], &device).to_vec::<i64>().unwrap();
        assert!(high.iter().all(|&v| (i64::MAX - 2..i64::MAX).contains(&v)));
    });
}
