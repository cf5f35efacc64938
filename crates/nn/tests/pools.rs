//! Pools whose windows a stride does not describe.

use kiln_nn::*;
use kiln_tensor::{Device, PoolOptions, Tensor, seed};

#[test]
fn fractional_windows_hold_their_largest_numbers_and_cover_both_ends() {
    let device = Device::cpu();
    seed(3);
    // Numbers that grow along both axes: the largest of a window is its last, so that places show.
    let x = (Tensor::arange(0, 9, 1, &device).reshape([9, 1]) * 10 + Tensor::arange(0, 7, 1, &device))
        .to_dtype(kiln_tensor::DType::F32)
        .expand([2, 3, 9, 7]);
    let (y, indices) = x.fractional_max_pool2d([2, 3], [4, 3]);
    assert_eq!(y.shape()[..], [2, 3, 4, 3]);
    let flat = x.flatten(2, 3).gather(2, &indices.flatten(2, 3));
    assert_eq!(flat.to_vec::<f32>().unwrap(), y.flatten(2, 3).to_vec::<f32>().unwrap());
    for plane in y.reshape([6, 12]).to_vec::<f32>().unwrap().chunks(12) {
        assert_eq!(plane[11], 86.0, "the last window ends where the input does");
        assert_eq!(plane[0], 12.0, "the first one begins where it does");
        assert!(plane.chunks(3).all(|row| row[0] < row[1] && row[1] < row[2]));
        assert!((0..3).all(|c| plane[c] < plane[c + 3] && plane[c + 3] < plane[c + 6]));
    }
    let layer = FractionalMaxPool3d::new(2, [2, 2, 3]);
    assert_eq!(layer.forward(&Tensor::randn([2, 4, 4, 5], &device)).shape()[..], [2, 2, 2, 3]);
}

#[test]
fn the_gradient_of_a_window_goes_to_its_first_maximum() {
    let device = Device::cpu();
    let x = Tensor::ones([1, 1, 5], &device).requires_grad();
    let y = AdaptiveMaxPool1d::new(2).forward(&x);
    let gradient = y.sum(()).backward().get(&x).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(gradient, [1.0, 0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn pools_are_undone_among_zeros() {
    let device = Device::cpu();
    let x = Tensor::randn([2, 7, 6], &device);
    let options = PoolOptions::default().stride(2).padding(1);
    let (y, indices) = x.max_pool2d_with_indices(3, options);
    let back = MaxUnpool2d::new(3).stride(2).padding(1).forward_to(&y, &indices, [7, 6]);
    let kept = back.ne(0).where_(&x, &x.zeros_like());
    assert_eq!(back.to_vec::<f32>().unwrap(), kept.to_vec::<f32>().unwrap());
    assert_eq!(MaxUnpool2d::new(2).forward(&y, &indices).shape()[..], [2, 8, 6]);
}

#[test]
#[should_panic = "fractional_max_pool2d: 4 windows of 3 do not lie apart in axis 2 of [1, 1, 5, 9]"]
fn windows_that_do_not_fit_are_told() {
    let _ = FractionalMaxPool2d::new(3, 4).forward(&Tensor::ones([1, 1, 5, 9], &Device::cpu()));
}
