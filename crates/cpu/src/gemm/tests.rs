//! Every path, layout, instruction set and split against the product by its definition, bit for bit.

use super::half::half_on;
use super::scalar::Compute;
use super::*;
use crate::pool;
use ::half::{bf16, f16};
use std::fmt::Debug;

/// What a test needs to know of an element type.
trait Number: Copy + Default + Debug + 'static {
    fn from_f64(x: f64) -> Self;
    fn bits(self) -> u64;
    /// The product by its definition.
    fn dot(k: usize, a: impl Fn(usize) -> Self, b: impl Fn(usize) -> Self) -> Self;
    unsafe fn run(isa: Isa, p: Problem<Self, Self>);
}

macro_rules! float_numbers {
    ($($t:ident, $w:ident, $widen:expr, $narrow:expr, $run:expr;)*) => {$(
        impl Number for $t {
            fn from_f64(x: f64) -> Self {
                $narrow(x as $w)
            }
            fn bits(self) -> u64 {
                self.to_bits() as u64
            }
            fn dot(k: usize, a: impl Fn(usize) -> Self, b: impl Fn(usize) -> Self) -> Self {
                let mut total = 0.0;
                for (k0, kc) in panels(k) {
                    let sum = (k0..k0 + kc).fold(0.0, |acc, k| $widen(a(k)).mul_add($widen(b(k)), acc));
                    total = if k0 == 0 { sum } else { total + sum };
                }
                $narrow(total)
            }
            unsafe fn run(isa: Isa, p: Problem<Self, Self>) {
                // SAFETY: the caller's promise.
                unsafe { $run(isa, p, &|_| ()) }
            }
        }
    )*};
}

float_numbers! {
    f32, f32, |x: f32| x, |x: f32| x, <f32 as Compute>::run;
    f64, f64, |x: f64| x, |x: f64| x, <f64 as Compute>::run;
    f16, f32, f16::to_f32, f16::from_f32, half_on;
    bf16, f32, bf16::to_f32, bf16::from_f32, half_on;
}

macro_rules! int_numbers {
    ($($t:ident)*) => {$(
        impl Number for $t {
            fn from_f64(x: f64) -> Self {
                (x * 1e18) as i64 as $t
            }
            fn bits(self) -> u64 {
                self as u64
            }
            fn dot(k: usize, a: impl Fn(usize) -> Self, b: impl Fn(usize) -> Self) -> Self {
                (0..k).fold(0, |acc: $t, k| acc.wrapping_add(a(k).wrapping_mul(b(k))))
            }
            unsafe fn run(_: Isa, p: Problem<Self, Self>) {
                // SAFETY: the caller's promise.
                unsafe { gemm_int(p.m, p.n, p.k, p.a, p.b, p.c) }
            }
        }
    )*};
}
int_numbers!(i8 i16 i32 i64 u8 u16 u32 u64);

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Of mixed sign and size, so that every change of order shows.
    fn number(&mut self) -> f64 {
        let x = (self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        x * [1.0, 0.01, 4.0, 1.0][self.next() as usize % 4]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Rows,
    Columns,
    /// Rows apart by more than their length.
    Padded,
    /// Neither stride is 1.
    Spread,
    Reversed,
    /// All rows are the same memory.
    SameRow,
    SameColumn,
}

const LAYOUTS: [Layout; 7] = [
    Layout::Rows,
    Layout::Columns,
    Layout::Padded,
    Layout::Spread,
    Layout::Reversed,
    Layout::SameRow,
    Layout::SameColumn,
];

/// (length of memory, offset of (0, 0), row stride, column stride)
fn lay(layout: Layout, rows: usize, cols: usize) -> (usize, isize, isize, isize) {
    let (r, c) = (rows as isize, cols as isize);
    match layout {
        Layout::Rows => (rows * cols, 0, c, 1),
        Layout::Columns => (rows * cols, 0, 1, r),
        Layout::Padded => (rows * (cols + 3), 2, c + 3, 1),
        Layout::Spread => (rows * (2 * cols + 1), 0, 2 * c + 1, 2),
        Layout::Reversed => (rows * cols, (r * c - 1).max(0), -c, -1),
        Layout::SameRow => (cols, 0, 0, 1),
        Layout::SameColumn => (rows, 0, 1, 0),
    }
}

fn check<T: Number>(isa: Isa, (m, n, k): (usize, usize, usize), layouts: [Layout; 3]) {
    let mut rng = Rng((m * 1_000_003 + n * 1009 + k) as u64);
    let mut data = |len: usize| -> Vec<T> { (0..len + 8).map(|_| T::from_f64(rng.number())).collect() };
    let (a_len, a_at, a_rs, a_cs) = lay(layouts[0], m, k);
    let (b_len, b_at, b_rs, b_cs) = lay(layouts[1], k, n);
    let (c_len, c_at, c_rs, c_cs) = lay(layouts[2], m, n);
    let (a, b, mut c) = (data(a_len), data(b_len), data(c_len));
    let before = c.clone();
    let product = Problem {
        m,
        n,
        k,
        a: Mat { ptr: a.as_ptr().wrapping_offset(a_at), rs: a_rs, cs: a_cs },
        b: Mat { ptr: b.as_ptr().wrapping_offset(b_at), rs: b_rs, cs: b_cs },
        c: MatMut { ptr: c.as_mut_ptr().wrapping_offset(c_at), rs: c_rs, cs: c_cs },
        share: Share::WHOLE,
    };
    // SAFETY: `lay` gives strides that stay in the memory, and callers no overlapping layout for C.
    unsafe { T::run(isa, product) };
    let place = |at: isize, rs: isize, cs: isize, i: usize, j: usize| {
        (at + i as isize * rs + j as isize * cs) as usize
    };
    let mut written = vec![false; c.len()];
    for i in 0..m {
        for j in 0..n {
            let row = |k: usize| a[place(a_at, a_rs, a_cs, i, k)];
            let column = |k: usize| b[place(b_at, b_rs, b_cs, k, j)];
            let (want, at) = (T::dot(k, row, column), place(c_at, c_rs, c_cs, i, j));
            written[at] = true;
            let name = std::any::type_name::<T>();
            assert_eq!(
                c[at].bits(),
                want.bits(),
                "{name} {isa:?} {m}x{n}x{k} {layouts:?} at ({i}, {j}): {:?}, not {want:?}",
                c[at]
            );
        }
    }
    for (at, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
        assert_eq!(c[at].bits(), before[at].bits(), "{isa:?} {m}x{n}x{k} {layouts:?} wrote outside of C");
    }
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.supported())
}

