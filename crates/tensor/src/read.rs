//! Reading values back: the points where the world's failures become `Result`s.

use crate::{Element, Error, Tensor, lane};
use kiln_device::{Bytes, Data, Pending};
use kiln_ir::Op;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

impl Tensor {
    /// The content, as bytes with dtype and shape. Waits until it is computed.
    pub fn to_data(&self) -> Result<Data, Error> {
        self.to_data_async().wait()
    }

    /// The content, awaited in any async runtime or waited for later. What is read is the value as of this call.
    pub fn to_data_async(&self) -> Pending<Data> {
        lane::seal_for(&self.value);
        self.value.device().driver().read(self.value.id)
    }

    /// The same values under a new name, computed in that host memory if the device can, see
    /// [`Host::target`](crate::Host::target): then a read of them gives that memory. Nobody may read or write it before,
    /// but what [`Host::reached`](crate::Host::reached) has told of. It is asked for when the values are about to be computed, perhaps several times. Has no gradient.
    #[track_caller]
    pub fn computed_in(&self, memory: impl Fn() -> Option<Bytes> + Send + Sync + 'static) -> Tensor {
        let x = self.detach();
        let driver = x.value.device().driver();
        if !driver.follows_wishes() {
            return x;
        }
        let placed = Tensor::one(Op::Cast(x.dtype()), &[&x]);
        driver.wish(placed.value.id, Arc::new(memory));
        placed
    }

    /// The content, or [`Error::Timeout`] after `limit`; computing goes on in the background.
    pub fn to_data_timeout(&self, limit: Duration) -> Result<Data, Error> {
        self.to_data_async().wait_timeout(limit)
    }

    /// The elements in row-major order. `T` must be the tensor's dtype.
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

    /// The only element. `T` must be the tensor's dtype.
    pub fn item<T: Element>(&self) -> Result<T, Error> {
        one(self.numel(), self.to_vec()?)
    }

    /// Like [`Tensor::item`], awaited.
    pub fn item_async<T: Element>(&self) -> impl Future<Output = Result<T, Error>> + Send + use<T> {
        let (count, pending) = (self.numel(), self.to_vec_async());
        async move { one(count, pending.await?) }
    }

    /// Like [`Tensor::item`], with a limit on the wait.
    pub fn item_timeout<T: Element>(&self, limit: Duration) -> Result<T, Error> {
        one(self.numel(), self.to_vec_timeout(limit)?)
    }
}

fn elements<T: Element>(data: Data) -> Result<Vec<T>, Error> {
    if data.meta.dtype != T::DTYPE {
        return Err(Error::DType { want: T::DTYPE, got: data.meta.dtype });
    }
    Ok(T::from_bytes(&data.bytes))
}

fn one<T>(count: usize, mut items: Vec<T>) -> Result<T, Error> {
    match (items.pop(), count) {
        (Some(item), 1) => Ok(item),
        _ => Err(Error::NotOne(count)),
    }
}
