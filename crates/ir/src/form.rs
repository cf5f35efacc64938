//! The written form of an operation: a name and named fields. Text, wire, signature and relative forms all come from
//! the two functions here, [`Op::fields`] (out) and [`Op::build`] (in), so a field is listed once for each direction.

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
pub trait Sink {
    /// Takes one field.
    fn put(&mut self, key: &'static str, field: Field);
}

/// Gives an operation's fields in order. `like` tells the kind that is wanted.
pub trait Source {
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
        trait Get: Source {
            $(fn $get(&mut self, key: &'static str) -> Result<$ty, FormError> {
                match self.get(key, Field::$variant($like))? {
                    Field::$variant(x) => Ok(x),
                    _ => Err(FormError::BadField { key }),
                }
            })*
        }
        impl<S: Source + ?Sized> Get for S {}
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

    /// Its name in written form: like [`Op::name`], but `custom` for every custom operation.
    pub fn form_name(&self) -> &'static str {
        match self {
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Custom(_) => "custom",
            op => STRUCTURED.iter().find(|n| **n == op.name()).expect("every structured operation is listed"),
        }
    }

    /// Gives its fields to `sink`.
    pub fn fields(&self, sink: &mut (impl Sink + ?Sized)) {
        use Field as F;
        match self {
            Op::Full { shape, value } => {
                sink.put("shape", F::Shape(*shape));
                sink.put("value", F::Scalar(*value));
            }
            Op::Iota { shape, dtype, axis } => {
                sink.put("shape", F::Shape(*shape));
                sink.put("dtype", F::DType(*dtype));
                sink.put("axis", F::Axis(*axis));
            }
            Op::Random { kind: _, shape, dtype, key, offset } => {
                sink.put("shape", F::Shape(*shape));
                sink.put("dtype", F::DType(*dtype));
                sink.put("key", F::Word(*key));
                sink.put("offset", F::Word(*offset));
            }
            Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Commit => {}
            Op::Cast(dtype) => sink.put("dtype", F::DType(*dtype)),
            Op::Move(Move::Reshape(shape) | Move::Expand(shape)) => sink.put("shape", F::Shape(*shape)),
            Op::Move(Move::Permute(order)) => sink.put("order", F::Order(*order)),
            Op::Move(Move::Slice { axis, start, end, step } | Move::Assign { axis, start, end, step }) => {
                sink.put("axis", F::Axis(*axis));
                sink.put("start", F::Bound(*start));
                sink.put("end", F::Bound(*end));
                sink.put("step", F::Bound(*step));
            }
            Op::Move(Move::Flip(axes)) => sink.put("axes", F::Axes(*axes)),
            Op::Move(Move::Cat { axis }) => sink.put("axis", F::Axis(*axis)),
            Op::Reduce { kind: _, axes, keep } => {
                sink.put("axes", F::Axes(*axes));
                sink.put("keep", F::Flag(*keep));
            }
            Op::Scan { kind: _, axis, reverse } => {
                sink.put("axis", F::Axis(*axis));
                sink.put("reverse", F::Flag(*reverse));
            }
            Op::Dot { transpose } => sink.put("transpose", F::Flag(*transpose)),
            Op::Conv { kind: _, conv } => {
                sink.put("stride", F::Triple(conv.stride));
                sink.put("low", F::Triple(conv.low));
                sink.put("high", F::Triple(conv.high));
                sink.put("dilation", F::Triple(conv.dilation));
                sink.put("extent", F::Triple(conv.extent));
                sink.put("groups", F::Count(conv.groups));
            }
            Op::Pool { kind: _, pool } => {
                sink.put("kernel", F::Triple(pool.kernel));
                sink.put("stride", F::Triple(pool.stride));
                sink.put("low", F::Triple(pool.low));
                sink.put("high", F::Triple(pool.high));
                sink.put("dilation", F::Triple(pool.dilation));
                sink.put("extent", F::Triple(pool.extent));
            }
            Op::Gather { kind: _, axis } | Op::Scatter { kind: _, axis } => sink.put("axis", F::Axis(*axis)),
            Op::Sort { axis, descending, take } => {
                sink.put("axis", F::Axis(*axis));
                sink.put("descending", F::Flag(*descending));
                sink.put("take", F::Bound(*take));
            }
            Op::Guard { finite } => sink.put("finite", F::Flag(*finite)),
            Op::Named(Named::Softmax { axis } | Named::LogSoftmax { axis }) => {
                sink.put("axis", F::Axis(*axis))
            }
            Op::Named(Named::LayerNorm { axes, eps } | Named::RmsNorm { axes, eps }) => {
                sink.put("axes", F::Axis(*axes));
                sink.put("eps", F::Real(*eps));
            }
            Op::Named(Named::Attention { causal, scale }) => {
                sink.put("causal", F::Flag(*causal));
                sink.put("scale", F::Real(*scale));
            }
            Op::Custom(call) => {
                sink.put("name", F::Name(call.name.clone()));
                sink.put("attrs", F::Bytes(call.attrs.clone()));
            }
        }
    }

