//! Typed owned arrays: what the interpreter computes with.

use crate::memory;
use half::{bf16, f16};
use kiln_ir::{DType, Meta, Shape};

/// The elements of a value in row-major order, one variant for each dtype.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)]
pub enum Array {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I64(Vec<i64>),
    I32(Vec<i32>),
    I16(Vec<i16>),
    I8(Vec<i8>),
    U64(Vec<u64>),
    U32(Vec<u32>),
    U16(Vec<u16>),
    U8(Vec<u8>),
    Bool(Vec<bool>),
    /// Packed blocks, see [`kiln_ir::quant`].
    Q8(Vec<u8>),
    /// Packed blocks, see [`kiln_ir::quant`].
    Q4(Vec<u8>),
}

/// An array with its extents.
#[derive(Clone, PartialEq, Debug)]
pub struct Value {
    /// Extents.
    pub shape: Shape,
    /// Elements, as many as the shape has.
    pub data: Array,
}

/// A Rust type that is the element of some plain dtype.
pub trait Element: Copy + PartialOrd + Default + Send + Sync + std::fmt::Debug + 'static {
    /// Its dtype.
    const DTYPE: DType;
    /// An array of these elements.
    fn wrap(data: Vec<Self>) -> Array;
    /// The elements of an array of this dtype.
    fn slice(array: &Array) -> Option<&[Self]>;
    /// Whether it is NaN: never for integers and bool.
    #[allow(clippy::eq_op)]
    fn is_nan(self) -> bool {
        self != self
    }
}

macro_rules! elements {
    ($($t:ty, $variant:ident;)*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$variant;
            fn wrap(data: Vec<$t>) -> Array {
                Array::$variant(data)
            }
            fn slice(array: &Array) -> Option<&[$t]> {
                if let Array::$variant(data) = array { Some(data) } else { None }
            }
        }
    )*};
}
elements! {
    f64, F64; f32, F32; f16, F16; bf16, BF16;
    i64, I64; i32, I32; i16, I16; i8, I8;
    u64, U64; u32, U32; u16, U16; u8, U8;
    bool, Bool;
}

/// Evaluates `$body` with `$x` the elements of an array of integers.
macro_rules! with_ints {
    ($array:expr, $x:ident => $body:expr, $($other:pat => $else:expr),* $(,)?) => {
        match $array {
            $crate::reference::Array::I64($x) => $body,
            $crate::reference::Array::I32($x) => $body,
            $crate::reference::Array::I16($x) => $body,
            $crate::reference::Array::I8($x) => $body,
            $crate::reference::Array::U64($x) => $body,
            $crate::reference::Array::U32($x) => $body,
            $crate::reference::Array::U16($x) => $body,
            $crate::reference::Array::U8($x) => $body,
            $($other => $else,)*
            other => unreachable!("infer lets no {} operand come here", other.dtype()),
        }
    };
}

/// Evaluates `$body` with `$x` the elements of an array of floats.
macro_rules! with_floats {
    ($array:expr, $x:ident => $body:expr) => {
        match $array {
            $crate::reference::Array::F64($x) => $body,
            $crate::reference::Array::F32($x) => $body,
            $crate::reference::Array::F16($x) => $body,
            $crate::reference::Array::BF16($x) => $body,
            other => unreachable!("infer lets no {} operand come here", other.dtype()),
        }
    };
}

/// Evaluates `$body` with `$x` the elements of an array of floats or integers.
macro_rules! with_numbers {
    ($array:expr, $x:ident => $body:expr) => {
        $crate::reference::array::with_ints!($array, $x => $body,
            $crate::reference::Array::F64($x) => $body,
            $crate::reference::Array::F32($x) => $body,
            $crate::reference::Array::F16($x) => $body,
            $crate::reference::Array::BF16($x) => $body,
        )
    };
}

/// Evaluates `$body` with `$x` the elements of an array of any plain dtype.
macro_rules! with_plain {
    ($array:expr, $x:ident => $body:expr) => {
        $crate::reference::array::with_ints!($array, $x => $body,
            $crate::reference::Array::F64($x) => $body,
            $crate::reference::Array::F32($x) => $body,
            $crate::reference::Array::F16($x) => $body,
            $crate::reference::Array::BF16($x) => $body,
            $crate::reference::Array::Bool($x) => $body,
        )
    };
}

pub(super) use {with_floats, with_ints, with_numbers, with_plain};

