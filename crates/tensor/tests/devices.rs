//! Devices as the user sees them: names, memory, moves, and failures that stay where they belong.

use kiln_device::Bytes;
use kiln_ir::custom::{CustomOp, register};
use kiln_ir::{CustomCall, Op};
use kiln_tensor::{DType, Data, Device, DeviceId, Error, Meta, OpError, Tensor, Usage};
use std::sync::Arc;

fn settled(device: &Device) -> kiln_tensor::Memory {
    device.sync().unwrap();
    device.memory()
}

#[test]
fn ids_are_stable_both_ways() {
    let ids: Vec<DeviceId> =
        [" CPU ", "cpu", "cpu:0", "Cpu:00"].map(|a| Device::open(a).unwrap().id()).to_vec();
    assert!(ids.iter().all(|id| *id == Device::cpu().id()), "{ids:?}");
    let one = Device::open("cpu:1").unwrap();
    assert_ne!(one.id(), ids[0]);
    assert_ne!(one, Device::cpu());
    for device in Device::list() {
        assert_eq!(Device::by_id(device.id()).unwrap(), device);
        assert_eq!(Device::by_id(device.id()).unwrap().address(), device.address());
    }
    assert_eq!(Device::open("Reference").unwrap(), Device::reference());
    assert!(Device::list().contains(&one) && Device::list().contains(&Device::reference()));
    assert_eq!(Device::by_id(DeviceId(99_999)).unwrap_err(), Error::UnknownDevice(99_999));
}

#[test]
fn bad_addresses_are_errors() {
    for bad in [
        "",
        "gpu",
        "cpu:",
        "cpu:64",
        "cpu:-1",
        "cpu:x",
        "cpu:99999999999999",
        "reference:1",
        "cpu 1",
        "remote://",
    ] {
        match Device::open(bad) {
            Err(Error::Address { address, reason }) => assert!(address == bad && !reason.is_empty()),
            other => panic!("{bad}: {other:?}"),
        }
    }
    let driver: Arc<dyn kiln_device::Driver> = Arc::new(kiln_cpu::Cpu::start());
    assert!(matches!(Device::wrap("CPU:3", driver.clone()), Err(Error::Address { .. })));
    let mine = Device::wrap("mine", driver.clone()).unwrap();
    assert_eq!(Tensor::ones([2], &mine).to_vec::<f32>().unwrap(), [1.0; 2]);
    assert!(matches!(Device::wrap("mine", driver), Err(Error::Address { .. })));
    assert_eq!(Device::by_id(mine.id()).unwrap().address(), "mine");
}

#[test]
fn info_says_what_can_be_done_with_each_dtype() {
    for device in [Device::cpu(), Device::reference()] {
        let info = device.info();
        for dtype in DType::ALL {
            let usage = info.usage(dtype);
            assert!(usage.has(Usage::STORAGE), "{device} {dtype}");
            assert_eq!(usage.has(Usage::ARITHMETIC), !dtype.is_quantised(), "{device} {dtype}");
        }
        assert!(info.threads().is_some_and(|n| n >= 1) && info.count >= 1 && !info.numerics.is_empty());
    }
    assert!(Device::cpu().info().usage(DType::F32).has(Usage::ACCELERATED));
    assert_eq!(Device::cpu().info().numerics, Device::reference().info().numerics);
}

#[test]
fn two_cpus_are_apart() {
    let (a, b) = (Device::open("cpu:20").unwrap(), Device::open("cpu:21").unwrap());
    let x = Tensor::ones([1000], &a) * 2.0;
    x.to_data().unwrap();
    assert!(settled(&a).live_bytes > 0);
    assert_eq!((settled(&b).live_bytes, settled(&b).values), (0, 0));
    let y = Tensor::ones([1000], &b);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| &x + &y)).map(|_| ()).unwrap_err();
    let text = caught.downcast_ref::<String>().unwrap();
    assert!(text.contains("cpu:20") && text.contains("cpu:21"), "{text}");
}

