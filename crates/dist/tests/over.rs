//! Copies of a model on several devices of one program: which way gradients go, with a thread for all or one for each, and
//! that every worker fares alike whatever goes wrong.

use kiln_device::{Decorator, DeviceInfo, Driver, Locality};
use kiln_dist::{Error, GradientSync, Round, Route, SyncConfig, Unused};
use kiln_nn::{Adam, Linear, Module, NonFinite, Sgd};
use kiln_tensor::{Device, Tensor, seed};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A CPU that says it is on a server.
struct Elsewhere(kiln_cpu::Cpu);

impl Decorator for Elsewhere {
    fn inner(&self) -> &dyn Driver {
        &self.0
    }
    fn info(&self) -> DeviceInfo {
        DeviceInfo { locality: Locality::Server("elsewhere".into()), places_outputs: false, ..self.0.info() }
    }
}

/// Kinds of devices, and the way that gradients go between them.
const KINDS: [(&str, Route); 3] =
    [("plain", Route::Ranks), ("decorated", Route::Ranks), ("elsewhere", Route::Moves)];

fn devices(kind: &str, count: usize) -> Vec<Device> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let device = |_| {
        let name = format!("over-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        match kind {
            "elsewhere" => Device::wrap(&name, Arc::new(Elsewhere(kiln_cpu::Cpu::start()))).unwrap(),
            kind => {
                let plain = Device::wrap(&name, Arc::new(kiln_cpu::Cpu::start())).unwrap();
                if kind == "plain" { plain } else { plain.profiled(None).unwrap().0 }
            }
        }
    };
    (0..count).map(device).collect()
}

#[derive(Module)]
struct Mlp {
    first: Linear,
    second: Linear,
    idle: Tensor,
}
impl Mlp {
    fn new(device: &Device) -> Mlp {
        seed(1);
        let idle = Tensor::ones([3], device).requires_grad();
        Mlp { first: Linear::new(6, 40, device), second: Linear::new(40, 3, device), idle }
    }

    /// The loss of a shard; `scale` goes to the second layer's gradient.
    fn loss(&self, step: usize, shard: usize, scale: f64) -> Tensor {
        let n = 4 + shard % 3;
        let x: Vec<f32> =
            (0..n * 6).map(|i| ((i * 37 + step * 11 + shard * 7) % 101) as f32 / 50.0 - 1.0).collect();
        let x = Tensor::from_vec(x, [n, 6], &self.idle.device());
        self.second.forward(&self.first.forward(&x).tanh()).square().mean(()) * scale + self.idle.sum(())
    }
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

fn models(devices: &[Device]) -> Vec<Mlp> {
    devices.iter().map(Mlp::new).collect()
}

fn over(models: &mut [Mlp], shards: usize, config: SyncConfig) -> Vec<GradientSync> {
    let mut list: Vec<&mut dyn Module> = models.iter_mut().map(|m| m as _).collect();
    GradientSync::over(&mut list, shards, config).unwrap()
}

fn bits(model: &dyn Module) -> Vec<u32> {
    let values = model.parameters().into_iter().flat_map(|(_, p)| p.to_vec::<f32>().unwrap());
    values.map(f32::to_bits).collect()
}

fn differentiate(round: &mut Round, model: &Mlp, step: usize) -> Result<(), Error> {
    for shard in round.shards() {
        round.backward_of(&model.loss(step, shard, 1.0), 1 + shard % 3, 9)?;
    }
    Ok(())
}

const STEPS: usize = 4;
const SHARDS: usize = 5;

fn alone() -> Vec<u32> {
    let device = devices("plain", 1).remove(0);
    let mut model = Mlp::new(&device);
    let sync = GradientSync::alone(SHARDS, config()).unwrap();
    let mut optimizer = Adam::new(0.1);
    for step in 0..STEPS {
        let mut round = sync.begin(&model).unwrap();
        differentiate(&mut round, &model, step).unwrap();
        round.step(&mut model, &mut optimizer).unwrap();
    }
    assert_eq!(sync.stats().route, Route::Alone);
    bits(&model)
}

/// All results of workers that each have a thread.
fn threads<T: Send>(
    models: &mut [Mlp],
    syncs: &[GradientSync],
    f: impl Fn(usize, &mut Mlp, &GradientSync) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let workers = models.iter_mut().zip(syncs).enumerate();
        let threads: Vec<_> =
            workers.map(|(w, (model, sync))| scope.spawn(move || f(w, model, sync))).collect();
        threads.into_iter().map(|t| t.join().expect("a worker panicked")).collect()
    })
}

