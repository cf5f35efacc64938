//! Methods whose results the golden cases do not cover: parts by index, counts read back, quantised and half-precision
//! operands.

use kiln_tensor::*;

fn count(shape: &[usize]) -> Tensor {
    Tensor::arange(0, shape.iter().product::<usize>() as i64, 1, &Device::cpu()).reshape(shape)
}

fn ints(t: &Tensor) -> (Vec<usize>, Vec<i64>) {
    (t.shape().to_vec(), t.to_vec().unwrap())
}

#[test]
fn parts_by_index_follow_python() {
    let x = count(&[3, 4]);
    assert_eq!(ints(&x.index(1)), (vec![4], vec![4, 5, 6, 7]));
    assert_eq!(ints(&x.index((-1, -1))), (vec![], vec![11]));
    assert_eq!(ints(&x.select(0, 1)), ints(&x.index(1)));
    assert_eq!(ints(&x.select(-1, -2)), (vec![3], vec![2, 6, 10]));
    assert_eq!(ints(&x.index((.., 1))), (vec![3], vec![1, 5, 9]));
    assert_eq!(ints(&x.index((1.., ..2))), (vec![2, 2], vec![4, 5, 8, 9]));
    assert_eq!(ints(&x.index((..=0, -2..=-1))), (vec![1, 2], vec![2, 3]));
    assert_eq!(ints(&x.index((step_by(.., 2), step_by(1..4, 2)))), (vec![2, 2], vec![1, 3, 9, 11]));
    assert_eq!(ints(&x.index((5..9, 0))), (vec![0], vec![]));
    let (rows, column) = (0usize..2, 3usize);
    assert_eq!(ints(&x.index((rows, column))), (vec![2], vec![3, 7]));
}

#[test]
fn counts_are_read_where_shapes_depend_on_them() {
    let x = Tensor::from_slice(&[0.0f32, f32::NAN, 0.0, 2.0, -1.0, 0.0], [2, 3], &Device::cpu());
    assert_eq!(ints(&x.nonzero().unwrap()), (vec![3, 2], vec![0, 1, 1, 0, 1, 1]));
    assert_eq!(ints(&Tensor::scalar(3i64, &Device::cpu()).nonzero().unwrap()), (vec![1, 0], vec![]));
    let row = Tensor::from_slice(&[true, false, true], [3], &Device::cpu());
    assert_eq!(ints(&count(&[2, 3]).masked_select(&row).unwrap()), (vec![4], vec![0, 2, 3, 5]));
}

#[test]
fn a_failed_index_is_told_where_the_result_is_read() {
    let x = Tensor::ones([3], &Device::cpu());
    let y = x.index_select(0, &Tensor::from_slice(&[0i64, 3], [2], &Device::cpu())) + 1.0;
    let error = y.to_vec::<f32>().unwrap_err();
    assert!(matches!(error.root(), Error::Index { index: 3, length: 3, .. }), "{error}");
}

#[test]
fn quantised_weights_stay_packed_in_products() {
    let device = Device::cpu();
    let (x, w) = (Tensor::randn([3, 64], &device), Tensor::randn([5, 64], &device));
    for (dtype, slack) in [(DType::Q8, 0.3), (DType::Q4, 4.0)] {
        let packed = w.quantize(dtype);
        assert_eq!(packed.dtype(), dtype);
        let x = x.clone().requires_grad();
        let y = x.linear(&packed, None);
        let far = (&y - x.linear(&w, None)).abs().amax(()).item::<f32>().unwrap();
        assert!(far < slack, "{dtype}: off by {far}");
        let plain = packed.dequantize(DType::F32);
        let gradient = y.sum(()).backward().get_or_zeros(&x);
        let want = Tensor::ones([3, 5], &device).matmul(&plain);
        let far = (gradient - want).abs().amax(()).item::<f32>().unwrap();
        assert!(far < 1e-4, "{dtype}: gradient off by {far}");
    }
}

#[test]
fn composites_of_half_precision_round_once() {
    let device = Device::cpu();
    let x = Tensor::randn([4, 64], &device).to_dtype(DType::BF16);
    let wide = x.to_dtype(DType::F32);
    type Method = fn(&Tensor) -> Tensor;
    let methods: [Method; 6] = [
        |x| x.var(1, 1),
        |x| x.norm(1, 2.0),
        |x| x.logsumexp(1),
        |x| x.softmax(1),
        |x| x.reshape([2, 8, 16]).group_norm(2, None, None, 1e-5),
        |x| x.reshape([2, 8, 16]).avg_pool1d(3, PoolOptions::default().padding(1)),
    ];
    for (i, f) in methods.iter().enumerate() {
        let (got, want) = (f(&x), f(&wide).to_dtype(DType::BF16));
        assert_eq!(got.dtype(), DType::BF16, "method {i}");
        let far =
            (got.to_dtype(DType::F32) - want.to_dtype(DType::F32)).abs().amax(()).item::<f32>().unwrap();
        assert_eq!(far, 0.0, "method {i}");
    }
}

#[test]
fn a_number_on_the_left_needs_no_type_even_before_a_method() {
    let p = Tensor::from_slice(&[0.5f32, 0.75], [2], &Device::cpu());
    assert_eq!((1.0 - &p).sqrt().to_vec::<f32>().unwrap(), [0.5f32.sqrt(), 0.5]);
    assert_eq!((2 * &p).square().to_vec::<f32>().unwrap(), [1.0, 2.25]);
    assert_eq!((1.0 / (p + 1e-6)).clamp(None, Some(1.0)).to_vec::<f32>().unwrap(), [1.0, 1.0]);
}
