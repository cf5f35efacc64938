//! `#[derive(Module)]` and the walks over what it makes: paths, modes, freezing, state dicts, printing.

use kiln_nn::*;
use kiln_tensor::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};

/// Every kind of part, and fields that are none.
#[derive(Module)]
struct All {
    layer: Linear,
    list: Vec<Linear>,
    array: [Linear; 2],
    maybe: Option<Linear>,
    none: Option<Linear>,
    map: BTreeMap<String, Linear>,
    table: HashMap<String, Linear>,
    boxed: Box<Linear>,
    pair: (Linear, Option<Tensor>),
    choice: Choice,
    inner: Generic<Linear>,
    count: Buffer,
    parameter: Tensor,
    r#type: Wrapper,
    #[module(skip)]
    left_out: Linear,
    mode: Mode,
    scale: f64,
    name: String,
    device: Device,
    f: fn(&Tensor) -> Tensor,
}

#[derive(Module)]
enum Choice {
    Layer(Linear),
    Named { layer: Linear, width: usize },
    Nothing,
}

#[derive(Module)]
struct Generic<M> {
    module: M,
}

#[derive(Module)]
struct Wrapper(Linear, Dropout);

fn all(device: &Device) -> All {
    let layer = || Linear::new(2, 1, device).without_bias();
    let map = || [("b", layer()), ("a", layer())].map(|(name, layer)| (name.to_string(), layer));
    All {
        layer: Linear::new(2, 1, device),
        list: vec![layer(), layer()],
        array: [layer(), layer()],
        maybe: Some(layer()),
        none: None,
        map: map().into_iter().collect(),
        table: map().into_iter().collect(),
        boxed: Box::new(layer()),
        pair: (layer(), Some(init::ones([3], device))),
        choice: Choice::Layer(layer()),
        inner: Generic { module: layer() },
        count: Buffer::new(Tensor::zeros([2], device)),
        parameter: init::zeros([2, 2], device),
        r#type: Wrapper(layer(), Dropout::new(0.5)),
        left_out: layer(),
        mode: Mode::default(),
        scale: 0.5,
        name: "all".into(),
        device: device.clone(),
        f: Tensor::relu,
    }
}

fn paths(model: &dyn Module) -> Vec<String> {
    model.parameters().into_iter().map(|(path, _)| path).collect()
}

#[test]
fn every_kind_of_part_has_its_path_and_other_fields_are_skipped() {
    let device = Device::cpu();
    let mut model = all(&device);
    let want = [
        "layer.weight",
        "layer.bias",
        "list.0.weight",
        "list.1.weight",
        "array.0.weight",
        "array.1.weight",
        "maybe.weight",
        "map.a.weight",
        "map.b.weight",
        "table.a.weight",
        "table.b.weight",
        "boxed.weight",
        "pair.0.weight",
        "pair.1",
        "choice.weight",
        "inner.module.weight",
        "parameter",
        "type.0.weight",
    ];
    assert_eq!(paths(&model), want);
    let mut mutable = Vec::new();
    model.visit_mut("", &mut |path, _| mutable.push(path.to_string()));
    assert_eq!(mutable, want);
    assert_eq!(model.buffers().into_iter().map(|(path, _)| path).collect::<Vec<_>>(), ["count"]);
    model.choice = Choice::Named { layer: Linear::new(2, 1, &device), width: 3 };
    assert!(paths(&model).contains(&"choice.layer.bias".to_string()));
    model.choice = Choice::Nothing;
    assert!(paths(&model).iter().all(|path| !path.starts_with("choice")));
    let _ = (&model.left_out, &model.scale, &model.name, &model.device, model.f);
}

