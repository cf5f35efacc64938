//! What an operation gives for what it is given: the only truth about dtypes and shapes.
//!
//! The tensor API panics with these errors at the user's line, the verifier checks with them, a server answers with
//! them. Whatever it is handed, `infer` neither panics nor overflows.

use crate::op::*;
use crate::{Binary, DType, Dims, Domain, MAX_RANK, Meta, Op, Shape, Unary, broadcast};
use smallvec::{SmallVec, smallvec};

/// Why an operation cannot be applied.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpError {
    #[error("{op} takes {want} operands, got {got}")]
    Arity { op: String, want: &'static str, got: usize },
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

struct Infer<'a> {
    op: &'a Op,
    ins: &'a [Meta],
}

impl Infer<'_> {
    fn name(&self) -> String {
        self.op.name().to_string()
    }

    fn all(&self) -> Result<SmallVec<[Meta; 2]>, OpError> {
        let one = |meta: Meta| -> Result<SmallVec<[Meta; 2]>, OpError> { Ok(smallvec![meta]) };
        match self.op {
            Op::Full { shape, value } => {
                self.none()?;
                one(Meta { dtype: value.dtype(), shape: *shape })
            }
            Op::Iota { shape, dtype, axis } => {
                self.none()?;
                if dtype.is_quantised() || *dtype == DType::Bool {
                    return self.dtype(*dtype);
                }
                self.axis(*axis, shape)?;
                one(Meta { dtype: *dtype, shape: *shape })
            }
            Op::Random { kind, shape, dtype, .. } => {
                self.none()?;
                let fits = match kind {
                    RandomKind::Bits => dtype.is_int(),
                    RandomKind::Uniform | RandomKind::Normal => dtype.is_float(),
                };
                if !fits {
                    return self.dtype(*dtype);
                }
                one(Meta { dtype: *dtype, shape: *shape })
            }
            Op::Unary(kind) => one(infer_unary(*kind, &self.one()?)?),
            Op::Binary(kind) => {
                let [a, b] = self.two()?;
                one(infer_binary(*kind, &a, &b)?)
            }
            Op::Select => {
                let [c, a, b] = self.three()?;
                if c.dtype != DType::Bool {
                    return self.dtype(c.dtype);
                }
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
            Op::Scan { kind, axis, .. } => {
                let x = match kind {
                    ScanKind::Sum | ScanKind::Prod => self.one()?,
                    ScanKind::Linear => {
                        let [a, b] = self.two()?;
                        self.same_plain(&a, &b)?;
                        self.same_shape(&a.shape, &b.shape)?;
                        a
                    }
                };
                self.number(x.dtype)?;
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
                self.plain(x.dtype)?;
                let axis = self.axis(*axis, &x.shape)?;
                if *take > x.shape[axis] {
                    let length = x.shape[axis];
                    return Err(OpError::Range { op: self.name(), start: 0, end: *take, step: 1, length });
                }
                x.shape[axis] = *take;
                Ok(smallvec![x, Meta { dtype: DType::I64, shape: x.shape }])
            }
            Op::Guard { .. } => {
                if self.ins.is_empty() {
                    return self.arity("at least 1");
                }
                self.ins.iter().try_for_each(|x| self.plain(x.dtype))?;
                one(Meta::new(DType::Bool, []))
            }
            Op::Commit => {
                let [ok, new, old] = self.three()?;
                if ok.dtype != DType::Bool {
                    return self.dtype(ok.dtype);
                }
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

    fn moved(&self, op: &Move) -> Result<Meta, OpError> {
        let cut = |x: &Meta, axis: u8, start: usize, end: usize, step: usize| -> Result<Meta, OpError> {
            let axis = self.axis(axis, &x.shape)?;
            let length = x.shape[axis];
            if step == 0 || start > end || end > length {
                return Err(OpError::Range { op: self.name(), start, end, step, length });
            }
            let mut out = *x;
            out.shape[axis] = (end - start).div_ceil(step);
            Ok(out)
        };
        match op {
            Move::Reshape(shape) => {
                let x = self.one()?;
                self.plain(x.dtype)?;
                match (shape.checked_numel(), x.shape.checked_numel()) {
                    (None, _) => Err(OpError::TooLarge { shape: *shape }),
                    (_, None) => Err(OpError::TooLarge { shape: x.shape }),
                    (Some(n), Some(m)) if n == m => Ok(Meta { dtype: x.dtype, shape: *shape }),
                    (Some(_), Some(_)) => self.mismatch(&x.shape, shape),
                }
            }
            Move::Permute(order) => {
                let x = self.one()?;
                self.plain(x.dtype)?;
                let mut seen = AxisSet::default();
                let fits = order.len() == x.shape.len()
                    && order.iter().all(|&p| {
                        let new = (p as usize) < x.shape.len() && !seen.has(p as usize);
                        seen = if new { seen.with(p as usize) } else { seen };
                        new
                    });
                if !fits {
                    return self.shape(&x.shape, "the order is not a permutation of its axes");
                }
                Ok(Meta { dtype: x.dtype, shape: Dims::collect(order.iter().map(|&p| x.shape[p as usize])) })
            }
            Move::Expand(shape) => {
                let x = self.one()?;
                self.plain(x.dtype)?;
                if broadcast(&x.shape, shape) != Some(*shape) {
                    return self.mismatch(&x.shape, shape);
                }
                Ok(Meta { dtype: x.dtype, shape: *shape })
            }
            Move::Slice { axis, start, end, step } => {
                let x = self.one()?;
                self.plain(x.dtype)?;
                cut(&x, *axis, *start, *end, *step)
            }
            Move::Assign { axis, start, end, step } => {
                let [x, v] = self.two()?;
                self.same_plain(&x, &v)?;
                self.same_shape(&cut(&x, *axis, *start, *end, *step)?.shape, &v.shape)?;
                Ok(x)
            }
            Move::Flip(axes) => {
                let x = self.one()?;
                self.plain(x.dtype)?;
                self.axes(*axes, &x.shape)?;
                Ok(x)
            }
            Move::Cat { axis } => {
                let Some((first, rest)) = self.ins.split_first() else { return self.arity("at least 1") };
                self.plain(first.dtype)?;
                let axis = self.axis(*axis, &first.shape)?;
                let mut out = *first;
                for x in rest {
                    self.same_plain(first, x)?;
                    let length = out.shape[axis].checked_add(*x.shape.get(axis).unwrap_or(&0));
                    let mut like = x.shape;
                    if like.len() == out.shape.len() {
                        like[axis] = first.shape[axis];
                    }
                    if like != first.shape {
                        return self.mismatch(&first.shape, &x.shape);
                    }
                    match length {
                        Some(length) => out.shape[axis] = length,
                        None => return Err(OpError::TooLarge { shape: out.shape }),
                    }
                }
                Ok(out)
            }
        }
    }

    fn reduce(&self, kind: ReduceKind, axes: AxisSet, keep: bool) -> Result<Meta, OpError> {
        let x = self.one()?;
        self.axes(axes, &x.shape)?;
        let dtype = match kind {
            ReduceKind::Sum | ReduceKind::Prod => {
                self.number(x.dtype)?;
                x.dtype
            }
            ReduceKind::Mean if !x.dtype.is_float() => return self.dtype(x.dtype),
            ReduceKind::Mean => x.dtype,
            ReduceKind::Max | ReduceKind::Min => {
                self.plain(x.dtype)?;
                x.dtype
            }
            ReduceKind::Any | ReduceKind::All if x.dtype != DType::Bool => return self.dtype(x.dtype),
            ReduceKind::Any | ReduceKind::All => DType::Bool,
            ReduceKind::ArgMax | ReduceKind::ArgMin => {
                self.plain(x.dtype)?;
                if axes.len() != 1 {
                    return Err(OpError::Attribute {
                        op: self.name(),
                        reason: "it works along exactly one axis",
                    });
                }
                DType::I64
            }
        };
        let shape = x.shape.reduced(axes, keep);
        let needs_one =
            matches!(kind, ReduceKind::Max | ReduceKind::Min | ReduceKind::ArgMax | ReduceKind::ArgMin);
        if needs_one && axes.iter().any(|i| x.shape[i] == 0) && !shape.contains(&0) {
            return Err(OpError::Empty { op: self.name(), shape: x.shape });
        }
        Ok(Meta { dtype, shape })
    }

    fn dot(&self, transpose: bool) -> Result<Meta, OpError> {
        let [a, b] = self.two()?;
        self.number(a.dtype)?;
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

    fn conv(&self, kind: ConvKind, conv: &Conv) -> Result<Meta, OpError> {
        let [p, q] = self.two()?;
        if p.dtype != q.dtype {
            return Err(OpError::DTypeMismatch { op: self.name(), lhs: p.dtype, rhs: q.dtype });
        }
        self.number(p.dtype)?;
        let rank = p.shape.len();
        if !(3..=5).contains(&rank) || q.shape.len() != rank {
            return self.mismatch(&p.shape, &q.shape);
        }
        let groups = conv.groups as usize;
        if groups == 0 || conv.stride[..rank - 2].contains(&0) || conv.dilation[..rank - 2].contains(&0) {
            return Err(OpError::Attribute {
                op: self.name(),
                reason: "stride, dilation and groups are at least 1",
            });
        }
        let mut out = p;
        let axis =
            |i: usize| (conv.stride[i], conv.low[i], conv.high[i], conv.dilation[i], conv.extent[i] as usize);
        match kind {
            ConvKind::Forward => {
                let fits =
                    p.shape[1] % groups == 0 && q.shape[0] % groups == 0 && p.shape[1] / groups == q.shape[1];
                if !fits {
                    return self.mismatch(&p.shape, &q.shape);
                }
                out.shape[1] = q.shape[0];
                for i in 0..rank - 2 {
                    let (stride, low, high, dilation, _) = axis(i);
                    match windows(p.shape[i + 2], q.shape[i + 2], stride, low, high, dilation) {
                        Some(n) => out.shape[i + 2] = n,
                        None => return self.mismatch(&p.shape, &q.shape),
                    }
                }
            }
            ConvKind::Input => {
                let channels = q.shape[1].checked_mul(groups);
                let fits = p.shape[1] == q.shape[0] && q.shape[0] % groups == 0;
                let Some(channels) = channels.filter(|_| fits) else {
                    return self.mismatch(&p.shape, &q.shape);
                };
                out.shape[1] = channels;
                for i in 0..rank - 2 {
                    let (stride, low, high, dilation, extent) = axis(i);
                    if !reaches(extent, q.shape[i + 2], p.shape[i + 2], stride, low, high, dilation) {
                        return self.mismatch(&p.shape, &q.shape);
                    }
                    out.shape[i + 2] = extent;
                }
            }
            ConvKind::Weight => {
                let fits = p.shape[0] == q.shape[0] && p.shape[1] % groups == 0 && q.shape[1] % groups == 0;
                if !fits {
                    return self.mismatch(&p.shape, &q.shape);
                }
                out.shape[0] = q.shape[1];
                out.shape[1] = p.shape[1] / groups;
                for i in 0..rank - 2 {
                    let (stride, low, high, dilation, extent) = axis(i);
                    if !reaches(p.shape[i + 2], extent, q.shape[i + 2], stride, low, high, dilation) {
                        return self.mismatch(&p.shape, &q.shape);
                    }
                    out.shape[i + 2] = extent;
                }
            }
        }
        Ok(out)
    }

    fn pool(&self, kind: PoolKind, pool: &Pool) -> Result<SmallVec<[Meta; 2]>, OpError> {
        let x = self.one()?;
        let rank = x.shape.len();
        self.number(x.dtype)?;
        if !(3..=5).contains(&rank) {
            return self.shape(&x.shape, "pooling takes [N, C, ..] with one to three spatial axes");
        }
        let zero = |t: &[u32; 3]| t[..rank - 2].contains(&0);
        if zero(&pool.kernel) || zero(&pool.stride) || zero(&pool.dilation) {
            return Err(OpError::Attribute {
                op: self.name(),
                reason: "kernel, stride and dilation are at least 1",
            });
        }
        let mut out = x;
        for i in 0..rank - 2 {
            let (stride, low, high, dilation) = (pool.stride[i], pool.low[i], pool.high[i], pool.dilation[i]);
            let kernel = pool.kernel[i] as usize;
            let length = x.shape[i + 2];
            out.shape[i + 2] = match kind {
                PoolKind::Max | PoolKind::Sum => match windows(length, kernel, stride, low, high, dilation) {
                    Some(n) => n,
                    None => return self.shape(&x.shape, "the window does not fit"),
                },
                PoolKind::SumInput => {
                    if !reaches(pool.extent[i] as usize, kernel, length, stride, low, high, dilation) {
                        return self.shape(&x.shape, "the windows do not fit the extent");
                    }
                    pool.extent[i] as usize
                }
            };
        }
        match kind {
            PoolKind::Max => {
                // Every window must hold at least one real element, or its maximum would have no index.
                let lone = (0..rank - 2).any(|i| {
                    let n = out.shape[i + 2] as u64;
                    let last = n.saturating_sub(1).saturating_mul(pool.stride[i] as u64);
                    let length = x.shape[i + 2] as u64;
                    let reach = (pool.kernel[i] as u64 - 1).saturating_mul(pool.dilation[i] as u64);
                    let low = pool.low[i] as u64;
                    // Taps further apart than the axis is long may step over it, if they start in the low padding.
                    let strides_over = low > 0 && length < pool.dilation[i] as u64;
                    n > 0 && (low > reach || last >= length.saturating_add(low) || strides_over)
                });
                if lone {
                    return self.shape(&x.shape, "a window lies wholly in the padding");
                }
                Ok(smallvec![out, Meta { dtype: DType::I64, shape: out.shape }])
            }
            PoolKind::Sum | PoolKind::SumInput => Ok(smallvec![out]),
        }
    }

    fn gather(&self, kind: GatherKind, axis: u8) -> Result<Meta, OpError> {
        let [x, index] = self.two()?;
        self.plain(x.dtype)?;
        self.index(&index)?;
        let axis = self.axis(axis, &x.shape)?;
        match kind {
            GatherKind::Each => {
                self.fits_each(&x.shape, &index.shape, axis)?;
                Ok(Meta { dtype: x.dtype, shape: index.shape })
            }
            GatherKind::Take => Ok(Meta { dtype: x.dtype, shape: self.taken(&x.shape, &index.shape, axis)? }),
        }
    }

    fn scatter(&self, kind: ScatterKind, axis: u8) -> Result<Meta, OpError> {
        let [x, index, source] = self.three()?;
        self.same_plain(&x, &source)?;
        self.index(&index)?;
        let axis = self.axis(axis, &x.shape)?;
        if kind != ScatterKind::Each {
            self.number(x.dtype)?;
        }
        match kind {
            ScatterKind::Each | ScatterKind::EachAdd => {
                self.fits_each(&x.shape, &index.shape, axis)?;
                self.same_shape(&index.shape, &source.shape)?;
            }
            ScatterKind::TakeAdd => {
                self.same_shape(&self.taken(&x.shape, &index.shape, axis)?, &source.shape)?;
            }
        }
        Ok(x)
    }

    fn named(&self, op: &Named) -> Result<Meta, OpError> {
        let float = |x: &Meta| if x.dtype.is_float() { Ok(()) } else { self.dtype(x.dtype) };
        match op {
            Named::Softmax { axis } | Named::LogSoftmax { axis } => {
                let x = self.one()?;
                float(&x)?;
                self.axis(*axis, &x.shape)?;
                Ok(x)
            }
            Named::LayerNorm { axes, .. } | Named::RmsNorm { axes, .. } => {
                let limit = if matches!(op, Named::LayerNorm { .. }) { 3 } else { 2 };
                let Some((x, rest)) = self.ins.split_first().filter(|_| self.ins.len() <= limit) else {
                    return self.arity(if limit == 3 { "1 to 3" } else { "1 or 2" });
                };
                float(x)?;
                let n = *axes as usize;
                if n == 0 || n > x.shape.len() {
                    return Err(OpError::Axis { op: self.name(), axis: n as i64, shape: x.shape });
                }
                for w in rest {
                    if w.dtype != x.dtype {
                        return Err(OpError::DTypeMismatch { op: self.name(), lhs: x.dtype, rhs: w.dtype });
                    }
                    if w.shape[..] != x.shape[x.shape.len() - n..] {
                        return self.mismatch(&x.shape, &w.shape);
                    }
                }
                Ok(*x)
            }
            Named::Attention { .. } => {
                let (q, k, v) = match self.ins {
                    [q, k, v] | [q, k, v, _] => (q, k, v),
                    _ => return self.arity("3 or 4"),
                };
                float(q)?;
                self.same_plain(q, k)?;
                self.same_plain(q, v)?;
                let rank = q.shape.len();
                let fits = rank >= 2
                    && k.shape.len() == rank
                    && v.shape.len() == rank
                    && q.shape[..rank - 2] == k.shape[..rank - 2]
                    && q.shape[..rank - 2] == v.shape[..rank - 2]
                    && q.shape[rank - 1] == k.shape[rank - 1]
                    && k.shape[rank - 2] == v.shape[rank - 2];
                if !fits {
                    return self.mismatch(&q.shape, if q.shape == k.shape { &v.shape } else { &k.shape });
                }
                if let [_, _, _, mask] = self.ins {
                    self.same_plain(q, mask)?;
                    let mut scores = q.shape;
                    scores[rank - 1] = k.shape[rank - 2];
                    if broadcast(&mask.shape, &scores) != Some(scores) {
                        return self.mismatch(&scores, &mask.shape);
                    }
                }
                let mut out = *q;
                out.shape[rank - 1] = v.shape[rank - 1];
                Ok(out)
            }
        }
    }

    fn arity<T>(&self, want: &'static str) -> Result<T, OpError> {
        Err(OpError::Arity { op: self.name(), want, got: self.ins.len() })
    }

    fn none(&self) -> Result<(), OpError> {
        if self.ins.is_empty() { Ok(()) } else { self.arity("0") }
    }

    fn one(&self) -> Result<Meta, OpError> {
        if let [x] = self.ins { Ok(*x) } else { self.arity("1") }
    }

    fn two(&self) -> Result<[Meta; 2], OpError> {
        self.ins.try_into().or_else(|_| self.arity("2"))
    }

    fn three(&self) -> Result<[Meta; 3], OpError> {
        self.ins.try_into().or_else(|_| self.arity("3"))
    }

    fn dtype<T>(&self, dtype: DType) -> Result<T, OpError> {
        Err(OpError::DType { op: self.name(), dtype })
    }

    fn plain(&self, dtype: DType) -> Result<(), OpError> {
        if dtype.is_quantised() { self.dtype(dtype) } else { Ok(()) }
    }

    fn number(&self, dtype: DType) -> Result<(), OpError> {
        if dtype.is_float() || dtype.is_int() { Ok(()) } else { self.dtype(dtype) }
    }

    fn same_plain(&self, a: &Meta, b: &Meta) -> Result<(), OpError> {
        if a.dtype != b.dtype {
            return Err(OpError::DTypeMismatch { op: self.name(), lhs: a.dtype, rhs: b.dtype });
        }
        self.plain(a.dtype)
    }

    fn index(&self, index: &Meta) -> Result<(), OpError> {
        match index.dtype.is_int() {
            true => Ok(()),
            false => Err(OpError::Index { op: self.name(), dtype: index.dtype }),
        }
    }

    fn mismatch<T>(&self, lhs: &Shape, rhs: &Shape) -> Result<T, OpError> {
        Err(OpError::ShapeMismatch { op: self.name(), lhs: *lhs, rhs: *rhs })
    }

    fn same_shape(&self, a: &Shape, b: &Shape) -> Result<(), OpError> {
        if a == b { Ok(()) } else { self.mismatch(a, b) }
    }

    fn shape<T>(&self, shape: &Shape, reason: &'static str) -> Result<T, OpError> {
        Err(OpError::Shape { op: self.name(), shape: *shape, reason })
    }

    fn broadcast(&self, a: &Shape, b: &Shape) -> Result<Shape, OpError> {
        broadcast(a, b).map_or_else(|| self.mismatch(a, b), Ok)
    }

    fn axis(&self, axis: u8, shape: &Shape) -> Result<usize, OpError> {
        if (axis as usize) < shape.len() {
            Ok(axis as usize)
        } else {
            Err(OpError::Axis { op: self.name(), axis: axis as i64, shape: *shape })
        }
    }

    fn axes(&self, axes: AxisSet, shape: &Shape) -> Result<(), OpError> {
        if axes.bound() <= shape.len() {
            Ok(())
        } else {
            Err(OpError::Axis { op: self.name(), axis: axes.bound() as i64 - 1, shape: *shape })
        }
    }

    /// Indices of `gather` and `scatter` cover at most x's extents off the axis.
    fn fits_each(&self, x: &Shape, index: &Shape, axis: usize) -> Result<(), OpError> {
        let fits = x.len() == index.len() && (0..x.len()).all(|i| i == axis || index[i] <= x[i]);
        if fits { Ok(()) } else { self.mismatch(x, index) }
    }

    fn taken(&self, x: &Shape, index: &Shape, axis: usize) -> Result<Shape, OpError> {
        let rank = x.len() - 1 + index.len();
        if rank > MAX_RANK {
            return Err(OpError::Rank { op: self.name(), rank });
        }
        Ok(Dims::collect(x[..axis].iter().chain(index.iter()).chain(&x[axis + 1..]).copied()))
    }
}

/// How many windows of `kernel` fit a padded axis, or nothing if none does.
fn windows(length: usize, kernel: usize, stride: u32, low: u32, high: u32, dilation: u32) -> Option<usize> {
    let padded = length.checked_add(low as usize)?.checked_add(high as usize)?;
    let span = kernel.checked_sub(1)?.checked_mul(dilation as usize)?.checked_add(1)?;
    Some(padded.checked_sub(span)? / stride as usize + 1)
}

/// Whether `count` windows of `kernel` stay within a padded axis of `length`.
fn reaches(
    length: usize,
    kernel: usize,
    count: usize,
    stride: u32,
    low: u32,
    high: u32,
    dilation: u32,
) -> bool {
    if count == 0 {
        return true;
    }
    windows(length, kernel, stride, low, high, dilation).is_some_and(|n| count <= n)
}
