//! Plans of six models, compared with the snapshots in `plans/`: a change of structure must not change what runs together.
//!
//! The models run in processes of their own, without `KILN_*` variables except those that a test sets: plans are the same
//! for any number of threads and any instruction set. `KILN_BLESS=1` writes the snapshots anew.

use kiln::device::Cpu;
use kiln::fuse::{NewPlan, Observer};
use kiln::prelude::*;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::{env, fs};

/// Where a process that runs the models leaves their plans.
const FOLDER: &str = "KILN_TEST_FOLDER";

/// Steps of each model: the first plans, the second plans what recurs, and nothing is planned in the last.
const STEPS: usize = 4;

/// A model's name, and what prepares it and then makes each of its steps.
type Model = (&'static str, fn(&Device) -> Box<dyn FnMut()>);

const MODELS: [Model; 6] = [
    ("digits", digits),
    ("cnn", cnn),
    ("gpt", gpt),
    ("lstm", lstm),
    ("optimizer", optimizer),
    ("norms", norms),
];

#[derive(Module)]
struct Mlp {
    first: Linear,
    second: Linear,
}

/// A classifier of digits, as `kiln train digits` has it, with Adam.
fn digits(device: &Device) -> Box<dyn FnMut()> {
    let x = Tensor::randn([32, 64], device);
    let y = Tensor::randint(0, 10, [32], device);
    let mut model = Mlp { first: Linear::new(64, 48, device), second: Linear::new(48, 10, device) };
    let mut optimizer = Adam::new(1e-3);
    Box::new(move || {
        let loss = model.second.forward(&model.first.forward(&x).relu()).cross_entropy(&y);
        optimizer.step(&mut model, &loss.backward());
        loss.item::<f32>().unwrap();
    })
}

#[derive(Module)]
struct Cnn {
    first: Conv2d,
    scale: Tensor,
    shift: Tensor,
    second: Conv2d,
    norm: LayerNorm,
    head: Linear,
}

/// Two convolutions with a batch norm, both kinds of pool and a layer norm, with SGD.
fn cnn(device: &Device) -> Box<dyn FnMut()> {
    let x = Tensor::randn([4, 3, 12, 12], device);
    let y = Tensor::randint(0, 5, [4], device);
    let mut model = Cnn {
        first: Conv2d::new(3, 8, 3, device).padding(1),
        scale: Tensor::ones([8], device).requires_grad(),
        shift: Tensor::zeros([8], device).requires_grad(),
        second: Conv2d::new(8, 16, 3, device).padding(1),
        norm: LayerNorm::new(16, device),
        head: Linear::new(16, 5, device),
    };
    let mut optimizer = Sgd::new(0.1).momentum(0.9);
    Box::new(move || {
        let a = model.first.forward(&x).batch_norm(Some(&model.scale), Some(&model.shift), 1e-5).relu();
        let a = model.second.forward(&a.max_pool2d(2, PoolOptions::default())).relu();
        let a = a.avg_pool2d(2, PoolOptions::default()).mean([2, 3]);
        let loss = model.head.forward(&model.norm.forward(&a)).cross_entropy(&y);
        optimizer.step(&mut model, &loss.backward());
        loss.item::<f32>().unwrap();
    })
}

#[derive(Module)]
struct Gpt {
    tokens: Embedding,
    places: Embedding,
    first_norm: LayerNorm,
    attention: Attention,
    second_norm: LayerNorm,
    up: Linear,
    down: Linear,
    head: Linear,
}

/// A transformer of one block that predicts the next token, with Adam.
fn gpt(device: &Device) -> Box<dyn FnMut()> {
    let (context, width, vocabulary) = (16, 32, 50);
    let ids = Tensor::randint(0, vocabulary as i64, [2, context], device);
    let next = ids.roll(&[-1], &[1]).reshape([-1]);
    let mut model = Gpt {
        tokens: Embedding::new(vocabulary, width, device),
        places: Embedding::new(context, width, device),
        first_norm: LayerNorm::new(width, device),
        attention: Attention::new(width, 4, device).causal(),
        second_norm: LayerNorm::new(width, device),
        up: Linear::new(width, 4 * width, device),
        down: Linear::new(4 * width, width, device),
        head: Linear::new(width, vocabulary, device),
    };
    let mut optimizer = Adam::new(1e-3);
    Box::new(move || {
        let x = model.tokens.forward(&ids) + model.places.weight.narrow(0, 0, context);
        let x = &x + model.attention.forward(&model.first_norm.forward(&x));
        let y = model.up.forward(&model.second_norm.forward(&x)).gelu_tanh();
        let x = &x + model.down.forward(&y);
        let loss = model.head.forward(&x).reshape([-1, vocabulary as isize]).cross_entropy(&next);
        optimizer.step(&mut model, &loss.backward());
        loss.item::<f32>().unwrap();
    })
}

#[derive(Module)]
struct Lstm {
    input: Linear,
    hidden: Linear,
}

/// An LSTM over four inputs, made of operations, with SGD.
fn lstm(device: &Device) -> Box<dyn FnMut()> {
    let (batch, features, width) = (8, 6, 12);
    let inputs = Tensor::randn([4, batch, features], device);
    let target = Tensor::randn([batch, width], device);
    let mut model = Lstm {
        input: Linear::new(features, 4 * width, device),
        hidden: Linear::new(width, 4 * width, device),
    };
    let mut optimizer = Sgd::new(0.1);
    Box::new(move || {
        let [mut h, mut c] = [(), ()].map(|()| Tensor::zeros([batch, width], &inputs.device()));
        for t in 0..4 {
            let x = inputs.narrow(0, t, 1).squeeze(0);
            let gates = model.input.forward(&x) + model.hidden.forward(&h);
            let gate = |i: usize| gates.narrow(1, (i * width) as isize, width);
            c = gate(1).sigmoid() * &c + gate(0).sigmoid() * gate(2).tanh();
            h = gate(3).sigmoid() * c.tanh();
        }
        let loss = (h - &target).square().mean(());
        optimizer.step(&mut model, &loss.backward());
        loss.item::<f32>().unwrap();
    })
}

/// Adam alone, over parameters of different shapes.
fn optimizer(device: &Device) -> Box<dyn FnMut()> {
    let of = |shape: &[usize]| Tensor::randn(shape, device);
    let shapes: [&[usize]; 5] = [&[64, 32], &[32], &[8, 3, 3, 3], &[1], &[]];
    let mut model: Vec<Tensor> = shapes.iter().map(|shape| of(shape).requires_grad()).collect();
    let gradients: Vec<Tensor> = shapes.iter().map(|shape| of(shape)).collect();
    let (mut optimizer, device) = (Adam::new(1e-3), device.clone());
    Box::new(move || {
        optimizer.step_with(&mut model, &gradients);
        device.sync().unwrap();
    })
}

/// Normalisations forward and backward, read at the end.
fn norms(device: &Device) -> Box<dyn FnMut()> {
    let [x, weight, bias] =
        [&[24, 40][..], &[40], &[40]].map(|shape| Tensor::randn(shape, device).requires_grad());
    Box::new(move || {
        let normed = [
            x.softmax(1),
            x.log_softmax(0),
            x.layer_norm(40, Some(&weight), Some(&bias), 1e-5),
            x.rms_norm(40, Some(&weight), 1e-5),
            x.var_keepdim(1, 1.0).expand(x.shape()),
            x.to_dtype(DType::BF16).softmax(1).to_dtype(DType::F32),
        ];
        for y in normed {
            let gradients = (y.square() * &x).sum(()).backward();
            gradients.get(&x).unwrap().to_vec::<f32>().unwrap();
        }
    })
}

/// What a device's engine does, as text: each plan once, and the order in which plans run.
#[derive(Default)]
struct Dump {
    text: String,
    /// Plans by the hashes of their structures, in the order in which they came.
    plans: HashMap<u64, usize>,
}

/// A dump that the engine writes into and a test reads.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Dump>>);

impl Observer for Shared {
    fn planned(&mut self, plan: &NewPlan<'_>) {
        let mut dump = self.0.lock().unwrap();
        let number = dump.plans.len();
        dump.plans.insert(plan.hash, number);
        let _ = writeln!(dump.text, "plan {number}: {} groups, {} launches", plan.groups, plan.launches);
        let lines = renumbered(plan.text);
        lines.lines().for_each(|line| dump.text += &format!("    {line}\n"));
    }

    fn window(&mut self, hash: u64, items: usize) {
        let mut dump = self.0.lock().unwrap();
        let number = dump.plans[&hash];
        let _ = writeln!(dump.text, "run plan {number}: {items} items");
    }

    fn guarded(&mut self, name: &str, nodes: usize) {
        let _ = writeln!(self.0.lock().unwrap().text, "guarded {name} of {nodes}");
    }

    fn fallback(&mut self, name: &str, error: &Error) {
        let _ = writeln!(self.0.lock().unwrap().text, "fallback {name}: {error}");
    }
}

/// The text with the names of values, such as `v12`, counted from 0: they go on through a process.
fn renumbered(text: &str) -> String {
    let mut known = HashMap::new();
    let is_name = |word: &str| {
        word.strip_prefix('v').is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    (text.split_inclusive([' ', ',', '\n']))
        .map(|piece| {
            let word = piece.trim_end_matches([' ', ',', '\n']);
            if !is_name(word) {
                return piece.to_string();
            }
            let next = known.len();
            format!("v{}{}", known.entry(word).or_insert(next), &piece[word.len()..])
        })
        .collect()
}

/// The dump of some steps of a model, on a device of its own.
fn dump(name: &str, start: fn(&Device) -> Box<dyn FnMut()>) -> String {
    let (cpu, dump) = (Arc::new(Cpu::start()), Shared::default());
    let device = Device::wrap(&format!("plans of {name}"), cpu.clone()).unwrap();
    let mut step = start(&device);
    // The values that the model starts with are made first, without a word.
    device.sync().unwrap();
    cpu.observe(Box::new(dump.clone()));
    for number in 0..STEPS {
        let before = cpu.fusion();
        let _ = writeln!(dump.0.lock().unwrap().text, "step {number}");
        step();
        device.sync().unwrap();
        let after = cpu.fusion();
        let _ = writeln!(
            dump.0.lock().unwrap().text,
            "{} launches, {} nodes fused, {} bytes moved\n",
            after.launches - before.launches,
            after.fused - before.fused,
            after.moved - before.moved
        );
    }
    let dump = dump.0.lock().unwrap();
    dump.text.clone()
}

/// Runs in a process of its own, started below.
#[test]
fn child() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    for (name, start) in MODELS {
        kiln::seed(1);
        fs::write(folder.join(name), dump(name, start)).unwrap();
    }
}

/// The dumps of all models, made in a process with these variables.
fn dumps(variables: &[(&str, &str)]) -> Vec<String> {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let folder = env::temp_dir().join(format!("kiln-plans-{}-{run}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut child = Command::new(env::current_exe().unwrap());
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KILN_")) {
        child.env_remove(name);
    }
    child.args(["--exact", "child"]).env(FOLDER, &folder).envs(variables.iter().copied());
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let all = MODELS.iter().map(|(name, _)| fs::read_to_string(folder.join(name)).unwrap()).collect();
    fs::remove_dir_all(folder).unwrap();
    all
}

/// Lines of two texts in which they differ, each side with its sign, with a few equal ones around.
fn difference(kept: &str, found: &str) -> String {
    let (kept, found): (Vec<&str>, Vec<&str>) = (kept.lines().collect(), found.lines().collect());
    // The longest common subsequence from each pair of places on.
    let mut common = vec![vec![0; found.len() + 1]; kept.len() + 1];
    for i in (0..kept.len()).rev() {
        for j in (0..found.len()).rev() {
            common[i][j] = match kept[i] == found[j] {
                true => common[i + 1][j + 1] + 1,
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j, mut lines) = (0, 0, Vec::new());
    while i < kept.len() || j < found.len() {
        if i < kept.len() && j < found.len() && kept[i] == found[j] {
            lines.push((' ', kept[i]));
            (i, j) = (i + 1, j + 1);
        } else if i < kept.len() && (j == found.len() || common[i + 1][j] >= common[i][j + 1]) {
            lines.push(('-', kept[i]));
            i += 1;
        } else {
            lines.push(('+', found[j]));
            j += 1;
        }
    }
    let near =
        |at: usize| lines[at.saturating_sub(2)..lines.len().min(at + 3)].iter().any(|(sign, _)| *sign != ' ');
    (0..lines.len()).filter(|&at| near(at)).map(|at| format!("{} {}\n", lines[at].0, lines[at].1)).collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans")
}

#[test]
fn plans_are_those_of_the_snapshots() {
    let blessed = kiln_env::BLESS.is_on();
    let mut faults = String::new();
    for ((name, _), found) in MODELS.iter().zip(dumps(&[])) {
        let path = folder().join(format!("{name}.txt"));
        if blessed {
            fs::write(&path, found).unwrap();
            continue;
        }
        let kept = fs::read_to_string(&path).unwrap_or_default();
        if kept != found {
            faults += &format!("\n{name} (- snapshot, + now):\n{}", difference(&kept, &found));
        }
    }
    assert!(faults.is_empty(), "plans have changed; KILN_BLESS=1 keeps the new ones\n{faults}");
}

#[test]
fn threads_and_instruction_sets_do_not_change_plans() {
    let plain = dumps(&[]);
    for variable in
        [("KILN_THREADS", "1"), ("KILN_THREADS", "2"), ("KILN_THREADS", "7"), ("KILN_ISA", "interp")]
    {
        for (((name, _), plain), other) in MODELS.iter().zip(&plain).zip(dumps(&[variable])) {
            assert!(*plain == other, "{name} with {variable:?}:\n{}", difference(plain, &other));
        }
    }
}

#[test]
fn a_difference_is_told_with_what_is_around_it() {
    let (kept, found) = ("a\nb\nc\nd\ne\nf\ng", "a\nb\nc\nd\nE\nf\ng");
    assert_eq!(difference(kept, found), "  c\n  d\n- e\n+ E\n  f\n  g\n");
    assert_eq!(difference(kept, kept), "");
}

#[test]
fn names_are_counted_from_zero() {
    let text = "v70 = neg v71\nv72, v73 = max_pool v70\nproduct of 2: dot v\n";
    assert_eq!(renumbered(text), "v0 = neg v1\nv2, v3 = max_pool v0\nproduct of 2: dot v\n");
}
