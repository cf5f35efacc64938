//! The device `reference`: the plain interpreter behind the device trait.

use crate::host::{Arg, HostDevice, Kernels};
use crate::reference::{self, EvalError, Value};
use kiln_device::{Bytes, Data, DeviceInfo, Error, Memory, Place, Usage};
use kiln_ir::{DType, Meta, Op};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The device that every other is compared with.
pub type Reference = HostDevice<Interpreter>;

/// The kernels of [`Reference`].
#[derive(Default)]
pub struct Interpreter {
    bytes: Arc<Count>,
}

#[derive(Default)]
struct Count {
    live: AtomicUsize,
    buffers: AtomicUsize,
    peak: AtomicUsize,
}

/// A value that is counted while it lives.
#[derive(Clone)]
pub struct Counted(Arc<Held>);

struct Held {
    value: Value,
    bytes: usize,
    count: Arc<Count>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.count.live.fetch_sub(self.bytes, Ordering::Relaxed);
        self.count.buffers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reference {
    /// The plain interpreter as a device.
    #[allow(clippy::new_without_default)]
    pub fn start() -> Reference {
        HostDevice::new(Interpreter::default())
    }
}

impl Interpreter {
    fn held(&self, value: Value) -> Counted {
        let bytes = value.meta().bytes();
        let live = self.bytes.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.bytes.buffers.fetch_add(1, Ordering::Relaxed);
        self.bytes.peak.fetch_max(live, Ordering::Relaxed);
        Counted(Arc::new(Held { value, bytes, count: self.bytes.clone() }))
    }
}

impl Kernels for Interpreter {
    type Value = Counted;

    fn info(&self) -> DeviceInfo {
        let usage = DType::ALL.map(|d| {
            let arithmetic = if d.is_quantised() { Usage::NONE } else { Usage::ARITHMETIC };
            (d, Usage::STORAGE.and(arithmetic))
        });
        DeviceInfo {
            name: "reference".into(),
            count: 1,
            usage: usage.to_vec(),
            numerics: crate::NUMERICS.into(),
            threads: 1,
        }
    }

    fn upload(&self, data: &Data, _: Place) -> Result<Counted, Error> {
        Ok(self.held(Value::from_bytes(data.meta, &data.bytes)))
    }

    fn meta(&self, value: &Counted) -> Meta {
        value.0.value.meta()
    }

    fn download(&self, value: &Counted) -> Result<Data, Error> {
        Ok(Data::new(value.0.value.meta(), Bytes::new(value.0.value.to_bytes())))
    }

    fn eval(&self, op: &Op, ins: &mut [Arg<Counted>], _: Place) -> Result<SmallVec<[Counted; 2]>, Error> {
        let ins: SmallVec<[&Value; 4]> = ins.iter().map(|arg| &arg.0.value).collect();
        let outs = reference::eval(op, &ins).map_err(error)?;
        Ok(outs.into_iter().map(|value| self.held(value)).collect())
    }

    fn memory(&self) -> Memory {
        Memory {
            live_bytes: self.bytes.live.load(Ordering::Relaxed),
            live_buffers: self.bytes.buffers.load(Ordering::Relaxed),
            peak_bytes: self.bytes.peak.load(Ordering::Relaxed),
            ..Memory::default()
        }
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
