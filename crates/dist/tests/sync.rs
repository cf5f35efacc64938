//! Gradients combined over threads and devices: the bits of one worker, and every misuse told.

use kiln_dist::{Bf16, Combine, Compress, Error, GradientSync, Group, Round, SyncConfig, Unused};
use kiln_nn::{Linear, Module, Optimizer, Sgd};
use kiln_tensor::{DType, Device, Tensor, custom_grad, seed};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(Module)]
struct Mlp {
    first: Linear,
    second: Linear,
}
impl Mlp {
    fn new(device: &Device) -> Mlp {
        Mlp { first: Linear::new(6, 40, device), second: Linear::new(40, 3, device) }
    }

    fn loss(&self, step: usize, shard: usize, device: &Device) -> Tensor {
        let n = 4 + shard % 3;
        let x: Vec<f32> =
            (0..n * 6).map(|i| ((i * 37 + step * 11 + shard * 7) % 101) as f32 / 50.0 - 1.0).collect();
        let x = Tensor::from_vec(x, [n, 6], device);
        self.second.forward(&self.first.forward(&x).tanh()).square().mean(())
    }
}

fn device(i: usize) -> Device {
    Device::open(&format!("cpu:{i}")).unwrap()
}

/// Small buckets, so that there are several.
fn config() -> SyncConfig {
    SyncConfig {
        first: 64,
        others: 256,
        check: Some(2),
        deadline: Duration::from_secs(5),
        ..SyncConfig::default()
    }
}

fn groups(ranks: usize, shards: usize) -> Vec<Group> {
    linked(ranks, shards, None)
}

/// Ranks whose exchange takes a processor's time, and ranks whose link would take it: the latter exchange while they
/// compute, even if there is no core for it.
fn both_ways(ranks: usize, shards: usize) -> [Vec<Group>; 2] {
    let ways = [None, Some(u64::MAX)].map(|rate| linked(ranks, shards, rate));
    assert!(ways[1][0].overlaps());
    ways
}

fn linked(ranks: usize, shards: usize, rate: Option<u64>) -> Vec<Group> {
    let settings = kiln_dist::Config {
        deadline: Duration::from_secs(5),
        shards: Some(shards),
        flight: None,
        rate,
        ..Default::default()
    };
    Group::local(ranks, settings).unwrap()
}

