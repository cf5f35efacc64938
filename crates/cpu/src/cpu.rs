//! The device `cpu`: views instead of copies, results written over operands at their last use, tiles shared out among
//! threads. What has no kernel here runs through the plain interpreter, so every operation works and has the same bits.

use crate::arena::{Arena, Buffer};
use crate::reference::{self, Value};
use crate::view::View;
use crate::{
    convolution, elementwise, fused, guard, indexed, interpreter, memory, movement, pool, pooling, product,
    reduction,
};
use kiln_device::{Bytes, Data, DeviceInfo, Error, Memory, Place, Processor, UploadBuffer, Usage};
use kiln_fuse::Fuser;
use kiln_host::{Arg, HostDevice, Kernels};
use kiln_ir::{DType, GatherKind, Meta, Op, Shape, custom, infer};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// How many logical CPU devices one process can open: `cpu:0` and on.
pub const CPUS: u32 = 64;

/// The CPU as a device.
pub type Cpu = HostDevice<CpuKernels>;

/// The kernels of [`Cpu`].
pub struct CpuKernels {
    arena: Arc<Arena>,
}

impl Default for CpuKernels {
    /// Kernels with an arena of their own. `KILN_MEMORY` limits it, in bytes.
    fn default() -> CpuKernels {
        CpuKernels { arena: Arena::new(kiln_env::MEMORY.get()) }
    }
}

/// What a kernel needs besides its operands.
pub(crate) struct Context<'a> {
    pub arena: &'a Arc<Arena>,
    pub place: Place,
}

impl Context<'_> {
    /// A fresh row-major value, of arbitrary content.
    pub fn fresh(&self, meta: Meta) -> Result<View, Error> {
        // Scratch of kernels comes through here too, whose extents nobody has looked at.
        meta.check()?;
        let buffer = self.arena.share(meta.bytes(), self.place)?;
        Ok(View::whole(buffer, meta))
    }

    /// A fresh row-major value in that memory, if it can be one.
    pub fn fresh_at(&self, meta: Meta, memory: Bytes) -> Option<View> {
        let fits = memory.len() == meta.bytes() && memory.target().is_some();
        let buffer = if fits { self.arena.lend(memory) } else { None };
        buffer.map(|buffer| View::whole(buffer, meta))
    }

    /// A fresh value with this content.
    pub fn filled(&self, meta: Meta, bytes: &[u8]) -> Result<View, Error> {
        let view = self.fresh(meta)?;
        assert_eq!(bytes.len(), meta.bytes());
        // SAFETY: the buffer is fresh, so this is its only view, and it holds `meta.bytes()` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), view.address(), bytes.len()) };
        Ok(view)
    }

    /// The same value row-major.
    pub fn dense(&self, x: &View) -> Result<View, Error> {
        if x.is_dense() { Ok(x.clone()) } else { elementwise::copy(self, x) }
    }
}

impl Kernels for CpuKernels {
    type Value = View;

    fn info(&self) -> DeviceInfo {
        let info = DeviceInfo::new("cpu", crate::NUMERICS);
        let usage = info.usage.iter().map(|&(d, usage)| match d {
            DType::F32 | DType::F64 => (d, usage.and(Usage::ACCELERATED)),
            _ => (d, usage),
        });
        DeviceInfo {
            count: CPUS as usize,
            usage: usage.collect(),
            processor: Processor::Cores { threads: pool::threads() },
            supports_all: true,
            places_outputs: true,
            ..info
        }
    }

    fn upload(&self, data: &Data, place: Place) -> Result<View, Error> {
        // Bytes that came from elsewhere may hold bools other than 0 and 1: those are copied and set right.
        let valid = || data.meta.dtype != DType::Bool || data.bytes.iter().all(|&b| b <= 1);
        if let Some(buffer) = data.bytes.whole::<Buffer>()
            && buffer.place() == place
            && buffer.is_of(&self.arena)
            && valid()
        {
            return Ok(View::whole(buffer, data.meta));
        }
        if data.bytes.is_lent()
            && place == Place::Reuse
            && data.meta.dtype != DType::Bool
            && let Some(buffer) = self.arena.lend(data.bytes.clone())
        {
            return Ok(View::whole(buffer, data.meta));
        }
        let view = Context { arena: &self.arena, place }.filled(data.meta, &data.bytes)?;
        if data.meta.dtype == DType::Bool {
            // SAFETY: the view is fresh and holds one byte an element.
            let bytes = unsafe { std::slice::from_raw_parts_mut(view.ptr::<u8>(), view.numel()) };
            bytes.iter_mut().for_each(|b| *b = (*b != 0) as u8);
        }
        Ok(view)
    }

