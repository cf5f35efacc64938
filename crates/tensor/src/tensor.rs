//! The tensor itself: a value, and its place in the graph of derivatives.

use crate::tape::{self, Edge};
use crate::value::Value;
use crate::{Device, lane};
use kiln_device::{Data, Origin};
use kiln_ir::{DType, Meta, Op, Shape, V, infer, infer_binary, infer_unary};
use smallvec::SmallVec;
use std::sync::Arc;

/// An n-dimensional array on a device. Dtype, shape and device are facts of the value, not of the type.
///
/// Cloning is cheap and shares the value. Operations return at once: they are recorded and computed when something is
/// read. An operation that does not fit its operands panics at the caller's line; what fails while computing is told
/// where the result is read.
///
/// Methods are grouped by theme, each under a heading of its own, and can be searched by PyTorch's names where ours differ.
/// Left out on purpose: complex numbers, Fourier transforms, decompositions and solvers of linear algebra, `vmap`, and
/// probability distributions as objects.
#[derive(Clone)]
#[must_use = "operations give a new tensor and change none"]
pub struct Tensor {
    pub(crate) value: Arc<Value>,
    pub(crate) edge: Option<Edge>,
}

/// # Facts
impl Tensor {
    /// A tensor from host data.
    pub fn from_data(data: Data, device: &Device) -> Tensor {
        Tensor { value: lane::write(device, data), edge: None }
    }

    /// Its dtype and shape.
    pub fn meta(&self) -> Meta {
        self.value.meta
    }

    /// Its extents.
    #[doc(alias("size"))]
    pub fn shape(&self) -> Shape {
        self.value.meta.shape
    }

    /// The extent of an axis; negative axes count from the end.
    #[doc(alias("size"))]
    #[track_caller]
    pub fn dim(&self, axis: isize) -> usize {
        self.shape()[self.axis("dim", axis)]
    }

    /// How many axes it has.
    #[doc(alias("dim", "ndim", "ndimension"))]
    pub fn rank(&self) -> usize {
        self.value.meta.shape.len()
    }

    /// How many elements it has.
    #[doc(alias("nelement", "len"))]
    pub fn numel(&self) -> usize {
        self.value.meta.shape.numel()
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.value.meta.dtype
    }

    /// The device it is on.
    pub fn device(&self) -> Device {
        self.value.device().clone()
    }

    /// Names this tensor in the process: clones have the same, so that weights which several layers share are known.
    pub fn identity(&self) -> (u64, Option<u64>) {
        (self.value.id.0, self.leaf())
    }

    /// The results of an operation on tensors of one device. The methods of this type are made of this; it is public
    /// for custom operations and tools.
    ///
    /// # Panics
    /// If the operation does not fit its operands, or they are on different devices.
    #[track_caller]
    pub fn apply(op: Op, ins: &[&Tensor]) -> SmallVec<[Tensor; 2]> {
        let origin = Origin::here();
        let device = common(origin.name(op.name()), ins);
        emit(op, ins, device, origin)
    }

    /// The result of an operation without operands.
    #[track_caller]
    pub fn create(op: Op, device: &Device) -> Tensor {
        emit_one(op, &[], device, Origin::here())
    }

    /// The single result of an operation on tensors.
    #[track_caller]
    pub(crate) fn one(op: Op, ins: &[&Tensor]) -> Tensor {
        let origin = Origin::here();
        let device = common(origin.name(op.name()), ins);
        emit_one(op, ins, device, origin)
    }

    /// The axis that `axis` names: negative axes count from the end, and rank 0 has an axis 0 as in PyTorch.
    #[track_caller]
    pub(crate) fn axis(&self, op: &str, axis: isize) -> usize {
        resolve_axis(op, axis, self.rank(), &self.shape())
    }
}

/// `axis` counted from the start, for a tensor of `rank`.
#[track_caller]
pub(crate) fn resolve_axis(op: &str, axis: isize, rank: usize, shape: &Shape) -> usize {
    let signed = if axis < 0 { axis + rank as isize } else { axis };
    if signed < 0 || signed >= rank as isize {
        panic!("{op}: axis {axis} is out of range for shape {shape:?}");
    }
    signed as usize
}

/// The device of all of `ins`.
#[track_caller]
fn common<'a>(name: &str, ins: &[&'a Tensor]) -> &'a Device {
    let Some(first) = ins.first() else { panic!("{name}: no operands; see Tensor::create") };
    let device = first.value.device();
    let elsewhere =
        |t: &&&Tensor| !std::ptr::eq(t.value.lane, first.value.lane) && t.value.device() != device;
    if let Some(other) = ins.iter().find(elsewhere) {
        if other.value.device().id() == device.id() {
            panic!("{name}: operands of before and after {device} was opened again");
        }
        panic!("{name}: operands on different devices, {} and {}", device, other.value.device());
    }
    device
}

