//! Steps are applied whole or not at all, and what was refused is told.

use kiln_nn::{Adam, Embedding, Linear, Module, NonFinite, Optimizer, Sgd};
use kiln_tensor::{Device, Error, Tensor, seed};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[derive(Module)]
struct Model {
    tokens: Embedding,
    head: Linear,
}
impl Model {
    fn new(device: &Device) -> Model {
        seed(5);
        Model { tokens: Embedding::new(7, 4, device), head: Linear::new(4, 7, device) }
    }

    /// `ids` are one less than what is looked up: what they come to is known to the device alone.
    fn loss(&self, ids: &[i64]) -> Tensor {
        let device = self.head.weight.device();
        let ids = Tensor::from_slice(ids, [ids.len()], &device) + 1;
        let target = ids.clamp(Some(0), Some(6));
        self.head.forward(&self.tokens.forward(&ids)).cross_entropy(&target)
    }
}

const GOOD: [[i64; 3]; 3] = [[0, 1, 2], [3, 4, 5], [-1, 0, 5]];
/// 98 + 1 is no token.
const BAD: [i64; 3] = [1, 98, 2];

fn devices(name: &str) -> Vec<Device> {
    let own = Device::wrap(name, Arc::new(kiln_cpu::Cpu::start())).unwrap();
    let plain = Device::wrap(&format!("{name}-plain"), Arc::new(kiln_cpu::Reference::start())).unwrap();
    vec![own, plain]
}

fn bits(tensors: Vec<(String, Tensor)>) -> Vec<(String, Vec<u8>)> {
    tensors.into_iter().map(|(path, t)| (path, t.to_data().unwrap().bytes.to_vec())).collect()
}

/// Model and optimiser after some batches.
fn trained<O: Optimizer>(device: &Device, mut optimizer: O, batches: &[&[i64]]) -> Vec<(String, Vec<u8>)> {
    let mut model = Model::new(device);
    for batch in batches {
        let loss = model.loss(batch);
        let gradients = loss.backward();
        optimizer.step(&mut model, &gradients);
        match loss.item::<f32>() {
            Ok(loss) => assert!(loss.is_finite()),
            Err(error) => {
                assert_eq!(*batch, BAD, "{error}");
                assert!(matches!(error.root(), Error::Index { index: 99, length: 7, .. }), "{error}");
            }
        }
    }
    device.sync().expect("the read has told of the batch");
    let mut all = model.parameters();
    all.extend(optimizer.state());
    bits(all)
}

#[test]
fn a_bad_batch_leaves_model_and_optimiser_as_they_were() {
    for device in devices("bad-batch") {
        let [a, b, c] = GOOD.each_ref().map(|batch| &batch[..]);
        let adam = || Adam::new(0.1).weight_decay(0.01);
        let want = trained(&device, adam(), &[a, b, c]);
        assert!(want.iter().any(|(name, _)| name == "mean.tokens.weight"));
        for with in [[a, &BAD, b, c], [a, b, &BAD, c], [a, b, c, &BAD], [&BAD, a, b, c]] {
            assert!(trained(&device, adam(), &with) == want, "{device} {with:?}");
        }
        let sgd = || Sgd::new(0.1).momentum(0.9).weight_decay(0.01);
        let want = trained(&device, sgd(), &[a, b, c]);
        assert_eq!(want.len(), 6, "three parameters and their velocities");
        assert!(trained(&device, sgd(), &[a, &BAD, b, c]) == want, "{device}");
    }
}

#[test]
fn a_refused_step_that_nobody_read_of_is_told_by_sync_and_once() {
    for device in devices("untold") {
        let mut model = Model::new(&device);
        let before = bits(model.parameters());
        let mut optimizer = Sgd::new(0.1);
        let gradients = model.loss(&BAD).backward();
        let line = line!() + 1;
        optimizer.step(&mut model, &gradients);
        drop(gradients);
        match device.sync() {
            Err(Error::StepRefused { path, origin, cause, .. }) => {
                assert_eq!(path, "tokens.weight");
                let origin = origin.unwrap();
                assert_eq!((origin.line.file(), origin.line.line()), (file!(), line));
                let text = cause.unwrap().to_string();
                assert!(text.contains("99") && text.contains("embedding"), "{text}");
            }
            other => panic!("{device}: {other:?}"),
        }
        device.sync().unwrap();
        assert!(bits(model.parameters()) == before, "{device}");
        // A failure that nothing depends on is told as well.
        drop(Tensor::ones([2], &device).index_select(0, &(Tensor::arange(0, 3, 1, &device) + 1)));
        assert!(matches!(device.sync().unwrap_err().root(), Error::Index { .. }));
        device.sync().unwrap();
    }
}

/// The sum of 1/x and x: a gradient that is infinite where x is 0, of a loss that is infinite too.
fn infinite(device: &Device, optimizer: &mut Sgd) -> Pair {
    let mut model = Pair {
        fine: Tensor::ones([2], device).requires_grad(),
        bad: Tensor::from_slice(&[2.0f32, 0.0], [2], device).requires_grad(),
    };
    let gradients = (&model.fine * 2.0 + model.bad.reciprocal()).sum(()).backward();
    optimizer.step(&mut model, &gradients);
    model
}

