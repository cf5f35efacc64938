//! Reads that are awaited, timed or dropped.

use kiln_ir::custom::{CustomOp, register};
use kiln_ir::{CustomCall, Op};
use kiln_tensor::{DType, Device, Error, Meta, OpError, Tensor};
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// The smallest executor: parks until woken.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Poll::Ready(out) = future.as_mut().poll(&mut cx) {
            return out;
        }
        std::thread::park_timeout(Duration::from_secs(1));
        assert!(Instant::now() < end, "nobody woke the future");
    }
}

/// Its operand, after 200 ms.
struct Slow;

impl CustomOp for Slow {
    fn name(&self) -> &str {
        "reads.slow"
    }
    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<smallvec::SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec::smallvec![ins[0]])
    }
    fn eval(&self, _: &[u8], ins: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        std::thread::sleep(Duration::from_millis(200));
        outs[0].1.copy_from_slice(ins[0].1);
        Ok(())
    }
}

fn slow(x: &Tensor) -> Tensor {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| register(Slow).unwrap());
    let call = CustomCall { name: "reads.slow".into(), attrs: Vec::new() };
    Tensor::apply(Op::Custom(Arc::new(call)), &[x]).swap_remove(0)
}

#[test]
fn an_awaited_read_takes_its_place_when_it_is_called() {
    let device = Device::open("cpu:30").unwrap();
    let x = Tensor::from_vec(vec![1f32, 2.0, 3.0], [3], &device);
    let y = slow(&x) * 2.0;
    let read = y.to_vec_async::<f32>();
    let sync = device.sync_async();
    // What happens to the tensor afterwards does not matter: its value ends, and its memory is used again.
    let z = y * 100.0;
    let again = z.to_vec_async::<f32>();
    drop((x, z));
    assert_eq!(block_on(read).unwrap(), [2.0, 4.0, 6.0]);
    assert_eq!(block_on(again).unwrap(), [200.0, 400.0, 600.0]);
    block_on(sync).unwrap();
    assert_eq!(block_on(Tensor::scalar(5i64, &device).item_async::<i64>()).unwrap(), 5);
}

#[test]
fn polling_never_computes_on_the_polling_thread() {
    let device = Device::open("cpu:31").unwrap();
    let y = slow(&Tensor::scalar(1f32, &device));
    let mut read = pin!(y.to_data_async());
    let from = Instant::now();
    let mut cx = Context::from_waker(Waker::noop());
    assert!(read.as_mut().poll(&mut cx).is_pending());
    assert!(from.elapsed() < Duration::from_millis(150), "{:?}", from.elapsed());
    assert!(block_on(read).is_ok());
}

#[test]
fn dropping_a_future_drops_only_the_answer() {
    let device = Device::open("cpu:32").unwrap();
    let y = slow(&Tensor::from_vec(vec![7i32], [1], &device));
    let mut read = Box::pin(y.to_vec_async::<i32>());
    assert!(read.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(read);
    drop(y.to_data_async());
    assert_eq!(y.to_vec::<i32>().unwrap(), [7]);
    drop(y);
    device.sync().unwrap();
    assert_eq!(device.memory().values, 0);
}

#[test]
fn a_wait_ends_at_its_limit_and_the_work_goes_on() {
    let device = Device::open("cpu:33").unwrap();
    let y = slow(&Tensor::scalar(3f32, &device)) + 1.0;
    let limit = Duration::from_millis(20);
    let from = Instant::now();
    assert_eq!(y.to_data_timeout(limit).map(|d| d.meta), Err(Error::Timeout(limit)));
    assert!(from.elapsed() < Duration::from_millis(150), "{:?}", from.elapsed());
    assert_eq!(y.item_timeout::<f32>(Duration::from_secs(20)).unwrap(), 4.0);
    assert_eq!(y.item::<f32>().unwrap(), 4.0);
    assert_eq!(y.item_timeout::<f32>(Duration::MAX).unwrap(), 4.0);
}

#[test]
fn reads_are_checked() {
    let x = Tensor::from_vec(vec![1f32, 2.0], [2], &Device::cpu());
    assert_eq!(
        x.to_vec::<i32>(),
        Err(Error::DType { want: kiln_tensor::DType::I32, got: kiln_tensor::DType::F32 })
    );
    assert_eq!(x.item::<f32>(), Err(Error::NotOne(2)));
    assert_eq!(block_on(x.item_async::<f32>()), Err(Error::NotOne(2)));
    assert_eq!(Tensor::zeros([0], &Device::cpu()).item::<f32>(), Err(Error::NotOne(0)));
}

#[test]
fn item_converts_where_the_value_stays() {
    let device = Device::cpu();
    let number = |x: f64, dtype: DType| Tensor::full([], x, dtype, &device);
    assert_eq!(number(1.5, DType::BF16).item::<f32>().unwrap(), 1.5);
    assert_eq!(number(1.5, DType::F16).item::<f64>().unwrap(), 1.5);
    assert_eq!(number(0.1, DType::F64).item::<f32>().unwrap(), 0.1f32);
    assert_eq!(number(0.1, DType::F32).item::<f64>().unwrap(), 0.1f32 as f64);
    assert_eq!(number(-3.0, DType::I64).item::<f32>().unwrap(), -3.0);
    assert_eq!(number(-3.0, DType::I64).item::<i8>().unwrap(), -3);
    assert_eq!(number(200.0, DType::U8).item::<i64>().unwrap(), 200);
    assert_eq!(number(1.0, DType::Bool).item::<u8>().unwrap(), 1);
    let refused = |want: DType, got: DType| Some(Error::DType { want, got });
    assert_eq!(number(-3.0, DType::I64).item::<u64>().err(), refused(DType::U64, DType::I64));
    assert_eq!(number(200.0, DType::U8).item::<i8>().err(), refused(DType::I8, DType::U8));
    assert_eq!(number(2.0, DType::F32).item::<i64>().err(), refused(DType::I64, DType::F32));
    assert_eq!(number(1.0, DType::I64).item::<bool>().err(), refused(DType::Bool, DType::I64));
    let large = Tensor::from_vec(vec![u64::MAX], [1], &device);
    assert_eq!(large.item::<u64>().unwrap(), u64::MAX);
    assert_eq!(large.item::<i64>().err(), refused(DType::I64, DType::U64));
    assert_eq!(large.expand([2]).item::<u64>().err(), Some(Error::NotOne(2)));
}
