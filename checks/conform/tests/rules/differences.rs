//! First and second derivatives against central differences, in f64.

use crate::cases::{case, elementwise};
use crate::eager::Eager;
use kiln_grad::*;
use kiln_ir::*;
use std::collections::HashMap;

type Data = Vec<Vec<f64>>;

/// The gradients of `wrt` for the gradient `seed` of `y`: a small walk, by the rules.
fn backward<'a>(build: &'a Eager, y: V<'a>, seed: V<'a>, wrt: &[V<'a>]) -> Vec<Option<V<'a>>> {
    let mut grads: HashMap<u32, V<'a>> = HashMap::from([(y.key(), seed)]);
    for node in build.nodes().iter().rev() {
        let values = |ids: &[Id]| ids.iter().map(|id| V::new(build, id.0 as u32)).collect::<Vec<_>>();
        let (ins, outs) = (values(&node.ins), values(&node.outs));
        let given: Vec<_> = outs.iter().map(|v| grads.get(&v.key()).copied()).collect();
        if given.iter().all(Option::is_none) {
            continue;
        }
        for (i, x) in ins.iter().enumerate() {
            if let Some(g) = gradient(&node.op, &Rule { grads: &given, ins: &ins, outs: &outs }, i) {
                grads.entry(x.key()).and_modify(|sum| *sum = *sum + g).or_insert(g);
            }
        }
    }
    wrt.iter().map(|v| grads.get(&v.key()).copied()).collect()
}

fn noise(seed: u64, n: usize, low: f64, high: f64) -> Vec<f64> {
    (0..n as u64).map(|i| low + (high - low) * philox::uniform_wide(philox::wide(seed, 5, i))).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

struct Check {
    op: Op,
    metas: Vec<Meta>,
    out: Meta,
}

impl Check {
    /// The result and gradients of `sum(result * weights)`, or, for `twice`, those of the gradients' own weighted sum.
    fn run(&self, xs: &Data, twice: bool) -> (f64, Data) {
        let build = Eager::default();
        let leaves: Vec<V<'_>> =
            self.metas.iter().zip(xs).map(|(meta, x)| build.leaf(*meta, x.clone())).collect();
        let y = V::emit(self.op.clone(), &leaves)[0];
        let weights = noise(11, self.out.shape.numel(), 0.5, 1.5);
        let seed = build.leaf(self.out, weights.clone());
        let first = backward(&build, y, seed, &leaves);
        let zeros = |i: usize| vec![0.0; xs[i].len()];
        let data = |grads: &[Option<V<'_>>]| {
            grads
                .iter()
                .enumerate()
                .map(|(i, g)| g.map_or_else(|| zeros(i), |g| build.data(g)))
                .collect::<Data>()
        };
        if !twice {
            return (dot(&build.data(y), &weights), data(&first));
        }
        let weights: Data = (0..xs.len()).map(|i| noise(13 + i as u64, xs[i].len(), 0.5, 1.5)).collect();
        let mut total: Vec<Option<V<'_>>> = vec![None; xs.len()];
        for (i, g) in first.iter().enumerate().filter_map(|(i, g)| g.map(|g| (i, g))) {
            let seed = build.leaf(self.metas[i], weights[i].clone());
            for (sum, g) in total.iter_mut().zip(backward(&build, g, seed, &leaves)) {
                *sum = match (*sum, g) {
                    (Some(sum), Some(g)) => Some(sum + g),
                    (sum, g) => sum.or(g),
                };
            }
        }
        let value = data(&first).iter().zip(&weights).map(|(g, w)| dot(g, w)).sum();
        (value, data(&total))
    }

    fn check(&self, xs: &Data, twice: bool, line: &str) {
        let (_, grads) = self.run(xs, twice);
        const H: f64 = 1e-5;
        let differentiated = |i: usize| !matches!(flow(&self.op, i), Flow::None(_));
        for i in (0..xs.len()).filter(|&i| self.metas[i].dtype.is_float() && differentiated(i)) {
            for k in 0..xs[i].len() {
                let moved = |h: f64| {
                    let mut xs = xs.clone();
                    xs[i][k] += h;
                    self.run(&xs, twice).0
                };
                let want = (moved(H) - moved(-H)) / (2.0 * H);
                let got = grads[i][k];
                // Outside an operation's domain there is nothing to compare.
                let close = want.is_nan() || (got - want).abs() <= 2e-6 * (1.0 + want.abs() + got.abs());
                assert!(
                    close,
                    "{line} at {xs:?}: operand {i}[{k}], twice {twice}: rule {got}, difference {want}"
                );
            }
        }
    }
}

/// Elements that operands have together: each is moved back and forth, twice.
const MOST: usize = 48;

/// Whether several writes of a scatter that keeps one of them are sure to meet: there its rule is not the derivative.
fn collides(op: &Op, metas: &[Meta]) -> bool {
    match op {
        Op::Scatter { kind: ScatterKind::Each, axis } => {
            metas[1].shape[*axis as usize] > metas[0].shape[*axis as usize]
        }
        _ => false,
    }
}

fn check(line: &str, low: f64, high: f64) {
    let (op, metas) = case(line, DType::F64);
    let op = if matches!(op, Op::Cast(_)) { Op::Cast(DType::F64) } else { op };
    let out = infer(&op, &metas).unwrap()[0];
    let few = metas.iter().map(|meta| meta.shape.numel()).sum::<usize>() <= MOST;
    if !out.dtype.is_float() || !few || collides(&op, &metas) {
        return;
    }
    let xs: Data = (0..metas.len())
        .map(|i| {
            let n = metas[i].shape.numel();
            match metas[i].dtype.kind() {
                Kind::Float => noise(100 + i as u64, n, low, high),
                _ => noise(100 + i as u64, n, 0.0, 2.0).into_iter().map(f64::floor).collect(),
            }
        })
        .collect();
    let check = Check { op, metas, out };
    check.check(&xs, false, line);
    check.check(&xs, true, line);
}

#[test]
fn agree_with_the_rules_of_structured_operations() {
    for line in kiln_conform::cases::all() {
        check(line, 0.3, 1.7);
        check(line, -1.0, 1.0);
    }
}

#[test]
fn agree_with_the_rules_of_the_tables() {
    for line in elementwise() {
        check(&line, 0.2, 0.9);
        check(&line, 1.1, 1.4);
        check(&line, -0.9, -0.2);
        check(&line, -4.5, 4.5);
    }
}

/// The gradients of one operation at given values.
fn gradients(line: &str, xs: &[&[f64]]) -> Data {
    let (op, metas) = case(line, DType::F64);
    let out = infer(&op, &metas).unwrap()[0];
    let build = Eager::default();
    let leaves: Vec<V<'_>> = metas.iter().zip(xs).map(|(meta, x)| build.leaf(*meta, x.to_vec())).collect();
    let y = V::emit(op, &leaves)[0];
    let seed = build.leaf(out, vec![1.0; out.shape.numel()]);
    let grads = backward(&build, y, seed, &leaves);
    grads.into_iter().zip(xs).map(|(g, x)| g.map_or_else(|| vec![0.0; x.len()], |g| build.data(g))).collect()
}

#[test]
fn ties_of_max_share_over_all_axes() {
    let got = gradients("max axes=[0,1] keep=false : f32[2,2]", &[&[3.0, 1.0, 3.0, 3.0]]);
    assert_eq!(got, [[1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0 / 3.0]]);
    let got = gradients("maximum : f32[2] f32[2]", &[&[1.0, 2.0], &[1.0, 1.0]]);
    assert_eq!(got, [[0.5, 1.0], [0.5, 0.0]]);
}

#[test]
fn products_with_zeros_have_finite_gradients() {
    let got = gradients("prod axes=[0] keep=false : f32[3]", &[&[2.0, 0.0, 3.0]]);
    assert_eq!(got, [[0.0, 6.0, 0.0]]);
    let got = gradients("prod axes=[0,1] keep=false : f32[2,2]", &[&[2.0, 0.0, 0.0, 3.0]]);
    assert_eq!(got, [[0.0; 4]]);
    let got = gradients("cumprod axis=0 reverse=false : f32[4]", &[&[2.0, 0.0, 3.0, 5.0]]);
    assert_eq!(got, [[1.0, 2.0 * (1.0 + 3.0 + 15.0), 0.0, 0.0]]);
}

#[test]
fn attention_rows_that_see_nothing_have_zero_gradients() {
    let inf = f64::NEG_INFINITY;
    let (op, metas) =
        case("attention causal=false scale=1.0 : f32[2,1] f32[2,1] f32[2,1] f32[2,2]", DType::F64);
    let out = metas[0];
    let check = Check { op, metas, out };
    let xs: Data = vec![vec![0.3, 0.4], vec![0.5, -0.6], vec![0.7, 0.8], vec![inf, inf, 0.0, inf]];
    for twice in [false, true] {
        let (_, grads) = check.run(&xs, twice);
        assert!(grads.iter().flatten().all(|g| g.is_finite()), "twice {twice}: {grads:?}");
        assert_eq!(grads[0][0], 0.0);
        assert_eq!(grads[3], [0.0; 4]);
    }
}