fn all_layouts<T: Number>(shapes: &[(usize, usize, usize)]) {
    for isa in isas() {
        for &shape in shapes {
            for a in LAYOUTS {
                for b in LAYOUTS {
                    for c in &LAYOUTS[..5] {
                        check::<T>(isa, shape, [a, b, *c]);
                    }
                }
            }
        }
    }
}

const SHAPES: [(usize, usize, usize); 12] = [
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (2, 3, 5),
    (17, 16, 9),
    (13, 33, 20),
    (25, 37, 19),
    (1, 70, 90),
    (70, 3, 41),
    (4, 129, 33),
    (5, 31, 64),
];

#[test]
fn layouts_f32() {
    all_layouts::<f32>(&SHAPES);
}

#[test]
fn layouts_f64() {
    all_layouts::<f64>(&SHAPES);
}

#[test]
fn layouts_half() {
    all_layouts::<f16>(&SHAPES);
    all_layouts::<bf16>(&SHAPES);
}

#[test]
fn layouts_int() {
    all_layouts::<i8>(&SHAPES[..8]);
    all_layouts::<u8>(&SHAPES[..5]);
    all_layouts::<i16>(&SHAPES[..5]);
    all_layouts::<u16>(&SHAPES[..5]);
    all_layouts::<i32>(&SHAPES);
    all_layouts::<u32>(&SHAPES[..5]);
    all_layouts::<i64>(&SHAPES[..8]);
    all_layouts::<u64>(&SHAPES[..5]);
}

#[test]
fn panel_edges() {
    for isa in isas() {
        for k in [511, 512, 513, 1024, 1025, 1100, 1537] {
            for (m, n) in [(1, 1), (2, 3), (1, 40), (40, 2), (13, 35), (30, 6), (141, 33)] {
                for a in [Layout::Rows, Layout::Columns, Layout::Spread] {
                    for b in [Layout::Rows, Layout::Columns, Layout::Spread] {
                        check::<f32>(isa, (m, n, k), [a, b, Layout::Rows]);
                    }
                    check::<f64>(isa, (m, n, k), [a, Layout::Rows, Layout::Columns]);
                    check::<f16>(isa, (m, n, k), [a, Layout::Rows, Layout::Rows]);
                    check::<bf16>(isa, (m, n, k), [a, Layout::Columns, Layout::Padded]);
                }
            }
        }
    }
}

#[test]
fn long_dots() {
    for isa in isas() {
        for k in [4095, 4096, 4097, 9000, 140_000] {
            check::<f32>(isa, (1, 1, k), [Layout::Rows, Layout::Columns, Layout::Rows]);
            check::<f64>(isa, (2, 3, k), [Layout::Columns, Layout::Rows, Layout::Columns]);
            check::<f16>(isa, (3, 1, k), [Layout::Reversed, Layout::Rows, Layout::Rows]);
        }
    }
}