    /// The operation named `name` with the fields that `source` gives.
    pub fn build(name: &str, s: &mut (impl Source + ?Sized)) -> Result<Op, FormError> {
        if let Some(op) = Unary::from_name(name) {
            return Ok(Op::Unary(op));
        }
        if let Some(op) = Binary::from_name(name) {
            return Ok(Op::Binary(op));
        }
        let random = |kind, s: &mut _| -> Result<Op, FormError> {
            let s: &mut dyn Source = s;
            let (shape, dtype) = (s.shape("shape")?, s.dtype("dtype")?);
            Ok(Op::Random { kind, shape, dtype, key: s.word("key")?, offset: s.word("offset")? })
        };
        let reduce = |kind, s: &mut dyn Source| -> Result<Op, FormError> {
            Ok(Op::Reduce { kind, axes: s.axes("axes")?, keep: s.flag("keep")? })
        };
        let scan = |kind, s: &mut dyn Source| -> Result<Op, FormError> {
            Ok(Op::Scan { kind, axis: s.axis("axis")?, reverse: s.flag("reverse")? })
        };
        let s = &mut Adapter(s);
        Ok(match name {
            "full" => Op::Full { shape: s.shape("shape")?, value: s.scalar("value")? },
            "iota" => Op::Iota { shape: s.shape("shape")?, dtype: s.dtype("dtype")?, axis: s.axis("axis")? },
            "random_bits" => random(RandomKind::Bits, s)?,
            "random_uniform" => random(RandomKind::Uniform, s)?,
            "random_normal" => random(RandomKind::Normal, s)?,
            "select" => Op::Select,
            "cast" => Op::Cast(s.dtype("dtype")?),
            "reshape" => Op::Move(Move::Reshape(s.shape("shape")?)),
            "permute" => Op::Move(Move::Permute(s.order("order")?)),
            "expand" => Op::Move(Move::Expand(s.shape("shape")?)),
            "slice" => {
                let (axis, start) = (s.axis("axis")?, s.bound("start")?);
                Op::Move(Move::Slice { axis, start, end: s.bound("end")?, step: s.bound("step")? })
            }
            "assign" => {
                let (axis, start) = (s.axis("axis")?, s.bound("start")?);
                Op::Move(Move::Assign { axis, start, end: s.bound("end")?, step: s.bound("step")? })
            }
            "flip" => Op::Move(Move::Flip(s.axes("axes")?)),
            "cat" => Op::Move(Move::Cat { axis: s.axis("axis")? }),
            "sum" => reduce(ReduceKind::Sum, s)?,
            "mean" => reduce(ReduceKind::Mean, s)?,
            "prod" => reduce(ReduceKind::Prod, s)?,
            "max" => reduce(ReduceKind::Max, s)?,
            "min" => reduce(ReduceKind::Min, s)?,
            "any" => reduce(ReduceKind::Any, s)?,
            "all" => reduce(ReduceKind::All, s)?,
            "argmax" => reduce(ReduceKind::ArgMax, s)?,
            "argmin" => reduce(ReduceKind::ArgMin, s)?,
            "cumsum" => scan(ScanKind::Sum, s)?,
            "cumprod" => scan(ScanKind::Prod, s)?,
            "linear_scan" => scan(ScanKind::Linear, s)?,
            "dot" => Op::Dot { transpose: s.flag("transpose")? },
            "conv" => Op::Conv { kind: ConvKind::Forward, conv: conv(s)? },
            "conv_input" => Op::Conv { kind: ConvKind::Input, conv: conv(s)? },
            "conv_weight" => Op::Conv { kind: ConvKind::Weight, conv: conv(s)? },
            "max_pool" => Op::Pool { kind: PoolKind::Max, pool: pool(s)? },
            "sum_pool" => Op::Pool { kind: PoolKind::Sum, pool: pool(s)? },
            "sum_pool_input" => Op::Pool { kind: PoolKind::SumInput, pool: pool(s)? },
            "gather" => Op::Gather { kind: GatherKind::Each, axis: s.axis("axis")? },
            "take" => Op::Gather { kind: GatherKind::Take, axis: s.axis("axis")? },
            "scatter" => Op::Scatter { kind: ScatterKind::Each, axis: s.axis("axis")? },
            "scatter_add" => Op::Scatter { kind: ScatterKind::EachAdd, axis: s.axis("axis")? },
            "take_add" => Op::Scatter { kind: ScatterKind::TakeAdd, axis: s.axis("axis")? },
            "sort" => {
                let (axis, descending) = (s.axis("axis")?, s.flag("descending")?);
                Op::Sort { axis, descending, take: s.bound("take")? }
            }
            "guard" => Op::Guard { finite: s.flag("finite")? },
            "commit" => Op::Commit,
            "softmax" => Op::Named(Named::Softmax { axis: s.axis("axis")? }),
            "log_softmax" => Op::Named(Named::LogSoftmax { axis: s.axis("axis")? }),
            "layer_norm" => Op::Named(Named::LayerNorm { axes: s.axis("axes")?, eps: s.real("eps")? }),
            "rms_norm" => Op::Named(Named::RmsNorm { axes: s.axis("axes")?, eps: s.real("eps")? }),
            "attention" => Op::Named(Named::Attention { causal: s.flag("causal")?, scale: s.real("scale")? }),
            "custom" => Op::Custom(Arc::new(CustomCall { name: s.text("name")?, attrs: s.bytes("attrs")? })),
            name => return Err(FormError::UnknownOp { name: name.to_string() }),
        })
    }

