//! Elementwise methods, one for each line of the tables, and the operators `+ - * / %` on values, references and numbers.

use crate::{DType, Number, Tensor};
use kiln_ir::{Binary, Domain, Op, Shape, Unary, promote};
use std::borrow::Cow;

/// What may stand on the right of an elementwise operation: a tensor or a number.
pub trait Operand {
    /// The operand as a tensor that meets `like`, with the dtype they meet in.
    #[track_caller]
    fn meet<'a>(self, like: &Tensor) -> (Cow<'a, Tensor>, DType)
    where
        Self: 'a;
}

impl Operand for &Tensor {
    #[track_caller]
    fn meet<'a>(self, like: &Tensor) -> (Cow<'a, Tensor>, DType)
    where
        Self: 'a,
    {
        (Cow::Borrowed(self), meet(like, self))
    }
}

impl Operand for Tensor {
    #[track_caller]
    fn meet<'a>(self, like: &Tensor) -> (Cow<'a, Tensor>, DType) {
        let dtype = meet(like, &self);
        (Cow::Owned(self), dtype)
    }
}

impl<N: Into<Number>> Operand for N {
    #[track_caller]
    fn meet<'a>(self, like: &Tensor) -> (Cow<'a, Tensor>, DType)
    where
        N: 'a,
    {
        let number = self.into();
        let dtype = number.meets(like.dtype());
        let op = Op::Full { shape: Shape::default(), value: number.scalar(dtype) };
        (Cow::Owned(Tensor::create(op, like.value.device())), dtype)
    }
}

/// The dtype in which two tensors meet: [`promote`]'s, except that a tensor of rank 0 does not widen another within
/// its own kind (bool, integer, float).
fn meet(a: &Tensor, b: &Tensor) -> DType {
    let (da, db) = (a.dtype().unpacked(), b.dtype().unpacked());
    if da == db {
        return da;
    }
    let kind = |d: DType| if d.is_float() { 2 } else { d.is_int() as u8 };
    match (a.rank() == 0, b.rank() == 0) {
        (true, false) if kind(da) <= kind(db) => db,
        (false, true) if kind(db) <= kind(da) => da,
        _ => promote(da, db),
    }
}

#[track_caller]
fn unary(op: Unary, x: &Tensor) -> Tensor {
    let dtype = x.dtype().unpacked();
    match op {
        Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc if dtype.is_int() => x.clone(),
        _ if op.domain() == Domain::Test && dtype == DType::Bool => {
            Tensor::one(Op::Unary(op), &[&x.to_dtype(DType::U8)])
        }
        _ if op.domain() == Domain::Float && !dtype.is_float() => {
            Tensor::one(Op::Unary(op), &[&x.to_dtype(DType::F32)])
        }
        _ => Tensor::one(Op::Unary(op), &[x]),
    }
}

#[track_caller]
fn binary(op: Binary, a: &Tensor, b: impl Operand) -> Tensor {
    let (b, mut dtype) = b.meet(a);
    if op.domain() == Domain::Float && !dtype.is_float() {
        dtype = DType::F32;
    }
    // On bool, sums and products are logical, as in PyTorch.
    let op = match (dtype, op) {
        (DType::Bool, Binary::Add | Binary::Maximum) => Binary::Or,
        (DType::Bool, Binary::Mul | Binary::Minimum) => Binary::And,
        (_, op) => op,
    };
    match (a.dtype() == dtype, b.dtype() == dtype) {
        (true, true) => Tensor::one(Op::Binary(op), &[a, &b]),
        _ => Tensor::one(Op::Binary(op), &[&a.to_dtype(dtype), &b.to_dtype(dtype)]),
    }
}

