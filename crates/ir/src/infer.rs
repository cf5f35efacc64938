//! What an operation gives for what it is given: the only truth about dtypes and shapes.
//!
//! The tensor API panics with these errors at the user's line, the verifier checks with them, a server answers with
//! them. Whatever it is handed, `infer` neither panics nor overflows.

use crate::op::*;
use crate::{Binary, DType, Dims, Domain, Meta, Op, Shape, Unary, broadcast};
use smallvec::{SmallVec, smallvec};
use std::ops::RangeInclusive;

/// Why an operation cannot be applied.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpError {
    #[error("{op} takes {} operands, got {got}", count(want))]
    Arity { op: String, want: RangeInclusive<usize>, got: usize },
    #[error("{op} is not defined for {dtype}")]
    DType { op: String, dtype: DType },
    #[error("{op}: an index must be an integer, not {dtype}")]
    Index { op: String, dtype: DType },
    #[error("{op} needs operands of one dtype, got {lhs} and {rhs}")]
    DTypeMismatch { op: String, lhs: DType, rhs: DType },
    #[error("{op}: shapes {lhs:?} and {rhs:?} do not fit together")]
    ShapeMismatch { op: String, lhs: Shape, rhs: Shape },
    #[error("{op}: axis {axis} is out of range for shape {shape:?}")]
    Axis { op: String, axis: i64, shape: Shape },
    #[error("{op}: {start}..{end} by {step} is not a range of an axis of length {length}")]
    Range { op: String, start: usize, end: usize, step: usize, length: usize },
    #[error("{op}: shape {shape:?} is not valid here: {reason}")]
    Shape { op: String, shape: Shape, reason: &'static str },
    #[error("{op}: {reason}")]
    Attribute { op: String, reason: &'static str },
    #[error("{op} of an empty axis has no value (shape {shape:?})")]
    Empty { op: String, shape: Shape },
    #[error("{op}: rank {rank} is above the highest supported, 8")]
    Rank { op: String, rank: usize },
    #[error("shape {shape:?} has too many elements to address")]
    TooLarge { shape: Shape },
    #[error("{dtype} packs rows of whole blocks of 32, which shape {shape:?} does not have")]
    Quantised { dtype: DType, shape: Shape },
    #[error("custom operation `{name}` is not registered")]
    UnknownCustom { name: String },
    #[error("{op}: {message}")]
    Custom { op: String, message: String },
}

/// A number of operands, in words.
fn count(range: &RangeInclusive<usize>) -> String {
    match (*range.start(), *range.end()) {
        (least, most) if least == most => least.to_string(),
        (least, usize::MAX) => format!("at least {least}"),
        (least, most) => format!("{least} to {most}"),
    }
}

impl OpError {
    /// The same about `name`: the method that the user called instead of the operation that it is made of.
    pub fn about(mut self, name: &str) -> OpError {
        match &mut self {
            OpError::Arity { op, .. }
            | OpError::DType { op, .. }
            | OpError::Index { op, .. }
            | OpError::DTypeMismatch { op, .. }
            | OpError::ShapeMismatch { op, .. }
            | OpError::Axis { op, .. }
            | OpError::Range { op, .. }
            | OpError::Shape { op, .. }
            | OpError::Attribute { op, .. }
            | OpError::Empty { op, .. }
            | OpError::Rank { op, .. }
            | OpError::Custom { op, .. } => *op = name.into(),
            OpError::TooLarge { .. } | OpError::Quantised { .. } | OpError::UnknownCustom { .. } => {}
        }
        self
    }
}

/// The metas of the results of `op` on operands with metas `ins`.
pub fn infer(op: &Op, ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
    // The two commonest cases first: recording tiny operations is bound by this function.
    let outs: SmallVec<[Meta; 2]> = match (op, ins) {
        (Op::Unary(kind), [x]) => return Ok(smallvec![infer_unary(*kind, x)?]),
        (Op::Binary(kind), [a, b]) => return Ok(smallvec![infer_binary(*kind, a, b)?]),
        _ => Infer { op, ins }.all()?,
    };
    for meta in &outs {
        meta.check()?;
    }
    Ok(outs)
}

/// [`infer`] for an elementwise operation of one operand.
pub fn infer_unary(op: Unary, x: &Meta) -> Result<Meta, OpError> {
    domain(op.domain(), op.name(), x.dtype).map(|dtype| Meta { dtype, shape: x.shape })
}

/// [`infer`] for an elementwise operation of two operands.
pub fn infer_binary(op: Binary, a: &Meta, b: &Meta) -> Result<Meta, OpError> {
    if a.dtype != b.dtype {
        return Err(OpError::DTypeMismatch { op: op.name().into(), lhs: a.dtype, rhs: b.dtype });
    }
    let dtype = domain(op.domain(), op.name(), a.dtype)?;
    if a.shape == b.shape {
        return Ok(Meta { dtype, shape: a.shape });
    }
    let meta = match broadcast(&a.shape, &b.shape) {
        Some(shape) => Meta { dtype, shape },
        None => return Err(OpError::ShapeMismatch { op: op.name().into(), lhs: a.shape, rhs: b.shape }),
    };
    meta.check().map(|_| meta)
}

fn domain(domain: Domain, op: &str, dtype: DType) -> Result<DType, OpError> {
    let num = dtype.is_float() || dtype.is_int();
    let (fits, out) = match domain {
        Domain::Float => (dtype.is_float(), dtype),
        Domain::Num => (num, dtype),
        Domain::Bits => (dtype.is_int() || dtype == DType::Bool, dtype),
        Domain::Test => (num, DType::Bool),
        Domain::Compare => (!dtype.is_quantised(), DType::Bool),
    };
    if fits { Ok(out) } else { Err(OpError::DType { op: op.into(), dtype }) }
}

/// The dtypes that a structured operation takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Takes {
    /// All.
    Any,
    /// All that are not quantised.
    Plain,
    /// Floats and integers.
    Num,
    /// Floats.
    Float,
    /// Integers.
    Int,
    /// Bool.
    Bool,
}

