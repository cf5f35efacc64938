//! The table of operators: PyTorch's name, attributes and inputs to our methods. Missing attributes take PyTorch's
//! defaults. Elementwise operators are known by being in the IR's tables.

use super::attrs::{Attrs, Must};
use super::options::*;
use super::{functions, layers, losses};
use kiln_tensor::{DType, Interpolate, Reduction, Tensor};

/// The outputs of an operator, or why there are none.
pub(super) fn apply(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let input = |i: usize| inputs.get(i).ok_or_else(|| format!("input {i} is missing"));
    let x = input(0)?;
    let one = |t: Tensor| Ok(vec![t]);
    let two = |(a, b): (Tensor, Tensor)| Ok(vec![a, b]);
    match op {
        // Elementwise, with attributes.
        "gelu" if a.text("approximate")? == Some("tanh") => one(x.gelu_tanh()),
        "leaky_relu" => one(x.leaky_relu(a.real("negative_slope")?.unwrap_or(0.01))),
        "elu" => one(x.elu(a.real("alpha")?.unwrap_or(1.0))),
        "softplus" if a.has("beta") || a.has("threshold") => {
            one(x.softplus_with(a.real("beta")?.unwrap_or(1.0), a.real("threshold")?.unwrap_or(20.0)))
        }
        "clamp" => one(x.clamp(a.number("min")?, a.number("max")?)),
        "pow_scalar" => one(x.pow_scalar(a.number("exponent").must("exponent")?)),
        "add_scalar" => one(x + a.number("other").must("other")?),
        "mul_scalar" => one(x * a.number("other").must("other")?),
        "add" if a.has("alpha") => one(x + input(1)? * a.number("alpha").must("alpha")?),
        "sub" if a.has("alpha") => one(x - input(1)? * a.number("alpha").must("alpha")?),
        "div" if a.has("rounding_mode") => one(rounded_quotient(x, input(1)?, a.text("rounding_mode")?)?),
        "logical_and" => one(x.logical_and(input(1)?)),
        "logical_or" => one(x.logical_or(input(1)?)),
        "logical_xor" => one(x.logical_xor(input(1)?)),
        "logical_not" => one(x.logical_not()),
        "where" => one(x.where_(input(1)?, input(2)?)),
        "masked_fill" => one(x.masked_fill(input(1)?, a.number("value").must("value")?)),
        "to_dtype" => one(x.to_dtype(a.dtype("dtype").must("dtype")?)),

        // Reductions.
        "sum" => one(if keep(a)? { x.sum_keepdim(axes(a)?) } else { x.sum(axes(a)?) }),
        "mean" => one(if keep(a)? { x.mean_keepdim(axes(a)?) } else { x.mean(axes(a)?) }),
        "amax" => one(if keep(a)? { x.amax_keepdim(axes(a)?) } else { x.amax(axes(a)?) }),
        "amin" => one(if keep(a)? { x.amin_keepdim(axes(a)?) } else { x.amin(axes(a)?) }),
        "prod" => one(if keep(a)? { x.prod_keepdim(axes(a)?) } else { x.prod(axes(a)?) }),
        "any" => one(like_byte(x, if keep(a)? { x.any_keepdim(axes(a)?) } else { x.any(axes(a)?) })),
        "all" => one(like_byte(x, if keep(a)? { x.all_keepdim(axes(a)?) } else { x.all(axes(a)?) })),
        "logsumexp" => one(if keep(a)? { x.logsumexp_keepdim(axes(a)?) } else { x.logsumexp(axes(a)?) }),
        "var" => one(if keep(a)? {
            x.var_keepdim(axes(a)?, correction(a)?)
        } else {
            x.var(axes(a)?, correction(a)?)
        }),
        "std" => one(if keep(a)? {
            x.std_keepdim(axes(a)?, correction(a)?)
        } else {
            x.std(axes(a)?, correction(a)?)
        }),
        "norm" => {
            let p = a.real("p")?.unwrap_or(2.0);
            one(if keep(a)? { x.norm_keepdim(axes(a)?, p) } else { x.norm(axes(a)?, p) })
        }
        "argmax" => one(if keep(a)? { x.argmax_keepdim(axes(a)?) } else { x.argmax(axes(a)?) }),
        "argmin" => one(if keep(a)? { x.argmin_keepdim(axes(a)?) } else { x.argmin(axes(a)?) }),
        "cumsum" => one(x.cumsum(a.int("dim").must("dim")?)),
        "cumprod" => one(x.cumprod(a.int("dim").must("dim")?)),

        // Shapes.
        "reshape" => one(x.reshape(a.ints("shape").must("shape")?)),
        "permute" => one(x.permute(&a.ints("dims").must("dims")?[..])),
        "transpose" => one(x.transpose(a.int("dim0").must("dim0")?, a.int("dim1").must("dim1")?)),
        "expand" => one(x.expand(a.ints("shape").must("shape")?)),
        "narrow" => {
            one(x.narrow(dim(a, 0)?, a.int("start").must("start")?, a.size("length").must("length")?))
        }
        "flip" => one(x.flip(&a.ints("dims").must("dims")?[..])),
        "roll" => one(x.roll(&a.ints("shifts").must("shifts")?, &a.ints("dims")?.unwrap_or_default())),
        "repeat" => one(x.repeat(a.sizes("repeats").must("repeats")?)),
        "squeeze" => one(squeezed(x, a)?),
        "unsqueeze" => one(x.unsqueeze(a.int("dim").must("dim")?)),
        "flatten" => one(x.flatten(a.int("start_dim")?.unwrap_or(0), a.int("end_dim")?.unwrap_or(-1))),
        "tril" => one(x.tril(a.int("diagonal")?.unwrap_or(0))),
        "triu" => one(x.triu(a.int("diagonal")?.unwrap_or(0))),
        "slice" => {
            let (dim, start, end, step) = slice(a)?;
            one(x.slice(dim, start, end, step))
        }
        "slice_assign" => {
            let (dim, start, end, step) = slice(a)?;
            one(x.slice_assign(dim, start, end, step, input(1)?))
        }
        "cat" => one(Tensor::cat(inputs, dim(a, 0)?)),
        "stack" => one(Tensor::stack(inputs, dim(a, 0)?)),
        "split" if a.is_list("split_size") => {
            Ok(x.split_sizes(&a.sizes("split_size").must("split_size")?, dim(a, 0)?))
        }
        "split" => Ok(x.split(a.size("split_size").must("split_size")?, dim(a, 0)?)),
        "chunk" => Ok(x.chunk(a.size("chunks").must("chunks")?, dim(a, 0)?)),
        "pad" => one(x.pad(&a.ints("pad").must("pad")?, pad_mode(a)?)),

        // Indices.
        "gather" => one(x.gather(a.int("dim").must("dim")?, input(1)?)),
        "scatter" => one(x.scatter(a.int("dim").must("dim")?, input(1)?, input(2)?)),
        "scatter_add" => one(x.scatter_add(a.int("dim").must("dim")?, input(1)?, input(2)?)),
        "index_select" => one(x.index_select(a.int("dim").must("dim")?, input(1)?)),
        "index_add" => {
            let source = match a.number("alpha")? {
                Some(alpha) => input(2)? * alpha,
                None => input(2)?.clone(),
            };
            one(x.index_add(a.int("dim").must("dim")?, input(1)?, &source))
        }
        "embedding" => one(embedding(x, input(1)?, a.int("padding_idx")?)),
        "one_hot" => one(one_hot(x, a.int("num_classes")?.unwrap_or(-1))?),
        "sort" => two(x.sort(dim(a, -1)?, a.flag("descending")?.unwrap_or(false))),
        "argsort" => one(x.argsort(dim(a, -1)?, a.flag("descending")?.unwrap_or(false))),
        "topk" => two(x.topk(a.size("k").must("k")?, dim(a, -1)?, a.flag("largest")?.unwrap_or(true))),
        "nonzero" => one(x.nonzero().map_err(|e| e.to_string())?),

        // Products and windows.
        "matmul" => one(x.matmul(input(1)?)),
        "linear" => one(x.linear(input(1)?, inputs.get(2))),
        "conv1d" => one(x.conv1d(input(1)?, inputs.get(2), conv(a)?)),
        "conv2d" => one(x.conv2d(input(1)?, inputs.get(2), conv(a)?)),
        "conv3d" => one(x.conv3d(input(1)?, inputs.get(2), conv(a)?)),
        "conv_transpose1d" => one(x.conv_transpose1d(input(1)?, inputs.get(2), conv(a)?)),
        "conv_transpose2d" => one(x.conv_transpose2d(input(1)?, inputs.get(2), conv(a)?)),
        "conv_transpose3d" => one(x.conv_transpose3d(input(1)?, inputs.get(2), conv(a)?)),
        "max_pool1d" => one(x.max_pool1d(kernel(a)?, pool(a)?)),
        "max_pool2d" => one(x.max_pool2d(kernel(a)?, pool(a)?)),
        "max_pool3d" => one(x.max_pool3d(kernel(a)?, pool(a)?)),
        "avg_pool1d" => one(x.avg_pool1d(kernel(a)?, pool(a)?)),
        "avg_pool2d" => one(x.avg_pool2d(kernel(a)?, pool(a)?)),
        "avg_pool3d" => one(x.avg_pool3d(kernel(a)?, pool(a)?)),
        "adaptive_avg_pool1d" => one(x.adaptive_avg_pool1d(output_size(x, a, 1)?)),
        "adaptive_avg_pool2d" => one(x.adaptive_avg_pool2d(output_size(x, a, 2)?)),
        "adaptive_avg_pool3d" => one(x.adaptive_avg_pool3d(output_size(x, a, 3)?)),
        "unfold" => one(x.unfold(kernel(a)?, conv(a)?)),
        "interpolate" => one(interpolated(x, a)?),

        // Normalisation and attention.
        "softmax" => one(x.softmax(a.int("dim").must("dim")?)),
        "log_softmax" => one(x.log_softmax(a.int("dim").must("dim")?)),
        "layer_norm" => {
            let shape = normalized_shape(a, inputs)?;
            one(x.layer_norm(shape, inputs.get(1), inputs.get(2), a.real("eps")?.unwrap_or(1e-5)))
        }
        "rms_norm" => {
            let shape = normalized_shape(a, inputs)?;
            one(x.rms_norm(shape, inputs.get(1), a.real("eps")?.unwrap_or(f32::EPSILON as f64)))
        }
        "batch_norm" => one(x.batch_norm(inputs.get(1), inputs.get(2), a.real("eps")?.unwrap_or(1e-5))),
        "group_norm" => {
            let groups = a.size("num_groups").must("num_groups")?;
            one(x.group_norm(groups, inputs.get(1), inputs.get(2), a.real("eps")?.unwrap_or(1e-5)))
        }
        "scaled_dot_product_attention" => {
            let (key, value) = (input(1)?, input(2)?);
            let (key, value) = match a.flag("enable_gqa")?.unwrap_or(false) {
                true => (shared_heads(x, key), shared_heads(x, value)),
                false => (key.clone(), value.clone()),
            };
            let causal = a.flag("is_causal")?.unwrap_or(false);
            one(x.scaled_dot_product_attention(&key, &value, inputs.get(3), causal, a.real("scale")?))
        }

        // Losses.
        "mse_loss" => loss(a, |r| x.mse_loss(&inputs[1], r), inputs, 2),
        "l1_loss" => loss(a, |r| x.l1_loss(&inputs[1], r), inputs, 2),
        "huber_loss" => {
            let delta = a.real("delta")?.unwrap_or(1.0);
            loss(a, |r| x.huber_loss(&inputs[1], delta, r), inputs, 2)
        }
        "binary_cross_entropy_with_logits" => {
            let each = |r| x.binary_cross_entropy_with_logits(&inputs[1], r);
            match inputs.get(2) {
                Some(weight) => one(losses::reduced(each(Reduction::None) * weight, reduction(a)?)),
                None => loss(a, each, inputs, 2),
            }
        }
        "cross_entropy" => one(x.cross_entropy_with(input(1)?, &classes(a, inputs)?)),
        "nll_loss" => one(x.nll_loss_with(input(1)?, &classes(a, inputs)?)),
        "kl_div" => {
            let (x, y) = (x.log_softmax(1), input(1)?.softmax(1));
            match a.text("reduction")? {
                Some("batchmean") => one(x.kl_div(&y, Reduction::Sum) / x.dim(0)),
                _ => one(x.kl_div(&y, reduction(a)?)),
            }
        }
        _ => match elementwise(op, inputs) {
            Some(out) => one(out),
            None => elsewhere(op, a, inputs)?.ok_or_else(|| format!("operator `{op}` is not known")),
        },
    }
}

