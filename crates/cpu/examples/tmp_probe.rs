use kiln_cpu::gemm::*;
use kiln_cpu::pool;
use std::time::Instant;
use std::arch::x86_64::*;
#[target_feature(enable = "avx512f")]
fn peak() -> f64 { let t = Instant::now(); let mut a = [_mm512_set1_ps(1.0); 24]; let x = std::hint::black_box(_mm512_set1_ps(0.5));
 for _ in 0..20000 { for a in a.iter_mut() { *a = _mm512_fmadd_ps(*a, x, x); } } std::hint::black_box(a); 20000.0*24.0*32.0/t.elapsed().as_secs_f64()/1e9 }
fn main() {
    let mut peaks = vec![];

    pool::set_threads(2);
    for work in [200u64, 1000, 5000, 20000] {
        for chunks in [2usize, 8] {
            let f = |_: usize| { let mut x = 1u64; for i in 0..work * 2 / chunks as u64 { x = std::hint::black_box(x.wrapping_mul(3) + i); } };
            let mut v: Vec<f64> = (0..3000).map(|_| { let t = Instant::now(); pool::parallel(chunks, &f); t.elapsed().as_secs_f64() * 1e6 }).collect();
            let mut s: Vec<f64> = (0..3000).map(|_| { let t = Instant::now(); for c in 0..chunks { f(c) }; t.elapsed().as_secs_f64() * 1e6 }).collect();
            v.sort_by(f64::total_cmp); s.sort_by(f64::total_cmp);
            println!("work {work} chunks {chunks}: par best {:.2} med {:.2}  serial best {:.2} med {:.2}", v[0], v[1500], s[0], s[1500]);
        }
    }
    let sizes = [96usize, 128, 192, 256, 512, 1024, 2048];
    let mut best = [[0f64; 2]; 7];
    let mut meds: Vec<[Vec<f64>; 2]> = (0..7).map(|_| [vec![], vec![]]).collect();
    let data: Vec<_> = sizes.iter().map(|&n| ((0..n*n).map(|i| ((i * 2654435761) % 1000) as f32 / 500.0 - 1.0).collect::<Vec<f32>>(), vec![0f32; n*n])).collect();
    for _ in 0..20 {
        for _ in 0..20 { peaks.push(unsafe { peak() }); }
        for (s, &n) in sizes.iter().enumerate() {
            for th in 0..2 {
                pool::set_threads(th + 1);
                let (a, c) = &data[s];
                let reps = (5e8 / (2.0 * (n * n * n) as f64)).clamp(1.0, 300.0) as usize;
                for _ in 0..reps {
                    let t = Instant::now();
                    let v = Mat { ptr: a.as_ptr(), rs: n as isize, cs: 1 };
                    unsafe { gemm(n, n, n, v, v, MatMut { ptr: c.as_ptr() as *mut f32, rs: n as isize, cs: 1 }) };
                    let g = 2e-9 * (n * n * n) as f64 / t.elapsed().as_secs_f64();
                    best[s][th] = best[s][th].max(g);
                    meds[s][th].push(g);
                }
            }
        }
    }
    peaks.sort_by(f64::total_cmp); println!("n fma peak best {:.1} median {:.1}", peaks[peaks.len()-1], peaks[peaks.len()/2]);
    for (s, n) in sizes.iter().enumerate() {
        for m in meds[s].iter_mut() { m.sort_by(f64::total_cmp); }
        let med = |t: usize| meds[s][t][meds[s][t].len() / 2];
        println!("n {n:5}: best {:.1} {:.1}  median {:.1} {:.1}", best[s][0], best[s][1], med(0), med(1));
    }
}
