//! Functions whose results golden cases do not cover: draws, derivatives of functions, questions with an answer, and what
//! misuse says.

use kiln_tensor::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn device() -> Device {
    Device::cpu()
}

fn floats(x: &[f32]) -> Tensor {
    Tensor::from_slice(x, [x.len()], &device())
}

fn read(x: &Tensor) -> Vec<f32> {
    x.to_vec().unwrap()
}

#[test]
fn draws_follow_their_weights() {
    seed(3);
    let weights = floats(&[1.0, 0.0, 3.0]).unsqueeze(0).broadcast_to([2, 3]);
    let drawn = weights.multinomial(4000, true);
    assert_eq!(drawn.shape()[..], [2, 4000]);
    let counts = drawn.reshape([8000]).bincount(3).unwrap().to_vec::<i64>().unwrap();
    assert_eq!(counts[1], 0);
    assert!((counts[0] - 2000).abs() < 200, "{counts:?}");
}

#[test]
fn draws_without_replacement_differ_and_leave_out_what_weighs_nothing() {
    seed(4);
    let weights = floats(&[0.0, 1.0, 1e-3, 5.0, 0.0]);
    for _ in 0..20 {
        let mut drawn = weights.multinomial(3, false).to_vec::<i64>().unwrap();
        drawn.sort_unstable();
        assert_eq!(drawn, [1, 2, 3]);
    }
}

#[test]
fn permutations_have_every_number_once() {
    seed(5);
    let (a, b) = (Tensor::randperm(100, &device()), Tensor::randperm(100, &device()));
    assert!(!a.equal(&b).unwrap());
    for order in [a, b] {
        assert_eq!(order.sort(0, false).0.to_vec::<i64>().unwrap(), (0..100).collect::<Vec<i64>>());
    }
}

#[test]
fn random_tensors_take_after_others() {
    let like = Tensor::full([3, 2], 0, DType::F64, &device());
    for x in [like.rand_like(), like.randn_like(), like.randint_like(2, 3)] {
        assert_eq!(x.meta(), like.meta());
    }
    let yes = floats(&[0.0, 1.0]).bernoulli_each();
    assert_eq!(yes.to_vec::<bool>().unwrap(), [false, true]);
}

#[test]
fn ranges_are_integers_only_if_all_their_ends_are() {
    assert_eq!(Tensor::arange(0, 5, 2, &device()).to_vec::<i64>().unwrap(), [0, 2, 4]);
    assert_eq!(read(&Tensor::arange(1.0, 0, -0.25, &device())), [1.0, 0.75, 0.5, 0.25]);
    assert_eq!(Tensor::arange(0.0, 1.0, -1, &device()).numel(), 0);
    assert_eq!(read(&Tensor::logspace(0.0, 3.0, 4, 10.0, &device())), [1.0, 10.0, 100.0, 1000.0]);
}

#[test]
fn equality_is_of_shape_and_values() {
    let x = floats(&[1.0, 2.0]);
    assert!(x.equal(&x).unwrap());
    assert!(!x.equal(&x.unsqueeze(0)).unwrap());
    assert!(!x.equal(&floats(&[1.0, f32::NAN])).unwrap());
    assert!(x.allclose(&floats(&[1.0, 2.00001]), 1e-5, 0.0).unwrap());
    assert!(!x.allclose(&floats(&[1.0, 2.1]), 1e-5, 1e-8).unwrap());
}

#[test]
fn jacobians_agree_from_both_sides() {
    let (w, x) = (Tensor::randn([3, 4], &device()), Tensor::randn([4], &device()));
    let f = |x: &Tensor| w.matmul(x).tanh();
    let whole = jacobian(f, &x);
    assert_eq!(whole.shape()[..], [3, 4]);
    let v = Tensor::randn([4], &device());
    let (y, along) = jvp(|xs| f(&xs[0]), &[&x], &[&v]);
    assert!(y.allclose(&f(&x), 1e-6, 1e-6).unwrap());
    assert!(along.allclose(&whole.matmul(&v), 1e-5, 1e-6).unwrap());
    let u = Tensor::randn([3], &device());
    let (_, back) = vjp(|xs| f(&xs[0]), &[&x], &u);
    assert!(back[0].allclose(&u.matmul(&whole), 1e-5, 1e-6).unwrap());
}