#[test]
fn tensors_and_gradients_move() {
    let (a, b) = (Device::open("cpu:22").unwrap(), Device::reference());
    let x = Tensor::from_vec(vec![0.5f32, -1.0, 2.0], [3], &a).requires_grad();
    let there = x.exp().to_device(&b).unwrap();
    assert_eq!(there.device(), b);
    let back = (there * 3.0).to_device(&a).unwrap();
    let loss = (back * &x).sum(());
    let grads = loss.backward();
    let g = grads.get(&x).unwrap();
    assert_eq!(g.device(), a);
    let plain = (x.exp() * 3.0 * &x).sum(()).backward();
    assert_eq!(g.to_vec::<f32>().unwrap(), plain.get(&x).unwrap().to_vec::<f32>().unwrap());
    assert!(x.to_device(&a).unwrap().is_leaf(), "a move to where it is gives the tensor itself");
    for dtype in [DType::Q8, DType::Bool, DType::I16] {
        let t = Tensor::ones([2, 32], &a).to_dtype(dtype);
        let moved = t.to_device(&b).unwrap();
        assert_eq!(&moved.to_data().unwrap().bytes[..], &t.to_data().unwrap().bytes[..]);
    }
    let failed = x.index_select(0, &Tensor::from_vec(vec![7i32], [1], &a));
    assert!(matches!(failed.to_device(&b).unwrap_err().root(), Error::Index { index: 7, length: 3, .. }));
}

#[test]
fn a_memory_limit_fails_what_exceeds_it_and_nothing_else() {
    let device = Device::open("cpu:23").unwrap();
    let small = Tensor::rand([16], &device);
    let want = small.to_vec::<f32>().unwrap();
    let limit = 1 << 20;
    device.set_memory_limit(Some(limit));
    assert_eq!(device.memory().limit, Some(limit));
    let line = line!() + 1;
    let large = Tensor::rand([1 << 20], &device);
    let dependent = (&large + 1.0).sum(());
    for failed in [&large, &dependent] {
        let error = failed.to_data().unwrap_err();
        match error.root() {
            Error::OutOfMemory { asked, free, limit: l } => {
                assert!(*asked >= 4 << 20 && *free <= limit && *l == limit, "{error}");
            }
            _ => panic!("{error:?}"),
        }
        match &error {
            Error::Failed { op, origin: Some(origin), .. } => {
                assert_eq!(
                    (op.as_str(), origin.line.file(), origin.line.line()),
                    ("random_uniform", file!(), line)
                );
            }
            _ => panic!("{error:?}"),
        }
    }
    // Uploads too.
    let uploaded = Tensor::from_vec(vec![0f32; 1 << 20], [1 << 20], &device);
    assert!(matches!(uploaded.to_data().unwrap_err().root(), Error::OutOfMemory { .. }));
    assert_eq!(small.to_vec::<f32>().unwrap(), want);
    assert_eq!((&small * 2.0).to_vec::<f32>().unwrap()[3], want[3] * 2.0);
    // Cached memory is given back before anything fails.
    for _ in 0..100 {
        Tensor::rand([20_000], &device).to_data().unwrap();
    }
    device.set_memory_limit(None);
    assert_eq!(Tensor::rand([1 << 20], &device).to_vec::<f32>().unwrap().len(), 1 << 20);
    drop((large, dependent, uploaded));
    assert!(settled(&device).cached_bytes > 0);
    device.cleanup();
    assert_eq!(device.memory().cached_bytes, 0);
    assert_eq!(small.to_vec::<f32>().unwrap(), want);
}

#[test]
fn persistent_values_are_counted_apart() {
    let device = Device::open("cpu:24").unwrap();
    let before = settled(&device);
    let w = device.persistent(|| Tensor::from_vec(vec![1f32; 1000], [1000], &device));
    let made = device.persistent(|| Tensor::rand([1000], &device) * 2.0);
    let other = Tensor::rand([1000], &device);
    other.to_data().unwrap();
    let held = settled(&device);
    assert!(held.persistent_bytes >= before.persistent_bytes + 8000, "{held:?}");
    assert!(held.live_bytes >= held.persistent_bytes + 4000, "{held:?}");
    drop((w, made, other));
    let after = settled(&device);
    assert_eq!(
        (after.persistent_bytes, after.live_bytes, after.values),
        (before.persistent_bytes, before.live_bytes, before.values)
    );
}

#[test]
fn staged_data_has_the_same_content() {
    for device in [Device::open("cpu:25").unwrap(), Device::reference()] {
        let numbers: Vec<f32> = (0..5000).map(|i| i as f32).collect();
        let data = Tensor::from_vec(numbers.clone(), [50, 100], &device).to_data().unwrap();
        let flags = Data::new(Meta::new(DType::Bool, [3]), Bytes::new(vec![0u8, 1, 7]));
        let staged = device.stage(vec![data, flags]);
        assert_eq!(staged.len(), 2);
        let (x, flags) =
            (Tensor::from_data(staged[0].clone(), &device), Tensor::from_data(staged[1].clone(), &device));
        let once = x.neg();
        drop(x);
        assert_eq!(once.neg().to_vec::<f32>().unwrap(), numbers);
        assert_eq!(Tensor::from_data(staged[0].clone(), &device).to_vec::<f32>().unwrap(), numbers);
        assert_eq!(flags.to_vec::<bool>().unwrap(), [false, true, true]);
        assert_eq!(flags.to_dtype(DType::I32).to_vec::<i32>().unwrap(), [0, 1, 1]);
    }
}

