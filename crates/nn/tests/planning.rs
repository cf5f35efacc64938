//! How often plans are made, over whole training steps: once per structure, whatever the sizes, and not at all in a second
//! process with a cache on disk.

use kiln_cpu::Cpu;
use kiln_nn::{Adam, Attention, Embedding, LayerNorm, Linear, Module, Optimizer};
use kiln_tensor::{DType, Device, Tensor};
use std::sync::Arc;

/// A transformer of one block.
#[derive(Module)]
struct Model {
    tokens: Embedding,
    places: Embedding,
    norm: LayerNorm,
    attention: Attention,
    up: Linear,
    down: Linear,
    head: Linear,
}

const CONTEXT: usize = 128;

impl Model {
    fn new(device: &Device) -> Model {
        let (width, vocabulary) = (32, 50);
        Model {
            tokens: Embedding::new(vocabulary, width, device),
            places: Embedding::new(CONTEXT, width, device),
            norm: LayerNorm::new(width, device),
            attention: Attention::new(width, 2, device).causal(),
            up: Linear::new(width, 4 * width, device),
            down: Linear::new(4 * width, width, device),
            head: Linear::new(width, vocabulary, device),
        }
    }

    fn forward(&self, ids: &Tensor) -> Tensor {
        let x = self.tokens.forward(ids) + self.places.weight.narrow(0, 0, ids.dim(1));
        let x = &x + self.attention.forward(&self.norm.forward(&x));
        let x = &x + self.down.forward(&self.up.forward(&x).gelu_tanh());
        self.head.forward(&x).reshape([-1, 50])
    }
}

/// A device of its own, with its counters.
fn start(name: &str) -> (Arc<Cpu>, Device) {
    let cpu = Arc::new(Cpu::start());
    let device = Device::wrap(name, cpu.clone()).unwrap();
    (cpu, device)
}

fn step(model: &mut Model, optimizer: &mut Adam, length: usize, device: &Device) -> Tensor {
    let ids: Vec<i32> = (0..2 * length).map(|i| (i * 7 % 50) as i32).collect();
    let ids = Tensor::from_vec(ids, [2, length], device);
    let target = ids.roll(&[-1], &[1]).reshape([-1]).to_dtype(DType::I64);
    let loss = model.forward(&ids).cross_entropy(&target);
    let gradients = loss.backward();
    optimizer.step(model, &gradients);
    loss.detach()
}

#[test]
fn sequence_lengths_share_a_handful_of_plans() {
    let (cpu, device) = start("lengths");
    let (mut model, mut optimizer) = (Model::new(&device), Adam::new(1e-3));
    let mut dice = 1u64;
    for _ in 0..1000 {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = 32 + (dice >> 33) as usize % 97;
        let loss = step(&mut model, &mut optimizer, length, &device).to_vec::<f32>().unwrap();
        assert!(loss[0].is_finite());
    }
    let stats = cpu.fusion();
    assert!(stats.windows >= 1000, "{stats:?}");
    assert!(stats.planned <= 16, "{stats:?}");
}

#[test]
fn a_recurring_step_is_recognised() {
    let (cpu, device) = start("recurring");
    let (mut model, mut optimizer) = (Model::new(&device), Adam::new(1e-3));
    for _ in 0..4 {
        step(&mut model, &mut optimizer, 40, &device).to_vec::<f32>().unwrap();
    }
    let (before, memory) = (cpu.fusion(), device.memory());
    for _ in 0..10 {
        step(&mut model, &mut optimizer, 40, &device).to_vec::<f32>().unwrap();
    }
    let after = cpu.fusion();
    assert_eq!(after.planned, before.planned);
    assert_eq!(
        after.matched - before.matched,
        after.windows - before.windows,
        "every window is compared alone"
    );
    assert_eq!(device.memory().system_allocs, memory.system_allocs, "the arena does not grow");
}

/// Bytes that one run of `step` moves once it recurs.
fn moved(cpu: &Cpu, mut step: impl FnMut()) -> u64 {
    step();
    let before = cpu.fusion().moved;
    step();
    cpu.fusion().moved - before
}