    fn meta(&self, x: &View) -> Meta {
        x.meta()
    }

    fn fusers(&self) -> Vec<Box<dyn Fuser<View>>> {
        vec![
            Box::new(fused::Elementwise::new(self.arena.clone())),
            Box::new(fused::Rows::new(self.arena.clone())),
            Box::new(fused::Product::new(self.arena.clone())),
        ]
    }

    fn download(&self, x: &View) -> Result<Data, Error> {
        let cx = Context { arena: &self.arena, place: Place::Reuse };
        let view = cx.dense(x)?;
        let range = view.range();
        Ok(Data::new(x.meta(), Bytes::shared(view.buffer.share(), range.start, range.len())))
    }

    fn eval(&self, op: &Op, ins: &mut [Arg<View>], place: Place) -> Result<SmallVec<[View; 2]>, Error> {
        let metas: SmallVec<[Meta; 4]> = ins.iter().map(|v| v.meta()).collect();
        let outs = infer(op, &metas)?;
        let cx = Context { arena: &self.arena, place };
        let out = outs.first().copied().unwrap_or(Meta { dtype: DType::F32, shape: Shape::default() });
        let one = |view: Result<View, Error>| view.map(|v| smallvec![v]);
        match op {
            Op::Full { shape, value } => {
                let single = cx.filled(Meta::new(out.dtype, []), &value.to_bytes())?;
                Ok(smallvec![single.expanded(shape)])
            }
            Op::Unary(op) => one(elementwise::unary(&cx, *op, ins, out)),
            Op::Binary(op) => one(elementwise::binary(&cx, *op, ins, out)),
            Op::Select => one(elementwise::select(&cx, ins, out)),
            Op::Cast(dtype) if !dtype.is_quantised() && !ins[0].dtype.is_quantised() => {
                one(elementwise::cast(&cx, ins, out))
            }
            Op::Move(op) => one(movement::movement(&cx, op, ins, out)),
            Op::Reduce { kind, axes, .. } if reduction::has_kernel(*kind, out.dtype) => {
                one(reduction::reduce(&cx, *kind, *axes, &ins[0], out))
            }
            Op::Dot { transpose } => one(product::dot(&cx, *transpose, &ins[0], &ins[1], out)),
            Op::Conv { kind, conv } if convolution::has_kernel(out.dtype) => {
                one(convolution::conv(&cx, *kind, conv, &ins[0], &ins[1], out))
            }
            Op::Guard { finite } => {
                let fine = !finite || ins.iter().all(|x| guard::all_finite(x));
                one(cx.filled(out, &[fine as u8]))
            }
            Op::Commit => {
                let ok = cx.dense(&ins[0])?.bytes() == [1];
                Ok(smallvec![ins[if ok { 1 } else { 2 }].clone()])
            }
            Op::Named(_) => self.lowered(op, ins, place),
            Op::Pool { kind, pool } => {
                match memory::counted(&self.arena, || pooling::pool(&cx, *kind, pool, &ins[0], &outs))? {
                    Some(views) => Ok(views),
                    None => interpreted(&cx, op, ins),
                }
            }
            Op::Scatter { kind, axis } if indexed::has_scatter(*kind, *axis, ins) => {
                let scatter = || indexed::scatter(&cx, *kind, &ins[0], &ins[1], &ins[2]);
                match memory::counted(&self.arena, scatter)? {
                    Some(view) => Ok(smallvec![view]),
                    None => interpreted(&cx, op, ins),
                }
            }
            Op::Gather { kind: GatherKind::Take, axis: 0 } => {
                match memory::counted(&self.arena, || indexed::take(&cx, &ins[0], &ins[1], out))? {
                    Some(view) => Ok(smallvec![view]),
                    None => interpreted(&cx, op, ins),
                }
            }
            // The counts once, however often they repeat.
            Op::Iota { shape, dtype, axis } => {
                let axis = *axis as usize;
                let line = Shape::collect((0..shape.len()).map(|i| if i == axis { shape[i] } else { 1 }));
                let counts =
                    interpreted(&cx, &Op::Iota { shape: line, dtype: *dtype, axis: axis as u8 }, ins)?;
                Ok(counts.into_iter().map(|line| line.expanded(shape)).collect())
            }
            Op::Random { .. }
            | Op::Cast(_)
            | Op::Reduce { .. }
            | Op::Scan { .. }
            | Op::Conv { .. }
            | Op::Gather { .. }
            | Op::Scatter { .. }
            | Op::Sort { .. } => interpreted(&cx, op, ins),
            Op::Custom(call) if custom::may_lower(call) => {
                let views = match self.written(op, ins, place)? {
                    Some(views) => views,
                    None => return interpreted(&cx, op, ins),
                };
                match views.iter().map(View::meta).eq(outs) {
                    true => Ok(views),
                    false => {
                        let message = "its lowering gives other results than it infers".into();
                        Err(Error::Custom { op: op.name().into(), message })
                    }
                }
            }
            Op::Custom(_) => interpreted(&cx, op, ins),
        }
    }