pub(crate) struct Infer<'a> {
    pub op: &'a Op,
    pub ins: &'a [Meta],
}

impl Infer<'_> {
    pub fn name(&self) -> String {
        self.op.name().to_string()
    }

    fn all(&self) -> Result<SmallVec<[Meta; 2]>, OpError> {
        let one = |meta: Meta| -> Result<SmallVec<[Meta; 2]>, OpError> { Ok(smallvec![meta]) };
        if !self.op.operands().contains(&self.ins.len()) {
            return self.arity();
        }
        if let Some(x) = self.ins.first() {
            self.takes(x.dtype)?;
        }
        match self.op {
            Op::Full { shape, value } => one(Meta { dtype: value.dtype(), shape: *shape }),
            Op::Iota { shape, dtype, axis } => {
                self.takes(*dtype)?;
                self.axis(*axis, shape)?;
                one(Meta { dtype: *dtype, shape: *shape })
            }
            Op::Random { shape, dtype, .. } => {
                self.takes(*dtype)?;
                one(Meta { dtype: *dtype, shape: *shape })
            }
            Op::Unary(kind) => one(infer_unary(*kind, &self.one()?)?),
            Op::Binary(kind) => {
                let [a, b] = self.two()?;
                one(infer_binary(*kind, &a, &b)?)
            }
            Op::Select => {
                let [c, a, b] = self.three()?;
                self.same_plain(&a, &b)?;
                let shape = self.broadcast(&a.shape, &b.shape)?;
                one(Meta { dtype: a.dtype, shape: self.broadcast(&c.shape, &shape)? })
            }
            Op::Cast(dtype) => {
                let x = self.one()?;
                if x.dtype.is_quantised() && !dtype.is_float() || dtype.is_quantised() && !x.dtype.is_float()
                {
                    return self.dtype(if x.dtype.is_quantised() { *dtype } else { x.dtype });
                }
                one(Meta { dtype: *dtype, shape: x.shape })
            }
            Op::Move(op) => one(self.moved(op)?),
            Op::Reduce { kind, axes, keep } => one(self.reduce(*kind, *axes, *keep)?),
            Op::Scan { kind: _, axis, .. } => {
                let x = self.ins[0];
                for other in &self.ins[1..] {
                    self.same_plain(&x, other)?;
                    self.same_shape(&x.shape, &other.shape)?;
                }
                self.axis(*axis, &x.shape)?;
                one(x)
            }
            Op::Dot { transpose } => one(self.dot(*transpose)?),
            Op::Conv { kind, conv } => one(self.conv(*kind, conv)?),
            Op::Pool { kind, pool } => self.pool(*kind, pool),
            Op::Gather { kind, axis } => one(self.gather(*kind, *axis)?),
            Op::Scatter { kind, axis } => one(self.scatter(*kind, *axis)?),
            Op::Sort { axis, take, .. } => {
                let mut x = self.one()?;
                let axis = self.axis(*axis, &x.shape)?;
                if *take > x.shape[axis] {
                    let length = x.shape[axis];
                    return Err(OpError::Range { op: self.name(), start: 0, end: *take, step: 1, length });
                }
                x.shape[axis] = *take;
                Ok(smallvec![x, Meta { dtype: DType::I64, shape: x.shape }])
            }
            Op::Guard { .. } => {
                self.ins.iter().try_for_each(|x| self.plain(x.dtype))?;
                one(Meta::new(DType::Bool, []))
            }
            Op::Commit => {
                let [ok, new, old] = self.three()?;
                if !ok.shape.is_empty() {
                    return self.shape(&ok.shape, "the condition is a single bool");
                }
                self.same_plain(&new, &old)?;
                self.same_shape(&new.shape, &old.shape)?;
                one(old)
            }
            Op::Named(op) => one(self.named(op)?),
            Op::Custom(call) => {
                let custom = crate::custom::find(&call.name)
                    .ok_or_else(|| OpError::UnknownCustom { name: call.name.clone() })?;
                let outs = custom.infer(&call.attrs, self.ins)?;
                if outs.len() != custom.outputs() {
                    let message = "its infer gives another number of results than it states".into();
                    return Err(OpError::Custom { op: self.name(), message });
                }
                Ok(outs)
            }
        }
    }

    fn dot(&self, transpose: bool) -> Result<Meta, OpError> {
        let [a, b] = self.two()?;
        if b.dtype.is_quantised() {
            if !a.dtype.is_float() {
                return self.dtype(a.dtype);
            }
        } else if a.dtype != b.dtype {
            return Err(OpError::DTypeMismatch { op: self.name(), lhs: a.dtype, rhs: b.dtype });
        }
        let (ra, rb) = (a.shape.len(), b.shape.len());
        if ra < 2 || rb < 2 {
            return self.shape(if ra < 2 { &a.shape } else { &b.shape }, "both operands are matrices");
        }
        let (m, k) = (a.shape[ra - 2], a.shape[ra - 1]);
        let (n, kb) =
            if transpose { (b.shape[rb - 2], b.shape[rb - 1]) } else { (b.shape[rb - 1], b.shape[rb - 2]) };
        let batch = broadcast(
            &Dims::collect(a.shape[..ra - 2].iter().copied()),
            &Dims::collect(b.shape[..rb - 2].iter().copied()),
        );
        match batch {
            Some(batch) if k == kb => {
                let shape = batch.inserted(batch.len(), m).and_then(|s| s.inserted(s.len(), n));
                match shape {
                    Some(shape) => Ok(Meta { dtype: a.dtype, shape }),
                    None => Err(OpError::Rank { op: self.name(), rank: batch.len() + 2 }),
                }
            }
            _ => self.mismatch(&a.shape, &b.shape),
        }
    }

    pub fn arity<T>(&self) -> Result<T, OpError> {
        Err(OpError::Arity { op: self.name(), want: self.op.operands(), got: self.ins.len() })
    }

    pub fn one(&self) -> Result<Meta, OpError> {
        if let [x] = self.ins { Ok(*x) } else { self.arity() }
    }

    pub fn two(&self) -> Result<[Meta; 2], OpError> {
        self.ins.try_into().or_else(|_| self.arity())
    }

    pub fn three(&self) -> Result<[Meta; 3], OpError> {
        self.ins.try_into().or_else(|_| self.arity())
    }

    pub fn dtype<T>(&self, dtype: DType) -> Result<T, OpError> {
        Err(OpError::DType { op: self.name(), dtype })
    }

    pub fn plain(&self, dtype: DType) -> Result<(), OpError> {
        if dtype.is_quantised() { self.dtype(dtype) } else { Ok(()) }
    }

    /// That the operation takes a dtype at all.
    fn takes(&self, dtype: DType) -> Result<(), OpError> {
        let fits = match self.op.takes() {
            Takes::Any => true,
            Takes::Plain => !dtype.is_quantised(),
            Takes::Num => dtype.is_float() || dtype.is_int(),
            Takes::Float => dtype.is_float(),
            Takes::Int => dtype.is_int(),
            Takes::Bool => dtype == DType::Bool,
        };
        if fits { Ok(()) } else { self.dtype(dtype) }
    }

    pub fn same_plain(&self, a: &Meta, b: &Meta) -> Result<(), OpError> {
        if a.dtype != b.dtype {
            return Err(OpError::DTypeMismatch { op: self.name(), lhs: a.dtype, rhs: b.dtype });
        }
        self.plain(a.dtype)
    }

    pub fn index(&self, index: &Meta) -> Result<(), OpError> {
        match index.dtype.is_int() {
            true => Ok(()),
            false => Err(OpError::Index { op: self.name(), dtype: index.dtype }),
        }
    }

    pub fn mismatch<T>(&self, lhs: &Shape, rhs: &Shape) -> Result<T, OpError> {
        Err(OpError::ShapeMismatch { op: self.name(), lhs: *lhs, rhs: *rhs })
    }

    pub fn same_shape(&self, a: &Shape, b: &Shape) -> Result<(), OpError> {
        if a == b { Ok(()) } else { self.mismatch(a, b) }
    }

    pub fn shape<T>(&self, shape: &Shape, reason: &'static str) -> Result<T, OpError> {
        Err(OpError::Shape { op: self.name(), shape: *shape, reason })
    }

    pub fn broadcast(&self, a: &Shape, b: &Shape) -> Result<Shape, OpError> {
        broadcast(a, b).map_or_else(|| self.mismatch(a, b), Ok)
    }

    pub fn axis(&self, axis: u8, shape: &Shape) -> Result<usize, OpError> {
        if (axis as usize) < shape.len() {
            Ok(axis as usize)
        } else {
            Err(OpError::Axis { op: self.name(), axis: axis as i64, shape: *shape })
        }
    }

    pub fn axes(&self, axes: AxisSet, shape: &Shape) -> Result<(), OpError> {
        if axes.bound() <= shape.len() {
            Ok(())
        } else {
            Err(OpError::Axis { op: self.name(), axis: axes.bound() as i64 - 1, shape: *shape })
        }
    }
}