fn each<T: Send>(groups: Vec<Group>, f: impl Fn(Group, Device) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> =
            groups.into_iter().map(|g| scope.spawn(move || f(g.clone(), device(g.rank())))).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

fn bits(model: &dyn Module) -> Vec<u32> {
    let values = model.parameters().into_iter().flat_map(|(_, p)| p.to_vec::<f32>().unwrap());
    values.map(f32::to_bits).collect()
}

fn differentiate(round: &mut Round, model: &Mlp, step: usize, device: &Device) -> Result<(), Error> {
    for shard in round.shards() {
        // Not all shards are as long.
        round.backward_of(&model.loss(step, shard, device), 1 + shard % 3, 17)?;
    }
    Ok(())
}

/// A few steps of one rank.
fn train(sync: &GradientSync, model: &mut Mlp, device: &Device) -> Result<Vec<u32>, Error> {
    let mut optimizer = Sgd::new(0.2).momentum(0.9);
    let mut losses = Vec::new();
    for step in 0..5 {
        let mut round = sync.begin(model)?;
        differentiate(&mut round, model, step, device)?;
        // Both ways are the same.
        let loss = if (step + sync.rank()).is_multiple_of(2) {
            round.step(model, &mut optimizer)?.loss
        } else {
            let reduced = round.wait()?;
            optimizer.step(model, &reduced.gradients);
            reduced.loss
        };
        losses.push(loss.item::<f32>()?.to_bits());
    }
    Ok(bits(model).into_iter().chain(losses).collect())
}

fn alone(shards: usize, config: SyncConfig) -> Vec<u32> {
    let device = device(0);
    seed(1);
    let mut model = Mlp::new(&device);
    train(&GradientSync::alone(shards, config).unwrap(), &mut model, &device).unwrap()
}

#[test]
fn any_number_of_ranks_gives_the_bits_of_one() {
    for combine in [Combine::Sum, Combine::Mean] {
        for compress in [None, Some(Arc::new(Bf16) as Arc<dyn Compress>)] {
            let config = SyncConfig { combine, compress, ..config() };
            let want = alone(8, config.clone());
            for groups in [2, 3, 8].into_iter().flat_map(|ranks| both_ways(ranks, 8)) {
                let ranks = groups.len();
                let got = each(groups, |group, device| {
                    // Only rank 0's weights count.
                    seed(if group.rank() == 0 { 1 } else { 77 });
                    let mut model = Mlp::new(&device);
                    let sync = GradientSync::start(&group, &mut model, config.clone()).unwrap();
                    let out = train(&sync, &mut model, &device).unwrap();
                    assert!(sync.stats().buckets >= 10, "{:?}", sync.stats());
                    sync.close().unwrap();
                    sync.close().unwrap();
                    assert_eq!(sync.begin(&model).err(), Some(Error::Group(kiln_group::Error::Closed)));
                    out
                });
                got.iter().for_each(|got| assert_eq!(*got, want, "{ranks} ranks, {combine:?}"));
            }
        }
    }
}

#[test]
fn devices_of_one_thread_give_the_same_bits() {
    let want = alone(5, config());
    for workers in [1, 2, 3, 5] {
        let devices: Vec<Device> = (0..workers).map(device).collect();
        let mut models: Vec<Mlp> = devices
            .iter()
            .map(|device| {
                seed(1);
                Mlp::new(device)
            })
            .collect();
        let mut list: Vec<&mut dyn Module> = models.iter_mut().map(|m| m as _).collect();
        let syncs = GradientSync::over(&mut list, 5, config()).unwrap();
        let mut optimizers: Vec<Sgd> = devices.iter().map(|_| Sgd::new(0.2).momentum(0.9)).collect();
        let mut losses = Vec::new();
        for step in 0..5 {
            let mut rounds = Vec::new();
            for (w, sync) in syncs.iter().enumerate() {
                let mut round = sync.begin(&models[w]).unwrap();
                differentiate(&mut round, &models[w], step, &devices[w]).unwrap();
                rounds.push(round);
            }
            for (w, round) in rounds.into_iter().enumerate() {
                let reduced = round.wait().unwrap();
                optimizers[w].step(&mut models[w], &reduced.gradients);
                if w == 0 {
                    losses.push(reduced.loss.item::<f32>().unwrap().to_bits());
                }
            }
        }
        for model in &models {
            let got: Vec<u32> = bits(model).into_iter().chain(losses.clone()).collect();
            assert_eq!(got, want, "{workers} workers");
        }
    }
}

#[test]
fn a_world_of_one_is_a_plain_backward() {
    let device = device(0);
    seed(3);
    let model = Mlp::new(&device);
    let plain = model.loss(0, 0, &device).backward();
    let sync = GradientSync::alone(1, SyncConfig::default()).unwrap();
    let mut round = sync.begin(&model).unwrap();
    round.backward_of(&model.loss(0, 0, &device), 7, 7).unwrap();
    let reduced = round.wait().unwrap();
    for (path, p) in model.parameters() {
        let (got, want) = (reduced.gradients.get(&p).unwrap(), plain.get(&p).unwrap());
        assert_eq!(got.to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap(), "{path}");
    }
    assert_eq!(sync.stats().copied, 0);
}

#[test]
fn a_shard_may_come_in_pieces() {
    let run = |shards: usize, ranks: usize| {
        each(groups(ranks, shards), |group, device| {
            seed(1);
            let mut model = Mlp::new(&device);
            let sync = GradientSync::start(&group, &mut model, config()).unwrap();
            let mut round = sync.begin(&model).unwrap();
            for shard in round.shards() {
                round.accumulate(&model.loss(0, shard, &device)).unwrap();
                round.accumulate(&model.loss(1, shard, &device)).unwrap();
                round.backward(&model.loss(2, shard, &device)).unwrap();
            }
            let reduced = round.wait().unwrap();
            let of = |(_, p): (String, Tensor)| reduced.gradients.get(&p).unwrap().to_vec::<f32>().unwrap();
            model.parameters().into_iter().flat_map(of).map(f32::to_bits).collect::<Vec<_>>()
        })
    };
    let want = run(4, 1).remove(0);
    run(4, 2).into_iter().chain(run(4, 4)).for_each(|got| assert_eq!(got, want));
    assert_eq!(run(1, 1).remove(0).len(), want.len());
}

/// Two weights, of which a loss may use one.
#[derive(Module)]
struct Pair {
    used: Tensor,
    idle: Tensor,
    frozen: Tensor,
    tied: Tensor,
}
fn pair(device: &Device) -> Pair {
    let used = Tensor::ones([3], device).requires_grad();
    Pair {
        tied: used.clone(),
        idle: Tensor::ones([2], device).requires_grad(),
        frozen: Tensor::ones([5], device),
        used,
    }
}

#[test]
fn unused_parameters_are_named_on_every_rank() {
    let errors = each(groups(2, 2), |group, device| {
        let mut model = pair(&device);
        let sync = GradientSync::start(&group, &mut model, config()).unwrap();
        let mut round = sync.begin(&model).unwrap();
        // Rank 1 leaves one out.
        let mut loss = (&model.used * &model.tied).sum(()) + model.frozen.sum(());
        if group.rank() == 0 {
            loss = loss + model.idle.sum(());
        }
        match round.backward(&loss) {
            Ok(()) => round.wait().err().unwrap(),
            Err(error) => error,
        }
    });
    let named = "rank 1: the loss does not depend on idle";
    assert_eq!(errors[1], Error::Unused { rank: 1, paths: vec!["idle".into()] });
    assert_eq!(errors[1].to_string(), named);
    assert_eq!(
        errors[0],
        Error::Group(kiln_group::Error::Poisoned { rank: 1, reason: named.into() }),
        "and the group lives on"
    );
}

#[test]
fn unused_frozen_and_shared_parameters_where_zeros_are_allowed() {
    each(groups(3, 3), |group, device| {
        let mut model = pair(&device);
        let config = SyncConfig { unused: Unused::Zeros, ..config() };
        let sync = GradientSync::start(&group, &mut model, config).unwrap();
        for step in 0..3 {
            let mut round = sync.begin(&model).unwrap();
            let mut loss = (&model.used * &model.tied).sum(()) + model.frozen.sum(());
            if step == 1 && group.rank() == 2 {
                loss = loss + model.idle.sum(());
            }
            round.backward(&loss).unwrap();
            let reduced = round.wait().unwrap();
            let shared = reduced.gradients.get(&model.used).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(shared, [6.0; 3], "both uses on three ranks");
            assert!(reduced.gradients.get(&model.frozen).is_none());
            match step {
                1 => {
                    assert_eq!(
                        reduced.gradients.get(&model.idle).unwrap().to_vec::<f32>().unwrap(),
                        [1.0; 2]
                    );
                    assert!(reduced.unused.is_empty());
                }
                _ => {
                    assert!(reduced.gradients.get(&model.idle).is_none());
                    assert_eq!(reduced.unused, ["idle"]);
                }
            }
        }
    });
}

#[test]
fn tied_weights_stay_tied_through_the_start_and_every_step() {
    let ends = each(groups(2, 2), |group, device| {
        let mut model = pair(&device);
        // Rank 1 begins with other values, and gets those of rank 0.
        let value = Tensor::full([3], 1 + group.rank(), DType::F32, &device).requires_grad();
        (model.used, model.tied) = (value.clone(), value);
        let config = SyncConfig { unused: Unused::Zeros, ..config() };
        let sync = GradientSync::start(&group, &mut model, config).unwrap();
        let mut optimizer = Sgd::new(0.1).momentum(0.9);
        for _ in 0..3 {
            assert_eq!(model.used.leaf(), model.tied.leaf(), "rank {}", group.rank());
            let mut round = sync.begin(&model).unwrap();
            round.backward(&(&model.used * &model.tied).sum(())).unwrap();
            round.step(&mut model, &mut optimizer).unwrap();
        }
        assert_eq!((model.used.leaf(), model.parameter_count()), (model.tied.leaf(), 10));
        sync.close().unwrap();
        bits(&model)
    });
    assert_eq!(ends[0], ends[1]);
    // What one copy comes to by itself, with the shards' gradients summed.
    let device = Device::cpu();
    let mut single = Tensor::ones([3], &device).requires_grad();
    let mut optimizer = Sgd::new(0.1).momentum(0.9);
    for _ in 0..3 {
        let loss = (&single * &single).sum(()) * 2.0;
        optimizer.step(&mut single, &loss.backward());
    }
    let (got, want) = (f32::from_bits(ends[0][0]), single.to_vec::<f32>().unwrap()[0]);
    assert!((got - want).abs() < 1e-5, "{got}, not {want}");
}

#[test]
fn shards_without_samples_count_as_zeros() {
    each(groups(2, 2), |group, device| {
        let mut model = Mlp::new(&device);
        let sync = GradientSync::start(&group, &mut model, config()).unwrap();
        let mut round = sync.begin(&model).unwrap();
        if group.rank() == 0 {
            round.backward_of(&model.loss(0, 0, &device), 4, 4).unwrap();
        } else {
            round.skip().unwrap();
        }
        let reduced = round.wait().unwrap();
        if group.rank() == 0 {
            let plain = model.loss(0, 0, &device).backward();
            let bias = &model.second.bias.as_ref().unwrap();
            let (got, want) = (reduced.gradients.get(bias).unwrap(), plain.get(bias).unwrap());
            assert_eq!(got.to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap());
        }
    });
}

#[test]
fn a_model_on_several_devices_is_refused_and_the_others_learn_it() {
    let errors = each(groups(2, 2), |group, own| {
        let mut model = Mlp::new(&own);
        if group.rank() == 1 {
            model.second = Linear::new(40, 3, &device(7));
        }
        let sync = GradientSync::start(&group, &mut model, config()).unwrap();
        let round = sync.begin(&model).and_then(|mut round| {
            differentiate(&mut round, &model, 0, &own)?;
            round.wait()
        });
        round.err()
    });
    let reason =
        Error::Devices { rank: 1, path: "second.weight".into(), want: "cpu:1".into(), got: "cpu:7".into() };
    let told = kiln_group::Error::Aborted { rank: 1, reason: reason.to_string() };
    assert_eq!(errors, [Some(Error::Group(told)), Some(reason)]);
}

#[test]
fn a_dropped_round_fails_everywhere_and_the_next_one_works() {
    let dropped = |group: Group, device: Device| {
        let mut model = Mlp::new(&device);
        let sync = GradientSync::start(&group, &mut model, config()).unwrap();
        for step in 0..4 {
            let mut round = sync.begin(&model).unwrap();
            if step % 2 == 0 && group.rank() == 1 {
                assert_eq!(sync.begin(&model).err(), Some(Error::Open));
                // As where something is thrown before backward.
                drop(round);
                continue;
            }
            differentiate(&mut round, &model, step, &device).unwrap();
            match round.wait() {
                Ok(_) => assert_eq!(step % 2, 1),
                Err(Error::Group(kiln_group::Error::Poisoned { rank: 1, .. })) => assert_eq!(step % 2, 0),
                Err(other) => panic!("{other}"),
            }
        }
    };
    both_ways(2, 2).into_iter().for_each(|groups| drop(each(groups, dropped)));
}

#[test]
fn a_panic_in_the_middle_of_backward_is_told_to_the_others() {
    let panics = |group: Group, device: Device| {
        let mut model = Mlp::new(&device);
        let sync = GradientSync::start(&group, &mut model, config()).unwrap();
        let mut round = sync.begin(&model).unwrap();
        let x = Tensor::ones([4, 6], &device);
        let hidden = model.first.forward(&x);
        // The second layer's gradients are in a bucket by then.
        let odd = group.rank() == 1;
        let through = custom_grad(&[&hidden], hidden.detach(), move |g| {
            assert!(!odd, "on purpose");
            vec![Some(g.clone())]
        });
        let loss = model.second.forward(&through).sum(());
        let begun = Instant::now();
        if odd {
            let panicked = catch_unwind(AssertUnwindSafe(|| round.backward(&loss)));
            assert!(panicked.is_err());
            drop(round);
        } else {
            round.backward(&loss).unwrap();
            let error = round.wait().err();
            let told = matches!(error, Some(Error::Group(kiln_group::Error::Poisoned { rank: 1, .. })));
            assert!(told, "{error:?}");
        }
        assert!(begun.elapsed() < Duration::from_secs(3), "nobody waited for the deadline");
    };
    both_ways(2, 2).into_iter().for_each(|groups| drop(each(groups, panics)));
}

#[test]
fn closing_finishes_a_round_that_nobody_waits_for() {
    let closes = |group: Group, _: Device| {
        // One that no other test gets going.
        let device = device(60 + group.rank());
        let mut model = Mlp::new(&device);
        let sync = GradientSync::start(&group, &mut model, config()).unwrap();
        let mut round = sync.begin(&model).unwrap();
        differentiate(&mut round, &model, 0, &device).unwrap();
        let begun = Instant::now();
        sync.close().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(3), "not by the deadline");
        assert_eq!(round.wait().unwrap().gradients.len(), 4);
    };
    both_ways(2, 2).into_iter().for_each(|groups| drop(each(groups, closes)));
}