#[derive(Module)]
struct Pair {
    fine: Tensor,
    bad: Tensor,
}
#[test]
fn what_is_not_finite_goes_on_or_is_skipped_or_is_an_error() {
    for device in devices("finite") {
        let go_on = infinite(&device, &mut Sgd::new(0.5));
        assert_eq!(go_on.fine.to_vec::<f32>().unwrap(), [0.0; 2]);
        assert!(go_on.bad.to_vec::<f32>().unwrap()[1].is_infinite());

        let skipped = infinite(&device, &mut Sgd::new(0.5).nonfinite(NonFinite::Skip));
        assert_eq!(skipped.fine.to_vec::<f32>().unwrap(), [1.0; 2], "the other parameter stays as well");
        assert_eq!(skipped.bad.to_vec::<f32>().unwrap(), [2.0, 0.0]);
        device.sync().unwrap();
        let events = device.events();
        assert!(events.len() == 1 && events[0].contains("gradient of bad is not finite"), "{events:?}");

        let refused = infinite(&device, &mut Sgd::new(0.5).nonfinite(NonFinite::Error));
        let beside = Tensor::ones([1], &device);
        match beside.to_vec::<f32>() {
            Err(Error::StepRefused { path, cause: None, origin: Some(_), .. }) => assert_eq!(path, "bad"),
            other => panic!("{device}: {other:?}"),
        }
        assert_eq!(beside.to_vec::<f32>().unwrap(), [1.0], "told once");
        assert_eq!(refused.fine.to_vec::<f32>().unwrap(), [1.0; 2]);
    }
}

#[test]
fn another_thread_is_not_told() {
    let device = devices("threads").remove(0);
    let mut optimizer = Sgd::new(0.5).nonfinite(NonFinite::Error);
    let model = infinite(&device, &mut optimizer);
    device.submit();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            Tensor::ones([3], &device).to_vec::<f32>().unwrap();
            device.sync().unwrap();
            // Its own is left to whoever waits.
            drop(Tensor::ones([2], &device).index_select(0, &(Tensor::arange(0, 3, 1, &device) + 1)));
        });
        other.join().unwrap();
    });
    assert!(matches!(model.fine.to_vec::<f32>(), Err(Error::StepRefused { .. })));
    assert!(matches!(device.sync().unwrap_err().root(), Error::Index { .. }));
    device.sync().unwrap();
}

#[derive(Module)]
struct Tied {
    tokens: Embedding,
    head: Linear,
}
#[test]
fn a_shared_parameter_stays_one() {
    let device = Device::cpu();
    seed(1);
    let mut model =
        Tied { tokens: Embedding::new(5, 3, &device), head: Linear::new(3, 5, &device).without_bias() };
    model.head.weight = model.tokens.weight.clone();
    let mut single = model.tokens.weight.clone();
    let ids = Tensor::from_slice(&[0i64, 3, 4], [3], &device);
    let loss = |tokens: &Tensor, head: &Tensor| {
        tokens.embedding(&ids).matmul(&head.transpose(0, 1)).cross_entropy(&ids)
    };
    let mut optimizers = [Adam::new(0.1), Adam::new(0.1)];
    for _ in 0..3 {
        let gradients = loss(&model.tokens.weight, &model.head.weight).backward();
        optimizers[0].step(&mut model, &gradients);
        let gradients = loss(&single, &single).backward();
        optimizers[1].step(&mut single, &gradients);
    }
    assert_eq!(model.head.weight.leaf(), model.tokens.weight.leaf());
    assert_eq!(model.head.weight.to_vec::<f32>().unwrap(), single.to_vec::<f32>().unwrap());
    let names: Vec<String> = optimizers[0].state().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["mean.tokens.weight", "power.mean", "power.square", "square.tokens.weight"]);
}

#[test]
fn gradients_of_no_parameter_are_refused_at_the_callers_line() {
    let device = Device::cpu();
    let mut model = Model::new(&device);
    let mut optimizer = Adam::new(0.1);
    let (first, second) = (model.loss(&GOOD[0]).backward(), model.loss(&GOOD[1]).backward());
    optimizer.step(&mut model, &first);
    let line = Arc::new(std::sync::Mutex::new(0));
    let told = line.clone();
    std::panic::set_hook(Box::new(move |info| {
        *told.lock().unwrap() = info.location().map_or(0, |l| l.line());
    }));
    let want = line!() + 1;
    let stale = catch_unwind(AssertUnwindSafe(|| optimizer.step(&mut model, &second))).unwrap_err();
    let short = catch_unwind(AssertUnwindSafe(|| optimizer.step_with(&mut model, &[]))).unwrap_err();
    drop(std::panic::take_hook());
    let text = |panic: Box<dyn std::any::Any + Send>| *panic.downcast::<String>().unwrap();
    assert!(text(stale).starts_with("step: none of the 3 gradients belongs to a parameter"));
    assert_eq!(text(short), "step_with: 0 gradients for 3 parameters");
    assert_eq!(*line.lock().unwrap(), want + 1, "the caller's line");
    // Nothing at all is no step.
    let before = bits(optimizer.state());
    optimizer.step(&mut model, &Default::default());
    assert!(bits(optimizer.state()) == before);
}

#[test]
fn the_update_of_a_parameter_stays_one_pass() {
    let cpu = Arc::new(kiln_cpu::Cpu::start());
    let device = Device::wrap("one-pass", cpu.clone()).unwrap();
    let mut parameter = Tensor::ones([3000], &device).requires_grad();
    let mut optimizer = Adam::new(0.1);
    let gradient = Tensor::full([3000], 0.5, kiln_tensor::DType::F32, &device);
    gradient.to_data().unwrap();
    let mut launches = Vec::new();
    for _ in 0..6 {
        let before = cpu.fusion().launches;
        optimizer.step_with(&mut parameter, std::slice::from_ref(&gradient));
        device.sync().unwrap();
        launches.push(cpu.fusion().launches - before);
    }
    // The guard, a power of each beta, and everything of the parameter.
    assert_eq!(launches[3..], [4; 3], "{launches:?}");
}
