//! Differentiation: misuse, release, hooks, recomputation, higher derivatives, long chains.

use kiln_device::{Batch, Decorator, Driver};
use kiln_ir::{Item, Op};
use kiln_tensor::{Device, Generator, Tensor, checkpoint, custom_grad, grad, no_grad, seed, with_generator};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

fn vec(t: &Tensor) -> Vec<f32> {
    t.to_vec::<f32>().unwrap()
}

fn leaf(values: &[f32], device: &Device) -> Tensor {
    Tensor::from_slice(values, [values.len()], device).requires_grad()
}

/// The text and place of the panic in `f`.
fn panics(f: impl FnOnce()) -> (String, String, u32) {
    static PLACE: Mutex<Option<(String, u32)>> = Mutex::new(None);
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let thread = std::thread::current().id();
    let old = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == thread {
            *PLACE.lock().unwrap() = info.location().map(|l| (l.file().to_string(), l.line()));
        }
    }));
    let caught = catch_unwind(AssertUnwindSafe(f));
    std::panic::set_hook(old);
    let payload = caught.expect_err("it should panic");
    let text = payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string()));
    let (file, line) = PLACE.lock().unwrap().take().unwrap();
    (text.unwrap(), file, line)
}

#[test]
fn misuse_panics_at_the_callers_line() {
    let device = Device::cpu();
    let x = Tensor::ones([2, 3], &device);
    let w = Tensor::ones([2, 3], &device).requires_grad();
    let loss = w.sum(());
    loss.backward();
    type Call<'a> = (&'a str, u32, Box<dyn Fn() + 'a>);
    // Each call is on the line that it gives.
    #[rustfmt::skip]
    let calls: Vec<Call<'_>> = vec![
        ("not tracked", line!(), Box::new(|| drop(x.sum(()).backward()))),
        ("differentiated before", line!(), Box::new(|| drop(loss.backward()))),
        ("more than one element", line!(), Box::new(|| drop(w.exp().backward()))),
        ("the gradient is f32[1]", line!(), Box::new(|| drop(w.exp().backward_with(&Tensor::ones([1], &device))))),
        ("only floats", line!(), Box::new(|| drop(Tensor::arange(0, 3, 1, &device).requires_grad()))),
        ("shapes [2, 3] and [4]", line!(), Box::new(|| drop(&x + &Tensor::ones([4], &device)))),
        ("shapes [2, 3] and [4]", line!(), Box::new(|| drop(x.add(Tensor::ones([4], &device))))),
        ("do not fit", line!(), Box::new(|| drop(x.matmul(&x)))),
        ("axis 2 is out of range", line!(), Box::new(|| drop(x.sum(2)))),
        ("axis 5", line!(), Box::new(|| drop(x.softmax(5)))),
        ("[2, 3]", line!(), Box::new(|| drop(x.reshape([7])))),
        ("3 elements do not fill", line!(), Box::new(|| drop(Tensor::from_vec(vec![1f32; 3], [2], &device)))),
        ("empty", line!(), Box::new(|| drop(Tensor::randint(3, 3, [1], &device)))),
        ("not defined for", line!(), Box::new(|| drop(x.bitwise_not()))),
        ("no operands", line!(), Box::new(|| drop(Tensor::apply(Op::Select, &[])))),
    ];
    for (want, line, call) in calls {
        let (text, file, at) = panics(call);
        assert!(text.contains(want), "line {line}: `{text}` does not say `{want}`");
        assert_eq!((file.as_str(), at), (file!(), line), "{text}");
    }
}

#[test]
fn a_graph_is_released_or_kept() {
    let device = Device::cpu();
    let x = leaf(&[0.5, 1.5], &device);
    let y = (x.exp() * &x).sum(());
    let first = vec(y.differentiate().retain_graph().run().get(&x).unwrap());
    assert_eq!(vec(y.differentiate().retain_graph().run().get(&x).unwrap()), first);
    assert_eq!(vec(y.backward().get(&x).unwrap()), first);
    let (text, ..) = panics(|| drop(y.backward()));
    assert!(text.contains("retain_graph()") && text.contains(file!()), "{text}");
    // Another graph on the same leaves is another matter.
    assert_eq!(vec((x.exp() * &x).sum(()).backward().get(&x).unwrap()), first);
}

