//! The tensor itself: a value, and its place in the graph of derivatives.

use crate::tape::{self, Link};
use crate::value::Value;
use crate::{Device, lane};
use kiln_device::{Data, Origin};
use kiln_ir::{DType, Meta, Op, Shape, V, infer};
use smallvec::SmallVec;
use std::sync::Arc;

/// An n-dimensional array on a device. Dtype, shape and device are facts of the value, not of the type.
///
/// Cloning is cheap and shares the value. Operations return at once: they are recorded and computed when something is
/// read. An operation that does not fit its operands panics at the caller's line; what fails while computing is told
/// where the result is read.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) value: Arc<Value>,
    pub(crate) link: Option<Link>,
}

impl Tensor {
    /// A tensor from host data.
    pub fn from_data(data: Data, device: &Device) -> Tensor {
        Tensor { value: lane::write(device, data), link: None }
    }

    /// Its dtype and shape.
    pub fn meta(&self) -> Meta {
        self.value.meta
    }

    /// Its extents.
    pub fn shape(&self) -> Shape {
        self.value.meta.shape
    }

    /// The extent of an axis; negative axes count from the end.
    #[track_caller]
    pub fn dim(&self, axis: isize) -> usize {
        self.shape()[self.axis("dim", axis)]
    }

    /// How many axes it has.
    pub fn rank(&self) -> usize {
        self.value.meta.shape.len()
    }

    /// How many elements it has.
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

    /// The results of an operation on tensors of one device. The methods of this type are made of this; it is public
    /// for custom operations and tools.
    ///
    /// # Panics
    /// If the operation does not fit its operands, or they are on different devices.
    #[track_caller]
    pub fn apply(op: Op, ins: &[&Tensor]) -> SmallVec<[Tensor; 2]> {
        let Some(first) = ins.first() else { panic!("{}: no operands; see Tensor::create", op.name()) };
        let device = first.value.device();
        if let Some(other) = ins.iter().find(|t| t.value.device() != device) {
            panic!("{}: operands on different devices, {} and {}", op.name(), device, other.value.device());
        }
        emit(op, ins, device, Origin::here())
    }

    /// The result of an operation without operands.
    #[track_caller]
    pub fn create(op: Op, device: &Device) -> Tensor {
        emit(op, &[], device, Origin::here()).swap_remove(0)
    }

    /// The single result of an operation on tensors.
    #[track_caller]
    pub(crate) fn one(op: Op, ins: &[&Tensor]) -> Tensor {
        Tensor::apply(op, ins).swap_remove(0)
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
        Err(e) => panic!("{e}"),
    };
    if !device.driver().supports(&op, &metas) {
        return lowered(&op, ins, device, origin);
    }
    let values: SmallVec<[&Arc<Value>; 3]> = ins.iter().map(|t| &t.value).collect();
    let tracked = tape::is_grad_enabled() && ins.iter().any(|t| t.link.is_some());
    if !tracked {
        let values = lane::record(device, op, &values, &outs, origin);
        return values.into_iter().map(|value| Tensor { value, link: None }).collect();
    }
    let values = lane::record(device, op.clone(), &values, &outs, origin);
    tape::track(op, ins, &metas, values, origin)
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
    let recorder = tape::Recorder::new(device.clone(), origin, ins.iter().map(|t| (*t).clone()));
    let keys: SmallVec<[V<'_>; 3]> = (0..ins.len()).map(|i| V::new(&recorder, i as u32)).collect();
    match kiln_ir::lower(op, &keys) {
        Some(outs) => outs.iter().map(|v| recorder.tensor(v.key())).collect(),
        None => panic!("{} is not supported by {}, and has no lowering", op.name(), device.info().name),
    }
}
