//! Rust types that are tensor elements, and numbers that may stand beside a tensor.

use half::{bf16, f16};
use kiln_ir::{DType, Scalar};

/// A Rust type that a tensor can hold.
pub trait Element: Copy + Send + Sync + 'static {
    /// Its dtype.
    const DTYPE: DType;
    /// The elements in little-endian bytes, without a copy where that is possible.
    fn into_bytes(items: Vec<Self>) -> Vec<u8>;
    /// Elements from bytes that need not be aligned.
    fn from_bytes(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! elements {
    ($($t:ty => $dtype:ident;)*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            fn into_bytes(items: Vec<$t>) -> Vec<u8> {
                bytemuck::cast_slice(&items).to_vec()
            }
            fn from_bytes(bytes: &[u8]) -> Vec<$t> {
                bytemuck::pod_collect_to_vec(bytes)
            }
        }
    )*};
}
elements! {
    f64 => F64; f32 => F32; f16 => F16; bf16 => BF16;
    i64 => I64; i32 => I32; i16 => I16; i8 => I8;
    u64 => U64; u32 => U32; u16 => U16; u8 => U8;
}

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn into_bytes(items: Vec<bool>) -> Vec<u8> {
        items.into_iter().map(u8::from).collect()
    }
    fn from_bytes(bytes: &[u8]) -> Vec<bool> {
        bytes.iter().map(|&b| b != 0).collect()
    }
}

/// A number beside a tensor. It takes the tensor's dtype, except that a float beside integers makes them f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A real number.
    Float(f64),
    /// An integer.
    Int(i64),
}

impl Number {
    /// The dtype of a tensor of `dtype` combined with this number.
    pub fn meets(self, dtype: DType) -> DType {
        match (self, dtype.unpacked()) {
            (Number::Float(_), d) if !d.is_float() => DType::F32,
            (Number::Int(_), DType::Bool) => DType::I64,
            (_, d) => d,
        }
    }

    /// The number as a scalar of `dtype`.
    pub fn scalar(self, dtype: DType) -> Scalar {
        match self {
            Number::Float(x) => Scalar::from_f64(dtype, x),
            Number::Int(x) => Scalar::from_i64(dtype, x),
        }
    }

    /// The number as f64.
    pub fn to_f64(self) -> f64 {
        match self {
            Number::Float(x) => x,
            Number::Int(x) => x as f64,
        }
    }
}

macro_rules! numbers {
    ($($t:ty => $variant:ident($as:ty);)*) => {$(
        impl From<$t> for Number {
            fn from(x: $t) -> Number {
                Number::$variant(x as $as)
            }
        }
    )*};
}
numbers! {
    f64 => Float(f64); f32 => Float(f64);
    i64 => Int(i64); i32 => Int(i64); i16 => Int(i64); i8 => Int(i64);
    u32 => Int(i64); u16 => Int(i64); u8 => Int(i64); usize => Int(i64);
}