#[test]
fn detach_and_no_grad_stop_the_flow() {
    let device = Device::cpu();
    let x = leaf(&[2.0], &device);
    let y = (&x * x.detach()).sum(());
    assert_eq!(vec(y.backward().get(&x).unwrap()), [2.0]);
    let z = no_grad(|| x.exp());
    assert!(!z.is_tracked() && kiln_tensor::is_grad_enabled());
    assert!(!no_grad(|| checkpoint(&x, |x| x.exp())).is_tracked());
    let w = leaf(&[3.0], &device);
    let grads = (&x * no_grad(|| w.exp())).sum(()).backward();
    assert!(grads.get(&w).is_none() && grads.len() == 1);
    assert_eq!(vec(&grads.get_or_zeros(&w)), [0.0]);
    let caught = catch_unwind(|| no_grad(|| panic!("on purpose")));
    assert!(caught.is_err() && kiln_tensor::is_grad_enabled());
    assert!(!x.argmax(()).is_tracked() && !x.gt(0.0).is_tracked());
}

/// A CPU that keeps the names of what it is asked to run.
struct Spy(kiln_cpu::Cpu, Mutex<Vec<String>>);

impl Decorator for Spy {
    fn inner(&self) -> &dyn Driver {
        &self.0
    }
    fn submit(&self, batch: Batch) {
        let names = batch.items.iter().filter_map(|item| match item {
            Item::Run(node) => Some(node.op.name().to_string()),
            Item::Free(_) => None,
        });
        self.1.lock().unwrap().extend(names);
        self.0.submit(batch);
    }
}

fn spy(name: &str) -> (Device, Arc<Spy>) {
    let spy = Arc::new(Spy(kiln_cpu::Cpu::start(), Mutex::default()));
    let device = Device::wrap(name, spy.clone()).unwrap();
    device.set_eager(true);
    (device, spy)
}

/// Runs a backward with a hook; gives for each firing which of `leaves` it was, and how many operations were recorded.
fn firings(y: &Tensor, leaves: &[&Tensor], spy: &Spy) -> Vec<(usize, usize)> {
    let mut fired = Vec::new();
    let grads = y
        .differentiate()
        .on_ready(|ready| {
            let which = leaves.iter().position(|l| ready.is_of(l)).unwrap();
            let ops = spy.1.lock().unwrap().len();
            fired.push((which, ops, vec(&ready.gradient)));
            Some(ready.gradient)
        })
        .run();
    for (which, _, gradient) in &fired {
        assert_eq!(vec(grads.get(leaves[*which]).unwrap()), *gradient, "the gradient was final");
    }
    fired.into_iter().map(|(which, ops, _)| (which, ops)).collect()
}

#[test]
fn a_hook_fires_when_the_last_contribution_is_recorded() {
    let (device, spy) = spy("spy-order");
    let (w1, w2, b) = (leaf(&[1.0, 2.0], &device), leaf(&[0.5, -1.0], &device), leaf(&[0.1, 0.2], &device));
    let h = (&w1 * 3.0 + &b).tanh();
    let y = (&h * &w2 + &b).sum(());
    let before = spy.1.lock().unwrap().len();
    let fired = firings(&y, &[&w1, &w2, &b], &spy);
    assert_eq!(
        fired.iter().map(|f| f.0).collect::<Vec<_>>(),
        [1, 2, 0],
        "w2, then b at its second use, then w1"
    );
    // When w2 fired, nothing of what lies below `h` had been recorded.
    let log = spy.1.lock().unwrap().clone();
    assert!(!log[before..fired[0].1].iter().any(|name| name == "sub"), "{:?}", &log[before..]);
    assert!(
        log[fired[0].1..fired[1].1].iter().any(|name| name == "sub"),
        "the derivative of tanh comes after"
    );
    assert!(fired[1].1 < fired[2].1);
}

