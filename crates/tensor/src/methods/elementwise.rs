//! Elementwise methods beyond the tables: conversion, choice, and activations with parameters.

use crate::operators::Operand;
use crate::{DType, Number, Tensor};
use kiln_device::method;
use kiln_ir::{Binary, Op};

/// # Elementwise: conversion, choice, logic
impl Tensor {
    /// The elements as another dtype. Floats are rounded to nearest, cut towards 0 on the way to integers, and packed
    /// on the way to quantised dtypes; to bool means "is not 0".
    #[doc(alias("to", "type", "float", "half", "long", "astype"))]
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Tensor {
        let _method = method("to_dtype");
        let from = self.dtype();
        if from == dtype {
            return self.clone();
        }
        // Packed values are read and written as floats only.
        if dtype.is_quantised() && !from.is_float() || from.is_quantised() && !dtype.is_float() {
            return Tensor::one(Op::Cast(DType::F32), &[self]).to_dtype(dtype);
        }
        Tensor::one(Op::Cast(dtype), &[self])
    }

    /// `a` where this bool tensor holds, else `b`; all three broadcast. What is not chosen gets a gradient of 0, even
    /// where it is NaN.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::from_slice(&[-1.0f32, 4.0], [2], &Device::cpu());
    /// let y = x.gt(0.0).where_(&x.sqrt(), &x);
    /// assert_eq!(y.to_vec::<f32>().unwrap(), [-1.0, 2.0]);
    /// ```
    #[doc(alias("where"))]
    #[track_caller]
    pub fn where_(&self, a: &Tensor, b: &Tensor) -> Tensor {
        let _method = method("where_");
        let dtype = b.meet(a).1;
        Tensor::one(Op::Select, &[self, &a.to_dtype(dtype), &b.to_dtype(dtype)])
    }

    /// `value` where `mask` holds, else this tensor.
    #[track_caller]
    pub fn masked_fill(&self, mask: &Tensor, value: impl Into<Number>) -> Tensor {
        let _method = method("masked_fill");
        Tensor::one(Op::Select, &[mask, &self.constant(value), self])
    }

    /// The elements held between two bounds, either of which may be missing. Where the bounds cross, the upper one
    /// wins. At a bound and beyond it the gradient is 0.
    #[doc(alias("clip"))]
    #[track_caller]
    pub fn clamp<N: Into<Number>>(&self, min: Option<N>, max: Option<N>) -> Tensor {
        let _method = method("clamp");
        let (min, max) = (min.map(N::into), max.map(N::into));
        let mut dtype = self.dtype().unpacked();
        for bound in [min, max].into_iter().flatten() {
            dtype = bound.meets(dtype);
        }
        let x = self.to_dtype(dtype);
        let min = min.map(|bound| x.constant(held(bound, dtype)));
        let max = max.map(|bound| x.constant(held(bound, dtype)));
        let (inside, bounded) = match (&min, &max) {
            (None, None) => return x,
            (Some(min), None) => (x.gt(min), x.detach().maximum(min)),
            (None, Some(max)) => (x.lt(max), x.detach().minimum(max)),
            (Some(min), Some(max)) => {
                (x.gt(min).bitwise_and(x.lt(max)), x.detach().maximum(min).minimum(max))
            }
        };
        inside.where_(&x, &bounded)
    }

    /// A fixed power. The half powers are roots, so that they are NaN below 0, -inf included; small whole ones are
    /// products.
    #[doc(alias("pow"))]
    #[track_caller]
    pub fn pow_scalar(&self, exponent: impl Into<Number>) -> Tensor {
        let _method = method("pow_scalar");
        let exponent = exponent.into();
        let x = self.to_dtype(exponent.meets(self.dtype()));
        match exponent.to_f64() {
            2.0 => x.square(),
            0.5 => x.sqrt(),
            -0.5 if x.dtype().is_float() => x.rsqrt(),
            -1.0 if x.dtype().is_float() => x.reciprocal(),
            _ => x.pow(exponent),
        }
    }