/// Records `op` and, where an operand is tracked, keeps it for backward.
#[track_caller]
pub(crate) fn emit(op: Op, ins: &[&Tensor], device: &Device, origin: Origin) -> SmallVec<[Tensor; 2]> {
    let metas: SmallVec<[Meta; 3]> = ins.iter().map(|t| t.value.meta).collect();
    if metas.iter().any(|m| m.dtype.is_quantised())
        && !matches!(op, Op::Cast(_) | Op::Dot { .. } | Op::Custom(_))
    {
        return unpacked(op, ins, device, origin);
    }
    // Not in a closure, which would panic at its own line instead of the caller's.
    let outs = match infer(&op, &metas) {
        Ok(outs) => outs,
        Err(e) => panic!("{}", e.about(origin.name(op.name()))),
    };
    if !device.runs_all() && !device.driver().supports(&op, &metas) {
        return lowered(&op, ins, device, origin);
    }
    if !is_tracked(ins) {
        let values = lane::record(device, op, ins, &outs, origin);
        return values.into_iter().map(|value| Tensor { value, edge: None }).collect();
    }
    let values = lane::record(device, op.clone(), ins, &outs, origin);
    tape::track(op, ins, values, origin)
}

/// Like [`emit`], for an operation with one result. What is elementwise takes a short way.
#[track_caller]
pub(crate) fn emit_one(op: Op, ins: &[&Tensor], device: &Device, origin: Origin) -> Tensor {
    let plain = |t: &Tensor| !t.value.meta.dtype.is_quantised();
    let inferred = match (&op, ins) {
        (Op::Binary(kind), [a, b]) if plain(a) && plain(b) => {
            infer_binary(*kind, &a.value.meta, &b.value.meta)
        }
        (Op::Unary(kind), [x]) if plain(x) => infer_unary(*kind, &x.value.meta),
        (Op::Full { shape, value }, []) => {
            let meta = Meta { dtype: value.dtype(), shape: *shape };
            meta.check().map(|_| meta)
        }
        _ => return emit(op, ins, device, origin).swap_remove(0),
    };
    // Not in a closure, which would panic at its own line instead of the caller's.
    let out = match inferred {
        Ok(out) => out,
        Err(e) => panic!("{}", e.about(origin.name(op.name()))),
    };
    if !device.runs_all() {
        return emit(op, ins, device, origin).swap_remove(0);
    }
    if !is_tracked(ins) {
        return Tensor { value: lane::record_one(device, op, ins, out, origin), edge: None };
    }
    let value = lane::record_one(device, op.clone(), ins, out, origin);
    tape::track_one(op, ins, value, origin)
}

fn is_tracked(ins: &[&Tensor]) -> bool {
    ins.iter().any(|t| t.edge.is_some()) && tape::is_grad_enabled()
}

/// Quantised operands of operations that have no packed form are unpacked first.
#[track_caller]
fn unpacked(op: Op, ins: &[&Tensor], device: &Device, origin: Origin) -> SmallVec<[Tensor; 2]> {
    let plain: SmallVec<[Tensor; 3]> = ins
        .iter()
        .map(|t| match t.dtype().is_quantised() {
            true => emit(Op::Cast(DType::F32), &[t], device, origin).swap_remove(0),
            false => (*t).clone(),
        })
        .collect();
    emit(op, &plain.iter().collect::<SmallVec<[&Tensor; 3]>>(), device, origin)
}

/// What a device does not execute itself is recorded as primitives.
#[track_caller]
fn lowered(op: &Op, ins: &[&Tensor], device: &Device, origin: Origin) -> SmallVec<[Tensor; 2]> {
    let device = ins.first().map_or_else(|| lane::own(device), |t| t.value.device());
    let recorder = tape::Recorder::new(device, origin, ins.iter().map(|t| (*t).clone()));
    let keys: SmallVec<[V<'_>; 3]> = (0..ins.len()).map(|i| V::new(&recorder, i as u32)).collect();
    match kiln_ir::lower(op, &keys) {
        Some(outs) => outs.iter().map(|v| recorder.tensor(v.key())).collect(),
        None => {
            let name = origin.name(op.name());
            panic!("{name} is not supported by {}, and has no lowering", device.info().name)
        }
    }
}
