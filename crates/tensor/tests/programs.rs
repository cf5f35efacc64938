//! Random programs: however a program is split, run or shared out, its results have the same bits.

use kiln_tensor::{DType, Data, Device, Tensor, set_threads};
use proptest::prelude::*;

/// What to do, which values to take, whether to seal or to drop something first. Numbers are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
struct Step {
    op: u8,
    a: u8,
    b: u8,
    axis: u8,
    seal: bool,
    forget: Option<u8>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (
        any::<u8>(),
        any::<u8>(),
        any::<u8>(),
        any::<u8>(),
        prop::bool::weighted(0.2),
        prop::option::weighted(0.4, any::<u8>()),
    )
        .prop_map(|(op, a, b, axis, seal, forget)| Step { op, a, b, axis, seal, forget });
    prop::collection::vec(step, 1..40)
}

fn given(device: &Device) -> Vec<Tensor> {
    let wave = |n: usize| (0..n).map(move |i| ((i * 37 % 101) as f32 - 50.0) / 25.0);
    vec![
        Tensor::from_vec(wave(15).collect(), [3, 5], device),
        Tensor::from_vec(wave(5).map(f64::from).collect(), [5], device),
        Tensor::from_vec(wave(15).map(|x| (x * 10.0) as i32).collect(), [3, 5], device),
        Tensor::from_vec(wave(6).map(|x| x > 0.0).collect(), [2, 1, 3], device),
        Tensor::from_vec(wave(4).map(|x| (x * 100.0) as u8).collect(), [4, 1], device),
        Tensor::scalar(0.5f32, device),
        Tensor::from_vec(wave(0).collect(), [0, 5], device),
        Tensor::from_vec(wave(181 * 183).collect(), [181, 183], device),
        Tensor::from_vec(wave(2 * 17_000).collect(), [2, 17_000], device),
    ]
}

/// Values that fit together in shape, else the first with itself.
fn pair(a: &Tensor, b: &Tensor) -> (Tensor, Tensor) {
    let fits = kiln_ir::broadcast(&a.shape(), &b.shape()).is_some_and(|s| s.numel() <= 40_000);
    (a.clone(), if fits { b.clone() } else { a.clone() })
}

fn apply(step: Step, a: &Tensor, b: &Tensor) -> Option<Tensor> {
    let rank = a.rank() as isize;
    let axis = if rank > 0 { step.axis as isize % rank } else { 0 };
    let some = rank > 0 && a.shape()[axis as usize] > 0;
    let (p, q) = pair(a, b);
    let float = |t: &Tensor| if t.dtype().is_float() { t.clone() } else { t.to_dtype(DType::F32) };
    Some(match step.op % 29 {
        0 => p + q,
        1 => p.to_dtype(DType::F32) - q.to_dtype(DType::BF16),
        2 => p * q,
        3 => p / q,
        4 => p.maximum(&q),
        5 => p.lt(&q),
        6 => float(a).tanh(),
        7 => float(a).exp(),
        8 => a.to_dtype(DType::F16),
        9 => a.to_dtype(DType::I32),
        10 if rank > 0 => float(a).sum(axis),
        11 if rank > 0 => float(a).mean_keepdim(axis),
        12 if some => a.to_dtype(DType::F32).amax(axis),
        13 if rank > 1 => a.transpose(axis, (axis + 1) % rank),
        14 if rank > 0 => a.flip(axis),
        15 if some => {
            a.slice(axis, (step.b % 2) as isize, a.shape()[axis as usize] as isize, 1 + step.b as usize % 3)
        }
        16 => a.reshape([-1]),
        17 if rank > 0 && a.numel() < 20_000 => Tensor::cat(&[a, a], axis),
        18 if rank == 2 && a.dim(0) < 190 => a.to_dtype(DType::F32).matmul(&a.to_dtype(DType::F32).t()),
        19 if rank > 0 => float(a).softmax(axis),
        20 if rank > 0 => a.to_dtype(DType::F64).cumsum(axis),
        21 if some => a.to_dtype(DType::F32).argmax(axis),
        22 => p.to_dtype(DType::Bool).where_(&p.to_dtype(DType::F32), &q.to_dtype(DType::F32)),
        23 if rank < 3 => a.unsqueeze(0).broadcast_to([&[2][..], &a.shape()[..]].concat()),
        24 => float(a).neg().sum(()),
        25 if rank > 0 => (float(&p) * float(&q)).sum(0),
        26 if rank == 2 && a.numel() > 0 => trained(a, |x| x.cross_entropy(&classes(x, step.b))),
        27 if rank > 0 && a.numel() > 0 => {
            let last = a.to_dtype(DType::F32).reshape([-1, a.dim(-1) as isize]).sum(0).requires_grad();
            let x = a.to_dtype(DType::F32).requires_grad();
            let y = x.layer_norm(last.shape(), Some(&last), Some(&last), 1e-5);
            let gradients = (&y * &y).sum(()).backward();
            gradients.get(&x)?.clone() + gradients.get(&last)?.clone() + y.detach()
        }
        28 if rank == 2 && a.numel() > 0 => {
            let x = a.to_dtype(DType::F32);
            let index = classes(&x, step.b).unsqueeze(1);
            let y = (&x - x.mean_keepdim(1)).exp();
            &y * y.gather(1, &index) + x.amax_keepdim(1)
        }
        _ => return None,
    })
}