#[test]
fn misuse_is_told() {
    let group = groups(1, 2).remove(0);
    let device = device(0);
    let mut model = Mlp::new(&device);
    let sync = GradientSync::start(&group, &mut model, config()).unwrap();
    let twice = GradientSync::start(&group, &mut model, config()).err();
    assert_eq!(twice, Some(Error::Group(kiln_group::Error::Claimed { name: "gradients".into() })));
    let other = SyncConfig { name: "others".into(), ..config() };
    let beside = GradientSync::start(&group, &mut model, other).unwrap();
    let round = sync.begin(&model).unwrap();
    assert_eq!(round.wait().err(), Some(Error::Unfinished { rank: 0, left: 2 }));
    let mut round = beside.begin(&model).unwrap();
    differentiate(&mut round, &model, 0, &device).unwrap();
    let more = round.backward(&model.loss(0, 0, &device)).err();
    assert_eq!(more, Some(Error::Shard { rank: 0, held: 2 }));
    round.wait().unwrap();
    sync.close().unwrap();
    assert!(GradientSync::start(&group, &mut model, config()).is_ok(), "closed, it can start again");
}

#[test]
fn a_rank_with_other_parameters_is_named() {
    let errors = each(groups(2, 2), |group, device| {
        let mut model = Linear::new(4, 2 + group.rank(), &device);
        GradientSync::start(&group, &mut model, config()).err().map(|e| e.to_string()).unwrap_or_default()
    });
    let named = "rank 1 has other parameters than rank 0: `weight";
    assert!(errors[1].starts_with(named), "{errors:?}");
    assert!(errors[0].contains(named), "{errors:?}");
}

