//! Attention with masks, grouped heads, rotary positions and a cache, and the transformer's layers.

use kiln_cpu::Cpu;
use kiln_nn::*;
use kiln_tensor::{DType, Device, Tensor, no_grad};
use std::sync::Arc;

fn near(a: &Tensor, b: &Tensor, within: f32) {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= within), "{a:?}, not {b:?}");
}

fn layer(device: &Device) -> MultiHeadAttention {
    MultiHeadAttention::new(16, 4, device)
}

#[test]
fn grouped_heads_are_heads_that_are_repeated() {
    let device = Device::cpu();
    let grouped = layer(&device).kv_heads(2).causal();
    let mut whole = layer(&device).causal();
    let weight = grouped.in_proj_weight.as_ref().unwrap();
    let twice = |start: isize| {
        let heads = weight.narrow(0, start, 8).reshape([2, 1, 4, 16]);
        heads.expand([2, 2, 4, 16]).reshape([16, 16])
    };
    whole.in_proj_weight = Some(Tensor::cat(&[weight.narrow(0, 0, 16), twice(16), twice(24)], 0));
    whole.out_proj = grouped.out_proj.clone();
    let x = Tensor::randn([2, 5, 16], &device);
    near(&grouped.forward(&x), &whole.forward(&x), 1e-5);
    let (y, weights) = grouped.attend_with_weights(&x, &x, &x, Attend::new());
    near(&y, &whole.forward(&x), 1e-5);
    assert_eq!(weights.shape()[..], [2, 4, 5, 5]);
    near(&weights.sum(-1), &Tensor::ones([2, 4, 5], &device), 1e-5);
}

#[test]
fn what_is_hidden_does_not_count() {
    let device = Device::cpu();
    let layer = layer(&device);
    let (x, memory) = (Tensor::randn([2, 3, 16], &device), Tensor::randn([2, 6, 16], &device));
    let short = memory.narrow(1, 0, 4);
    let want = layer.attend(&x, &short, &short, Attend::new());
    let places = Tensor::arange(0, 6, 1, &device);
    let seen = places.lt(4).expand([3, 6]);
    near(&layer.attend(&x, &memory, &memory, Attend::new().mask(&seen)), &want, 1e-5);
    let added = (places.ge(4).to_dtype(DType::F32) * -1e30).expand([3, 6]);
    near(&layer.attend(&x, &memory, &memory, Attend::new().mask(&added)), &want, 1e-5);
    let each = seen.expand([8, 3, 6]);
    near(&layer.attend(&x, &memory, &memory, Attend::new().mask(&each)), &want, 1e-5);
    let padding = places.ge(4).expand([2, 6]);
    near(&layer.attend(&x, &memory, &memory, Attend::new().key_padding_mask(&padding)), &want, 1e-5);
    let bias = Tensor::randn([3, 6], &device);
    let cut = bias.narrow(1, 0, 4);
    let both = Attend::new().mask(&bias).key_padding_mask(&padding);
    let want = layer.attend(&x, &short, &short, Attend::new().mask(&cut));
    near(&layer.attend(&x, &memory, &memory, both), &want, 1e-5);
    let both = Attend::new().mask(&bias).key_padding_mask(&padding);
    near(&layer.attend_with_weights(&x, &memory, &memory, both).0, &want, 1e-5);
}

#[test]
fn a_query_that_sees_nothing_gives_the_bias_and_finite_gradients() {
    let device = Device::cpu();
    let layer = layer(&device);
    let x = Tensor::randn([1, 3, 16], &device).requires_grad();
    let padding = Tensor::ones([1, 3], &device).eq(1);
    let with = || Attend::new().key_padding_mask(&padding);
    for y in [layer.attend(&x, &x, &x, with()), layer.attend_with_weights(&x, &x, &x, with()).0] {
        near(&y, &Tensor::zeros([1, 3, 16], &device), 0.0);
        let gradients = (y + 1.0).square().sum(()).backward();
        assert!(gradients.get(&x).unwrap().to_vec::<f32>().unwrap().iter().all(|g| g.is_finite()));
    }
}

#[test]
fn inputs_of_other_widths_have_projections_of_their_own() {
    let device = Device::cpu();
    let own = layer(&device).widths(6, 10);
    let names: Vec<String> = own.parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[..4], ["q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"]);
    let (x, k, v) = (
        Tensor::randn([2, 3, 16], &device),
        Tensor::randn([2, 5, 6], &device),
        Tensor::randn([2, 5, 10], &device),
    );
    assert_eq!(own.attend(&x, &k, &v, Attend::new()).shape()[..], [2, 3, 16]);
}

#[test]
fn rotary_scores_depend_on_distances_alone() {
    let device = Device::cpu();
    let (q, k) = (Tensor::randn([1, 8], &device), Tensor::randn([1, 8], &device));
    for rotary in [Rotary::new(), Rotary::new().interleaved(), Rotary::new().width(4)] {
        let score = |a: usize, b: usize| {
            (rotary.forward(&q, a) * rotary.forward(&k, b)).sum(()).item::<f32>().unwrap()
        };
        assert!((score(3, 1) - score(9, 7)).abs() < 1e-4);
        assert!((score(3, 1) - score(3, 2)).abs() > 1e-4);
        near(&rotary.forward(&q, 0), &q, 0.0);
    }
    // The two orders of pairs are the same rotation of numbers in another order.
    let order = Tensor::from_vec(vec![0i64, 4, 1, 5, 2, 6, 3, 7], [8], &device);
    let mixed = Rotary::new().interleaved().forward(&q.index_select(1, &order), 5);
    near(&mixed, &Rotary::new().forward(&q, 5).index_select(1, &order), 1e-6);
}