    /// x where it is positive, else `slope * x`.
    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Tensor {
        let _method = method("leaky_relu");
        self.gt(0).where_(self, &(self * slope))
    }

    /// x where it is positive, else `alpha * (exp(x) - 1)`.
    #[track_caller]
    pub fn elu(&self, alpha: f64) -> Tensor {
        let _method = method("elu");
        let positive = self.gt(0);
        // A large x would overflow in the branch that is not taken.
        let safe = self.masked_fill(&positive, 0);
        positive.where_(self, &(safe.expm1() * alpha))
    }

    /// `log(1 + exp(beta * x)) / beta`, and x itself where `beta * x` is above `threshold`.
    #[track_caller]
    pub fn softplus_with(&self, beta: f64, threshold: f64) -> Tensor {
        let _method = method("softplus_with");
        let scaled = self * beta;
        let linear = scaled.gt(threshold);
        let safe = scaled.masked_fill(&linear, 0);
        linear.where_(self, &(safe.exp().log1p() / beta))
    }

    /// Whether both are not 0.
    #[track_caller]
    pub fn logical_and(&self, other: &Tensor) -> Tensor {
        let _method = method("logical_and");
        Tensor::one(Op::Binary(Binary::And), &[&self.truth(), &other.truth()])
    }

    /// Whether at least one is not 0.
    #[track_caller]
    pub fn logical_or(&self, other: &Tensor) -> Tensor {
        let _method = method("logical_or");
        Tensor::one(Op::Binary(Binary::Or), &[&self.truth(), &other.truth()])
    }

    /// Whether exactly one is not 0.
    #[track_caller]
    pub fn logical_xor(&self, other: &Tensor) -> Tensor {
        let _method = method("logical_xor");
        Tensor::one(Op::Binary(Binary::Xor), &[&self.truth(), &other.truth()])
    }

    /// Whether it is 0.
    #[doc(alias("not"))]
    #[track_caller]
    pub fn logical_not(&self) -> Tensor {
        let _method = method("logical_not");
        self.truth().bitwise_not()
    }

    /// Whether it is not 0, of any dtype; NaN is not 0.
    #[track_caller]
    pub(super) fn truth(&self) -> Tensor {
        if self.dtype() == DType::Bool { self.clone() } else { self.ne(0) }
    }

    /// A number of this tensor's dtype and device, rank 0.
    #[track_caller]
    pub(crate) fn constant(&self, value: impl Into<Number>) -> Tensor {
        Tensor::full([], value, self.dtype().unpacked(), self.value.device())
    }

    /// Half-precision floats as f32, so that what is composed of several operations rounds once.
    #[track_caller]
    pub(super) fn widened(&self) -> Tensor {
        match self.dtype() {
            DType::F16 | DType::BF16 => self.to_dtype(DType::F32),
            _ => self.clone(),
        }
    }

    /// The square root with a gradient of 0, not infinity, at 0.
    #[track_caller]
    pub(super) fn sqrt_flat_at_zero(&self) -> Tensor {
        let zero = self.eq(0);
        self.masked_fill(&zero, 1).sqrt().masked_fill(&zero, 0)
    }
}

/// The nearest number that `dtype` holds.
fn held(bound: Number, dtype: DType) -> Number {
    let (least, most) = match dtype {
        DType::I32 => (i32::MIN as i64, i32::MAX as i64),
        DType::I16 => (i16::MIN as i64, i16::MAX as i64),
        DType::I8 => (i8::MIN as i64, i8::MAX as i64),
        DType::U64 => (0, i64::MAX),
        DType::U32 => (0, u32::MAX as i64),
        DType::U16 => (0, u16::MAX as i64),
        DType::U8 => (0, u8::MAX as i64),
        DType::Bool => (0, 1),
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::I64 | DType::Q8 | DType::Q4 => {
            return bound;
        }
    };
    match bound {
        Number::Int(bound) => Number::Int(bound.clamp(least, most)),
        Number::Float(_) => bound,
    }
}