#[test]
fn modes_reach_every_part_and_come_back_also_after_a_panic() {
    let device = Device::cpu();
    let mut model = all(&device);
    model.r#type.1.train(false);
    let modes = |m: &All| (m.mode.is_training(), m.r#type.1.mode.is_training());
    assert_eq!(modes(&model), (true, false));
    let (inside, kept) =
        model.eval(|m| (modes(m), m.layer.forward(&Tensor::ones([1, 2], &device)).is_tracked()));
    assert_eq!((inside, kept, modes(&model)), ((false, false), false, (true, false)));
    let panicked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.eval(|_| panic!("inside"))));
    assert!(panicked.is_err());
    assert_eq!(modes(&model), (true, false));
    model.train(false);
    assert_eq!(modes(&model), (false, false));
    // Outside of `eval` gradients are kept in evaluation mode too.
    assert!(model.layer.forward(&Tensor::ones([1, 2], &device)).is_tracked());
}

#[test]
fn frozen_parameters_are_not_trained_and_thaw() {
    let device = Device::cpu();
    let mut model = Sequential::new().then(Linear::new(2, 3, &device)).then(Linear::new(3, 1, &device));
    assert_eq!(model.freeze("0.*"), 2);
    let before = model.state_dict();
    let loss = model.forward(&Tensor::ones([4, 2], &device)).square().mean(());
    Sgd::new(0.1).step(&mut model, &loss.backward());
    let changed: Vec<String> = model
        .state_dict()
        .into_iter()
        .filter(|(path, t)| t.to_vec::<f32>().unwrap() != before[path].to_vec::<f32>().unwrap())
        .map(|(path, _)| path)
        .collect();
    assert_eq!(changed, ["1.bias", "1.weight"]);
    assert_eq!(model.unfreeze("*"), 4);
    assert!(model.parameters().iter().all(|(_, t)| t.is_leaf()));
}

#[test]
fn tied_weights_freeze_and_load_as_one() {
    let device = Device::cpu();
    let mut model = (Embedding::new(5, 3, &device), Linear::new(3, 5, &device).without_bias());
    model.1.weight = model.0.weight.clone();
    assert_eq!(model.freeze("1.weight"), 1);
    assert!(!model.0.weight.is_leaf() && model.0.weight.identity() == model.1.weight.identity());
    model.unfreeze("0.weight");
    let mut state = model.state_dict();
    assert_eq!(state.len(), 2);
    state.remove("0.weight");
    let report = model.load_state_dict(&state).unwrap();
    assert_eq!(report.loaded, 1);
    assert!(model.0.weight.is_leaf() && model.0.weight.identity() == model.1.weight.identity());
}

#[test]
#[should_panic = "freeze: no parameter matches 'encoder.*'; there are weight, bias .."]
fn a_pattern_that_matches_nothing_is_a_mistake() {
    Linear::new(2, 3, &Device::cpu()).freeze("encoder.*");
}

#[test]
fn a_state_that_does_not_fit_changes_nothing_unless_it_is_partial() {
    let device = Device::cpu();
    let mut model = Sequential::new().then(Linear::new(2, 3, &device)).then(Linear::new(3, 1, &device));
    let mut state = model.state_dict();
    let before = state["0.bias"].to_vec::<f32>().unwrap();
    state.insert("0.bias".into(), Tensor::ones([3], &device).to_dtype(DType::F64));
    state.insert("1.weight".into(), Tensor::ones([1, 4], &device));
    state.insert("2.weight".into(), Tensor::ones([1], &device));
    state.remove("1.bias");
    let error = model.load_state_dict(&state).unwrap_err();
    let want = "the state does not fit the model: 2 loaded
  1 missing in the state:
    1.bias
  1 unused by the model:
    2.weight
  1 of another shape or kind:
    1.weight: f32[1,3] here, f32[1,4] in the state
  1 converted:
    0.bias from f64";
    assert_eq!(error.to_string(), want);
    assert_eq!(model.state_dict()["0.bias"].to_vec::<f32>().unwrap(), before);
    let report = model.load_state_dict_partial(&state).unwrap();
    assert_eq!((report.loaded, report.is_clean()), (2, false));
    let bias = model.state_dict().remove("0.bias").unwrap();
    assert_eq!((bias.dtype(), bias.to_vec::<f32>().unwrap()), (DType::F32, vec![1.0; 3]));
    assert!(model.parameters().iter().all(|(_, t)| t.is_leaf()));
    // An integer is no float.
    let ids = BTreeMap::from([("count".to_string(), Tensor::arange(0, 2, 1, &device))]);
    let report = all(&device).load_state_dict_partial(&ids).unwrap();
    assert_eq!((report.loaded, report.mismatched.len()), (0, 1));
}