    fn memory(&self) -> Memory {
        let stats = self.arena.stats();
        Memory {
            live_bytes: stats.live_bytes + stats.persistent_bytes,
            live_buffers: stats.live_buffers + stats.persistent_buffers,
            values: 0,
            cached_bytes: stats.cached_bytes,
            persistent_bytes: stats.persistent_bytes,
            peak_bytes: stats.peak_bytes,
            system_allocs: stats.system_allocs,
            limit: stats.limit,
        }
    }

    fn cleanup(&self) {
        self.arena.cleanup();
    }

    fn limit(&self, bytes: Option<usize>) {
        self.arena.set_limit(bytes);
    }

    fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>> {
        let buffer = self.arena.alloc(len, place).ok()?;
        Some(Box::new(buffer))
    }

    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        let stage = |data: Data| match self.upload(&data, Place::Reuse) {
            Ok(view) => Data::new(data.meta, Bytes::shared(view.buffer.share(), 0, data.meta.bytes())),
            // What does not fit now is copied when it is written, and fails there if it still does not fit.
            Err(_) => data,
        };
        data.into_iter().map(stage).collect()
    }
}

impl CpuKernels {
    /// A composite, as the primitives it stands for.
    fn lowered(&self, op: &Op, ins: &[Arg<View>], place: Place) -> Result<SmallVec<[View; 2]>, Error> {
        let unsupported = || Error::Unsupported { op: op.name().into(), device: "cpu".into() };
        self.written(op, ins, place)?.ok_or_else(unsupported)
    }

    /// The results of what an operation stands for, if it stands for others.
    fn written(
        &self,
        op: &Op,
        ins: &[Arg<View>],
        place: Place,
    ) -> Result<Option<SmallVec<[View; 2]>>, Error> {
        crate::composite::Eager::new(self, place, ins.iter().map(|v| (**v).clone())).lower(op)
    }
}

/// An operation run by the plain interpreter.
fn interpreted(cx: &Context<'_>, op: &Op, ins: &[Arg<View>]) -> Result<SmallVec<[View; 2]>, Error> {
    memory::counted(cx.arena, || {
        let mut values: SmallVec<[Value; 4]> = SmallVec::new();
        for x in ins {
            let x = cx.dense(x)?;
            values.push(Value::from_bytes(x.meta(), x.bytes()));
        }
        let refs: SmallVec<[&Value; 4]> = values.iter().collect();
        let outs = reference::eval(op, &refs).map_err(interpreter::error)?;
        outs.iter().map(|value| cx.filled(value.meta(), value.as_bytes())).collect()
    })
}
