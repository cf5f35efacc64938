//! Elementwise programs over f32, small enough for a cache and too large for any.

use super::{On, Row, Setup, Workload};

pub(super) const TABLE: &[Row] = &[
    ("elementwise/light_64k", On::All, |s| light(s, 1 << 16)),
    ("elementwise/gelu_64k", On::All, |s| gelu(s, 1 << 16)),
    ("elementwise/adam_64k", On::All, |s| adam(s, 1 << 16)),
    ("elementwise/light_1m", On::All, |s| light(s, 1 << 20)),
    ("elementwise/gelu_1m", On::All, |s| gelu(s, 1 << 20)),
    ("elementwise/adam_1m", On::All, |s| adam(s, 1 << 20)),
    ("elementwise/light_16m", On::All, |s| light(s, 1 << 24)),
    ("elementwise/gelu_16m", On::All, |s| gelu(s, 1 << 24)),
    ("elementwise/adam_16m", On::All, |s| adam(s, 1 << 24)),
    ("elementwise/broadcast", On::All, broadcast),
];

/// relu(x * 1.5 + b) * 0.7 + res
fn light(s: &Setup, n: usize) -> Workload {
    let inputs = [(); 3].map(|()| s.randn([s.n(n)]));
    Workload::moving(inputs, |[x, b, res]| vec![(x * 1.5 + b).relu() * 0.7 + res])
}

/// gelu(x + b) + res, the tanh form
fn gelu(s: &Setup, n: usize) -> Workload {
    let inputs = [(); 3].map(|()| s.randn([s.n(n)]));
    Workload::moving(inputs, |[x, b, res]| vec![(x + b).gelu_tanh() + res])
}

/// Adam's update of one parameter: the new parameter and moments.
fn adam(s: &Setup, n: usize) -> Workload {
    let [p, g, m, v] = [(); 4].map(|()| s.randn([s.n(n)]));
    let v = s.device.persistent(|| v.abs());
    Workload::moving([p, g, m, v], |[p, g, m, v]| {
        let m = m * 0.9 + g * 0.1;
        let v = v * 0.999 + g * g * 0.001;
        let p = p - 1e-3 * (&m / 0.5) / ((&v / 0.3).sqrt() + 1e-8);
        vec![p, m, v]
    })
}

/// (x[4096, 4096] + row[4096]) * col[4096, 1]
fn broadcast(s: &Setup) -> Workload {
    let n = s.n(4096);
    let inputs = [s.randn([n, n]), s.randn([n]), s.randn([n, 1])];
    Workload::moving(inputs, |[x, row, col]| vec![(x + row) * col])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Build, Machine};
    use kiln::Device;

    /// Compares a benchmark's results with `f` of its inputs in f64, which draws as many vectors as the builder did.
    fn check<const N: usize, const M: usize>(build: Build, f: impl Fn([f64; N]) -> [f64; M]) {
        let s = Setup { device: Device::cpu(), machine: Machine::Host, scale: 1024 };
        kiln::seed(0);
        let read = |t: &kiln::Tensor| t.to_vec::<f32>().unwrap();
        let got: Vec<Vec<f32>> = (build(&s).call)().iter().map(read).collect();
        kiln::seed(0);
        let inputs = [(); N].map(|()| read(&s.randn([64])));
        assert_eq!(got.len(), M);
        for i in 0..64 {
            let want = f(inputs.each_ref().map(|x| x[i] as f64));
            for (got, want) in got.iter().map(|y| y[i] as f64).zip(want) {
                assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "element {i}: {got}, not {want}");
            }
        }
    }

    #[test]
    fn programs_are_the_formulas_they_are_named_after() {
        check(|s| light(s, 1 << 16), |[x, b, res]| [(x * 1.5 + b).max(0.0) * 0.7 + res]);
        check(
            |s| gelu(s, 1 << 16),
            |[x, b, res]| {
                let x = x + b;
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                [0.5 * x * (1.0 + inner.tanh()) + res]
            },
        );
        check(
            |s| adam(s, 1 << 16),
            |[p, g, m, v]| {
                let (m, v) = (m * 0.9 + g * 0.1, v.abs() * 0.999 + g * g * 0.001);
                [p - 1e-3 * (m / 0.5) / ((v / 0.3).sqrt() + 1e-8), m, v]
            },
        );
    }
}