/// A loss's gradient beside its value.
fn trained(a: &Tensor, loss: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let x = a.to_dtype(DType::F32).requires_grad();
    let loss = loss(&x);
    let gradients = loss.backward();
    gradients.get(&x).unwrap().clone() + loss.detach()
}

/// A class for each row.
fn classes(x: &Tensor, n: u8) -> Tensor {
    let (rows, classes) = (x.dim(0), x.dim(1));
    let class = |i: usize| ((i * 31 + n as usize) % classes) as i64;
    Tensor::from_vec((0..rows).map(class).collect(), [rows], &x.device())
}

/// Runs a program; `seals` makes its seals take effect. Gives everything that is alive at the end.
fn run(device: &Device, steps: &[Step], seals: bool) -> Vec<Data> {
    let mut values = given(device);
    for &step in steps {
        if step.seal && seals {
            device.submit();
        }
        let pick = |n: u8| values[n as usize % values.len()].clone();
        if let Some(made) = apply(step, &pick(step.a), &pick(step.b)).filter(|t| t.numel() <= 40_000) {
            values.push(made);
        }
        if let Some(n) = step.forget.filter(|_| values.len() > 1) {
            drop(values.swap_remove(n as usize % values.len()));
        }
    }
    values.iter().map(|t| t.to_data().unwrap()).collect()
}

/// Equal bits; which NaN a NaN is does not count.
fn same(a: &Data, b: &Data) -> bool {
    let nan = |x: &[u8]| match a.meta.dtype {
        DType::F64 => f64::from_le_bytes(x.try_into().unwrap()).is_nan(),
        DType::F32 => f32::from_le_bytes(x.try_into().unwrap()).is_nan(),
        DType::F16 => half::f16::from_le_bytes(x.try_into().unwrap()).is_nan(),
        DType::BF16 => half::bf16::from_le_bytes(x.try_into().unwrap()).is_nan(),
        _ => false,
    };
    let size = a.meta.dtype.size();
    a.meta == b.meta
        && (a.bytes[..] == b.bytes[..]
            || a.bytes.chunks(size).zip(b.bytes.chunks(size)).all(|(x, y)| x == y || nan(x) && nan(y)))
}

fn start(data: &Data) -> &[u8] {
    &data.bytes[..data.bytes.len().min(64)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn have_the_same_bits_however_they_are_run(steps in steps()) {
        let device = Device::open("cpu:60").unwrap();
        set_threads(1);
        let want = run(&device, &steps, false);
        let check = |name: &str, got: Vec<Data>| {
            prop_assert_eq!(want.len(), got.len());
            for (i, (a, b)) in want.iter().zip(&got).enumerate() {
                prop_assert!(same(a, b), "{}: value {} of {} differs: {:x?} {:x?}", name, i, a.meta, start(b), start(a));
            }
            Ok(())
        };
        set_threads(2);
        check("2 threads, sealed", run(&device, &steps, true))?;
        set_threads(3);
        check("3 threads", run(&device, &steps, false))?;
        device.set_eager(true);
        let eager = run(&device, &steps, false);
        device.set_eager(false);
        check("eager", eager)?;
        check("reference", run(&Device::reference(), &steps, true))?;
        drop(want);
        device.sync().unwrap();
        prop_assert_eq!((device.memory().values, device.memory().live_bytes), (0, 0));
    }
}

/// Results that are written past the cache.
#[test]
fn large_results_have_the_same_bits_however_they_are_run() {
    let device = Device::open("cpu:61").unwrap();
    let wave =
        |n: usize| (0..n).map(|i| ((i * 7919 % 10_007) as f32 - 5_000.0) / 1_000.0).collect::<Vec<_>>();
    let run = || {
        let x = Tensor::from_vec(wave(1200 * 4096), [1200, 4096], &device);
        let row = Tensor::from_vec(wave(4096), [4096], &device);
        let class: Vec<i64> = (0..1200).map(|i| i * 13 % 4096).collect();
        let loss = |x: &Tensor| x.cross_entropy(&Tensor::from_vec(class.clone(), [1200], &x.device()));
        let results = [(&x * 1.5 + &row).relu() * 0.7, (&x + &row).softmax(1), trained(&x, loss)];
        drop(x);
        results.map(|t| t.to_data().unwrap())
    };
    let fused = run();
    device.set_eager(true);
    for (a, b) in fused.iter().zip(run()) {
        assert!(same(a, &b), "{:x?} {:x?}", start(a), start(&b));
    }
}

#[test]
fn an_index_out_of_range_is_told_inside_a_loss_too() {
    let device = Device::open("cpu:62").unwrap();
    let x = Tensor::from_vec(vec![0.5f32; 12], [3, 4], &device);
    let target = Tensor::from_vec(vec![0i64, 4, 1], [3], &device);
    let sum = x.exp().sum(());
    assert!(x.cross_entropy(&target).item::<f32>().is_err());
    assert_eq!(sum.item::<f32>().unwrap(), (0.5f32.exp() * 4.0) * 3.0);
}
