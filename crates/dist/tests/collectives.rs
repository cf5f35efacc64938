//! Collectives on tensors: between ranks and between devices, with their derivatives, for every dtype and size.

use kiln_dist::{
    Collective, Config, Error, Group, Reduce, all_gather_devices, all_reduce_devices, broadcast_devices,
    reduce_scatter_devices,
};
use kiln_tensor::{DType, Device, Tensor};
use std::time::Duration;

const DTYPES: [DType; 8] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];

fn groups(ranks: usize) -> Vec<Group> {
    let config = Config { deadline: Duration::from_secs(5), flight: None, ..Config::default() };
    Group::local(ranks, config).unwrap()
}

fn each<T: Send>(ranks: usize, f: impl Fn(Group, Device) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let run = |g: Group| {
            let device = Device::open(&format!("cpu:{}", g.rank())).unwrap();
            scope.spawn(move || f(g, device))
        };
        let threads: Vec<_> = groups(ranks).into_iter().map(run).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// A rank's values of a shape: small whole numbers, so that any dtype holds their sums and products.
fn values(rank: usize, shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let n: usize = shape.iter().product();
    let items: Vec<f32> = (0..n).map(|i| ((i * 3 + rank * 5) % 4) as f32).collect();
    Tensor::from_vec(items, shape, device).to_dtype(dtype)
}

fn numbers(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).to_vec::<f64>().unwrap()
}

fn combined(reduce: Reduce, dtype: DType, ranks: usize, n: usize) -> Vec<f64> {
    let x = |rank: usize, i: usize| {
        let v = ((i * 3 + rank * 5) % 4) as f64;
        if dtype == DType::Bool { (v != 0.0) as u8 as f64 } else { v }
    };
    let all = |i: usize| (0..ranks).map(move |r| x(r, i));
    (0..n)
        .map(|i| match reduce {
            Reduce::Sum => all(i).sum(),
            Reduce::Mean => all(i).sum::<f64>() / ranks as f64,
            Reduce::Max => all(i).fold(f64::MIN, f64::max),
            Reduce::Min => all(i).fold(f64::MAX, f64::min),
            Reduce::Prod => all(i).product(),
        })
        .collect()
}

#[test]
fn every_reduction_of_every_dtype_and_size() {
    each(4, |group, device| {
        for dtype in DTYPES {
            for reduce in Reduce::ALL {
                for shape in [&[4usize, 3][..], &[0, 2], &[4, 2000]] {
                    let x = values(group.rank(), shape, dtype, &device);
                    if reduce.fits(dtype).is_err() {
                        assert!(
                            matches!(x.all_reduce(&group, reduce), Err(Error::Group(_))),
                            "{reduce} {dtype}"
                        );
                        continue;
                    }
                    let n = shape.iter().product();
                    let want = combined(reduce, dtype, 4, n);
                    let got = x.all_reduce(&group, reduce).unwrap().wait().unwrap();
                    assert_eq!(got.meta(), x.meta());
                    assert_eq!(numbers(&got), want, "{reduce} {dtype} {shape:?}");
                    let part = x.reduce_scatter(&group, reduce).unwrap().wait().unwrap();
                    let own = group.rank() * n / 4..(group.rank() + 1) * n / 4;
                    assert_eq!(numbers(&part), want[own], "{reduce} {dtype} {shape:?}");
                }
            }
            for shape in [&[2usize, 3][..], &[0], &[1, 3000]] {
                let x = values(group.rank(), shape, dtype, &device);
                let all = x.all_gather(&group).unwrap().wait().unwrap();
                let want: Vec<f64> =
                    (0..4).flat_map(|r| numbers(&values(r, shape, dtype, &device))).collect();
                assert_eq!(numbers(&all), want, "{dtype} {shape:?}");
                let copy = x.broadcast(&group, 2).unwrap().wait().unwrap();
                assert_eq!(numbers(&copy), numbers(&values(2, shape, dtype, &device)), "{dtype} {shape:?}");
            }
        }
        let scalar = Tensor::scalar(group.rank() as f32, &device);
        assert_eq!(
            scalar.all_reduce(&group, Reduce::Max).unwrap().wait().unwrap().item::<f32>().unwrap(),
            3.0
        );
        group.barrier().unwrap();
    });
}

#[test]
fn several_are_under_way_while_the_device_computes() {
    each(3, |group, device| {
        let handles: Vec<_> = (0..20)
            .map(|i| {
                let x = Tensor::full([1000], i as f64 + group.rank() as f64, DType::F32, &device);
                x.exp().log().all_reduce(&group, Reduce::Sum).unwrap()
            })
            .collect();
        for (i, handle) in handles.into_iter().enumerate() {
            let sum = handle.wait().unwrap().to_vec::<f32>().unwrap();
            assert!((sum[999] - (3 * i + 3) as f32).abs() < 1e-3, "{i}: {}", sum[999]);
        }
    });
}