#[test]
fn random_shapes() {
    let mut rng = Rng(7);
    let mut below = |n: usize| rng.next() as usize % n;
    for _ in 0..150 {
        let shape = (1 + below(70), 1 + below(90), 1 + below(120));
        let layouts = [LAYOUTS[below(7)], LAYOUTS[below(7)], LAYOUTS[below(5)]];
        for isa in isas() {
            check::<f32>(isa, shape, layouts);
            check::<f64>(isa, shape, layouts);
        }
    }
}

/// Larger than a chunk in each direction, so that splits differ by thread count.
#[test]
fn threads_change_no_bit() {
    let shapes =
        [(90, 130, 530), (310, 40, 530), (40, 400, 150), (300, 280, 260), (3, 2100, 70), (2100, 2, 70)];
    for threads in [1, 2, 3] {
        pool::set_threads(threads);
        for isa in isas().filter(|&isa| isa != Isa::Interp || cfg!(not(target_arch = "x86_64"))) {
            for shape in shapes {
                for layouts in [
                    [Layout::Rows, Layout::Rows, Layout::Rows],
                    [Layout::Rows, Layout::Columns, Layout::Rows],
                    [Layout::Columns, Layout::Rows, Layout::Columns],
                    [Layout::Spread, Layout::Reversed, Layout::Spread],
                ] {
                    check::<f32>(isa, shape, layouts);
                    check::<f64>(isa, shape, layouts);
                }
                check::<f16>(isa, shape, [Layout::Rows; 3]);
                check::<bf16>(isa, shape, [Layout::Columns; 3]);
            }
        }
        check::<f32>(Isa::Interp, (90, 130, 530), [Layout::Rows; 3]);
        check::<i32>(Isa::Interp, (150, 200, 530), [Layout::Rows; 3]);
    }
}

/// More than one block of the shared side, and of the sums of halves; rows that share sets of a cache.
#[test]
fn several_blocks() {
    let isa = isa();
    check::<f32>(isa, (90, 1024, 70), [Layout::Rows; 3]);
    check::<f32>(isa, (70, 130, 1024), [Layout::Rows; 3]);
    check::<f32>(isa, (30, 1024, 40), [Layout::Rows; 3]);
    check::<f32>(isa, (500, 40, 1024), [Layout::Rows; 3]);
    check::<f32>(isa, (1400, 1100, 17), [Layout::Rows; 3]);
    check::<f64>(isa, (520, 600, 40), [Layout::Rows; 3]);
    check::<bf16>(isa, (1030, 1050, 9), [Layout::Rows; 3]);
}

/// Blocks are told of once each, when they are complete, and cover C.
#[test]
fn blocks_cover_the_result() {
    let shapes =
        [(1, 1, 0), (3, 5, 2), (2, 700, 90), (700, 3, 90), (90, 130, 530), (310, 40, 530), (40, 700, 600)];
    for threads in [1, 2, 4] {
        pool::set_threads(threads);
        for (m, n, k) in shapes {
            let data = |len: usize| (0..len).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>();
            let (a, b) = (data(m * k), data(k * n));
            for swapped in [false, true] {
                let (rs, cs) = if swapped { (1, m as isize) } else { (n as isize, 1) };
                let mut c = vec![f32::NAN; m * n];
                let c = MatMut { ptr: c.as_mut_ptr(), rs, cs };
                let seen = std::sync::Mutex::new(vec![0; m * n]);
                let after = |block: Block| {
                    for i in block.i..block.i + block.m {
                        for j in block.j..block.j + block.n {
                            let want = (0..k).fold(0.0, |sum, x| sum + a[i * k + x] * b[x * n + j]);
                            // SAFETY: the block is complete and this thread's.
                            assert_eq!(unsafe { *c.at(i, j) }, want, "{m}x{n}x{k} at ({i}, {j})");
                            seen.lock().unwrap()[i * n + j] += 1;
                        }
                    }
                };
                let a = Mat { ptr: a.as_ptr(), rs: k as isize, cs: 1 };
                let b = Mat { ptr: b.as_ptr(), rs: n as isize, cs: 1 };
                // What is next is only fetched, so it may be anywhere.
                let nowhere = Share { alone: threads == 2, next: std::ptr::dangling(), bytes: 5000 };
                // SAFETY: the vectors have m · k, k · n and m · n.
                unsafe { gemm_then(m, n, k, a, b, c, nowhere, &after) };
                assert!(seen.into_inner().unwrap().iter().all(|&times| times == 1), "{m}x{n}x{k}");
            }
        }
    }
}

#[test]
fn public_functions_multiply() {
    let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0, 7.0, 8.0]);
    let mut c = [0.0f32; 4];
    let view = |x: &[f32; 4]| Mat { ptr: x.as_ptr(), rs: 2, cs: 1 };
    // SAFETY: 2 × 2 matrices in arrays of 4.
    unsafe { gemm(2, 2, 2, view(&a), view(&b), MatMut { ptr: c.as_mut_ptr(), rs: 2, cs: 1 }) };
    assert_eq!(c, [19.0, 22.0, 43.0, 50.0]);
}