#[test]
fn replicas_that_differ_are_noticed() {
    let errors = each(groups(2, 2), |group, device| -> Result<(), Error> {
        let mut model = Mlp::new(&device);
        let sync = GradientSync::start(&group, &mut model, config())?;
        for step in 0..4 {
            if step == 1 && group.rank() == 1 {
                let weight = model.second.weight.detach() + 1e-6;
                model.second.weight = weight.requires_grad();
            }
            let mut round = sync.begin(&model)?;
            differentiate(&mut round, &model, step, &device)?;
            round.wait()?;
        }
        Ok(())
    });
    for error in errors {
        let text = error.unwrap_err().to_string();
        assert_eq!(text, "rank 1 ended the group: its second.weight is not that of rank 0 at step 2");
    }
}

/// A hook of the user's own: halves travel as f16.
struct Halves;

impl Compress for Halves {
    fn name(&self) -> &str {
        "halves"
    }
    fn wire(&self, _: DType) -> DType {
        DType::F16
    }
    fn encode(&self, gradient: &Tensor) -> Tensor {
        (gradient * 0.5).to_dtype(DType::F16)
    }
    fn decode(&self, sum: &Tensor, dtype: DType) -> Tensor {
        sum.to_dtype(dtype) * 2.0
    }
}

#[test]
fn a_hook_of_the_users_own_gives_the_same_bits_at_any_number_of_ranks() {
    let config = SyncConfig { compress: Some(Arc::new(Halves)), ..config() };
    let want = alone(4, config.clone());
    assert_ne!(want, alone(4, self::config()), "it is lossy");
    for got in each(groups(4, 4), |group, device| {
        seed(1);
        let mut model = Mlp::new(&device);
        let sync = GradientSync::start(&group, &mut model, config.clone()).unwrap();
        train(&sync, &mut model, &device).unwrap()
    }) {
        assert_eq!(got, want);
    }
}