#[test]
fn sums_means_gathering_scattering_and_broadcast_have_derivatives() {
    each(2, |group, device| {
        let rank = group.rank();
        let x = Tensor::from_vec(vec![1.0f32 + rank as f32, 2.0, 3.0, 4.0], [4], &device).requires_grad();
        // Every rank weighs the result in its own way: 1 on rank 0, 2 on rank 1.
        let weight = 1.0 + rank as f64;
        let gradient = |y: Tensor| -> Vec<f32> {
            let g = (y * weight).sum(()).backward();
            g.get(&x).map_or(Vec::new(), |g| g.to_vec::<f32>().unwrap())
        };
        assert_eq!(gradient(x.all_reduce(&group, Reduce::Sum).unwrap().wait().unwrap()), [3.0; 4]);
        assert_eq!(gradient(x.all_reduce(&group, Reduce::Mean).unwrap().wait().unwrap()), [1.5; 4]);
        assert_eq!(gradient(x.all_gather(&group).unwrap().wait().unwrap()), [3.0; 4]);
        let scattered = x.reduce_scatter(&group, Reduce::Sum).unwrap().wait().unwrap();
        assert_eq!(gradient(scattered), [1.0, 1.0, 2.0, 2.0]);
        let copied = gradient(x.broadcast(&group, 1).unwrap().wait().unwrap());
        assert_eq!(copied, if rank == 1 { vec![3.0; 4] } else { vec![] });
        assert!(!x.all_reduce(&group, Reduce::Max).unwrap().wait().unwrap().is_tracked());
    });
}

#[test]
fn a_failed_operand_fails_the_collective_on_every_rank_and_the_group_lives() {
    let errors = each(2, |group, device| {
        let x = Tensor::from_vec(vec![4i64, 6], [2], &device);
        // Division by zero is an error of the device.
        let by = Tensor::from_vec(vec![1i64, group.rank() as i64 ^ 1], [2], &device);
        let y = x.floor_divide(&by);
        let error = y.all_reduce(&group, Reduce::Sum).unwrap().wait().expect_err("poisoned");
        assert_eq!(numbers(&x.all_reduce(&group, Reduce::Sum).unwrap().wait().unwrap()), [8.0, 12.0]);
        error
    });
    for error in errors {
        assert!(matches!(error, Error::Group(kiln_group::Error::Poisoned { rank: 1, .. })), "{error}");
    }
}

#[test]
fn ranks_with_several_shards_are_refused() {
    let config = Config { shards: Some(3), flight: None, ..Config::default() };
    let group = Group::local(2, config).unwrap().remove(0);
    let error = Tensor::ones([2], &Device::cpu()).all_reduce(&group, Reduce::Sum).err();
    assert_eq!(error, Some(Error::Shared { shards: 3, ranks: 2 }));
}

#[test]
fn devices_of_one_program() {
    let devices: Vec<Device> = (0..4).map(|i| Device::open(&format!("cpu:{i}")).unwrap()).collect();
    for dtype in DTYPES {
        for reduce in Reduce::ALL.into_iter().filter(|r| r.fits(dtype).is_ok()) {
            for shape in [&[4usize, 5][..], &[0, 2]] {
                let on = |(i, d): (usize, &Device)| values(i, shape, dtype, d);
                let tensors: Vec<Tensor> = devices.iter().enumerate().map(on).collect();
                let n: usize = shape.iter().product();
                let want = combined(reduce, dtype, 4, n);
                for (t, device) in all_reduce_devices(&tensors, reduce).unwrap().iter().zip(&devices) {
                    assert_eq!((t.dtype(), &t.device()), (dtype, device));
                    assert_eq!(numbers(t), want, "{reduce} {dtype}");
                }
                let parts = reduce_scatter_devices(&tensors, reduce).unwrap();
                assert_eq!(parts.iter().flat_map(numbers).collect::<Vec<_>>(), want, "{reduce} {dtype}");
            }
        }
    }
    let x: Vec<Tensor> = devices.iter().map(|d| Tensor::ones([2], d).requires_grad()).collect();
    let all = all_gather_devices(&x).unwrap();
    assert_eq!(all[1].to_vec::<f32>().unwrap(), [1.0; 8]);
    let copies = broadcast_devices(&x[0], &devices).unwrap();
    assert_eq!(copies[2].to_vec::<f32>().unwrap(), [1.0; 2]);
    let y = all_reduce_devices(&x, Reduce::Sum).unwrap();
    let g = (&y[2] * 3.0).sum(()).backward();
    assert_eq!(g.get(&x[0]).unwrap().to_vec::<f32>().unwrap(), [3.0; 2]);
}