#[test]
fn backward_computes_again_what_is_cheaper_than_keeping() {
    let (cpu, device) = start("again");
    let (rows, columns) = (512, 256);
    let a = Tensor::randn([rows, columns], &device);
    let w = Tensor::randn([columns, 8], &device);
    let x = Tensor::randn([rows, columns], &device).requires_grad();
    let mut gradient = Vec::new();
    let count = moved(&cpu, || {
        let y = (x.exp() * 2.0 * &a).matmul(&w);
        gradient = y.square().sum(()).backward().get(&x).unwrap().to_vec::<f32>().unwrap();
    });
    let reference = Device::reference();
    let [a, w, x] = [&a, &w, &x].map(|t| t.detach().to_device(&reference).unwrap());
    let x = x.requires_grad();
    let y = (x.exp() * 2.0 * &a).matmul(&w);
    let want = y.square().sum(()).backward().get(&x).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(gradient, want);
    // Forward reads x and a and writes their product, which is read once; backward reads x and a and writes a gradient.
    // The exponential is neither written nor read.
    let most = 8 * rows * columns * 4;
    assert!(count < most as u64, "{count} bytes of {most}");
}

#[test]
fn reductions_of_one_value_along_different_axes_read_it_once() {
    let (cpu, device) = start("sums");
    let (rows, columns) = (512, 256);
    let x = Tensor::randn([rows, columns], &device);
    let count = moved(&cpu, || {
        let sums = [x.softmax(1), x.sum(0)];
        device.sync().unwrap();
        drop(sums);
    });
    let least = 2 * rows * columns * 4 + columns * 4;
    assert!(count <= least as u64, "{count} bytes, not {least}");
}

/// Runs in a process of its own, started below, which sets a cache.
#[test]
fn child() {
    if std::env::var_os("KILN_TEST_CHILD").is_none() {
        return;
    }
    kiln_tensor::seed(1);
    let (cpu, device) = start("child");
    let (mut model, mut optimizer) = (Model::new(&device), Adam::new(1e-3));
    let mut bits = 0;
    for _ in 0..3 {
        let loss = step(&mut model, &mut optimizer, 40, &device).to_vec::<f32>().unwrap();
        bits = loss[0].to_bits();
    }
    println!("planned {} loaded {} bits {}", cpu.fusion().planned, cpu.fusion().loaded, bits);
}

#[test]
fn a_second_process_plans_nothing() {
    let dir = std::env::temp_dir().join(format!("kiln-cache-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let run = || {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "child", "--nocapture"]).env("KILN_TEST_CHILD", "1").env("KILN_CACHE", &dir);
        let output = child.output().unwrap();
        let (out, warnings) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{out}{warnings}");
        let line = out.lines().find_map(|line| line.split_once("planned ")).unwrap().1.to_string();
        let words: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        ((words[0], words[1], words[2]), warnings)
    };
    let ((planned, loaded, bits), _) = run();
    assert!(planned > 0 && loaded == 0);
    let ((again, loaded, same), warnings) = run();
    assert_eq!((again, loaded, same), (0, planned, bits), "{warnings}");
    for entry in std::fs::read_dir(&dir).unwrap().flatten() {
        std::fs::write(entry.path(), b"kilnplan, but not really").unwrap();
    }
    let ((again, loaded, same), warnings) = run();
    assert_eq!((again, loaded, same), (planned, 0, bits));
    assert!(warnings.contains("is not used"), "{warnings}");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_composite_on_its_own_is_one_kernel() {
    let (cpu, device) = start("lone");
    let x = Tensor::ones([64, 64], &device);
    device.sync().unwrap();
    let before = cpu.fusion().launches;
    let y = x.softmax(1);
    device.sync().unwrap();
    assert_eq!(cpu.fusion().launches - before, 1);
    assert_eq!(y.to_vec::<f32>().unwrap()[0], 1.0 / 64.0);
}