/// Two parameters whose gradient is one value, which backward goes on with.
#[derive(Module)]
struct Twins {
    first: Tensor,
    second: Tensor,
    third: Tensor,
}
impl Twins {
    fn new(device: &Device) -> Twins {
        let leaf = || Tensor::randn([32, 64], device).requires_grad();
        Twins { first: leaf(), second: leaf(), third: leaf() }
    }

    fn loss(&self, shard: usize) -> Tensor {
        let sum = &self.first + &self.second + self.third.tanh().reshape([64, 32]).reshape([32, 64]);
        (sum * (shard as f64 + 0.5)).square().mean(())
    }
}

#[test]
fn gradients_are_computed_in_their_buckets_and_what_they_share_stays() {
    let train = |sync: &GradientSync, twins: &mut Twins| {
        let mut optimizer = Sgd::new(0.1);
        for _ in 0..4 {
            let mut round = sync.begin(twins).unwrap();
            for shard in round.shards() {
                round.backward_of(&twins.loss(shard), 1, 4).unwrap();
            }
            round.step(twins, &mut optimizer).unwrap();
        }
        bits(twins)
    };
    seed(9);
    let config = SyncConfig { first: 1 << 20, ..config() };
    let want = train(&GradientSync::alone(4, config.clone()).unwrap(), &mut Twins::new(&device(0)));
    let got = each(groups(2, 4), |group, device| {
        seed(9);
        let mut twins = Twins::new(&device);
        let sync = GradientSync::start(&group, &mut twins, config.clone()).unwrap();
        let bits = train(&sync, &mut twins);
        let (copied, all) = (sync.stats().copied, 4 * 3 * 32 * 64 * 4);
        assert!(copied < all / 10, "{copied} of {all} bytes were copied");
        sync.close().unwrap();
        bits
    });
    got.iter().for_each(|got| assert_eq!(*got, want));
}

