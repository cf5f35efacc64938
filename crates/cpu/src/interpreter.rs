//! The device `reference`: the plain interpreter behind the device trait.

use crate::arena::{Arena, Reserved};
use crate::memory;
use crate::reference::{self, EvalError, Value};
use kiln_device::{Bytes, Data, DeviceInfo, Error, Memory, Place};
use kiln_host::{Arg, HostDevice, Kernels};
use kiln_ir::{Meta, Op};
use smallvec::SmallVec;
use std::sync::Arc;

/// The device that every other is compared with.
pub type Reference = HostDevice<Interpreter>;

/// The kernels of [`Reference`].
pub struct Interpreter {
    /// Only counts: values lie in memory of their own.
    arena: Arc<Arena>,
}

/// A value that is counted while it lives.
#[derive(Clone)]
pub struct Counted(Arc<Storage>);

struct Storage {
    value: Value,
    _reserved: Reserved,
}

impl Default for Interpreter {
    fn default() -> Interpreter {
        Interpreter { arena: Arena::new(None) }
    }
}

impl Interpreter {
    fn held(&self, value: Value) -> Result<Counted, Error> {
        let _reserved = self.arena.reserve(value.meta().bytes())?;
        Ok(Counted(Arc::new(Storage { value, _reserved })))
    }
}

impl Kernels for Interpreter {
    type Value = Counted;

    fn info(&self) -> DeviceInfo {
        DeviceInfo { supports_all: true, ..DeviceInfo::new("reference", crate::NUMERICS) }
    }

    fn upload(&self, data: &Data, _: Place) -> Result<Counted, Error> {
        self.held(memory::counted(&self.arena, || Value::from_bytes(data.meta, &data.bytes)))
    }

    fn meta(&self, value: &Counted) -> Meta {
        value.0.value.meta()
    }

    fn download(&self, value: &Counted) -> Result<Data, Error> {
        Ok(Data::new(
            value.0.value.meta(),
            Bytes::new(memory::counted(&self.arena, || value.0.value.to_bytes())),
        ))
    }

    fn eval(&self, op: &Op, ins: &mut [Arg<Counted>], _: Place) -> Result<SmallVec<[Counted; 2]>, Error> {
        let ins: SmallVec<[&Value; 4]> = ins.iter().map(|arg| &arg.0.value).collect();
        let outs = memory::counted(&self.arena, || reference::eval(op, &ins)).map_err(error)?;
        outs.into_iter().map(|value| self.held(value)).collect()
    }

    fn memory(&self) -> Memory {
        let stats = self.arena.stats();
        Memory {
            live_bytes: stats.live_bytes,
            live_buffers: stats.live_buffers,
            peak_bytes: stats.peak_bytes,
            limit: stats.limit,
            ..Memory::default()
        }
    }

    fn limit(&self, bytes: Option<usize>) {
        self.arena.set_limit(bytes);
    }
}

/// An interpreter's error as a device's.
pub(crate) fn error(error: EvalError) -> Error {
    match error {
        EvalError::Op(error) => Error::Op(error),
        EvalError::Index { op, index, length } => Error::Index { op, index, length },
        EvalError::Divide { op, error } => Error::Divide { op, error },
        EvalError::Custom { op, message } => Error::Custom { op, message },
        EvalError::NotLowerable { op } => Error::Unsupported { op, device: "cpu".into() },
        EvalError::Input { id, .. } => Error::UnknownValue(id),
    }
}
