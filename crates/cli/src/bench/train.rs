//! Training steps on fixed data: forward, loss, backward and the optimiser's step. The loss is not read back.

use super::{On, Row, Setup, Workload};
use kiln::PoolOptions;
use kiln::nn::cast;
use kiln::prelude::*;

pub(super) const TABLE: &[Row] = &[
    ("train/mlp", On::All, mlp),
    ("train/mlp_small", On::All, mlp_small),
    ("train/cnn", On::All, cnn),
    ("train/gpt", On::All, gpt_small),
    ("train/lstm", On::All, lstm),
    ("train/gpt2_124m", On::Cuda, |s| gpt(s, &GPT2)),
];

/// A training step of `model`, whose logits for the data are `forward`'s.
fn trainer<M: Module + 'static>(
    mut model: M,
    mut optimizer: impl Optimizer + 'static,
    target: Tensor,
    forward: impl Fn(&M) -> Tensor + 'static,
) -> Workload {
    Workload::new(move || {
        let loss = forward(&model).cross_entropy(&target);
        let gradients = loss.backward();
        optimizer.step(&mut model, &gradients);
        vec![loss.detach()]
    })
}

/// 784-512-512-10, batch 256, Adam
fn mlp(s: &Setup) -> Workload {
    let sizes = [s.n(784), s.n(512), s.n(512), 10];
    let (x, y) = (s.randn([s.n(256), sizes[0]]), s.classes(10, [s.n(256)]));
    trainer(Mlp::new(&sizes, &s.device), Adam::new(1e-3), y, move |model| model.forward(&x))
}

/// 64-32-10, batch 32, SGD: little but overhead
fn mlp_small(s: &Setup) -> Workload {
    let (x, y) = (s.randn([32, 64]), s.classes(10, [32]));
    trainer(Mlp::new(&[64, 32, 10], &s.device), Sgd::new(1e-2), y, move |model| model.forward(&x))
}

/// Two convolutions, a pool and two layers on 128 images of 28 by 28, Adam
fn cnn(s: &Setup) -> Workload {
    let (x, y) = (s.randn([s.n(128), 1, 28, 28]), s.classes(10, [s.n(128)]));
    trainer(Cnn::new(s), Adam::new(1e-3), y, move |model| model.forward(&x))
}

/// An LSTM of width 256 over 64 steps of 32 samples: forward, and backward to its parameters from a fixed gradient
fn lstm(s: &Setup) -> Workload {
    let (batch, steps, width) = (s.n(32), s.n(64), s.n(256));
    let layer = Lstm::new(width, width, &s.device);
    let (x, gradient) = (s.randn([steps, batch, width]), s.randn([steps, batch, width]));
    Workload::new(move || {
        let (y, _) = layer.forward(&x);
        let gradients = y.backward_with(&gradient);
        let of = layer.parameters().into_iter().filter_map(|(_, p)| gradients.get(&p).cloned());
        [y.detach()].into_iter().chain(of).collect()
    })
}

/// The transformer of `train/gpt`.
pub(super) fn gpt_small(s: &Setup) -> Workload {
    gpt(s, &GPT_SMALL)
}

/// A decoder-only transformer on random text, AdamW
fn gpt(s: &Setup, size: &'static GptSize) -> Workload {
    let vocabulary = s.n(size.vocabulary);
    let ids = s.classes(vocabulary, [s.n(size.batch), s.n(size.context)]);
    let target = s.device.persistent(|| ids.roll(&[-1], &[1]).reshape([-1]));
    trainer(Gpt::new(s, size), Adam::new(1e-3).weight_decay(1e-2), target, move |model| {
        let logits = model.forward(&ids, size.products);
        logits.reshape([-1, vocabulary as isize]).to_dtype(DType::F32)
    })
}

/// Fully connected layers with relu between them.
#[derive(Module)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new(sizes: &[usize], device: &Device) -> Mlp {
        Mlp { layers: sizes.windows(2).map(|pair| Linear::new(pair[0], pair[1], device)).collect() }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        self.layers[1..].iter().fold(self.layers[0].forward(x), |x, layer| layer.forward(&x.relu()))
    }
}

/// conv 1 to 32, conv 32 to 64, each 3 by 3 with relu, the largest of 2 by 2, then 9216-128-10.
#[derive(Module)]
struct Cnn {
    first: Conv2d,
    second: Conv2d,
    head: Mlp,
}

impl Cnn {
    fn new(s: &Setup) -> Cnn {
        let device = &s.device;
        let (low, high) = (s.n(32), s.n(64));
        Cnn {
            first: Conv2d::new(1, low, 3, device),
            second: Conv2d::new(low, high, 3, device),
            head: Mlp::new(&[high * 12 * 12, s.n(128), 10], device),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let x = self.second.forward(&self.first.forward(x).relu()).relu();
        self.head.forward(&x.max_pool2d(2, PoolOptions::default()).flatten(1, -1))
    }
}

struct GptSize {
    width: usize,
    layers: usize,
    heads: usize,
    vocabulary: usize,
    context: usize,
    batch: usize,
    /// What products of matrices and attention are computed in; parameters, sums and norms are f32.
    products: DType,
}

const GPT_SMALL: GptSize = GptSize {
    width: 256,
    layers: 4,
    heads: 4,
    vocabulary: 1000,
    context: 128,
    batch: 8,
    products: DType::F32,
};

const GPT2: GptSize = GptSize {
    width: 768,
    layers: 12,
    heads: 12,
    vocabulary: 50304,
    context: 1024,
    batch: 16,
    products: DType::BF16,
};

#[derive(Module)]
struct Gpt {
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(s: &Setup, size: &GptSize) -> Gpt {
        let (width, vocabulary, device) = (s.n(size.width), s.n(size.vocabulary), &s.device);
        let block = || GptBlock::new(width, size.heads, device).compute_in(size.products);
        Gpt {
            tokens: Embedding::new(vocabulary, width, device),
            places: Embedding::new(s.n(size.context), width, device),
            blocks: (0..s.n(size.layers)).map(|_| block()).collect(),
            norm: LayerNorm::new(width, device),
            head: Linear::new(width, vocabulary, device).without_bias(),
        }
    }

    fn forward(&self, ids: &Tensor, products: DType) -> Tensor {
        let places = self.places.weight.narrow(0, 0, ids.dim(1));
        let x = self.tokens.forward(ids) + places;
        let x = self.blocks.iter().fold(x, |x, block| block.forward(&x));
        cast(&self.head, products).forward(&self.norm.forward(&x).to_dtype(products))
    }
}