#[test]
fn bytes_read_as_another_dtype_become_proper_bools() {
    let device = Device::open("cpu:26").unwrap();
    let bytes = Tensor::from_vec(vec![0u8, 1, 2, 255], [4], &device).to_data().unwrap().bytes;
    let flags = Tensor::from_data(Data::new(Meta::new(DType::Bool, [4]), bytes), &device);
    assert_eq!(&flags.to_data().unwrap().bytes[..], [0, 1, 1, 1]);
    assert_eq!(flags.to_dtype(DType::I64).sum(()).item::<i64>().unwrap(), 3);
}

#[test]
fn eager_gives_the_bits_of_lazy() {
    let device = Device::open("cpu:27").unwrap();
    let run = || {
        let x = Tensor::from_vec((0..600).map(|i| (i as f32 * 0.37).sin()).collect(), [20, 30], &device)
            .requires_grad();
        let y = (x.matmul(&x.t()).softmax(1) * x.sum_keepdim(1)).layer_norm(20, None, None, 1e-5);
        let g = y.square().mean(()).backward();
        [y.to_data().unwrap(), g.get(&x).unwrap().to_data().unwrap()].map(|d| d.bytes.to_vec())
    };
    let lazy = run();
    device.set_eager(true);
    let eager = run();
    device.set_eager(false);
    assert!(lazy == eager && lazy == run());
}

struct Panics;

impl CustomOp for Panics {
    fn name(&self) -> &str {
        "devices.panics"
    }
    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<smallvec::SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec::smallvec![ins[0]])
    }
    fn eval(&self, attrs: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        match attrs {
            [] => Err("no attributes".into()),
            _ => panic!("on purpose"),
        }
    }
}

#[test]
fn a_panicking_operation_poisons_only_its_result() {
    register(Panics).unwrap();
    for device in [Device::open("cpu:28").unwrap(), Device::reference()] {
        let x = Tensor::from_vec(vec![1f32, 2.0], [2], &device);
        let call = |attrs: Vec<u8>| Op::Custom(Arc::new(CustomCall { name: "devices.panics".into(), attrs }));
        let bad = Tensor::apply(call(vec![1]), &[&x]).swap_remove(0);
        let refused = Tensor::apply(call(vec![]), &[&x]).swap_remove(0);
        let (after, fine) = (bad.exp() + &x, &x + 1.0);
        let panicked = Error::Panicked { op: "devices.panics".into(), message: "on purpose".into() };
        assert_eq!(*after.to_data().unwrap_err().root(), panicked);
        assert_eq!(*bad.to_data().unwrap_err().root(), panicked);
        let message = Error::Custom { op: "devices.panics".into(), message: "no attributes".into() };
        assert_eq!(*refused.to_data().unwrap_err().root(), message);
        assert_eq!(fine.to_vec::<f32>().unwrap(), [2.0, 3.0]);
        assert_eq!(x.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    }
}

#[test]
fn a_failed_gather_names_the_users_line() {
    let device = Device::open("cpu:29").unwrap();
    let x = Tensor::from_vec(vec![1f32, 2.0, 3.0], [3], &device);
    let index = Tensor::from_vec(vec![0i64, 5], [2], &device);
    let (line, y) = (line!(), kiln_tensor::scope("embed", || x.gather(0, &index)));
    let dependent = (y.exp() * 2.0).sum(());
    let unrelated = &x * 2.0;
    for failed in [&dependent, &y] {
        let error = failed.to_data().unwrap_err();
        assert_eq!(*error.root(), Error::Index { op: "gather".into(), index: 5, length: 3 });
        let Error::Failed { op, origin: Some(origin), .. } = &error else { panic!("{error:?}") };
        assert_eq!((op.as_str(), origin.line.file(), origin.line.line()), ("gather", file!(), line));
        assert_eq!(origin.scope.name().as_deref(), Some("embed"));
        let text = error.to_string();
        assert!(text.contains(&format!("{}:{line}", file!())) && text.contains("index 5"), "{text}");
    }
    assert_eq!(unrelated.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    device.sync().unwrap();
    let division =
        Tensor::from_vec(vec![1i32], [1], &device).floor_divide(Tensor::from_vec(vec![0i32], [1], &device));
    assert!(matches!(division.to_data().unwrap_err().root(), Error::Divide { .. }));
}
