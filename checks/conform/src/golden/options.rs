//! PyTorch's keyword arguments as the options of our methods.

use super::attrs::{Attrs, Must};
use kiln_tensor::{
    Axes, ClassOptions, ConvOptions, Extents, Number, PadMode, Padding, PoolOptions, Reduction, Shape, Tensor,
};

pub(super) fn keep(a: &Attrs) -> Result<bool, String> {
    Ok(a.flag("keepdim")?.unwrap_or(false))
}

pub(super) fn dim(a: &Attrs, default: isize) -> Result<isize, String> {
    Ok(a.int("dim")?.unwrap_or(default))
}

pub(super) fn correction(a: &Attrs) -> Result<f64, String> {
    Ok(a.real("correction")?.unwrap_or(1.0))
}

/// `dims` or `dim`; all axes if neither is there.
pub(super) fn axes(a: &Attrs) -> Result<Axes, String> {
    let dims = match a.ints("dims")? {
        Some(dims) => Some(dims),
        None => a.ints("dim")?,
    };
    Ok(dims.map_or(().into(), |dims| Axes::new(&dims)))
}

pub(super) fn slice(a: &Attrs) -> Result<(isize, isize, isize, usize), String> {
    let (start, end) = (a.int("start")?.unwrap_or(0), a.int("end")?.unwrap_or(isize::MAX));
    Ok((dim(a, 0)?, start, end, a.size("step")?.unwrap_or(1)))
}

pub(super) fn pad_mode(a: &Attrs) -> Result<PadMode, String> {
    match a.text("mode")?.unwrap_or("constant") {
        "constant" => Ok(PadMode::Constant(a.real("value")?.unwrap_or(0.0))),
        "reflect" => Ok(PadMode::Reflect),
        "replicate" => Ok(PadMode::Replicate),
        "circular" => Ok(PadMode::Circular),
        mode => Err(format!("attribute `mode` is {mode}")),
    }
}

pub(super) fn extents(a: &Attrs, key: &str) -> Result<Option<Extents>, String> {
    Ok(a.sizes(key)?.filter(|sizes| !sizes.is_empty()).map(|sizes| Extents::from(&sizes[..])))
}

pub(super) fn kernel(a: &Attrs) -> Result<Extents, String> {
    extents(a, "kernel_size").must("kernel_size")
}

pub(super) fn conv(a: &Attrs) -> Result<ConvOptions, String> {
    let mut options = ConvOptions::default().groups(a.size("groups")?.unwrap_or(1));
    if let Some(stride) = extents(a, "stride")? {
        options = options.stride(stride);
    }
    if let Some(dilation) = extents(a, "dilation")? {
        options = options.dilation(dilation);
    }
    if let Some(padding) = extents(a, "output_padding")? {
        options = options.output_padding(padding);
    }
    options.padding = match a.text("padding") {
        Ok(None) => Padding::Valid,
        Ok(Some("same")) => Padding::Same,
        Ok(Some("valid")) => Padding::Valid,
        Ok(Some(word)) => return Err(format!("attribute `padding` is {word}")),
        Err(_) => extents(a, "padding").must("padding")?.into(),
    };
    Ok(options)
}

pub(super) fn pool(a: &Attrs) -> Result<PoolOptions, String> {
    let mut options = PoolOptions::default()
        .ceil_mode(a.flag("ceil_mode")?.unwrap_or(false))
        .count_include_pad(a.flag("count_include_pad")?.unwrap_or(true));
    options.stride = extents(a, "stride")?;
    options.divisor_override = a.size("divisor_override")?;
    if let Some(padding) = extents(a, "padding")? {
        options = options.padding(padding);
    }
    if let Some(dilation) = extents(a, "dilation")? {
        options = options.dilation(dilation);
    }
    Ok(options)
}

pub(super) fn output_size(x: &Tensor, a: &Attrs, n: usize) -> Result<Extents, String> {
    let sizes = a.open_sizes("output_size").must("output_size")?;
    let size = |i: usize| -> usize {
        let given = sizes.get(if sizes.len() == 1 { 0 } else { i }).copied().flatten();
        given.unwrap_or_else(|| x.dim(i as isize - n as isize))
    };
    Ok(Extents::from(&(0..n).map(size).collect::<Vec<_>>()[..]))
}

/// The shape that is normalised: that of the weight where none is stated, else the last axis.
pub(super) fn normalized_shape(a: &Attrs, inputs: &[Tensor]) -> Result<Shape, String> {
    Ok(match a.sizes("normalized_shape")? {
        Some(shape) => shape.into(),
        None => inputs.get(1).map_or_else(|| inputs[0].dim(-1).into(), Tensor::shape),
    })
}

pub(super) fn reduction(a: &Attrs) -> Result<Reduction, String> {
    match a.text("reduction")?.unwrap_or("mean") {
        "none" => Ok(Reduction::None),
        "mean" => Ok(Reduction::Mean),
        "sum" => Ok(Reduction::Sum),
        word => Err(format!("attribute `reduction` is {word}")),
    }
}

pub(super) fn classes(a: &Attrs, inputs: &[Tensor]) -> Result<ClassOptions, String> {
    let ignore_index = match a.number("ignore_index")? {
        Some(Number::Int(ignore)) => ignore,
        Some(Number::Float(ignore)) => return Err(format!("attribute `ignore_index` is {ignore}")),
        None => -100,
    };
    let label_smoothing = a.real("label_smoothing")?.unwrap_or(0.0);
    Ok(ClassOptions {
        reduction: reduction(a)?,
        label_smoothing,
        ignore_index,
        weight: inputs.get(2).cloned(),
    })
}