/// An operator of one of the other tables.
fn elsewhere(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>, String> {
    for table in [functions::apply, losses::apply, layers::apply] {
        if let Some(outputs) = table(op, a, inputs)? {
            return Ok(Some(outputs));
        }
    }
    Ok(None)
}

/// An operator of the IR's tables.
fn elementwise(op: &str, inputs: &[Tensor]) -> Option<Tensor> {
    macro_rules! unary {
        ($($variant:ident $name:ident $doc:literal $columns:tt)*) => {
            match (op, inputs) {
                $((stringify!($name), [x]) => return Some(x.$name()),)*
                _ => {}
            }
        };
    }
    macro_rules! binary {
        ($($variant:ident $name:ident $doc:literal $columns:tt)*) => {
            match (op, inputs) {
                $((stringify!($name), [a, b]) => return Some(a.$name(b)),)*
                _ => {}
            }
        };
    }
    kiln_ir::unary_table!(unary);
    kiln_ir::binary_table!(binary);
    None
}

/// PyTorch's `any` and `all` of u8 give u8.
fn like_byte(x: &Tensor, out: Tensor) -> Tensor {
    if x.dtype() == DType::U8 { out.to_dtype(DType::U8) } else { out }
}

fn rounded_quotient(x: &Tensor, y: &Tensor, mode: Option<&str>) -> Result<Tensor, String> {
    match mode {
        Some("floor") => Ok(x.floor_divide(y)),
        Some("trunc") if x.dtype().is_int() && y.dtype().is_int() => {
            // What is left over has the sign of x, so that the rest divides evenly.
            Ok((x - x.fmod(y)).floor_divide(y))
        }
        Some("trunc") => Ok(x.div(y).trunc()),
        mode => Err(format!("attribute `rounding_mode` is {mode:?}")),
    }
}

fn squeezed(x: &Tensor, a: &Attrs) -> Result<Tensor, String> {
    let Some(dims) = a.ints("dim")? else { return Ok(x.squeeze_all()) };
    // From the last axis on, so that dropping one does not rename the others.
    let rank = x.rank().max(1) as isize;
    let mut dims: Vec<isize> = dims.iter().map(|&d| if d < 0 { d + rank } else { d }).collect();
    dims.sort_unstable();
    Ok(dims.iter().rev().fold(x.clone(), |x, &d| x.squeeze(d)))
}

/// Rows at `padding_idx` get no gradient.
fn embedding(weight: &Tensor, ids: &Tensor, padding: Option<isize>) -> Tensor {
    let Some(padding) = padding else { return weight.embedding(ids) };
    let padding = if padding < 0 { padding + weight.dim(0) as isize } else { padding };
    let still = ids.eq(padding as i64).unsqueeze(-1);
    still.where_(&weight.detach().embedding(ids), &weight.embedding(ids))
}

fn one_hot(x: &Tensor, classes: isize) -> Result<Tensor, String> {
    match usize::try_from(classes) {
        Ok(classes) => Ok(x.one_hot(classes)),
        Err(_) => {
            let most: i64 = x.to_dtype(DType::I64).amax(()).item().map_err(|e| e.to_string())?;
            Ok(x.one_hot(most as usize + 1))
        }
    }
}

fn interpolated(x: &Tensor, a: &Attrs) -> Result<Tensor, String> {
    let align_corners = a.flag("align_corners")?.unwrap_or(false);
    if a.flag("antialias")?.unwrap_or(false) {
        return Err("attribute `antialias` is not supported".into());
    }
    let mode = match a.text("mode")?.unwrap_or("nearest") {
        "nearest" => Interpolate::Nearest,
        "nearest-exact" => Interpolate::NearestExact,
        "linear" | "bilinear" | "trilinear" => Interpolate::Linear { align_corners },
        "bicubic" => Interpolate::Cubic { align_corners },
        "area" => Interpolate::Area,
        mode => return Err(format!("attribute `mode` is {mode}")),
    };
    match extents(a, "size")? {
        Some(size) => Ok(x.interpolate(size, mode)),
        None => Ok(x.interpolate_by(&a.reals("scale_factor").must("scale_factor")?, mode)),
    }
}

/// Heads of keys or values, each as many times as there are heads of queries for it.
fn shared_heads(query: &Tensor, heads: &Tensor) -> Tensor {
    let times = query.dim(-3) / heads.dim(-3).max(1);
    let mut shape: Vec<usize> = heads.shape().to_vec();
    let axis = shape.len() - 3;
    let mut wide = shape.clone();
    wide.insert(axis + 1, times);
    shape[axis] *= times;
    heads.unsqueeze(axis as isize + 1).expand(wide).reshape(shape)
}

/// A loss of exactly `count` inputs.
fn loss(
    a: &Attrs,
    f: impl FnOnce(Reduction) -> Tensor,
    inputs: &[Tensor],
    count: usize,
) -> Result<Vec<Tensor>, String> {
    match inputs.len() == count {
        true => Ok(vec![f(reduction(a)?)]),
        false => Err(format!("{} inputs instead of {count}", inputs.len())),
    }
}