/// That contributions went that way, the first of them while backward still ran, and left nothing behind.
fn check_ways(syncs: &[GradientSync], route: Route) {
    for sync in syncs {
        let stats = sync.stats();
        assert_eq!(stats.route, route);
        assert_eq!(stats.rounds, STEPS as u64);
        assert!(stats.early >= STEPS as u64, "{stats:?}");
        assert_eq!(stats.late.len(), if route == Route::Ranks { syncs.len() } else { 0 });
        assert_eq!(stats.open, 0);
    }
}

#[test]
fn one_thread_for_all_devices_and_one_for_each_give_the_bits_of_one_worker() {
    let want = alone();
    for (kind, route) in KINDS {
        for workers in [2, 3] {
            let devices = devices(kind, workers);
            let mut all = models(&devices);
            let syncs = over(&mut all, SHARDS, config());
            let mut optimizers: Vec<Adam> = devices.iter().map(|_| Adam::new(0.1)).collect();
            for step in 0..STEPS {
                let mut rounds = Vec::new();
                for (model, sync) in all.iter().zip(&syncs) {
                    let mut round = sync.begin(model).unwrap();
                    differentiate(&mut round, model, step).unwrap();
                    rounds.push(round);
                }
                for ((round, model), optimizer) in rounds.into_iter().zip(&mut all).zip(&mut optimizers) {
                    round.step(model, optimizer).unwrap();
                }
            }
            all.iter().for_each(|model| assert!(bits(model) == want, "{kind}, {workers} in one thread"));
            check_ways(&syncs, route);
            syncs.iter().for_each(|sync| sync.close().unwrap());

            let mut all = models(&devices);
            let syncs = over(&mut all, SHARDS, config());
            threads(&mut all, &syncs, |_, model, sync| {
                let mut optimizer = Adam::new(0.1);
                for step in 0..STEPS {
                    let mut round = sync.begin(model).unwrap();
                    differentiate(&mut round, model, step).unwrap();
                    round.step(model, &mut optimizer).unwrap();
                }
            });
            all.iter().for_each(|model| assert!(bits(model) == want, "{kind}, {workers} threads"));
            check_ways(&syncs, route);
        }
    }
}

#[test]
fn a_worker_that_fails_tells_the_others_why_and_the_next_step_is_another() {
    for (kind, route) in KINDS {
        let mut all = models(&devices(kind, 3));
        let syncs = over(&mut all, 3, config());
        let before = bits(&all[0]);
        let outcomes = threads(&mut all, &syncs, |w, model, sync| {
            let mut optimizer = Sgd::new(0.1);
            let mut step = |model: &mut Mlp, fails: bool| {
                let mut round = sync.begin(model)?;
                let loss = model.loss(0, w, 1.0);
                round.backward(&if fails { loss.detach() + model.idle.sum(()) } else { loss })?;
                round.step(model, &mut optimizer).map(drop)
            };
            let unused = step(model, w == 1);
            let after = bits(model);
            step(model, false).unwrap();
            (unused, after)
        });
        for (w, (outcome, after)) in outcomes.into_iter().enumerate() {
            assert!(after == before, "{kind}: worker {w} went on alone");
            match outcome.unwrap_err() {
                Error::Unused { rank: 1, paths } if w == 1 => assert_eq!(paths.len(), 4, "{paths:?}"),
                Error::Group(kiln_group::Error::Poisoned { rank: 1, reason }) if w != 1 => {
                    assert!(reason.contains("first.weight"), "{reason}")
                }
                other => panic!("{kind}: worker {w}: {other:?}"),
            }
        }
        assert!(bits(&all[0]) != before && all.iter().all(|model| bits(model) == bits(&all[0])), "{kind}");
        assert!(syncs.iter().all(|sync| sync.stats().route == route && sync.stats().open == 0), "{kind}");
    }
}

