//! Reductions and running reductions. Each comes twice: `sum` drops the reduced axes, `sum_keepdim` keeps them as 1.

use super::Axes;
use crate::{DType, Tensor};
use kiln_device::method;
use kiln_ir::{AxisSet, Op, ReduceKind, ScanKind};

macro_rules! reductions {
    ($($kind:ident $name:ident $keep:ident $($alias:literal)? : $doc:literal;)*) => {
        /// # Reductions
        impl Tensor {
            $(
                #[doc = $doc]
                $(#[doc(alias = $alias)])?
                #[track_caller]
                pub fn $name(&self, axes: impl Into<Axes>) -> Tensor {
                    let _method = method(stringify!($name));
                    reduce(ReduceKind::$kind, stringify!($name), self, &axes.into(), false)
                }

                #[doc = concat!("Like [`Tensor::", stringify!($name), "`], with the reduced axes kept as 1.")]
                #[track_caller]
                pub fn $keep(&self, axes: impl Into<Axes>) -> Tensor {
                    let _method = method(stringify!($keep));
                    reduce(ReduceKind::$kind, stringify!($keep), self, &axes.into(), true)
                }
            )*
        }
    };
}
reductions! {
    Sum sum sum_keepdim: "The sum over axes. Integers and bool are summed as i64.";
    Mean mean mean_keepdim: "The mean over axes, of floats.";
    Prod prod prod_keepdim: "The product over axes. Integers and bool are multiplied as i64.";
    Max amax amax_keepdim "max": "The largest element over axes; NaN if one is. Ties share the gradient evenly.";
    Min amin amin_keepdim "min": "The smallest element over axes; NaN if one is. Ties share the gradient evenly.";
    Any any any_keepdim: "Whether an element over axes is not 0.";
    All all all_keepdim: "Whether no element over axes is 0.";
}

#[track_caller]
fn reduce(kind: ReduceKind, name: &str, x: &Tensor, axes: &Axes, keep: bool) -> Tensor {
    let axes = axes.set(name, x);
    let x = match kind {
        ReduceKind::Sum | ReduceKind::Prod => summable(x),
        ReduceKind::Any | ReduceKind::All => x.truth(),
        ReduceKind::Mean | ReduceKind::Max | ReduceKind::Min | ReduceKind::ArgMax | ReduceKind::ArgMin => {
            x.clone()
        }
    };
    Tensor::one(Op::Reduce { kind, axes, keep }, &[&x])
}

/// Narrow integers and bool as i64, so that sums do not wrap.
#[track_caller]
fn summable(x: &Tensor) -> Tensor {
    match x.dtype().unpacked() {
        dtype if dtype.is_float() || dtype == DType::U64 => x.clone(),
        _ => x.to_dtype(DType::I64),
    }
}

/// # Reductions: places, and running ones
impl Tensor {
    /// The i64 index of the first largest element along an axis, or in the flattened tensor for `()`. NaN counts as
    /// largest.
    #[track_caller]
    pub fn argmax(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("argmax");
        arg(ReduceKind::ArgMax, "argmax", self, &axes.into(), false)
    }

    /// Like [`Tensor::argmax`], with the reduced axes kept as 1.
    #[track_caller]
    pub fn argmax_keepdim(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("argmax_keepdim");
        arg(ReduceKind::ArgMax, "argmax_keepdim", self, &axes.into(), true)
    }

    /// The i64 index of the first smallest element along an axis, or in the flattened tensor for `()`. NaN counts as
    /// smallest.
    #[track_caller]
    pub fn argmin(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("argmin");
        arg(ReduceKind::ArgMin, "argmin", self, &axes.into(), false)
    }

    /// Like [`Tensor::argmin`], with the reduced axes kept as 1.
    #[track_caller]
    pub fn argmin_keepdim(&self, axes: impl Into<Axes>) -> Tensor {
        let _method = method("argmin_keepdim");
        arg(ReduceKind::ArgMin, "argmin_keepdim", self, &axes.into(), true)
    }

    /// The sum of each element and all before it along an axis. Integers and bool are summed as i64.
    #[track_caller]
    pub fn cumsum(&self, axis: isize) -> Tensor {
        let _method = method("cumsum");
        scan(ScanKind::Sum, "cumsum", self, axis)
    }

    /// The product of each element and all before it along an axis. Integers and bool are multiplied as i64.
    #[track_caller]
    pub fn cumprod(&self, axis: isize) -> Tensor {
        let _method = method("cumprod");
        scan(ScanKind::Prod, "cumprod", self, axis)
    }

    /// `log(sum(exp(x)))` of each element and all before it along an axis, without overflow. Integers and bool become f32.
    ///
    /// ```
    /// # use kiln_tensor::{Device, Tensor};
    /// let x = Tensor::from_vec(vec![0.0f32, -200.0, 1000.0], [3], &Device::cpu()).requires_grad();
    /// let y = x.logcumsumexp(0);
    /// assert_eq!(y.to_vec::<f32>().unwrap(), [0.0, 0.0, 1000.0]);
    /// assert_eq!(y.sum(()).backward().get(&x).unwrap().to_vec::<f32>().unwrap(), [2.0, 0.0, 1.0]);
    /// ```
    #[track_caller]
    pub fn logcumsumexp(&self, axis: isize) -> Tensor {
        let _method = method("logcumsumexp");
        scan(ScanKind::LogSumExp, "logcumsumexp", self, axis)
    }
}

#[track_caller]
fn arg(kind: ReduceKind, name: &str, x: &Tensor, axes: &Axes, keep: bool) -> Tensor {
    let (x, shape, at) = match axes.single(name, x) {
        Some(at) => (x.lifted(), x.shape().reduced(AxisSet::one(at), keep), at),
        None => (x.reshape([x.numel()]), x.shape().reduced(AxisSet::all(x.rank()), keep), 0),
    };
    Tensor::one(Op::Reduce { kind, axes: AxisSet::one(at), keep: false }, &[&x]).reshape(shape)
}

#[track_caller]
fn scan(kind: ScanKind, name: &str, x: &Tensor, axis: isize) -> Tensor {
    let axis = x.any_axis(name, axis) as u8;
    let wide = match kind {
        ScanKind::Sum | ScanKind::Prod => summable(x),
        ScanKind::LogSumExp if !x.dtype().unpacked().is_float() => x.to_dtype(DType::F32),
        ScanKind::LogSumExp | ScanKind::Linear => x.clone(),
    };
    Tensor::one(Op::Scan { kind, axis, reverse: false }, &[&wide.lifted()]).reshape(x.shape())
}
