//! Layers by PyTorch's names, and functions that are layers here. A layer that holds parameters is made and then given those
//! of the case.

use super::attrs::{Attrs, Must};
use super::options::*;
use super::sequences;
use kiln_nn::*;
use kiln_tensor::{Interpolate, Tensor};

/// The outputs of an operator; nothing if it is none of these.
pub(super) fn apply(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>, String> {
    let Some(x) = inputs.first() else { return Ok(None) };
    let input = |i: usize| inputs.get(i).ok_or_else(|| format!("input {i} is missing"));
    let real = |key: &str, default: f64| Ok::<f64, String>(a.real(key)?.unwrap_or(default));
    let eps = || real("eps", 1e-5);
    let one = |y: Tensor| Ok(Some(vec![y]));
    match op {
        // Activations.
        "logsigmoid" => one(LogSigmoid.forward(x)),
        "rrelu" => {
            let (lower, upper, mode) =
                (real("lower", 1.0 / 8.0)?, real("upper", 1.0 / 3.0)?, Mode::default());
            let mut layer = Rrelu { lower, upper, mode };
            layer.train(a.flag("training")?.unwrap_or(false));
            one(layer.forward(x))
        }
        "softmin" => one(Softmin::new(a.int("dim").must("dim")?).forward(x)),

        // Pools.
        "adaptive_max_pool1d" => pooled(a, x.adaptive_max_pool1d_with_indices(output_size(x, a, 1)?)),
        "adaptive_max_pool2d" => pooled(a, x.adaptive_max_pool2d_with_indices(output_size(x, a, 2)?)),
        "adaptive_max_pool3d" => pooled(a, x.adaptive_max_pool3d_with_indices(output_size(x, a, 3)?)),
        "lp_pool1d" => one(x.lp_pool1d(a.real("norm_type").must("norm_type")?, kernel(a)?, pool(a)?)),
        "lp_pool2d" => one(x.lp_pool2d(a.real("norm_type").must("norm_type")?, kernel(a)?, pool(a)?)),
        "lp_pool3d" => one(x.lp_pool3d(a.real("norm_type").must("norm_type")?, kernel(a)?, pool(a)?)),
        "max_unpool1d" => one(unpooled(MaxUnpool1d::new(kernel(a)?), x, input(1)?, a, 1)?),
        "max_unpool2d" => one(unpooled(MaxUnpool2d::new(kernel(a)?), x, input(1)?, a, 2)?),
        "max_unpool3d" => one(unpooled(MaxUnpool3d::new(kernel(a)?), x, input(1)?, a, 3)?),

        // Sizes.
        "channel_shuffle" => one(ChannelShuffle::new(a.size("groups").must("groups")?).forward(x)),
        "upsample_nearest" | "upsample_bilinear" => {
            let mode = match op {
                "upsample_nearest" => Interpolate::Nearest,
                _ => Interpolate::Linear { align_corners: true },
            };
            match extents(a, "size")? {
                Some(size) => one(x.interpolate(size, mode)),
                None => one(x.interpolate_by(&a.reals("scale_factor").must("scale_factor")?, mode)),
            }
        }

        // Normalisation.
        "batch_norm_eval" => one(evaluated(inputs, eps()?)?),
        "instance_norm" => one(by_instance(inputs, a, eps()?)?),
        "local_response_norm" => {
            let mut layer = LocalResponseNorm::new(a.size("size").must("size")?);
            (layer.alpha, layer.beta, layer.k) = (real("alpha", 1e-4)?, real("beta", 0.75)?, real("k", 1.0)?);
            one(layer.forward(x))
        }

        _ => sequences::apply(op, a, inputs),
    }
}

/// The largest, and with `return_indices` where they are.
fn pooled(a: &Attrs, (values, indices): (Tensor, Tensor)) -> Result<Option<Vec<Tensor>>, String> {
    let wanted = a.flag("return_indices")?.unwrap_or(false);
    Ok(Some(if wanted { vec![values, indices] } else { vec![values] }))
}

fn unpooled<const N: usize>(
    mut layer: MaxUnpool<N>,
    x: &Tensor,
    indices: &Tensor,
    a: &Attrs,
    n: usize,
) -> Result<Tensor, String> {
    if let Some(stride) = extents(a, "stride")? {
        layer = layer.stride(stride);
    }
    if let Some(padding) = extents(a, "padding")? {
        layer = layer.padding(padding);
    }
    Ok(match a.sizes("output_size")? {
        Some(size) => layer.forward_to(x, indices, &size[size.len().saturating_sub(n)..]),
        None => layer.forward(x, indices),
    })
}

/// Inputs, weight, bias, running mean and variance.
fn evaluated(inputs: &[Tensor], eps: f64) -> Result<Tensor, String> {
    let [x, weight, bias, mean, variance] = inputs else {
        return Err(format!("{} inputs instead of 5", inputs.len()));
    };
    macro_rules! through {
        ($layer:ident) => {{
            let mut layer = $layer::new(x.dim(1), &x.device()).eps(eps);
            (layer.weight, layer.bias) = (Some(weight.clone()), Some(bias.clone()));
            layer.running_mean = Some(Buffer::new(mean.clone()));
            layer.running_var = Some(Buffer::new(variance.clone()));
            layer.train(false);
            layer.forward(x)
        }};
    }
    match x.rank() {
        2 | 3 => Ok(through!(BatchNorm1d)),
        4 => Ok(through!(BatchNorm2d)),
        5 => Ok(through!(BatchNorm3d)),
        rank => Err(format!("an input of rank {rank}")),
    }
}

fn by_instance(inputs: &[Tensor], a: &Attrs, eps: f64) -> Result<Tensor, String> {
    if !a.flag("use_input_stats")?.unwrap_or(true) {
        return Err("attribute `use_input_stats` is false without running statistics".into());
    }
    let x = &inputs[0];
    macro_rules! through {
        ($layer:ident) => {{
            let mut layer = $layer::new(x.dim(1), &x.device()).eps(eps);
            (layer.weight, layer.bias) = (inputs.get(1).cloned(), inputs.get(2).cloned());
            layer.forward(x)
        }};
    }
    match x.rank() {
        3 => Ok(through!(InstanceNorm1d)),
        4 => Ok(through!(InstanceNorm2d)),
        5 => Ok(through!(InstanceNorm3d)),
        rank => Err(format!("an input of rank {rank}")),
    }
}