#[test]
fn a_cache_gives_what_the_whole_sequence_does() {
    let device = Device::cpu();
    let layer = layer(&device).kv_heads(2).rotary(Rotary::new()).causal();
    let x = Tensor::randn([2, 9, 16], &device);
    let want = layer.forward(&x);
    for (capacity, pieces) in [(16, vec![4, 1, 1, 3]), (2, vec![1, 2, 6]), (0, vec![9])] {
        let (mut cache, mut at, mut all) = (KvCache::new(capacity), 0, Vec::new());
        for piece in pieces {
            let part = x.narrow(1, at, piece);
            all.push(layer.attend(&part, &part, &part, Attend::new().cache(&mut cache)));
            at += piece as isize;
        }
        near(&Tensor::cat(&all, 1), &want, 1e-5);
        assert_eq!(cache.len(), 9);
        assert!(cache.capacity() >= 9);
    }
    let mut cache = KvCache::new(16);
    let part = |from: isize, n: usize| x.narrow(1, from, n);
    let step = |x: &Tensor, cache: &mut KvCache| layer.attend(x, x, x, Attend::new().cache(cache));
    let _ = step(&part(0, 5), &mut cache);
    let _ = step(&part(0, 3), &mut cache);
    cache.truncate(5);
    near(&step(&part(5, 4), &mut cache), &want.narrow(1, 5, 4), 1e-5);
    // The samples change places.
    let swap = Tensor::from_vec(vec![1i64, 0], [2], &device);
    cache.truncate(8);
    cache.reorder(&swap);
    let last = part(8, 1).index_select(0, &swap);
    near(&step(&last, &mut cache), &want.narrow(1, 8, 1).index_select(0, &swap), 1e-5);
}

#[test]
fn a_cache_that_grows_within_its_room_is_not_copied() {
    let device = Device::wrap("cache", Arc::new(Cpu::start())).unwrap();
    let mut cache = KvCache::new(4096);
    let step = |cache: &mut KvCache| {
        let (k, v) = (Tensor::ones([1, 8, 1, 64], &device), Tensor::ones([1, 8, 1, 64], &device));
        let (keys, values) = no_grad(|| cache.append(&k, &v));
        let sum = (keys.narrow(2, -1, 1) + values.narrow(2, -1, 1)).sum(()).item::<f32>().unwrap();
        assert_eq!(sum, 1024.0);
    };
    step(&mut cache);
    step(&mut cache);
    let (before, size) = (device.memory(), 4 * 8 * 4096 * 64);
    (0..20).for_each(|_| step(&mut cache));
    let after = device.memory();
    assert!(
        after.peak_bytes < before.live_bytes + size / 2,
        "another {size} bytes would be a copy: {before:?}, {after:?}"
    );
}

#[test]
#[should_panic = "a mask of shape [3, 4] for 2 samples, 4 heads, 3 queries and 6 keys"]
fn masks_of_another_shape_are_told() {
    let device = Device::cpu();
    let (x, memory) = (Tensor::ones([2, 3, 16], &device), Tensor::ones([2, 6, 16], &device));
    let mask = Tensor::ones([3, 4], &device);
    let _ = layer(&device).attend(&x, &memory, &memory, Attend::new().mask(&mask));
}

#[test]
fn transformers_have_pytorchs_names_and_learn_in_all_places() {
    let device = Device::cpu();
    let mut model = Transformer::new(8, 2, [1, 2], &device);
    let names: Vec<String> = model.parameters().into_iter().map(|(name, _)| name).collect();
    for name in [
        "encoder.layers.0.self_attn.in_proj_weight",
        "encoder.layers.0.self_attn.out_proj.bias",
        "encoder.layers.0.linear1.weight",
        "encoder.norm.weight",
        "decoder.layers.1.multihead_attn.in_proj_bias",
        "decoder.layers.1.norm3.bias",
        "decoder.norm.bias",
    ] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
    let (source, target) = (Tensor::randn([2, 4, 8], &device), Tensor::randn([2, 3, 8], &device));
    let gradients = model.forward(&source, &target).square().sum(()).backward();
    assert!(model.parameters().iter().all(|(_, p)| gradients.get(p).is_some()));
    // Masks reach every layer: what is padding does not matter, and what comes behind does not either.
    let padding = Tensor::arange(0, 4, 1, &device).ge(3).expand([2, 4]);
    let causal = Tensor::ones([3, 3], &device).tril(0).gt(0);
    model.train(false);
    let run = |source: &Tensor, target: &Tensor| {
        let hidden = || Attend::new().key_padding_mask(&padding);
        let memory = || Memory { own: Attend::new().mask(&causal), memory: hidden() };
        no_grad(|| model.forward_with(source, target, hidden, memory)).narrow(1, 0, 2)
    };
    let noise = |x: &Tensor, at: isize| x.slice_assign(1, at, at + 1, 1, &Tensor::randn([2, 1, 8], &device));
    near(&run(&source, &target), &run(&noise(&source, 3), &noise(&target, 2)), 1e-5);
}