#[test]
fn a_hook_fires_once_for_a_leaf_used_often_and_in_checkpoints() {
    let (device, spy) = spy("spy-shared");
    let (x, w) = (leaf(&[0.3, 0.6], &device), leaf(&[1.5, -0.5], &device));
    let captured = w.clone();
    let h = checkpoint(&(&x * &w), move |h| (h * &captured).tanh() + &captured);
    let captured = w.clone();
    let h = checkpoint(&h, move |h| h.sin() * &captured * &captured);
    let y = (h * &x + &w).sum(());
    let fired = firings(&y, &[&x, &w], &spy);
    let mut which: Vec<usize> = fired.iter().map(|f| f.0).collect();
    which.sort();
    assert_eq!(which, [0, 1]);
    assert!(fired.iter().all(|f| f.1 > 10));
}

#[test]
fn a_hook_fires_though_a_branch_has_no_gradient() {
    let (device, spy) = spy("spy-dead");
    let (x, w) = (leaf(&[0.3, 1.6], &device), leaf(&[1.5, -0.5], &device));
    let captured = w.clone();
    let dead = checkpoint(&x.exp(), move |x| x * &captured).floor() + (&w * 2.0).round();
    let straight = custom_grad(&[&x, &w], x.detach(), |g| vec![Some(g.clone()), None]);
    let y = (dead + &x * 2.0 + straight + &w).sum(());
    let mut which: Vec<usize> = firings(&y, &[&x, &w], &spy).iter().map(|f| f.0).collect();
    which.sort();
    assert_eq!(which, [0, 1]);
}

#[test]
fn a_hook_may_replace_gradients_and_record() {
    let device = Device::cpu();
    let (x, w) = (leaf(&[1.0, 2.0], &device), leaf(&[3.0, 4.0], &device));
    let mut sum = None;
    let grads = (&x * &w)
        .sum(())
        .differentiate()
        .on_ready(|ready| {
            sum = Some(ready.gradient.sum(()));
            Some(ready.gradient * 10.0)
        })
        .run();
    assert_eq!(vec(grads.get(&x).unwrap()), [30.0, 40.0]);
    assert_eq!(vec(grads.get(&w).unwrap()), [10.0, 20.0]);
    assert!(sum.is_some());
}

#[test]
fn a_gradient_that_a_hook_lets_go_takes_no_memory() {
    let device = Device::open("cpu:51").unwrap();
    let n = 256;
    let square = || Tensor::randn([n, n], &device);
    let weights = [square().requires_grad(), square().requires_grad()];
    let loss = square().matmul(&weights[0]).tanh().matmul(&weights[1]).sum(());
    device.sync().unwrap();
    let before = device.memory().live_bytes;
    let mut sums = Vec::new();
    let grads = loss
        .differentiate()
        .on_ready(|ready| {
            sums.push(ready.gradient.sum(()));
            drop(ready);
            device.sync().unwrap();
            let more = device.memory().live_bytes.saturating_sub(before);
            assert!(more < 4 * n * n, "{more} bytes more after {} gradients", sums.len());
            None
        })
        .run();
    assert!(grads.is_empty());
    assert_eq!(sums.len(), 2);
}