#[test]
fn models_move_and_change_their_dtype() {
    let device = Device::cpu();
    let other = Device::open("cpu:1").unwrap();
    let mut model = all(&device);
    model.freeze("list.*");
    let values = |m: &All| {
        m.parameters()
            .iter()
            .map(|(_, t)| t.to_dtype(DType::F32).to_vec::<f32>().unwrap())
            .collect::<Vec<_>>()
    };
    let before = values(&model);
    model.to_device(&other).unwrap();
    assert!(model.parameters().iter().chain(&model.buffers()).all(|(_, t)| t.device() == other));
    assert_eq!(values(&model), before);
    model.to_dtype(DType::F64);
    assert!(model.parameters().iter().chain(&model.buffers()).all(|(_, t)| t.dtype() == DType::F64));
    assert_eq!(values(&model), before);
    assert!(!model.list[0].weight.is_leaf() && model.layer.weight.is_leaf());
}

#[test]
fn a_refused_step_takes_buffers_back() {
    #[derive(Module)]
    struct Counting {
        layer: Linear,
        mean: Buffer,
    }
    // Its own: a refused step is told once, at whatever is read next.
    let device = Device::open("cpu:2").unwrap();
    let layer = Linear::new(1, 1, &device);
    let mut model = Counting { layer, mean: Buffer::new(Tensor::zeros([1], &device)) };
    let mut optimizer = Sgd::new(0.0);
    let mut step = |model: &mut Counting, index: i64| {
        let x = Tensor::ones([2, 1], &device).index_select(0, &Tensor::from_vec(vec![index], [1], &device));
        let y = model.layer.forward(&x);
        model.mean.set(model.mean.get() + x.mean(()));
        optimizer.step(model, &y.sum(()).backward());
    };
    step(&mut model, 0);
    step(&mut model, 99);
    assert!(device.sync().is_err());
    step(&mut model, 1);
    assert_eq!(model.mean.get().to_vec::<f32>().unwrap(), [2.0]);
}

#[test]
fn a_model_prints_as_a_tree() {
    #[derive(Module)]
    struct Net {
        first: Linear,
        blocks: Vec<Generic<Linear>>,
        dropout: Dropout,
        last: Option<Linear>,
        seen: Buffer,
    }
    let device = Device::cpu();
    let mut net = Net {
        first: Linear::new(40, 30, &device),
        blocks: vec![Generic { module: Linear::new(30, 30, &device).without_bias() }],
        dropout: Dropout::new(0.25),
        last: Some(Linear::new(30, 30, &device)),
        seen: Buffer::new(Tensor::arange(0, 1, 1, &device)),
    };
    net.last.as_mut().unwrap().weight = net.blocks[0].module.weight.clone();
    net.freeze("first.bias");
    let want = "\
Net                                                     2,160
  first: Linear                                         1,230
    weight: f32[30,40]
    bias: f32[30], frozen
  blocks: Vec<Generic<Linear>>                            900
    0: Generic<Linear>                                    900
      module: Linear                                      900
        weight: f32[30,30]
  dropout: Dropout(p=0.25)
  last: Linear                                            930
    weight: f32[30,30], tied to blocks.0.module.weight
    bias: f32[30]
  seen: i64[1] buffer
2,160 parameters, 30 of them frozen";
    assert_eq!(net.to_string(), want);
    let x = Tensor::ones([8, 40], &device);
    let text = net.summary(|net| net.blocks[0].module.forward(&net.first.forward(&x)));
    assert!(
        text.contains("first: Linear                                         1,230  -> [8, 30]\n"),
        "{text}"
    );
    assert!(text.contains("module: Linear                                      900  -> [8, 30]\n"), "{text}");
    assert!(!net.to_string().contains("->"));
}