#[test]
fn hessians_of_composed_functions_are_right() {
    // Of lgamma: digamma's derivative on the diagonal.
    let x = Tensor::from_slice(&[0.7f64, 2.5], [2], &device());
    let h = hessian(|x| x.lgamma().sum(()), &x).to_vec::<f64>().unwrap();
    let want = [2.834_049_156_783_88, 0.0, 0.0, 0.490_357_756_100_234_2];
    for (got, want) in h.iter().zip(want) {
        assert!((got - want).abs() < 1e-10, "{h:?}");
    }
    // Of the cross entropy of a yes-or-no decision with y = 1: 1 / p².
    let p = Tensor::from_slice(&[0.25f64], [1], &device());
    let one = p.ones_like();
    let h = hessian(|p| p.binary_cross_entropy(&one, Reduction::Sum), &p);
    assert!((h.item::<f64>().unwrap() - 16.0).abs() < 1e-9);
}

#[test]
fn what_a_function_does_not_depend_on_has_derivatives_of_zero() {
    let x = floats(&[1.0, 2.0]);
    assert_eq!(read(&jacobian(|_| floats(&[3.0]), &x)), [0.0, 0.0]);
    assert_eq!(read(&jvp(|_| floats(&[3.0]), &[&x], &[&x]).1), [0.0]);
    assert_eq!(read(&hessian(|x| x.sum(()), &x)), [0.0; 4]);
}

#[test]
fn indices_outside_of_their_own_axis_fail_though_their_place_exists() {
    let x = Tensor::zeros([3, 4], &device());
    let at = |i: i64| Tensor::from_slice(&[i], [1], &device());
    assert!(x.index((&at(0), &at(4))).to_vec::<f32>().is_err());
    assert!(x.index((&at(2), &at(-5))).to_vec::<f32>().is_err());
    assert!(x.index((&at(1), &at(-4))).to_vec::<f32>().is_ok());
    assert!(x.index_put((&at(0), &at(4)), &floats(&[1.0])).to_vec::<f32>().is_err());
}

#[test]
fn parts_and_indices_mix_as_in_python() {
    let x = Tensor::arange(0, 24, 1, &device()).reshape([2, 3, 4]);
    let i = Tensor::from_slice(&[1i64, 0, -1], [3], &device());
    let ints = |t: Tensor| (t.shape().to_vec(), t.to_vec::<i64>().unwrap());
    assert_eq!(ints(x.index((0, &i, 1..3))), (vec![3, 2], vec![5, 6, 1, 2, 9, 10]));
    // Not neighbours: the indices' shape comes first.
    let j = Tensor::from_slice(&[0i64, 1, 1], [3], &device());
    assert_eq!(ints(x.index((&j, 1.., &i))), (vec![3, 2], vec![5, 9, 16, 20, 19, 23]));
    let y = x.index_put((.., 0, &i), &Tensor::scalar(-1i64, &device()));
    assert_eq!(ints(y.index((.., 0))), (vec![2, 4], vec![-1, -1, 2, -1, -1, -1, 14, -1]));
    let counted = x.zeros_like().index_put_add((&j,), &Tensor::scalar(1i64, &device()));
    assert_eq!(counted.sum([1, 2]).to_vec::<i64>().unwrap(), [12, 24]);
}

#[test]
fn misuse_is_told_by_name_and_shape() {
    let x = Tensor::ones([2, 3], &device());
    let says = |f: &dyn Fn(&Tensor)| {
        let payload = catch_unwind(AssertUnwindSafe(|| f(&x))).unwrap_err();
        let literal = payload.downcast_ref::<&str>().map(|text| text.to_string());
        literal.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
    };
    type Misuse<'a> = (&'a str, &'a dyn Fn(&Tensor));
    let cases: [Misuse; 8] = [
        ("bmm: shapes [2, 3]", &|x| drop(x.bmm(x))),
        ("outer: shapes [2, 3]", &|x| drop(x.outer(x))),
        ("einsum: `ij,jk`: j is 3 and 2", &|x| drop(einsum("ij,jk", &[x, x]))),
        ("einsum: `i-`", &|x| drop(einsum("i-", &[x]))),
        ("pixel_shuffle: shape [2, 3]", &|x| drop(x.pixel_shuffle(2))),
        ("searchsorted: values of shape [3]", &|x| drop(x.searchsorted(&x.select(0, 0), false))),
        ("index: how many elements a mask has", &|x| drop(x.index((&x.gt(0.0),)))),
        ("grid_sample: places of shape [2, 3]", &|x| drop(x.grid_sample(x, &GridOptions::default()))),
    ];
    for (want, f) in cases {
        let said = says(f);
        assert!(said.starts_with(want), "{said}");
    }
}
