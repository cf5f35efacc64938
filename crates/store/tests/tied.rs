//! Weights that two layers share are one parameter: in the count, in the state, in a checkpoint and after loading one.

use kiln_nn::*;
use kiln_store::{Checkpoint, CheckpointError};
use kiln_tensor::{Device, with_generator};
use std::collections::BTreeMap;

#[derive(Module)]
struct Tied {
    table: Embedding,
    head: Linear,
}

impl Tied {
    fn new(device: &Device) -> Tied {
        let mut model = with_generator(kiln_tensor::Generator::new(3), || Tied {
            table: Embedding::new(5, 3, device),
            head: Linear::new(3, 5, device).without_bias(),
        });
        model.head.weight = model.table.weight.clone();
        model
    }

    fn loss(&self, ids: &Tensor) -> Tensor {
        self.head.forward(&self.table.forward(ids)).cross_entropy(ids)
    }

    fn is_tied(&self) -> bool {
        self.table.weight.identity() == self.head.weight.identity() && self.head.weight.is_leaf()
    }
}

#[test]
fn tied_weights_stay_one_parameter_from_the_count_to_a_loaded_checkpoint() {
    let device = Device::cpu();
    let ids = Tensor::from_vec(vec![0i64, 3, 1, 3], [4], &device);
    let mut model = Tied::new(&device);
    assert!(model.is_tied());
    assert_eq!((model.parameter_count(), model.parameters().len(), model.distinct().len()), (15, 2, 1));
    // Training leaves them one, with one state.
    let mut optimizer = Sgd::new(0.1).momentum(0.9);
    for _ in 0..3 {
        let gradients = model.loss(&ids).backward();
        optimizer.step(&mut model, &gradients);
        assert!(model.is_tied());
    }
    let kept: Vec<String> = optimizer.state().into_iter().map(|(name, _)| name).collect();
    assert_eq!(kept, ["velocity.table.weight"]);
    let folder = std::env::temp_dir().join(format!("kiln-tied-{}", std::process::id()));
    let mut state: Vec<_> =
        model.distinct().into_iter().map(|(path, t)| (format!("model.{path}"), t)).collect();
    let momentum = optimizer.state().into_iter().map(|(name, t)| (format!("optimizer.{name}"), t));
    state.extend(momentum);
    let path = Checkpoint::save(&folder, 3, &BTreeMap::new(), &state).unwrap();
    let saved = Checkpoint::read(&path).unwrap();
    assert_eq!(
        saved.tensors.keys().collect::<Vec<_>>(),
        ["model.table.weight", "optimizer.velocity.table.weight"]
    );
    let mut loaded = Tied::new(&device);
    loaded.replace(&mut |_, t| Some(t.detach().zeros_like().requires_grad()));
    assert!(loaded.is_tied());
    saved.restore("model.", &mut loaded).unwrap();
    assert!(loaded.is_tied());
    let values = |model: &Tied| model.table.weight.to_vec::<f32>().unwrap();
    assert_eq!(values(&loaded), values(&model));
    let loss = |model: &Tied| model.loss(&ids).item::<f32>().unwrap();
    assert_eq!(loss(&loaded), loss(&model));
    // And it goes on as the one that was never saved.
    let mut second = Sgd::new(0.1).momentum(0.9);
    let velocity = saved.tensors["optimizer.velocity.table.weight"].clone();
    second.restore(3, vec![("velocity.table.weight".into(), Tensor::from_data(velocity, &device))]);
    for (model, optimizer) in [(&mut model, &mut optimizer), (&mut loaded, &mut second)] {
        let gradients = model.loss(&ids).backward();
        optimizer.step(model, &gradients);
    }
    assert!(loaded.is_tied());
    assert_eq!(values(&loaded), values(&model));
    // A model that does not share needs both.
    loaded.head.weight = Tensor::zeros([5, 3], &device).requires_grad();
    let before = values(&loaded);
    let error = saved.restore("model.", &mut loaded).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Missing { name, .. } if name == "model.head.weight"),
        "{error}"
    );
    assert_eq!(values(&loaded), before);
    // Frozen parameters stay frozen.
    let mut frozen = Tied::new(&device);
    frozen.replace(&mut |_, t| Some(t.detach()));
    saved.restore("model.", &mut frozen).unwrap();
    assert!(!frozen.table.weight.is_leaf() && frozen.parameter_count() == 15);
    std::fs::remove_dir_all(&folder).unwrap();
}
