//! Tensors on the toy: chains fuse, plans recur, and the numbers are the reference's.

use kiln::prelude::*;
use std::sync::Arc;
use toy_device::Toy;

#[test]
fn chains_fuse_and_recur() {
    let toy = Arc::new(Toy::start());
    let device = Device::wrap("toy", toy.clone()).unwrap();
    let numbers = vec![0.5f32, -1.0, 2.0];
    let step = |device: &Device| {
        let x = Tensor::from_vec(numbers.clone(), [3], device);
        let y = x.exp().neg().tanh();
        // Two use `y`: the chain must end there.
        let z = &y + y.sin().cos();
        z.to_vec::<f32>().unwrap()
    };
    let want = step(&Device::reference());
    for _ in 0..5 {
        let got = step(&device);
        assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{got:?} and {want:?}");
    }
    let stats = toy.fusion();
    // The first window frees nothing of a step before; all others are alike.
    assert_eq!((stats.windows, stats.planned, stats.hits, stats.fallbacks), (5, 2, 3, 0), "{stats:?}");
    assert_eq!(toy.alone(), 5, "only the sums run by themselves");
    assert_eq!(stats.fused, 5 * 5);
}

#[test]
fn failures_are_told_where_they_are_read() {
    let device = Device::wrap("toy that fails", Arc::new(Toy::start())).unwrap();
    let x = Tensor::from_vec(vec![1i32, 2], [2], &device);
    let bad = x.remainder(&Tensor::from_vec(vec![1i32, 0], [2], &device));
    assert!(bad.to_vec::<i32>().is_err());
    assert_eq!((&x + &x).to_vec::<i32>().unwrap(), [2, 4]);
}
