//! Recurrent layers against their cells, which record every step as what it is.

use kiln_nn::*;
use kiln_tensor::{Device, Tensor, grad, no_grad};

fn near(a: &Tensor, b: &Tensor, within: f32) {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= within), "{a:?}, not {b:?}");
}

/// Layer and cell with the same weights, and the results of the cell at each step of `[time, batch, inputs]`.
macro_rules! by_cells {
    ($layer:ident $cell:ident |$state:ident| $hidden:expr) => {{
        let device = Device::cpu();
        let (layer, mut cell) = ($layer::new(3, 4, &device), $cell::new(3, 4, &device));
        cell.weights = layer.weights()[0].clone();
        let x = Tensor::randn([6, 2, 3], &device).requires_grad();
        let mut all = Vec::new();
        let mut last = None;
        for t in 0..6 {
            let $state = last.as_ref();
            let next = cell.forward(&x.select(0, t), $hidden);
            let $state = next;
            all.push($state.clone());
            last = Some($state);
        }
        (layer, cell, x, all)
    }};
}

/// First and second derivatives by the input and by all weights of the sum of `y`, weighted.
fn derivatives(y: &Tensor, x: &Tensor, module: &dyn Module) -> Vec<Tensor> {
    let weights = module.parameters();
    let by: Vec<&Tensor> = [x].into_iter().chain(weights.iter().map(|(_, w)| w)).collect();
    let first = grad(&y.square().sum(()), &by);
    let penalty = first.iter().map(|g| g.square().sum(())).reduce(|a, b| a + b).unwrap();
    let second = penalty.backward();
    first.into_iter().chain(by.iter().map(|t| second.get_or_zeros(t))).collect()
}

fn same_derivatives(a: (&Tensor, &dyn Module), b: (&Tensor, &dyn Module), x: &Tensor) {
    let (a, b) = (derivatives(a.0, x, a.1), derivatives(b.0, x, b.1));
    a.iter().zip(&b).for_each(|(a, b)| near(a, b, 2e-3));
}

#[test]
fn plain_layers_and_their_derivatives_of_any_order_are_those_of_their_cells() {
    let (layer, cell, x, all) = by_cells!(Rnn RnnCell |state| state);
    let y = Tensor::stack(&all, 0);
    near(&layer.forward(&x).0, &y, 1e-5);
    same_derivatives((&layer.forward(&x).0, &layer), (&y, &cell), &x);
}

#[test]
fn gated_layers_and_their_derivatives_of_any_order_are_those_of_their_cells() {
    let (layer, cell, x, all) = by_cells!(Gru GruCell |state| state);
    let y = Tensor::stack(&all, 0);
    near(&layer.forward(&x).0, &y, 1e-5);
    same_derivatives((&layer.forward(&x).0, &layer), (&y, &cell), &x);
}

#[test]
fn lstm_layers_and_their_derivatives_of_any_order_are_those_of_their_cells() {
    let (layer, cell, x, all) =
        by_cells!(Lstm LstmCell |state| state.map(|(h, c): &(Tensor, Tensor)| (h, c)));
    let y = Tensor::stack(&all.iter().map(|(h, _)| h.clone()).collect::<Vec<_>>(), 0);
    let (got, (h, c)) = layer.forward(&x);
    near(&got, &y, 1e-5);
    near(&h.squeeze(0), &all[5].0, 1e-5);
    near(&c.squeeze(0), &all[5].1, 1e-5);
    same_derivatives((&got, &layer), (&y, &cell), &x);
}

#[test]
fn first_derivatives_without_a_graph_of_their_own_are_the_same() {
    let device = Device::cpu();
    for layers in [1, 2] {
        let layer = Gru::new(3, 4, &device).layers(layers).bidirectional();
        let x = Tensor::randn([5, 2, 3], &device).requires_grad();
        let (y, _) = layer.forward(&x);
        let weights = layer.parameters();
        let by: Vec<&Tensor> = [&x].into_iter().chain(weights.iter().map(|(_, w)| w)).collect();
        let tracked = grad(&y.square().sum(()), &by);
        // Differentiated twice, the second time without anything kept.
        let kept = y.square().sum(()).differentiate().retain_graph().run();
        let plain = y.square().sum(()).backward();
        for (want, by) in tracked.iter().zip(&by) {
            near(kept.get(by).unwrap(), want, 1e-4);
            near(plain.get(by).unwrap(), want, 1e-4);
        }
    }
}