    /// The signature of the operation named `name`: its fields with their kinds, in order.
    pub fn signature(name: &str) -> Option<String> {
        struct Probe(String);
        impl Source for Probe {
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

impl<S: Source + ?Sized> Source for Adapter<'_, S> {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        self.0.get(key, like)
    }
}

fn conv(s: &mut dyn Source) -> Result<Conv, FormError> {
    Ok(Conv {
        stride: s.triple("stride")?,
        low: s.triple("low")?,
        high: s.triple("high")?,
        dilation: s.triple("dilation")?,
        extent: s.triple("extent")?,
        groups: s.count("groups")?,
    })
}

fn pool(s: &mut dyn Source) -> Result<Pool, FormError> {
    Ok(Pool {
        kernel: s.triple("kernel")?,
        stride: s.triple("stride")?,
        low: s.triple("low")?,
        high: s.triple("high")?,
        dilation: s.triple("dilation")?,
        extent: s.triple("extent")?,
    })
}

const STRUCTURED: &[&str] = &[
    "full",
    "iota",
    "random_bits",
    "random_uniform",
    "random_normal",
    "select",
    "cast",
    "reshape",
    "permute",
    "expand",
    "slice",
    "assign",
    "flip",
    "cat",
    "sum",
    "mean",
    "prod",
    "max",
    "min",
    "any",
    "all",
    "argmax",
    "argmin",
    "cumsum",
    "cumprod",
    "linear_scan",
    "dot",
    "conv",
    "conv_input",
    "conv_weight",
    "max_pool",
    "sum_pool",
    "sum_pool_input",
    "gather",
    "take",
    "scatter",
    "scatter_add",
    "take_add",
    "sort",
    "guard",
    "commit",
    "softmax",
    "log_softmax",
    "layer_norm",
    "rms_norm",
    "attention",
];

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