#[test]
fn what_one_worker_cannot_compute_changes_no_model() {
    for (kind, _) in KINDS {
        let mut all = models(&devices(kind, 2));
        let syncs = over(&mut all, 2, config());
        let before = bits(&all[0]);
        let outcomes = threads(&mut all, &syncs, |w, model, sync| {
            let device = model.idle.device();
            let mut optimizer = Adam::new(0.1);
            let mut step = |model: &mut Mlp, bad: bool| {
                let mut round = sync.begin(model)?;
                let mut loss = model.loss(0, w, 1.0);
                if bad {
                    // Out of range, which is found out on the device.
                    loss = loss + model.idle.index_select(0, &(Tensor::arange(1, 4, 1, &device) * 1)).sum(());
                }
                round.backward(&loss)?;
                round.step(model, &mut optimizer).map(drop)
            };
            let outcome = step(model, w == 1).err().map(|e| e.to_string());
            let told = outcome.or_else(|| device.sync().err().map(|e| e.to_string()));
            device.sync().unwrap_or_else(|e| panic!("{kind}: told twice: {e}"));
            let after = bits(model);
            step(model, false).unwrap();
            (told, after)
        });
        for (told, after) in &outcomes {
            let told = told.as_ref().unwrap_or_else(|| panic!("{kind}: nobody told"));
            assert!(told.contains("index_select") || told.contains("take"), "{kind}: {told}");
            assert!(*after == before, "{kind}");
        }
        assert!(bits(&all[0]) != before && bits(&all[0]) == bits(&all[1]), "{kind}");
    }
}

#[test]
fn what_is_infinite_on_one_worker_is_skipped_on_all() {
    for (kind, _) in KINDS {
        let mut all = models(&devices(kind, 2));
        let syncs = over(&mut all, 2, config());
        let before = bits(&all[0]);
        let outcomes = threads(&mut all, &syncs, |w, model, sync| {
            let mut optimizer = Adam::new(0.1).nonfinite(NonFinite::Skip);
            let mut step = |scale: f64| {
                let mut round = sync.begin(model).unwrap();
                round.backward(&model.loss(0, w, scale)).unwrap();
                round.step(model, &mut optimizer).unwrap();
                bits(model)
            };
            let skipped = step(if w == 0 { f64::INFINITY } else { 1.0 });
            (skipped, step(1.0), model.idle.device().events())
        });
        for (skipped, after, events) in &outcomes {
            assert!(*skipped == before && *after == outcomes[0].1 && *after != before, "{kind}");
            assert_eq!(events.len(), 1, "{kind}: {events:?}");
        }
    }
}

#[test]
fn what_any_worker_uses_all_update() {
    for (kind, _) in KINDS {
        let config = SyncConfig { unused: Unused::Zeros, ..config() };
        let mut all = models(&devices(kind, 2));
        let syncs = over(&mut all, 2, config);
        let lists = threads(&mut all, &syncs, |w, model, sync| {
            let mut unused = Vec::new();
            for step in 0..3 {
                let mut round = sync.begin(model).unwrap();
                let used = if w == 1 && step == 1 { model.idle.sum(()) } else { model.idle.detach().sum(()) };
                let x = Tensor::ones([2, 6], &model.idle.device());
                round.backward(&(model.second.forward(&model.first.forward(&x)).sum(()) + used)).unwrap();
                unused.push(round.step(model, &mut Sgd::new(0.1)).unwrap().unused);
            }
            unused
        });
        for unused in lists {
            assert_eq!(unused, [vec!["idle".to_string()], vec![], vec!["idle".into()]], "{kind}");
        }
        assert!(bits(&all[0]) == bits(&all[1]), "{kind}");
        assert_eq!(all[0].idle.to_vec::<f32>().unwrap(), [0.9f32; 3], "{kind}");
    }
}

#[test]
fn copies_that_differ_are_found_and_named() {
    for (kind, _) in KINDS {
        let mut all = models(&devices(kind, 2));
        let syncs = over(&mut all, 2, SyncConfig { check: Some(1), ..config() });
        all[1].second.weight = (all[1].second.weight.detach() * 1.5).requires_grad();
        let errors = threads(&mut all, &syncs, |w, model, sync| {
            // Between ranks the one that differs finds it, and the others by the next step.
            let step = |_| {
                let mut round = sync.begin(model)?;
                round.backward(&model.loss(0, w, 1.0))?;
                round.wait()
            };
            (0..2).find_map(|i| step(i).err()).expect("nobody noticed").to_string()
        });
        assert!(
            errors.iter().any(|e| e.contains("its second.weight is not that of rank 0")),
            "{kind}: {errors:?}"
        );
    }
}