/// A method under the other names that PyTorch has for it.
macro_rules! aliased {
    (abs $($item:tt)*) => { #[doc(alias("absolute"))] $($item)* };
    (neg $($item:tt)*) => { #[doc(alias("negative"))] $($item)* };
    (asin $($item:tt)*) => { #[doc(alias("arcsin"))] $($item)* };
    (acos $($item:tt)*) => { #[doc(alias("arccos"))] $($item)* };
    (atan $($item:tt)*) => { #[doc(alias("arctan"))] $($item)* };
    (asinh $($item:tt)*) => { #[doc(alias("arcsinh"))] $($item)* };
    (acosh $($item:tt)*) => { #[doc(alias("arccosh"))] $($item)* };
    (atanh $($item:tt)*) => { #[doc(alias("arctanh"))] $($item)* };
    (sigmoid $($item:tt)*) => { #[doc(alias("expit"))] $($item)* };
    (log_sigmoid $($item:tt)*) => { #[doc(alias("logsigmoid"))] $($item)* };
    (silu $($item:tt)*) => { #[doc(alias("swish"))] $($item)* };
    (gelu_tanh $($item:tt)*) => { #[doc(alias("gelu"))] $($item)* };
    (trunc $($item:tt)*) => { #[doc(alias("fix"))] $($item)* };
    (bitwise_not $($item:tt)*) => { #[doc(alias("invert"))] $($item)* };
    (sub $($item:tt)*) => { #[doc(alias("subtract"))] $($item)* };
    (mul $($item:tt)*) => { #[doc(alias("multiply"))] $($item)* };
    (div $($item:tt)*) => { #[doc(alias("divide", "true_divide"))] $($item)* };
    (pow $($item:tt)*) => { #[doc(alias("power", "float_power"))] $($item)* };
    (atan2 $($item:tt)*) => { #[doc(alias("arctan2"))] $($item)* };
    (ne $($item:tt)*) => { #[doc(alias("not_equal"))] $($item)* };
    (lt $($item:tt)*) => { #[doc(alias("less"))] $($item)* };
    (le $($item:tt)*) => { #[doc(alias("less_equal"))] $($item)* };
    (gt $($item:tt)*) => { #[doc(alias("greater"))] $($item)* };
    (ge $($item:tt)*) => { #[doc(alias("greater_equal"))] $($item)* };
    ($name:ident $($item:tt)*) => { $($item)* };
}

macro_rules! unary_methods {
    ($($variant:ident $name:ident $doc:literal $columns:tt)*) => {
        /// # Elementwise: of one operand
        #[allow(clippy::should_implement_trait)]
        impl Tensor {
            $(
                aliased! { $name
                    #[doc = $doc]
                    #[track_caller]
                    pub fn $name(&self) -> Tensor {
                        unary(Unary::$variant, self)
                    }
                }
            )*
        }
    };
}
kiln_ir::unary_table!(unary_methods);

macro_rules! binary_methods {
    ($($variant:ident $name:ident $doc:literal $columns:tt)*) => {
        /// # Elementwise: of two operands
        #[allow(clippy::should_implement_trait)]
        impl Tensor {
            $(
                aliased! { $name
                    #[doc = $doc]
                    #[doc = "Operands broadcast; a number takes the tensor's dtype."]
                    #[track_caller]
                    pub fn $name(&self, other: impl Operand) -> Tensor {
                        binary(Binary::$variant, self, other)
                    }
                }
            )*
        }
    };
}
kiln_ir::binary_table!(binary_methods);

macro_rules! operators {
    ($($trait:ident $method:ident $variant:ident;)*) => {$(
        impl<O: Operand> std::ops::$trait<O> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: O) -> Tensor {
                binary(Binary::$variant, &self, other)
            }
        }
        impl<O: Operand> std::ops::$trait<O> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: O) -> Tensor {
                binary(Binary::$variant, self, other)
            }
        }
        operators!(@numbers $trait $method $variant f64 i64);
    )*};
    (@numbers $trait:ident $method:ident $variant:ident $($n:ty)*) => {$(
        impl std::ops::$trait<Tensor> for $n {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: Tensor) -> Tensor {
                binary(Binary::$variant, &self.meet(&other).0, other)
            }
        }
        impl std::ops::$trait<&Tensor> for $n {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: &Tensor) -> Tensor {
                binary(Binary::$variant, &self.meet(other).0, other)
            }
        }
    )*};
}
operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
    Rem rem Remainder;
}

impl std::ops::Neg for Tensor {
    type Output = Tensor;
    #[track_caller]
    fn neg(self) -> Tensor {
        unary(Unary::Neg, &self)
    }
}

impl std::ops::Neg for &Tensor {
    type Output = Tensor;
    #[track_caller]
    fn neg(self) -> Tensor {
        unary(Unary::Neg, self)
    }
}

impl std::ops::Not for &Tensor {
    type Output = Tensor;
    #[track_caller]
    fn not(self) -> Tensor {
        unary(Unary::Not, self)
    }
}