#[test]
fn checkpoint_gives_the_bits_of_plain() {
    let device = Device::open("cpu:50").unwrap();
    let run = |kept: bool| {
        let x = Tensor::from_vec((0..64).map(|i| (i as f32 * 0.7).sin()).collect(), [8, 8], &device)
            .requires_grad();
        let w = Tensor::from_vec((0..64).map(|i| (i as f32 * 0.3).cos()).collect(), [8, 8], &device)
            .requires_grad();
        with_generator(Generator::new(3), || {
            let mut h = x.clone();
            for _ in 0..3 {
                let (w, device) = (w.clone(), device.clone());
                let block = move |h: &Tensor| {
                    let mask = Tensor::bernoulli(0.8, [8, 8], &device).to_dtype(kiln_tensor::DType::F32);
                    (h.matmul(&w).tanh() + h) * mask * Tensor::rand([8, 8], &device)
                };
                h = if kept { block(&h) } else { checkpoint(&h, block) };
            }
            let y = (h * Tensor::rand([8, 8], &device)).square().mean(());
            let grads = y.backward();
            let after = Tensor::rand([4], &device);
            [&y, grads.get(&x).unwrap(), grads.get(&w).unwrap(), &after].map(vec)
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn checkpoints_can_be_differentiated_twice() {
    let device = Device::cpu();
    let x = leaf(&[0.4, 1.1], &device);
    let plain = x.sin() * x.exp();
    let again = checkpoint(&x, |x| x.sin() * x.exp());
    let second = |y: &Tensor| vec(&grad(&grad(&y.sum(()), &[&x])[0].sum(()), &[&x])[0]);
    assert_eq!(second(&plain), second(&again));
}

#[test]
fn second_and_third_derivatives() {
    let device = Device::cpu();
    let x = Tensor::from_vec(vec![0.5f64, -1.25], [2], &device).requires_grad();
    let mut y = x.pow(4.0) + x.sin();
    let mut got = Vec::new();
    for _ in 0..3 {
        y = grad(&y.sum(()), &[&x]).swap_remove(0);
        got.push(y.to_vec::<f64>().unwrap());
    }
    for (i, x) in [0.5f64, -1.25].into_iter().enumerate() {
        let want = [4.0 * x.powi(3) + x.cos(), 12.0 * x * x - x.sin(), 24.0 * x - x.cos()];
        for (got, want) in got.iter().map(|g| g[i]).zip(want) {
            assert!((got - want).abs() < 1e-12, "{got} {want}");
        }
    }
    // With respect to something inside, and to something that it does not depend on.
    let x = leaf(&[2.0], &device);
    let h = &x * 3.0;
    let z = leaf(&[1.0], &device);
    let all = grad(&(&h * &h).sum(()), &[&h, &x, &z]);
    assert_eq!(all.iter().map(vec).collect::<Vec<_>>(), [[12.0], [36.0], [0.0]]);
}

#[test]
fn custom_derivatives_are_used_and_checked() {
    let device = Device::cpu();
    let (a, b) = (leaf(&[1.4, -2.6], &device), leaf(&[1.0, 1.0], &device));
    let y = custom_grad(&[&a, &b], no_grad(|| a.round() + &b), |g| vec![Some(g * 7.0), None]);
    let grads = (y * &b).sum(()).backward();
    assert_eq!(vec(grads.get(&a).unwrap()), [7.0, 7.0]);
    assert_eq!(vec(grads.get(&b).unwrap()), [2.0, -2.0]);
    let wrong = custom_grad(&[&a], a.detach(), |_| Vec::new());
    let (text, ..) = panics(|| drop(wrong.sum(()).backward()));
    assert!(text.contains("another number of gradients"), "{text}");
    let wrong = custom_grad(&[&a], a.detach(), |g| vec![Some(g.sum(()))]);
    let (text, ..) = panics(|| drop(wrong.sum(()).backward()));
    assert!(text.contains("f32[] for an operand of f32[2]"), "{text}");
}

#[test]
fn saved_values_are_released_on_the_way() {
    let chain = |name: &str, keep: bool| {
        let device = Device::open(name).unwrap();
        let n = 50_000;
        let x = Tensor::full([n], 0.01, kiln_tensor::DType::F32, &device).requires_grad();
        let mut h = x.clone();
        for _ in 0..40 {
            h = h.sin();
        }
        let y = h.sum(());
        drop(h);
        y.to_data().unwrap();
        let held = device.memory().live_bytes;
        let grads = if keep { y.differentiate().retain_graph().run() } else { y.backward() };
        grads.get(&x).unwrap().to_data().unwrap();
        drop(grads);
        device.sync().unwrap();
        (held, device.memory().live_bytes)
    };
    let (held, kept) = chain("cpu:51", true);
    let (same, left) = chain("cpu:52", false);
    assert_eq!(held, same);
    assert!(held >= 38 * 200_000, "sin keeps its operand: {held}");
    assert!(kept >= 38 * 200_000, "{kept}");
    assert!(left < 1_000_000, "{left} bytes are held after backward");
}

#[test]
fn a_million_nodes_are_walked_and_dropped_without_recursion() {
    let device = Device::open("cpu:53").unwrap();
    let x = leaf(&[1.0], &device);
    let one = Tensor::from_vec(vec![1e-3f32], [1], &device);
    let build = |n: usize| (0..n).fold(x.clone(), |y, _| y + &one);
    let y = build(1_000_000).sum(());
    let grads = y.backward();
    assert_eq!(vec(grads.get(&x).unwrap()), [1.0]);
    drop((grads, y));
    drop(build(1_000_000));
    device.sync().unwrap();
    // Also where steps hold tensors in closures.
    let mut h = x.clone();
    for i in 0..100_000 {
        h = match i % 2 {
            0 => checkpoint(&h, |h| h + 1.0),
            _ => custom_grad(&[&h], h.detach(), {
                let held = h.clone();
                move |g| {
                    let _ = &held;
                    vec![Some(g.clone())]
                }
            }),
        };
    }
    drop(h);
    drop((x, one));
    device.sync().unwrap();
    assert_eq!(device.memory().values, 0);
}

#[test]
fn a_seeded_stream_is_the_same_with_and_without_checkpoint() {
    let device = Device::cpu();
    let x = leaf(&[1.0; 8], &device);
    let draw = |y: Tensor| {
        let _ = y.sum(()).backward();
        vec(&Tensor::rand([4], &device))
    };
    let inner = {
        let device = device.clone();
        move |x: &Tensor| x * Tensor::rand([8], &device)
    };
    seed(9);
    let plain = draw(inner(&x));
    seed(9);
    assert_eq!(draw(checkpoint(&x, inner)), plain);
}

#[test]
fn gradients_of_parts_make_up_the_whole() {
    let device = Device::cpu();
    // Of a leaf and of a result: parts side by side, with a gap, that overlap, along two axes, and beside a whole.
    for of_result in [false, true] {
        let leaf = Tensor::from_vec((0..12).map(|i| i as f32).collect(), [4, 3], &device).requires_grad();
        let x = || if of_result { &leaf * 1.0 } else { leaf.clone() };
        let gradient = |loss: Tensor| loss.backward().get(&leaf).unwrap().to_vec::<f32>().unwrap();
        let rows = |x: &Tensor, from: isize, len: usize, by: f64| (x.narrow(0, from, len) * by).sum(());
        let all = x();
        let split = rows(&all, 2, 2, 3.0) + rows(&all, 0, 2, 5.0);
        assert_eq!(gradient(split), [[5.0; 3], [5.0; 3], [3.0; 3], [3.0; 3]].concat());
        let all = x();
        assert_eq!(gradient(rows(&all, 1, 2, 2.0)), [[0.0; 3], [2.0; 3], [2.0; 3], [0.0; 3]].concat());
        let all = x();
        let overlap = rows(&all, 0, 3, 1.0) + rows(&all, 2, 2, 4.0);
        assert_eq!(gradient(overlap), [[1.0; 3], [1.0; 3], [5.0; 3], [4.0; 3]].concat());
        let all = x();
        let crossed = rows(&all, 0, 2, 1.0) + (all.narrow(1, 0, 1) * 2.0).sum(()) + (&all * 10.0).sum(());
        let want = [[13.0, 11.0, 11.0], [13.0, 11.0, 11.0], [12.0, 10.0, 10.0], [12.0, 10.0, 10.0]];
        assert_eq!(gradient(crossed), want.concat());
        let all = x();
        assert_eq!(gradient(rows(&all, 0, 4, 7.0)), [7.0; 12]);
    }
}

#[test]
fn parts_can_be_differentiated_twice() {
    let device = Device::cpu();
    let leaf = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [4], &device).requires_grad();
    let all = &leaf * 1.0;
    let last = all.narrow(0, 2, 2);
    let loss = (all.narrow(0, 0, 2).square() * 3.0).sum(()) + (last.square() * &last).sum(());
    let first = loss.differentiate().create_graph().run().get(&leaf).unwrap().clone();
    let second = first.sum(()).backward().get(&leaf).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(second, [6.0, 6.0, 18.0, 24.0]);
}
