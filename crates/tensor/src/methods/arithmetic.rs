//! Elementwise functions of several operands, and such with numbers beside them, composed of the tables'.

use crate::operators::Operand;
use crate::{DType, Number, Tensor};
use kiln_device::method;
use std::f64::consts::LN_2;

/// # Elementwise: arithmetic beyond the operators
impl Tensor {
    /// `log(exp(x) + exp(other))`, without overflow.
    #[track_caller]
    pub fn logaddexp(&self, other: &Tensor) -> Tensor {
        let _method = method("logaddexp");
        // Equal infinities have no difference; what their distance of 0 adds is lost in them.
        let apart = (self - other).abs().masked_fill(&self.eq(other), 0);
        self.maximum(other) + (-apart).exp().log1p()
    }

    /// `log2(2^x + 2^other)`, without overflow.
    #[track_caller]
    pub fn logaddexp2(&self, other: &Tensor) -> Tensor {
        let _method = method("logaddexp2");
        (self * LN_2).logaddexp(&(other * LN_2)) / LN_2
    }

    /// `sqrt(x² + other²)`, without overflow.
    #[track_caller]
    pub fn hypot(&self, other: &Tensor) -> Tensor {
        let _method = method("hypot");
        let (a, b) = (self.abs(), other.abs());
        let (long, short) = (a.maximum(&b), a.minimum(&b));
        let plain = long.eq(0).bitwise_or(long.isinf());
        let ratio = (short / long.masked_fill(&plain, 1)).masked_fill(&plain, 0);
        long * (ratio.square() + 1).sqrt()
    }

    /// The way from x to `end`: x at a weight of 0, `end` at 1. The weight is a number or a tensor.
    #[track_caller]
    pub fn lerp(&self, end: &Tensor, weight: impl Operand) -> Tensor {
        let _method = method("lerp");
        let weight = weight.meet(self).0;
        // From the nearer end, so that both are exact.
        let way = end - self;
        let from_end = end - &way * (1.0 - &*weight);
        weight.abs().lt(0.5).where_(&(self + way * &*weight), &from_end)
    }

    /// The size of x with the sign of `sign`; that of a negative 0 counts.
    #[track_caller]
    pub fn copysign(&self, sign: impl Operand) -> Tensor {
        let _method = method("copysign");
        let (sign, dtype) = sign.meet(self);
        let dtype = if dtype.is_float() { dtype } else { DType::F32 };
        let size = self.to_dtype(dtype).abs();
        sign.to_dtype(dtype).signbit().where_(&-&size, &size)
    }

    /// Whether the sign is negative, that of 0 included. NaN counts as positive.
    #[track_caller]
    pub fn signbit(&self) -> Tensor {
        let _method = method("signbit");
        if !self.dtype().unpacked().is_float() {
            return self.lt(0);
        }
        let x = self.detach();
        x.lt(0).bitwise_or(x.eq(0).bitwise_and(x.reciprocal().lt(0)))
    }

    /// NaN and the infinities replaced by numbers: 0 and the dtype's largest and smallest where none are given. Where
    /// one was replaced, the gradient is 0.
    #[track_caller]
    pub fn nan_to_num(&self, nan: Option<f64>, posinf: Option<f64>, neginf: Option<f64>) -> Tensor {
        let _method = method("nan_to_num");
        let most = match self.dtype().unpacked() {
            DType::F64 => f64::MAX,
            DType::F32 => f32::MAX as f64,
            DType::BF16 => f32::from_bits(0x7f7f_0000) as f64,
            DType::F16 => 65504.0,
            _ => return self.clone(),
        };
        let (up, down) = (self.eq(f64::INFINITY), self.eq(f64::NEG_INFINITY));
        let x = self.masked_fill(&self.isnan(), nan.unwrap_or(0.0));
        x.masked_fill(&up, posinf.unwrap_or(most)).masked_fill(&down, neginf.unwrap_or(-most))
    }

    /// What is behind the point: `x - trunc(x)`, with the sign of x.
    #[track_caller]
    pub fn frac(&self) -> Tensor {
        let _method = method("frac");
        self - self.trunc()
    }

    /// Degrees as radians.
    #[doc(alias("radians"))]
    #[track_caller]
    pub fn deg2rad(&self) -> Tensor {
        let _method = method("deg2rad");
        self * (std::f64::consts::PI / 180.0)
    }

    /// Radians as degrees.
    #[doc(alias("degrees"))]
    #[track_caller]
    pub fn rad2deg(&self) -> Tensor {
        let _method = method("rad2deg");
        self * (180.0 / std::f64::consts::PI)
    }

    /// 0 where x is negative, 1 where it is positive, `values` where it is 0.
    #[track_caller]
    pub fn heaviside(&self, values: &Tensor) -> Tensor {
        let _method = method("heaviside");
        let step = self.gt(0).to_dtype(self.dtype().unpacked());
        let step = self.isnan().where_(&self.detach(), &step);
        self.eq(0).where_(values, &step)
    }

    /// The larger of the two; a number wins over NaN.
    #[track_caller]
    pub fn fmax(&self, other: &Tensor) -> Tensor {
        let _method = method("fmax");
        let most = self.maximum(other);
        self.isnan().where_(other, &other.isnan().where_(self, &most))
    }

    /// The smaller of the two; a number wins over NaN.
    #[track_caller]
    pub fn fmin(&self, other: &Tensor) -> Tensor {
        let _method = method("fmin");
        let least = self.minimum(other);
        self.isnan().where_(other, &other.isnan().where_(self, &least))
    }

    /// `x + value * a * b`.
    #[track_caller]
    pub fn addcmul(&self, a: &Tensor, b: &Tensor, value: impl Into<Number>) -> Tensor {
        let _method = method("addcmul");
        self + a * b * value.into()
    }

    /// `x + value * a / b`.
    #[track_caller]
    pub fn addcdiv(&self, a: &Tensor, b: &Tensor, value: impl Into<Number>) -> Tensor {
        let _method = method("addcdiv");
        self + a / b * value.into()
    }

    /// x where it is above a bound, else the bound.
    #[track_caller]
    pub fn clamp_min(&self, min: impl Into<Number>) -> Tensor {
        let _method = method("clamp_min");
        self.clamp(Some(min.into()), None)
    }

    /// x where it is below a bound, else the bound.
    #[track_caller]
    pub fn clamp_max(&self, max: impl Into<Number>) -> Tensor {
        let _method = method("clamp_max");
        self.clamp(None, Some(max.into()))
    }

    /// Whether elements are within `atol + rtol * |other|` of each other: bool. Equal infinities are; NaN is close to NaN
    /// with `equal_nan` only.
    #[track_caller]
    pub fn isclose(&self, other: &Tensor, rtol: f64, atol: f64, equal_nan: bool) -> Tensor {
        let _method = method("isclose");
        let (a, b) = (self.detach(), other.detach());
        let same = a.eq(&b);
        if !a.dtype().is_float() && !b.dtype().is_float() && rtol == 0.0 && atol == 0.0 {
            return same;
        }
        let (wide, far) = (a.to_dtype(DType::F64), b.to_dtype(DType::F64));
        let near = (wide - &far).abs().le(far.abs() * rtol + atol);
        let close = same.bitwise_or(near.bitwise_and(a.isfinite()).bitwise_and(b.isfinite()));
        match equal_nan {
            true => close.bitwise_or(a.isnan().bitwise_and(b.isnan())),
            false => close,
        }
    }
}
