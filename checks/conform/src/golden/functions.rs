//! Functions of tensors: PyTorch's names and attributes to our methods.

use super::attrs::{Attrs, Must};
use super::options::*;
use kiln_tensor::{DType, GridMode, GridOptions, GridPadding, Quantile, Tensor, TensorIndex, einsum};

/// The outputs of a function, or `None` if it is not one of these.
pub(super) fn apply(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>, String> {
    for family in [elementwise, extremes, products, indices, sets, shapes, images] {
        if let Some(outputs) = family(op, a, inputs)? {
            return Ok(Some(outputs));
        }
    }
    Ok(None)
}

type Outputs = Result<Option<Vec<Tensor>>, String>;

fn one(t: Tensor) -> Outputs {
    Ok(Some(vec![t]))
}

fn two((a, b): (Tensor, Tensor)) -> Outputs {
    Ok(Some(vec![a, b]))
}

fn input(inputs: &[Tensor], i: usize) -> Result<&Tensor, String> {
    inputs.get(i).ok_or_else(|| format!("input {i} is missing"))
}

fn told<T>(result: Result<T, kiln_tensor::Error>) -> Result<T, String> {
    result.map_err(|e| e.to_string())
}

fn elementwise(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let (x, y) = (input(inputs, 0)?, || input(inputs, 1));
    let real = |key: &str, default: f64| Ok::<f64, String>(a.real(key)?.unwrap_or(default));
    match op {
        "exp2" => one(x.exp2()),
        "log10" => one(x.log10()),
        "erfc" => one(x.erfc()),
        "erfinv" => one(x.erfinv()),
        "lgamma" => one(x.lgamma()),
        "digamma" => one(x.digamma()),
        "logit" => one(x.logit(a.real("eps")?)),
        "sinc" => one(x.sinc()),
        "frac" => one(x.frac()),
        "deg2rad" => one(x.deg2rad()),
        "rad2deg" => one(x.rad2deg()),
        "softsign" => one(x.softsign()),
        "tanhshrink" => one(x.tanhshrink()),
        "relu6" => one(x.relu6()),
        "selu" => one(x.selu()),
        "hardtanh" => one(x.hardtanh(real("min_val", -1.0)?, real("max_val", 1.0)?)),
        "celu" => one(x.celu(real("alpha", 1.0)?)),
        "hardshrink" => one(x.hardshrink(real("lambd", 0.5)?)),
        "softshrink" => one(x.softshrink(real("lambd", 0.5)?)),
        "threshold" => {
            one(x.threshold(a.real("threshold").must("threshold")?, a.real("value").must("value")?))
        }
        "glu" => one(x.glu(dim(a, -1)?)),
        "prelu" => one(x.prelu(y()?)),
        "logaddexp" => one(x.logaddexp(y()?)),
        "logaddexp2" => one(x.logaddexp2(y()?)),
        "hypot" => one(x.hypot(y()?)),
        "xlogy" => one(x.xlogy(y()?)),
        "lerp" => match inputs.get(2) {
            Some(weight) => one(x.lerp(y()?, weight)),
            None => one(x.lerp(y()?, a.number("weight").must("weight")?)),
        },
        "copysign" => match inputs.get(1) {
            Some(sign) => one(x.copysign(sign)),
            None => one(x.copysign(a.number("other").must("other")?)),
        },
        "signbit" => one(x.signbit()),
        "heaviside" => one(x.heaviside(y()?)),
        "fmax" => one(x.fmax(y()?)),
        "fmin" => one(x.fmin(y()?)),
        "nan_to_num" => one(x.nan_to_num(a.real("nan")?, a.real("posinf")?, a.real("neginf")?)),
        "addcmul" => one(x.addcmul(y()?, input(inputs, 2)?, real("value", 1.0)?)),
        "addcdiv" => one(x.addcdiv(y()?, input(inputs, 2)?, real("value", 1.0)?)),
        "isclose" => {
            let nan = a.flag("equal_nan")?.unwrap_or(false);
            one(x.isclose(y()?, real("rtol", 1e-5)?, real("atol", 1e-8)?, nan))
        }
        _ => Ok(None),
    }
}

fn extremes(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let x = input(inputs, 0)?;
    match op {
        "max" | "min" if inputs.len() == 2 => {
            one(if op == "max" { x.maximum(&inputs[1]) } else { x.minimum(&inputs[1]) })
        }
        "max" if !a.has("dim") => one(x.amax(())),
        "min" if !a.has("dim") => one(x.amin(())),
        "max" => two(if keep(a)? { x.max_dim_keepdim(dim(a, 0)?) } else { x.max_dim(dim(a, 0)?) }),
        "min" => two(if keep(a)? { x.min_dim_keepdim(dim(a, 0)?) } else { x.min_dim(dim(a, 0)?) }),
        "aminmax" => two(x.aminmax(axes(a)?)),
        "median" if !a.has("dim") => one(x.flatten(0, -1).median(0).0),
        "median" => two(if keep(a)? { x.median_keepdim(dim(a, 0)?) } else { x.median(dim(a, 0)?) }),
        "kthvalue" => {
            let (values, indices) = x.kthvalue(a.size("k").must("k")?, dim(a, -1)?);
            two(if keep(a)? {
                (values.unsqueeze(dim(a, -1)?), indices.unsqueeze(dim(a, -1)?))
            } else {
                (values, indices)
            })
        }
        "quantile" => one(quantile(x, a, inputs.get(1))?),
        "count_nonzero" => one(x.count_nonzero(axes(a)?)),
        "nansum" => one(x.nansum(axes(a)?)),
        "nanmean" => one(x.nanmean(axes(a)?)),
        "cummax" => one(x.cummax(dim(a, 0)?).0),
        "cummin" => one(x.cummin(dim(a, 0)?).0),
        "logcumsumexp" => one(x.logcumsumexp(dim(a, 0)?)),
        "diff" => one((0..a.size("n")?.unwrap_or(1))
            .try_fold(x.clone(), |x, _| Ok::<Tensor, String>(x.diff(dim(a, -1)?)))?),
        _ => Ok(None),
    }
}

fn quantile(x: &Tensor, a: &Attrs, given: Option<&Tensor>) -> Result<Tensor, String> {
    let (q, several) = match given {
        Some(q) => {
            let reals = told(q.to_dtype(DType::F64).to_vec::<f64>())?;
            (reals, q.rank() > 0)
        }
        None => (a.reals("q").must("q")?, a.is_list("q")),
    };
    let between = match a.text("interpolation")?.unwrap_or("linear") {
        "linear" => Quantile::Linear,
        "lower" => Quantile::Lower,
        "higher" => Quantile::Higher,
        "nearest" => Quantile::Nearest,
        "midpoint" => Quantile::Midpoint,
        word => return Err(format!("attribute `interpolation` is {word}")),
    };
    let axis = a.int("dim")?;
    let (flat, at) = match axis {
        Some(axis) => (x.clone(), axis),
        None => (x.flatten(0, -1), 0),
    };
    let mut y = flat.quantiles(&q, at, between);
    if keep(a)? {
        let rank = x.rank() as isize;
        let kept = axis.map_or(0..rank, |axis| (axis + rank) % rank..(axis + rank) % rank + 1);
        y = kept.fold(y, |y, axis| y.unsqueeze(axis + 1));
    }
    Ok(if several { y } else { y.squeeze(0) })
}

fn products(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let (x, y) = (input(inputs, 0)?, || input(inputs, 1));
    let real = |key: &str, default: f64| Ok::<f64, String>(a.real(key)?.unwrap_or(default));
    match op {
        "outer" => one(x.outer(y()?)),
        "bmm" => one(x.bmm(y()?)),
        "mm" | "mv" | "dot" => one(x.matmul(y()?)),
        "addmm" | "addmv" => one(x.addmm(y()?, input(inputs, 2)?, real("beta", 1.0)?, real("alpha", 1.0)?)),
        "baddbmm" => one(x.baddbmm(y()?, input(inputs, 2)?, real("beta", 1.0)?, real("alpha", 1.0)?)),
        "einsum" => {
            let Some(equation) = a.text("equation")? else {
                return Err("attribute `equation` is missing".into());
            };
            one(einsum(equation, inputs))
        }
        "tensordot" => match (a.size("dims"), a.pairs("dims")) {
            (Ok(dims), _) => one(x.tensordot(y()?, dims.unwrap_or(2))),
            (_, Ok(Some((ours, theirs)))) => one(x.tensordot_axes(y()?, &ours, &theirs)),
            (_, result) => result.map(|_| None),
        },
        "trace" => one(x.trace()),
        "diag" => one(x.diag(a.int("diagonal")?.unwrap_or(0))),
        "diag_embed" => one(x.diag_embed(a.int("offset")?.unwrap_or(0))),
        "diagonal" => {
            let (dim1, dim2) = (a.int("dim1")?.unwrap_or(0), a.int("dim2")?.unwrap_or(1));
            one(x.diagonal(a.int("offset")?.unwrap_or(0), dim1, dim2))
        }
        "normalize" => one(x.normalize(real("p", 2.0)?, dim(a, 1)?, real("eps", 1e-12)?)),
        "cdist" => one(x.cdist(y()?, real("p", 2.0)?)),
        "cosine_similarity" => one(x.cosine_similarity(y()?, dim(a, 1)?, real("eps", 1e-8)?)),
        "pairwise_distance" => {
            let distance = x.pairwise_distance(y()?, real("p", 2.0)?, real("eps", 1e-6)?);
            one(if keep(a)? { distance.unsqueeze(-1) } else { distance })
        }
        _ => Ok(None),
    }
}

fn indices(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let (x, y) = (input(inputs, 0)?, || input(inputs, 1));
    match op {
        "index" => {
            let places = places(&inputs[1..])?;
            one(x.index(&places[..]))
        }
        "index_put" => {
            let Some((values, named)) = inputs[1..].split_last() else { return Err("no indices".into()) };
            let places = places(named)?;
            one(match a.flag("accumulate")?.unwrap_or(false) {
                true => x.index_put_add(&places[..], values),
                false => x.index_put(&places[..], values),
            })
        }
        "take_along_dim" => match a.int("dim")? {
            Some(axis) => one(x.take_along_dim(y()?, axis)),
            None => one(x.flatten(0, -1).take_along_dim(&y()?.flatten(0, -1), 0)),
        },
        "masked_select" => Ok(Some(vec![told(x.masked_select(y()?))?])),
        "masked_scatter" => one(x.masked_scatter(y()?, input(inputs, 2)?)),
        _ => Ok(None),
    }
}

/// Indices as they are; a mask as the places where it holds.
fn places(inputs: &[Tensor]) -> Result<Vec<TensorIndex>, String> {
    let mut places = Vec::new();
    for index in inputs {
        match index.dtype() == DType::Bool {
            true => places.extend(told(index.nonzero())?.unbind(1).iter().map(TensorIndex::from)),
            false => places.push(index.into()),
        }
    }
    Ok(places)
}

fn sets(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let (x, y) = (input(inputs, 0)?, || input(inputs, 1));
    match op {
        "unique" | "unique_consecutive" if !a.has("dim") => {
            let unique = told(if op == "unique" { x.unique() } else { x.unique_consecutive() })?;
            Ok(Some(vec![unique.values, unique.inverse, unique.counts]))
        }
        "unique" => {
            let unique = told(x.unique_dim(a.int("dim").must("dim")?))?;
            Ok(Some(vec![unique.values, unique.inverse, unique.counts]))
        }
        "bincount" => {
            let minlength = a.size("minlength")?.unwrap_or(0);
            one(told(match inputs.get(1) {
                Some(weights) => x.bincount_weighted(weights, minlength),
                None => x.bincount(minlength),
            })?)
        }
        "searchsorted" => one(x.searchsorted(y()?, right(a)?)),
        "bucketize" => one(x.bucketize(y()?, right(a)?)),
        "isin" => one(x.isin(y()?)),
        "histc" => {
            let (min, max) = (a.real("min").must("min")?, a.real("max").must("max")?);
            one(x.histc(a.size("bins")?.unwrap_or(100), min, max))
        }
        _ => Ok(None),
    }
}

fn right(a: &Attrs) -> Result<bool, String> {
    Ok(a.flag("right")?.unwrap_or(false) || a.text("side")? == Some("right"))
}

fn shapes(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let x = input(inputs, 0)?;
    match op {
        "repeat_interleave" => {
            let (x, at) = match a.int("dim")? {
                Some(axis) => (x.clone(), axis),
                None => (x.flatten(0, -1), 0),
            };
            match (inputs.get(1), a.is_list("repeats")) {
                (Some(times), _) => one(told(x.repeat_interleave_each(times, at))?),
                (None, true) => {
                    let times: Vec<i64> =
                        a.ints("repeats").must("repeats")?.iter().map(|&n| n as i64).collect();
                    let n = times.len();
                    one(told(x.repeat_interleave_each(&Tensor::from_vec(times, [n], &x.device()), at))?)
                }
                (None, false) => one(x.repeat_interleave(a.size("repeats").must("repeats")?, at)),
            }
        }
        "unbind" => Ok(Some(x.unbind(dim(a, 0)?))),
        "meshgrid" => {
            let vectors: Vec<&Tensor> = inputs.iter().collect();
            Ok(Some(match a.text("indexing")?.unwrap_or("ij") {
                "xy" => Tensor::meshgrid_xy(&vectors),
                _ => Tensor::meshgrid(&vectors),
            }))
        }
        "broadcast_tensors" => Ok(Some(Tensor::broadcast_tensors(&inputs.iter().collect::<Vec<_>>()))),
        "movedim" => {
            let (from, to) = (a.ints("source").must("source")?, a.ints("destination").must("destination")?);
            one(x.movedim(&from[..], &to[..]))
        }
        "unflatten" => {
            let sizes = if a.has("sizes") { a.ints("sizes") } else { a.ints("unflattened_size") };
            one(x.unflatten(dim(a, 0)?, &sizes.must("sizes")?))
        }
        "rot90" => {
            let dims = a.ints("dims")?.unwrap_or(vec![0, 1]);
            let &[from, to] = &dims[..] else { return Err(format!("attribute `dims` is {dims:?}")) };
            one(x.rot90(a.int("k")?.unwrap_or(1), [from, to]))
        }
        _ => Ok(None),
    }
}

fn images(op: &str, a: &Attrs, inputs: &[Tensor]) -> Outputs {
    let x = input(inputs, 0)?;
    match op {
        "pixel_shuffle" => one(x.pixel_shuffle(a.size("upscale_factor").must("upscale_factor")?)),
        "pixel_unshuffle" => one(x.pixel_unshuffle(a.size("downscale_factor").must("downscale_factor")?)),
        "fold" => {
            let size = extents(a, "output_size").must("output_size")?;
            one(x.fold(size, kernel(a)?, conv(a)?))
        }
        "grid_sample" => {
            let mode = match a.text("mode")?.unwrap_or("bilinear") {
                "bilinear" => GridMode::Bilinear,
                "nearest" => GridMode::Nearest,
                "bicubic" => GridMode::Bicubic,
                word => return Err(format!("attribute `mode` is {word}")),
            };
            let padding = match a.text("padding_mode")?.unwrap_or("zeros") {
                "zeros" => GridPadding::Zeros,
                "border" => GridPadding::Border,
                "reflection" => GridPadding::Reflection,
                word => return Err(format!("attribute `padding_mode` is {word}")),
            };
            let align_corners = a.flag("align_corners")?.unwrap_or(false);
            one(x.grid_sample(input(inputs, 1)?, &GridOptions { mode, padding, align_corners }))
        }
        "affine_grid" => {
            one(x.affine_grid(a.sizes("size").must("size")?, a.flag("align_corners")?.unwrap_or(false)))
        }
        _ => Ok(None),
    }
}