/// A layer whose weight is a bucket of several ranges.
fn train_wide(sync: &GradientSync, model: &mut Linear, device: &Device) -> Vec<u32> {
    let mut optimizer = Sgd::new(0.1);
    for step in 0..3 {
        let mut round = sync.begin(model).unwrap();
        for shard in round.shards() {
            let number = |i: usize| ((i * 29 + step * 13 + shard * 7) % 103) as f32 / 51.0 - 1.0;
            let x = Tensor::from_vec((0..8 * 256).map(number).collect(), [8, 256], device);
            round.backward_of(&model.forward(&x).tanh().square().mean(()), 8, 64).unwrap();
        }
        round.step(model, &mut optimizer).unwrap();
    }
    bits(model)
}

#[test]
fn a_last_bucket_in_ranges_gives_the_same_bits() {
    for compress in [None, Some(Arc::new(Bf16) as Arc<dyn Compress>)] {
        let config = SyncConfig { compress: compress.clone(), ..config() };
        let want = {
            seed(5);
            let sync = GradientSync::alone(8, config.clone()).unwrap();
            train_wide(&sync, &mut Linear::new(256, 256, &device(0)), &device(0))
        };
        for (ranks, ranges) in [(2, 4), (3, 4), (8, 4)] {
            let got = each(linked(ranks, 8, Some(u64::MAX)), |group, device| {
                seed(5);
                let mut model = Linear::new(256, 256, &device);
                let sync = GradientSync::start(&group, &mut model, config.clone()).unwrap();
                let bits = train_wide(&sync, &mut model, &device);
                let sum = kiln_group::Op::AllReduce(kiln_group::Reduce::Sum);
                let count = group.flight().records.iter().filter(|r| r.signature.op == sum).count();
                let stats = sync.stats();
                // The first step does not know the order yet.
                let ranges = if compress.is_some() { ranges / 2 } else { ranges };
                assert_eq!(count as u64, stats.buckets + 2 * (ranges - 1), "{ranks} ranks: {stats:?}");
                sync.close().unwrap();
                bits
            });
            got.iter().for_each(|got| assert_eq!(*got, want, "{ranks} ranks"));
        }
    }
}

