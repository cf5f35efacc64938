//! The written form of an operation: a name and named fields. Text, wire, signature and relative forms all come from
//! [`Op::fields`] (out) and [`Op::build`] (in), which are made from one list of fields (`op/list.rs`).

use crate::op::*;
use crate::{Binary, DType, Dims, Scalar, Shape, Unary};
use std::sync::Arc;

/// One attribute on its way in or out.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Field {
    Shape(Shape),
    Scalar(Scalar),
    DType(DType),
    Axis(u8),
    Axes(AxisSet),
    Order(Dims<u8>),
    Flag(bool),
    /// A bound along an axis: a size that may differ between two runs of the same step.
    Bound(usize),
    /// A key or offset of a random stream.
    Word(u64),
    Real(Real),
    Triple([u32; 3]),
    Count(u32),
    Name(String),
    Bytes(Vec<u8>),
}

impl Field {
    /// The word for this kind of field in a signature.
    pub fn kind(&self) -> &'static str {
        match self {
            Field::Shape(_) => "shape",
            Field::Scalar(_) => "scalar",
            Field::DType(_) => "dtype",
            Field::Axis(_) => "axis",
            Field::Axes(_) => "axes",
            Field::Order(_) => "order",
            Field::Flag(_) => "flag",
            Field::Bound(_) => "bound",
            Field::Word(_) => "word",
            Field::Real(_) => "real",
            Field::Triple(_) => "triple",
            Field::Count(_) => "count",
            Field::Name(_) => "name",
            Field::Bytes(_) => "bytes",
        }
    }
}

/// Takes an operation's fields in order.
pub trait FieldSink {
    /// Takes one field.
    fn put(&mut self, key: &'static str, field: Field);
}

/// Gives an operation's fields in order. `like` tells the kind that is wanted.
pub trait FieldSource {
    /// The next field, of the kind of `like`.
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError>;
}

/// Why a written operation could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FormError {
    #[error("unknown operation `{name}`")]
    UnknownOp { name: String },
    #[error("missing or malformed field `{key}`")]
    BadField { key: &'static str },
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $get:ident $variant:ident $ty:ty = $like:expr;)*) => {
        /// Reads a field of a kind.
        pub(crate) trait Get: FieldSource {
            $(fn $get(&mut self, key: &'static str) -> Result<$ty, FormError> {
                match self.get(key, Field::$variant($like))? {
                    Field::$variant(x) => Ok(x),
                    _ => Err(FormError::BadField { key }),
                }
            })*
        }
        impl<S: FieldSource + ?Sized> Get for S {}

        /// Writes a field of a kind.
        pub(crate) trait Put: FieldSink {
            $(fn $get(&mut self, key: &'static str, value: $ty) {
                self.put(key, Field::$variant(value));
            })*
        }
        impl<S: FieldSink + ?Sized> Put for S {}
    };
}
kinds! {
    shape Shape Shape = Shape::default();
    scalar Scalar Scalar = Scalar::from_bits(DType::F32, 0);
    dtype DType DType = DType::F32;
    axis Axis u8 = 0;
    axes Axes AxisSet = AxisSet::default();
    order Order Dims<u8> = Dims::default();
    flag Flag bool = false;
    bound Bound usize = 0;
    word Word u64 = 0;
    real Real Real = Real::new(0.0);
    triple Triple [u32; 3] = [0; 3];
    count Count u32 = 0;
    text Name String = String::new();
    bytes Bytes Vec<u8> = Vec::new();
}

impl Op {
    /// The names of all operations that can be written; custom ones share the last.
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<&'static str> = STRUCTURED.to_vec();
        names.extend(Unary::ALL.iter().map(|op| op.name()));
        names.extend(Binary::ALL.iter().map(|op| op.name()));
        names.push("custom");
        names
    }

    /// The operation named `name` with the fields that `source` gives.
    pub fn build(name: &str, s: &mut (impl FieldSource + ?Sized)) -> Result<Op, FormError> {
        if let Some(op) = Unary::from_name(name) {
            return Ok(Op::Unary(op));
        }
        if let Some(op) = Binary::from_name(name) {
            return Ok(Op::Binary(op));
        }
        let s = &mut Adapter(s);
        if name == "custom" {
            let call = CustomCall { name: s.text("name")?, attrs: s.bytes("attrs")? };
            return Ok(Op::Custom(Arc::new(call)));
        }
        Op::structured(name, s)?.ok_or_else(|| FormError::UnknownOp { name: name.to_string() })
    }

    /// The signature of the operation named `name`: its fields with their kinds, in order.
    pub fn signature(name: &str) -> Option<String> {
        struct Probe(String);
        impl FieldSource for Probe {
            fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
                self.0 += &format!("{}{key}:{}", if self.0.is_empty() { "" } else { " " }, like.kind());
                Ok(like)
            }
        }
        let mut probe = Probe(String::new());
        Op::build(name, &mut probe).ok().map(|_| probe.0)
    }
}

/// Makes a sized source out of any.
struct Adapter<'a, S: ?Sized>(&'a mut S);

impl<S: FieldSource + ?Sized> FieldSource for Adapter<'_, S> {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        self.0.get(key, like)
    }
}

impl serde::Serialize for Op {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Op {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Op, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(d)?;
        crate::text::parse_op(&text).map_err(serde::de::Error::custom)
    }
}
