use kiln_tensor::*;
use std::time::Instant;
fn main() {
    let d = Device::cpu();
    let x = Tensor::randn([16], &d);
    let y = Tensor::randn([16], &d);
    let n: usize = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2000);
    let grad = std::env::args().nth(2).is_some();
    let x = if grad { x.requires_grad() } else { x };
    let (mut rec, mut back, mut syn, mut dropt) = (0f64, 0f64, 0f64, 0f64);
    for _ in 0..n {
        let t0 = Instant::now();
        let z = (0..1000).fold(x.clone(), |z, _| z + &y);
        let t1 = Instant::now();
        let g = if grad {
            let l = z.sum(());
            let g = l.backward().get(&x).cloned();
            drop(l);
            g
        } else {
            None
        };
        let t2 = Instant::now();
        d.sync().unwrap();
        let t3 = Instant::now();
        drop((z, g));
        let t4 = Instant::now();
        rec += (t1 - t0).as_secs_f64();
        back += (t2 - t1).as_secs_f64();
        syn += (t3 - t2).as_secs_f64();
        dropt += (t4 - t3).as_secs_f64();
    }
    let k = 1e6 / n as f64;
    println!("us: record {:.1} backward {:.1} sync {:.1} drop {:.1}", rec * k, back * k, syn * k, dropt * k);
}