impl Array {
    /// Its dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Array::F64(_) => DType::F64,
            Array::F32(_) => DType::F32,
            Array::F16(_) => DType::F16,
            Array::BF16(_) => DType::BF16,
            Array::I64(_) => DType::I64,
            Array::I32(_) => DType::I32,
            Array::I16(_) => DType::I16,
            Array::I8(_) => DType::I8,
            Array::U64(_) => DType::U64,
            Array::U32(_) => DType::U32,
            Array::U16(_) => DType::U16,
            Array::U8(_) => DType::U8,
            Array::Bool(_) => DType::Bool,
            Array::Q8(_) => DType::Q8,
            Array::Q4(_) => DType::Q4,
        }
    }

    /// The elements, which `infer` has made sure are of this type.
    pub(super) fn typed<T: Element>(&self) -> &[T] {
        T::slice(self).unwrap_or_else(|| unreachable!("{} where {} was inferred", self.dtype(), T::DTYPE))
    }

    /// The elements of row-major bytes, which need no alignment; a bool byte that is not 0 is true.
    pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Array {
        fn collect<T: bytemuck::Pod + bytemuck::Zeroable>(bytes: &[u8]) -> Vec<T> {
            let mut out = memory::filled(bytes.len() / size_of::<T>(), T::zeroed());
            bytemuck::cast_slice_mut(&mut out).copy_from_slice(bytes);
            out
        }
        match dtype {
            DType::F64 => Array::F64(collect(bytes)),
            DType::F32 => Array::F32(collect(bytes)),
            DType::F16 => Array::F16(collect(bytes)),
            DType::BF16 => Array::BF16(collect(bytes)),
            DType::I64 => Array::I64(collect(bytes)),
            DType::I32 => Array::I32(collect(bytes)),
            DType::I16 => Array::I16(collect(bytes)),
            DType::I8 => Array::I8(collect(bytes)),
            DType::U64 => Array::U64(collect(bytes)),
            DType::U32 => Array::U32(collect(bytes)),
            DType::U16 => Array::U16(collect(bytes)),
            DType::U8 => Array::U8(memory::copied(bytes)),
            DType::Bool => Array::Bool(memory::collect(bytes.len(), bytes.iter().map(|&b| b != 0))),
            DType::Q8 => Array::Q8(memory::copied(bytes)),
            DType::Q4 => Array::Q4(memory::copied(bytes)),
        }
    }

    /// Its elements as row-major bytes; a bool is 0 or 1.
    pub fn as_bytes(&self) -> &[u8] {
        use bytemuck::cast_slice;
        match self {
            Array::F64(x) => cast_slice(x),
            Array::F32(x) => cast_slice(x),
            Array::F16(x) => cast_slice(x),
            Array::BF16(x) => cast_slice(x),
            Array::I64(x) => cast_slice(x),
            Array::I32(x) => cast_slice(x),
            Array::I16(x) => cast_slice(x),
            Array::I8(x) => cast_slice(x),
            Array::U64(x) => cast_slice(x),
            Array::U32(x) => cast_slice(x),
            Array::U16(x) => cast_slice(x),
            Array::U8(x) | Array::Q8(x) | Array::Q4(x) => x,
            Array::Bool(x) => cast_slice(x),
        }
    }

    /// The same elements once more.
    pub(super) fn copied(&self) -> Array {
        Array::from_bytes(self.dtype(), self.as_bytes())
    }
}

impl<T: Element> From<Vec<T>> for Array {
    fn from(data: Vec<T>) -> Array {
        T::wrap(data)
    }
}

impl Value {
    /// A value of these elements.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    #[track_caller]
    pub fn new<T: Element>(shape: impl Into<Shape>, data: Vec<T>) -> Value {
        let shape = shape.into();
        assert_eq!(data.len(), shape.numel(), "elements of shape {shape:?}");
        Value { shape, data: data.into() }
    }

    /// Its dtype and shape.
    pub fn meta(&self) -> Meta {
        Meta { dtype: self.data.dtype(), shape: self.shape }
    }

    /// Its elements, if they are of this type.
    pub fn slice<T: Element>(&self) -> Option<&[T]> {
        T::slice(&self.data)
    }

    /// A value from row-major bytes, which need no alignment; a bool byte that is not 0 is true.
    ///
    /// # Panics
    /// If the meta has another number of bytes.
    #[track_caller]
    pub fn from_bytes(meta: Meta, bytes: &[u8]) -> Value {
        assert_eq!(bytes.len(), meta.bytes(), "bytes of {meta}");
        Value { shape: meta.shape, data: Array::from_bytes(meta.dtype, bytes) }
    }

    /// Its elements as row-major bytes; a bool is 0 or 1.
    pub fn to_bytes(&self) -> Vec<u8> {
        memory::copied(self.as_bytes())
    }

    /// Its elements as row-major bytes; a bool is 0 or 1.
    pub fn as_bytes(&self) -> &[u8] {
        self.data.as_bytes()
    }

    /// The same value once more.
    pub(super) fn copied(&self) -> Value {
        Value { shape: self.shape, data: self.data.copied() }
    }

    /// All zeros.
    pub fn zeros(meta: Meta) -> Value {
        Value::from_bytes(meta, &memory::filled(meta.bytes(), 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_whatever_their_alignment() {
        for dtype in DType::ALL {
            let meta = Meta::new(dtype, [2, 32]);
            let bytes: Vec<u8> = (0..meta.bytes() + 1)
                .map(|i| if dtype == DType::Bool { i % 2 } else { i % 100 } as u8)
                .collect();
            let value = Value::from_bytes(meta, &bytes[1..]);
            assert_eq!(value.meta(), meta);
            assert_eq!(value.to_bytes(), &bytes[1..], "{dtype}");
        }
        assert_eq!(Array::from_bytes(DType::Bool, &[0, 1, 7]), Array::Bool(vec![false, true, true]));
    }
}