#[test]
fn a_result_of_one_step_has_no_gradient_from_those_behind_it() {
    let device = Device::cpu();
    let layer = Gru::new(3, 4, &device).batch_first();
    let x = Tensor::randn([2, 5, 3], &device).requires_grad();
    let gradients = layer.forward(&x).0.select(1, 1).sum(()).backward();
    let behind = gradients.get(&x).unwrap().narrow(1, 2, 3);
    assert_eq!(behind.abs().amax(()).item::<f32>().unwrap(), 0.0);
    let short = layer.forward(&x.detach().narrow(1, 0, 2)).0.select(1, 1).sum(()).backward();
    for (_, w) in layer.parameters() {
        near(gradients.get(&w).unwrap(), short.get(&w).unwrap(), 1e-5);
    }
}

#[test]
fn a_sequence_may_come_in_pieces_and_without_a_batch() {
    let device = Device::cpu();
    let layer = Lstm::new(3, 4, &device).layers(2);
    let x = Tensor::randn([6, 2, 3], &device);
    let (whole, (h, c)) = layer.forward(&x);
    let (first, state) = layer.forward(&x.narrow(0, 0, 4));
    let (second, (last_h, last_c)) = layer.forward_with(&x.narrow(0, 4, 2), Some((&state.0, &state.1)), None);
    near(&Tensor::cat(&[first, second], 0), &whole, 1e-5);
    near(&last_h, &h, 1e-5);
    near(&last_c, &c, 1e-5);
    let (alone, (h, _)) = layer.forward(&x.select(1, 1));
    near(&alone, &whole.select(1, 1), 1e-5);
    assert_eq!(h.shape()[..], [2, 4]);
}

#[test]
fn lengths_end_each_sample_where_it_ends() {
    let device = Device::cpu();
    let layer = Gru::new(3, 4, &device).bidirectional().batch_first();
    let x = Tensor::randn([2, 5, 3], &device);
    let lengths = Tensor::from_vec(vec![5i64, 3], [2], &device);
    let (y, h) = layer.forward_with(&x, None, Some(&lengths));
    let (short, state) = layer.forward(&x.narrow(0, 1, 1).narrow(1, 0, 3));
    near(&y.narrow(0, 1, 1).narrow(1, 0, 3), &short, 1e-6);
    near(&h.narrow(1, 1, 1), &state, 1e-6);
    assert_eq!(y.narrow(0, 1, 1).narrow(1, 3, 2).abs().amax(()).item::<f32>().unwrap(), 0.0);
}

#[test]
fn names_and_counts_are_pytorchs() {
    let device = Device::cpu();
    let layer = Lstm::new(3, 4, &device).layers(2).bidirectional();
    let names: Vec<String> = layer.parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names[..5],
        ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_ih_l0_reverse"]
    );
    assert_eq!(names[12], "weight_ih_l1_reverse");
    assert_eq!(layer.weights()[2].input.shape()[..], [16, 8]);
    assert!(
        layer.to_string().starts_with("Lstm(inputs=3, hidden=4, layers=2, bidirectional=true)"),
        "{layer}"
    );
    let cell = GruCell::new(3, 4, &device);
    assert_eq!(cell.parameters()[3].0, "bias_hh");
}

#[test]
fn dropout_between_layers_is_for_training_only() {
    let device = Device::cpu();
    let mut layer = Rnn::new(3, 8, &device).layers(2).dropout(0.5);
    let x = Tensor::randn([4, 2, 3], &device);
    let run = |layer: &Rnn| no_grad(|| layer.forward(&x).0.to_vec::<f32>().unwrap());
    assert_ne!(run(&layer), run(&layer));
    layer.train(false);
    assert_eq!(run(&layer), run(&layer));
}

#[test]
#[should_panic = "input has 4 features where 3 are expected"]
fn inputs_of_another_width_are_told() {
    let device = Device::cpu();
    let _ = Lstm::new(3, 4, &device).forward(&Tensor::ones([5, 2, 4], &device));
}

#[test]
#[should_panic = "a state of shape [1, 2, 4] where [2, 2, 4] is expected"]
fn states_of_another_shape_are_told() {
    let device = Device::cpu();
    let layer = Gru::new(3, 4, &device).layers(2);
    let _ =
        layer.forward_with(&Tensor::ones([5, 2, 3], &device), Some(&Tensor::ones([1, 2, 4], &device)), None);
}
