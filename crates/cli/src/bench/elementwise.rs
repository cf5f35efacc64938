//! Elementwise programs over f32, small enough for a cache and too large for any.

use super::{On, Row, Setup, Work};

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
fn light(s: &Setup, n: usize) -> Work {
    let [x, b, res] = [(); 3].map(|()| s.randn([s.n(n)]));
    Work::moving(&[&x.clone(), &b.clone(), &res.clone()], move || vec![(&x * 1.5 + &b).relu() * 0.7 + &res])
}

/// gelu(x + b) + res, the tanh form
fn gelu(s: &Setup, n: usize) -> Work {
    let [x, b, res] = [(); 3].map(|()| s.randn([s.n(n)]));
    Work::moving(&[&x.clone(), &b.clone(), &res.clone()], move || vec![(&x + &b).gelu_tanh() + &res])
}

/// Adam's update of one parameter: the new parameter and moments.
fn adam(s: &Setup, n: usize) -> Work {
    let [p, g, m, v] = [(); 4].map(|()| s.randn([s.n(n)]));
    let v = s.device.persistent(|| v.abs());
    Work::moving(&[&p.clone(), &g.clone(), &m.clone(), &v.clone()], move || {
        let m = &m * 0.9 + &g * 0.1;
        let v = &v * 0.999 + &g * &g * 0.001;
        let p = &p - 1e-3 * (&m / 0.5) / ((&v / 0.3).sqrt() + 1e-8);
        vec![p, m, v]
    })
}

/// (x[4096, 4096] + row[4096]) * col[4096, 1]
fn broadcast(s: &Setup) -> Work {
    let n = s.n(4096);
    let (x, row, col) = (s.randn([n, n]), s.randn([n]), s.randn([n, 1]));
    Work::moving(&[&x.clone(), &row.clone(), &col.clone()], move || vec![(&x + &row) * &col])
}