#[test]
fn a_model_on_several_devices_is_refused() {
    for (kind, _) in KINDS {
        let three = devices(kind, 3);
        let mut all = models(&three[..2]);
        let syncs = over(&mut all, 2, config());
        all[1].second = Linear::new(40, 3, &three[2]);
        let error = syncs[1].begin(&all[1]).err().unwrap();
        assert!(
            matches!(&error, Error::Devices { rank: 1, path, .. } if path == "second.weight"),
            "{kind}: {error}"
        );
        let mut told = syncs[0].begin(&all[0]);
        if let Ok(round) = &mut told {
            let _ = round.backward(&all[0].loss(0, 0, 1.0));
        }
        let told = told.and_then(|round| round.wait()).err().unwrap().to_string();
        assert!(told.contains("second.weight"), "{kind}: {told}");
    }
}

#[test]
fn a_thread_does_not_wait_for_itself_and_others_not_for_ever() {
    let mut all = models(&devices("elsewhere", 2));
    let syncs = over(&mut all, 2, SyncConfig { deadline: Duration::from_millis(200), ..config() });
    let mut first = syncs[0].begin(&all[0]).unwrap();
    let second = syncs[1].begin(&all[1]).unwrap();
    first.backward(&all[0].loss(0, 0, 1.0)).unwrap();
    assert_eq!(first.wait().err(), Some(Error::Early), "the other one is this thread's too");
    drop(second);
    assert_eq!(syncs[0].stats().open, 0, "half a step is gone");
    let mut first = syncs[0].begin(&all[0]).unwrap();
    first.backward(&all[0].loss(0, 0, 1.0)).unwrap();
    let error = first.wait().err().unwrap();
    assert!(matches!(&error, Error::Late { rank: 0, missing, .. } if missing[..] == [1]), "{error}");
    assert_eq!(syncs[1].begin(&all[1]).err(), Some(error), "who comes later learns it");
}

#[test]
fn a_round_that_is_dropped_half_way_fails_on_all() {
    let mut all = models(&devices("elsewhere", 2));
    let syncs = over(&mut all, 4, config());
    let errors = threads(&mut all, &syncs, |w, model, sync| {
        let mut round = sync.begin(model).unwrap();
        let shards: Vec<usize> = round.shards().collect();
        for &shard in &shards[..if w == 0 { 2 } else { 1 }] {
            round.backward(&model.loss(0, shard, 1.0)).unwrap();
        }
        match w {
            0 => round.wait().err().map(|e| e.to_string()),
            _ => None,
        }
    });
    assert!(errors[0].as_ref().is_some_and(|e| e.contains("rank 1") && e.contains("dropped")), "{errors:?}");
    assert_eq!(syncs[0].stats().open, 0);
}

#[test]
fn gradients_made_by_hand_count_like_others() {
    for (kind, _) in KINDS {
        let run = |by_hand: bool| {
            let mut all = models(&devices(kind, 2));
            let syncs = over(&mut all, 4, config());
            threads(&mut all, &syncs, |_, model, sync| {
                let mut optimizer = Sgd::new(0.1);
                for step in 0..2 {
                    let mut round = sync.begin(model).unwrap();
                    for shard in round.shards() {
                        let loss = model.loss(step, shard, 1.0);
                        if !by_hand {
                            round.backward(&loss).unwrap();
                            continue;
                        }
                        let gradients = loss.backward();
                        let foreign = Tensor::ones([3], &model.idle.device()).requires_grad();
                        let rank = sync.rank();
                        assert_eq!(round.give(&foreign, &foreign), Err(Error::Foreign { rank }));
                        let other = round.give(&model.idle, &model.first.weight);
                        assert!(matches!(other, Err(Error::Gradient { .. })), "{other:?}");
                        for (_, p) in model.parameters() {
                            round.give(&p, gradients.get(&p).unwrap()).unwrap();
                        }
                        round.finish(&loss).unwrap();
                    }
                    round.step(model, &mut optimizer).unwrap();
                }
            });
            bits(&all[1])
        };
        assert!(run(true) == run(false), "{kind}");
    }
    // With nothing to combine too.
    let device = devices("plain", 1).remove(0);
    let model = Mlp::new(&device);
    let sync = GradientSync::alone(1, config()).unwrap();
    let mut round = sync.begin(&model).unwrap();
    round.give(&model.idle, &Tensor::ones([3], &device)).unwrap();
    round.finish(&model.idle.sum(())).unwrap();
    let reduced = round.wait().unwrap();
    assert_eq!(reduced.gradients.get(&model.idle).unwrap().to_vec::<f32>().unwrap(), [1.0; 3]);
    assert_eq!(reduced.loss.item::<f32>().unwrap(), 3.0);
}