/// Memory of a group for a device to compute in.
struct Place(kiln_group::Range);

// SAFETY: ranges do not overlap, and the buffer goes to its collective when they are computed.
unsafe impl kiln_tensor::Host for Place {
    fn bytes(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { self.0.bytes() }
    }

    fn target(&self) -> Option<*mut u8> {
        Some(self.0.start())
    }
}

/// Notes when nobody holds it any more.
struct Held(Vec<u64>, Arc<AtomicBool>);

// SAFETY: a vector that is only shared neither moves nor changes.
unsafe impl kiln_tensor::Host for Held {
    fn bytes(&self) -> &[u8] {
        let (at, length) = (self.0.as_ptr(), 8 * self.0.len());
        // SAFETY: the numbers' own bytes.
        unsafe { std::slice::from_raw_parts(at.cast(), length) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_place_goes_with_its_value() {
    let device = device(0);
    for others in [0, 1] {
        let gone = Arc::new(AtomicBool::new(false));
        let x = Tensor::randn([8], &device);
        let placed = {
            let held = kiln_tensor::Bytes::new(Held(vec![0; 4], gone.clone()));
            x.computed_in(move || Some(held.clone()))
        };
        // A batch of one operation runs as it is, one of several is planned.
        let others: Vec<_> = (0..others).map(|_| x.exp()).collect();
        device.sync().unwrap();
        drop((placed, others));
        device.sync().unwrap();
        assert!(gone.load(Ordering::SeqCst));
    }
}

#[test]
fn values_are_computed_where_they_are_placed_and_nothing_else_is_there() {
    let group = groups(1, 1).pop().unwrap();
    let mut buffer = group.buffer(2 * 4 * 48 * 48).unwrap();
    let place = |buffer: &kiln_group::Buffer, at: usize| {
        kiln_tensor::Bytes::new(Place(buffer.range(0, at * 4 * 48 * 48..(at + 1) * 4 * 48 * 48)))
    };
    let device = device(0);
    let (a, b) = (Tensor::randn([48, 48], &device), Tensor::randn([48, 48], &device));
    let want = [a.matmul(&b).to_vec::<f32>().unwrap(), (&a + &b).tanh().to_vec().unwrap()];
    let (product, sum) = (a.matmul(&b), (&a + &b).tanh());
    let memory = |at| {
        let place = place(&buffer, at);
        move || Some(place.clone())
    };
    let placed = [product.computed_in(memory(0)), sum.computed_in(memory(1))];
    // The values themselves go on.
    let others = [product.reshape([48 * 48]), sum.transpose(0, 1)];
    for (i, (placed, want)) in placed.iter().zip(&want).enumerate() {
        let data = placed.to_data().unwrap();
        assert_eq!(data.bytes.as_ptr(), place(&buffer, i).as_ptr(), "value {i} is elsewhere");
        let got: Vec<f32> = data.bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        assert_eq!(got, *want);
    }
    drop(placed);
    buffer.fill(0xff);
    assert_eq!(others[0].to_vec::<f32>().unwrap(), want[0]);
    assert_eq!(others[1].transpose(0, 1).to_vec::<f32>().unwrap(), want[1]);
    assert_eq!(product.to_vec::<f32>().unwrap(), want[0]);
}
