//! Reading values back: the points where the world's failures become `Result`s.

use crate::{Element, Error, Tensor, lane};
use kiln_device::{Bytes, Data, Pending, method};
use kiln_ir::{DType, Op, Scalar};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// # Values read back
impl Tensor {
    /// The content, as bytes with dtype and shape. Waits until it is computed.
    ///
    /// Like every read, it fails if the value does, and once with [`Error::StepRefused`] after a step of this thread's that
    /// was not applied.
    pub fn to_data(&self) -> Result<Data, Error> {
        let device = self.value.device();
        device.answered(lane::own_lane(device), self.content().wait())
    }

    /// The content, awaited in any async runtime or waited for later. What is read is the value as of this call.
    pub fn to_data_async(&self) -> Pending<Data> {
        let (device, content) = (self.value.device(), self.content());
        let lane = lane::own_lane(device);
        content.answered(move |answer| device.answered(lane, answer))
    }

    /// The content for machinery that has its own way to tell of failures: see [`crate::Device::told`].
    pub fn content(&self) -> Pending<Data> {
        lane::seal_for(&self.value);
        self.value.device().driver().read_as(self.value.id, self.value.meta)
    }

    /// The same values under a new name, computed in that host memory if the device can, see
    /// [`Host::target`](crate::Host::target): then a read of them gives that memory. Nobody may read or write it before,
    /// but what [`Host::reached`](crate::Host::reached) has told of. It is asked for when the values are about to be computed, perhaps several times. Has no gradient.
    #[track_caller]
    pub fn computed_in(&self, memory: impl Fn() -> Option<Bytes> + Send + Sync + 'static) -> Tensor {
        let x = self.detach();
        let device = x.value.device();
        if !device.places_outputs() {
            return x;
        }
        let placed = Tensor::one(Op::Cast(x.dtype()), &[&x]);
        device.driver().place_output(placed.value.id, Arc::new(memory));
        placed
    }

    /// The content, or [`Error::Timeout`] after `limit`; computing goes on in the background.
    pub fn to_data_timeout(&self, limit: Duration) -> Result<Data, Error> {
        self.to_data_async().wait_timeout(limit)
    }

    /// The elements in row-major order. `T` must be the tensor's dtype.
    #[doc(alias("numpy", "tolist"))]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        elements(self.to_data()?)
    }

    /// Like [`Tensor::to_vec`], awaited.
    pub fn to_vec_async<T: Element>(&self) -> impl Future<Output = Result<Vec<T>, Error>> + Send + use<T> {
        let pending = self.to_data_async();
        async move { elements(pending.await?) }
    }

    /// Like [`Tensor::to_vec`], with a limit on the wait.
    pub fn to_vec_timeout<T: Element>(&self, limit: Duration) -> Result<Vec<T>, Error> {
        elements(self.to_data_timeout(limit)?)
    }

    /// Whether both have the same shape and elements. Waits for them. NaN equals nothing.
    #[track_caller]
    pub fn equal(&self, other: &Tensor) -> Result<bool, Error> {
        let _method = method("equal");
        if self.shape() != other.shape() {
            return Ok(false);
        }
        self.detach().eq(other.detach()).all(()).item()
    }

    /// Whether all elements are close, as [`Tensor::isclose`] says; operands broadcast. Waits for them.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let x = Tensor::ones([2], &Device::cpu());
    /// assert!(x.allclose(&(&x + 1e-9), 1e-5, 1e-8)?);
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn allclose(&self, other: &Tensor, rtol: f64, atol: f64) -> Result<bool, Error> {
        let _method = method("allclose");
        self.isclose(other, rtol, atol, false).all(()).item()
    }

    /// The only element. Any dtype can be read as a float, rounded to nearest, and an integer or a bool as every integer
    /// type that holds its value. A float is not read as an integer: [`Tensor::to_dtype`] converts it.
    #[doc(alias("float", "int"))]
    pub fn item<T: Element>(&self) -> Result<T, Error> {
        only(self.numel())?;
        element(self.to_data()?)
    }

    /// Like [`Tensor::item`], awaited.
    pub fn item_async<T: Element>(&self) -> impl Future<Output = Result<T, Error>> + Send + use<T> {
        let (count, pending) = (self.numel(), self.to_data_async());
        async move {
            only(count)?;
            element(pending.await?)
        }
    }

    /// Like [`Tensor::item`], with a limit on the wait.
    pub fn item_timeout<T: Element>(&self, limit: Duration) -> Result<T, Error> {
        only(self.numel())?;
        element(self.to_data_timeout(limit)?)
    }
}

fn elements<T: Element>(data: Data) -> Result<Vec<T>, Error> {
    if data.meta.dtype != T::DTYPE {
        return Err(Error::DType { want: T::DTYPE, got: data.meta.dtype });
    }
    Ok(T::from_bytes(&data.bytes))
}

fn only(count: usize) -> Result<(), Error> {
    if count == 1 { Ok(()) } else { Err(Error::NotOne(count)) }
}

/// The only element of `data` as `T`, if it has that value there.
fn element<T: Element>(data: Data) -> Result<T, Error> {
    let (got, want) = (data.meta.dtype, T::DTYPE);
    let other = || Error::DType { want, got };
    let mut bytes = [0; 8];
    match data.bytes.get(..got.size()) {
        Some(own) if !got.is_quantised() => bytes[..own.len()].copy_from_slice(own),
        _ => return Err(other()),
    }
    let item = Scalar::from_bits(got, u64::from_le_bytes(bytes));
    let item = if got == want {
        item
    } else if want.is_float() {
        Scalar::from_f64(want, item.to_f64())
    } else if want.is_int() && !got.is_float() {
        let integer = |x: Scalar| if x.dtype() == DType::U64 { x.bits() as i128 } else { x.to_i64() as i128 };
        let converted = Scalar::from_bits(want, item.to_i64() as u64);
        if integer(converted) != integer(item) {
            return Err(other());
        }
        converted
    } else {
        return Err(other());
    };
    T::from_bytes(&item.to_bytes()).pop().ok_or_else(other)
}
