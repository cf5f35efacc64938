//! Random programs: however a program is cut, run or shared out, its results have the same bits.

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
    Some(match step.op % 25 {
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
        22 => p.to_dtype(DType::Bool).select(&p.to_dtype(DType::F32), &q.to_dtype(DType::F32)),
        23 if rank < 3 => a.unsqueeze(0).broadcast_to([&[2][..], &a.shape()[..]].concat()),
        24 => float(a).neg().sum(()),
        _ => return None,
    })
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
            values.swap_remove(n as usize % values.len());
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
