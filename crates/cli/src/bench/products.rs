//! Products of matrices, attention and convolutions.

use super::{Machine, On, Row, Setup, Workload, forward_backward};
use kiln::ConvOptions;
use kiln::prelude::*;

pub(super) const TABLE: &[Row] = &[
    ("matmul/f32_256", On::Host, |s| square(s, 256, DType::F32)),
    ("matmul/f32_512", On::Host, |s| square(s, 512, DType::F32)),
    ("matmul/f32_1024", On::All, |s| square(s, 1024, DType::F32)),
    ("matmul/f32_2048", On::Host, |s| square(s, 2048, DType::F32)),
    ("matmul/f32_4096", On::Cuda, |s| square(s, 4096, DType::F32)),
    ("matmul/bf16_1024", On::Host, |s| square(s, 1024, DType::BF16)),
    ("matmul/bf16_2048", On::All, |s| square(s, 2048, DType::BF16)),
    ("matmul/bf16_4096", On::Cuda, |s| square(s, 4096, DType::BF16)),
    ("matmul/bf16_8192", On::Cuda, |s| square(s, 8192, DType::BF16)),
    ("matmul/linear_gelu", On::All, linear_gelu),
    ("matmul/batched_64", On::All, batched),
    ("attention/causal_fwdbwd", On::All, attention),
    ("conv/resblock_fwdbwd", On::All, residual_block),
    ("conv/depthwise_fwdbwd", On::All, depthwise),
];

/// a[n, n] b[n, n]
fn square(s: &Setup, n: usize, dtype: DType) -> Workload {
    let [a, b] = [(); 2].map(|()| s.randn_as([s.n(n), s.n(n)], dtype));
    Workload::new(move || vec![a.matmul(&b)])
}

/// gelu(x[1024, 768] w[768, 3072] + b), the tanh form
fn linear_gelu(s: &Setup) -> Workload {
    let (rows, inputs, outputs) = (s.n(1024), s.n(768), s.n(3072));
    let (x, w, b) = (s.randn([rows, inputs]), s.randn([inputs, outputs]), s.randn([outputs]));
    Workload::new(move || vec![(x.matmul(&w) + &b).gelu_tanh()])
}

/// a[96, 128, 64] b[96, 64, 128]
fn batched(s: &Setup) -> Workload {
    let (batch, outer, inner) = (s.n(96), s.n(128), s.n(64));
    let (a, b) = (s.randn([batch, outer, inner]), s.randn([batch, inner, outer]));
    Workload::new(move || vec![a.matmul(&b)])
}

/// Causal attention of 8 heads over 1024 places of 64 numbers; on a GPU 4 times 16 heads over 4096, in bf16.
fn attention(s: &Setup) -> Workload {
    let (batch, heads, length, dtype) = match s.machine {
        Machine::Host => (1, 8, 1024, DType::F32),
        Machine::Cuda => (s.n(4), 16, 4096, DType::BF16),
    };
    let qkv = [(); 3].map(|()| s.randn_as([batch, s.n(heads), s.n(length), s.n(64)], dtype));
    forward_backward(s, qkv, |[q, k, v]| q.scaled_dot_product_attention(k, v, None, true, None)).computing()
}

/// relu of a 3 by 3 convolution from 64 channels to 64, x[8, 64, 56, 56]
fn residual_block(s: &Setup) -> Workload {
    let channels = s.n(64);
    let (x, w) = (s.randn([s.n(8), channels, 56, 56]), s.randn([channels, channels, 3, 3]));
    let options = ConvOptions::default().padding(1);
    forward_backward(s, [x, w], move |[x, w]| x.conv2d(w, None, options).relu()).computing()
}

/// A 3 by 3 convolution of each of 128 channels apart, x[8, 128, 28, 28]
fn depthwise(s: &Setup) -> Workload {
    let channels = s.n(128);
    let (x, w) = (s.randn([s.n(8), channels, 28, 28]), s.randn([channels, 1, 3, 3]));
    let options = ConvOptions::default().padding(1).groups(channels);
    forward_backward(s, [x, w], move |[x, w]| x.conv2d(w, None, options)).computing()
}
