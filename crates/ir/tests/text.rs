//! Operations as text, compiled by the system's C compiler, against the values that the CPU computes: bit by bit.

use half::{bf16, f16};
use kiln_ir::math::text::{Dialect, Text, Value, prelude, storage_type};
use kiln_ir::math::value;
use kiln_ir::{Binary, DType, Domain, Kind, RandomKind, Unary, philox};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Elements of f32, and of every other dtype.
const SINGLE: usize = 1 << 20;
const OTHER: usize = 1 << 14;

fn plain() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|d| !d.is_quantised())
}

fn count(dtype: DType) -> usize {
    if dtype == DType::F32 { SINGLE } else { OTHER }
}

fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Element `i` of operand `side`: special and ordinary numbers, what lies beside them, and any bits.
fn element(dtype: DType, side: u64, i: usize) -> u64 {
    const SPECIAL: [f64; 30] = [
        0.0,
        1e-45,
        1e-40,
        1.175_494_35e-38,
        0.25,
        0.5,
        0.625,
        0.875,
        1.0,
        1.5,
        2.0,
        3.0,
        4.0,
        9.02,
        10.0,
        20.0,
        88.72,
        104.0,
        127.0,
        128.0,
        255.5,
        32768.0,
        65504.0,
        65520.0,
        131_072.0,
        16_777_216.0,
        2_147_483_648.0,
        9.223_372_036_854_776e18,
        3.402_823_5e38,
        f64::INFINITY,
    ];
    let noise = mixed(i as u64 * 2 + side);
    if dtype == DType::Bool {
        return noise & 1;
    }
    let near = |x: f64, by: i64| {
        let bits = match dtype {
            DType::F64 => x.to_bits(),
            DType::F32 => (x as f32).to_bits() as u64,
            DType::F16 => f16::from_f64(x).to_bits() as u64,
            DType::BF16 => bf16::from_f64(x).to_bits() as u64,
            _ => x as i64 as u64,
        };
        bits.wrapping_add_signed(by) ^ (noise & 1) << (8 * dtype.size() - 1)
    };
    let bits = match (i % 8, side) {
        (0, _) => near(SPECIAL[(noise >> 8) as usize % SPECIAL.len()], (noise >> 32) as i64 % 40 - 20),
        (1, _) => near(SPECIAL[(noise >> 8) as usize % SPECIAL.len()], 0),
        (2, _) => near((noise >> 40) as f64 / 65536.0, 0),
        (3, 1) => near(((noise >> 60) as f64) / 2.0, 0),
        // Every bit pattern of f32 in even steps, and all of the shorter ones.
        (_, 0) if dtype == DType::F32 => (i as u64).wrapping_mul(4093),
        (_, 0) => (i as u64 * 4) ^ if dtype.size() > 2 { noise } else { (noise >> 9) & 3 },
        _ => noise,
    };
    if dtype.size() == 8 { bits } else { bits & ((1 << (8 * dtype.size())) - 1) }
}

/// An operation that is tried: what it writes, and what it should give for the bits of two operands and a condition.
struct Case {
    name: String,
    from: DType,
    to: DType,
    body: String,
    want: Box<dyn Fn(u64, u64, bool) -> u64>,
}

/// Values as bits, in the type that they are computed in.
trait Element: Copy {
    fn of(bits: u64) -> Self;
    fn bits(self, dtype: DType) -> u64;
}

macro_rules! elements {
    ($($t:ident)*) => { $(impl Element for $t {
        fn of(bits: u64) -> $t { bits as $t }
        fn bits(self, _: DType) -> u64 { self as u64 & (u64::MAX >> (64 - $t::BITS)) }
    })* };
}
elements!(i64 i32 i16 i8 u64 u32 u16 u8);

impl Element for f64 {
    fn of(bits: u64) -> f64 {
        f64::from_bits(bits)
    }
    fn bits(self, _: DType) -> u64 {
        self.to_bits()
    }
}

fn widened(dtype: DType, bits: u64) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits as u32),
    }
}

fn narrowed(dtype: DType, x: f32) -> u64 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_bits() as u64,
        DType::BF16 => bf16::from_f32(x).to_bits() as u64,
        _ => x.to_bits() as u64,
    }
}

macro_rules! with_integer {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::I32 => {
                type $T = i32;
                $body
            }
            DType::I16 => {
                type $T = i16;
                $body
            }
            DType::I8 => {
                type $T = i8;
                $body
            }
            DType::U64 => {
                type $T = u64;
                $body
            }
            DType::U32 => {
                type $T = u32;
                $body
            }
            DType::U16 => {
                type $T = u16;
                $body
            }
            _ => {
                type $T = u8;
                $body
            }
        }
    };
}

fn unary(op: Unary, dtype: DType, x: u64) -> Option<u64> {
    match (dtype.kind(), op.domain(), dtype) {
        (Kind::Float, Domain::Float, DType::F64) => value::unary_float(op, f64::of(x)).map(|y| y.bits(dtype)),
        (Kind::Float, Domain::Num, DType::F64) => value::unary_num(op, f64::of(x)).map(|y| y.bits(dtype)),
        (Kind::Float, Domain::Test, DType::F64) => value::unary_test(op, f64::of(x)).map(u64::from),
        (Kind::Float, Domain::Float, _) => {
            value::unary_float(op, widened(dtype, x)).map(|y| narrowed(dtype, y))
        }
        (Kind::Float, Domain::Num, _) => value::unary_num(op, widened(dtype, x)).map(|y| narrowed(dtype, y)),
        (Kind::Float, Domain::Test, _) => value::unary_test(op, widened(dtype, x)).map(u64::from),
        (Kind::Bool, Domain::Bits, _) => value::unary_bits(op, x != 0).map(u64::from),
        (Kind::Bool, ..) => None,
        (_, Domain::Num, _) => {
            with_integer!(dtype, T => value::unary_num(op, T::of(x)).map(|y| y.bits(dtype)))
        }
        (_, Domain::Bits, _) => {
            with_integer!(dtype, T => value::unary_bits(op, T::of(x)).map(|y| y.bits(dtype)))
        }
        (_, Domain::Test, _) => with_integer!(dtype, T => value::unary_test(op, T::of(x)).map(u64::from)),
        _ => None,
    }
}

fn binary(op: Binary, dtype: DType, a: u64, b: u64) -> Option<u64> {
    let wide = |x| widened(dtype, x);
    match (dtype.kind(), op.domain(), dtype) {
        (Kind::Float, Domain::Float, DType::F64) => {
            value::binary_float(op, f64::of(a), f64::of(b)).map(|y| y.bits(dtype))
        }
        (Kind::Float, Domain::Num, DType::F64) => {
            value::binary_num(op, f64::of(a), f64::of(b)).map(|y| y.bits(dtype))
        }
        (Kind::Float, Domain::Compare, DType::F64) => {
            value::binary_compare(op, f64::of(a), f64::of(b)).map(u64::from)
        }
        (Kind::Float, Domain::Float, _) => {
            value::binary_float(op, wide(a), wide(b)).map(|y| narrowed(dtype, y))
        }
        (Kind::Float, Domain::Num, _) => value::binary_num(op, wide(a), wide(b)).map(|y| narrowed(dtype, y)),
        (Kind::Float, Domain::Compare, _) => value::binary_compare(op, wide(a), wide(b)).map(u64::from),
        (Kind::Bool, Domain::Bits, _) => value::binary_bits(op, a != 0, b != 0).map(u64::from),
        (Kind::Bool, Domain::Compare, _) => value::binary_compare(op, a != 0, b != 0).map(u64::from),
        (Kind::Bool, ..) => None,
        (_, Domain::Num, _) => {
            with_integer!(dtype, T => value::binary_num(op, T::of(a), T::of(b)).map(|y| y.bits(dtype)))
        }
        (_, Domain::Bits, _) => {
            with_integer!(dtype, T => value::binary_bits(op, T::of(a), T::of(b)).map(|y| y.bits(dtype)))
        }
        (_, Domain::Compare, _) => {
            with_integer!(dtype, T => value::binary_compare(op, T::of(a), T::of(b)).map(u64::from))
        }
        _ => None,
    }
}

macro_rules! converted {
    ($x:expr, $to:expr) => {{
        let x = $x;
        match $to {
            DType::F64 => (x as f64).to_bits(),
            DType::F32 | DType::F16 | DType::BF16 => narrowed($to, x as f32),
            DType::Bool => (x != Default::default()) as u64,
            to => with_integer!(to, T => (x as T).bits(to)),
        }
    }};
}

fn cast(from: DType, to: DType, x: u64) -> u64 {
    match from {
        _ if from == to => x,
        DType::F64 => converted!(f64::of(x), to),
        DType::F32 | DType::F16 | DType::BF16 => converted!(widened(from, x), to),
        DType::Bool => converted!(x as u8, to),
        _ => with_integer!(from, T => converted!(T::of(x), to)),
    }
}

/// Writes a case, if its operation takes this dtype.
fn case(
    name: String,
    from: DType,
    write: impl Fn(&mut Text, [Value; 3]) -> Option<Value>,
    want: impl Fn(u64, u64, bool) -> u64 + 'static,
) -> Option<(Case, bool)> {
    let mut text = Text::new(Dialect::C);
    let operands = [text.load(from, "a[i]"), text.load(from, "b[i]"), text.load(DType::Bool, "c[i]")];
    let y = write(&mut text, operands)?;
    text.store("y[i]", y);
    Some((
        Case { name, from, to: y.dtype(), body: text.body().into(), want: Box::new(want) },
        text.is_exact(),
    ))
}

/// Everything that has the CPU's bits, and the names of what has not.
fn cases() -> (Vec<Case>, Vec<String>) {
    let (mut exact, mut rest) = (Vec::new(), Vec::new());
    let mut push = |made: Option<(Case, bool)>| match made {
        Some((case, true)) => exact.push(case),
        Some((case, false)) => rest.push(case.name),
        None => {}
    };
    for d in plain() {
        for &op in Unary::ALL {
            let name = format!("{} {d}", op.name());
            push(case(
                name,
                d,
                |t, [x, ..]| t.unary(op, x),
                move |x, _, _| unary(op, d, x).expect("it was written"),
            ));
        }
        for &op in Binary::ALL {
            let name = format!("{} {d}", op.name());
            push(case(
                name,
                d,
                |t, [a, b, _]| t.binary(op, a, b),
                move |a, b, _| binary(op, d, a, b).expect("it was written"),
            ));
        }
        for to in plain() {
            push(case(format!("{d} to {to}"), d, |t, [x, ..]| t.cast(x, to), move |x, _, _| cast(d, to, x)));
        }
        push(case(
            format!("select {d}"),
            d,
            |t, [a, b, c]| t.select(c, a, b),
            |a, b, c| if c { a } else { b },
        ));
    }
    let place = ("0x0123456789abcdefull", "5ull", "(unsigned long long)i");
    let (key, offset) = (0x0123_4567_89ab_cdef, 5);
    for d in plain() {
        for kind in [RandomKind::Bits, RandomKind::Uniform] {
            let index = std::cell::Cell::new(0);
            let want = move |_, _, _| {
                let i = index.replace(index.get() + 1);
                let word = philox::word(key, offset, i);
                match (kind, d) {
                    (RandomKind::Bits, d) if d.size() == 8 => philox::wide(key, offset, i),
                    (RandomKind::Bits, d) => word as u64 & (u64::MAX >> (64 - 8 * d.size())),
                    (_, DType::F64) => philox::uniform_wide(philox::wide(key, offset, i)).to_bits(),
                    (_, DType::F32) => philox::uniform(word).to_bits() as u64,
                    (_, DType::F16) => narrowed(d, (word >> 21) as f32 / 2048.0),
                    _ => narrowed(d, (word >> 24) as f32 / 256.0),
                }
            };
            push(case(
                format!("random {kind:?} {d}"),
                d,
                |t, _| t.random(kind, d, place.0, place.1, place.2),
                want,
            ));
        }
    }
    (exact, rest)
}

/// A program that reads operands of every dtype and writes every case's results.
fn program(cases: &[Case]) -> String {
    let mut out = String::from(prelude(Dialect::C));
    out.push_str("#include <stdio.h>\n#include <stdlib.h>\n");
    for (k, case) in cases.iter().enumerate() {
        let [from, to] = [case.from, case.to].map(storage_type);
        out.push_str(&format!(
            "// {}\nstatic void case{k}(long n, const {from} *restrict a, const {from} *restrict b, const unsigned char *restrict c, {to} *restrict y) {{\n\
             for (long i = 0; i < n; i++) {{\n{}}}\n}}\n",
            case.name, case.body
        ));
    }
    out.push_str("static void *read_all(size_t n) { void *p = malloc(n); return fread(p, 1, n, stdin) == n ? p : NULL; }\nint main(void) {\n");
    out.push_str(&format!("void *y = malloc({SINGLE} * 8);\n"));
    for d in plain() {
        for side in ["a", "b"] {
            out.push_str(&format!("void *{side}_{d} = read_all({});\n", count(d) * d.size()));
        }
    }
    out.push_str(&format!("unsigned char *c = read_all({SINGLE});\n"));
    for (k, case) in cases.iter().enumerate() {
        let (d, n) = (case.from, count(case.from));
        out.push_str(&format!(
            "case{k}({n}, a_{d}, b_{d}, c, y);\nfwrite(y, 1, {}, stdout);\n",
            n * case.to.size()
        ));
    }
    out + "return 0;\n}\n"
}

/// The program compiled, or nothing where there is no compiler.
fn compiled(source: &str, folder: &Path) -> Option<PathBuf> {
    let (file, binary) = (folder.join("cases.c"), folder.join("cases"));
    std::fs::write(&file, source).expect("a file in the temporary folder");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O1", "-ffp-contract=off", "-w"]);
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        cc.arg("-mfma");
    }
    let done = cc.arg("-o").arg(&binary).arg(&file).arg("-lm").output();
    match done {
        Err(e) if std::env::var_os("CI").is_none() => {
            eprintln!("left out, because there is no C compiler: {e}");
            None
        }
        Err(e) => panic!("there is no C compiler: {e}"),
        Ok(done) => {
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            Some(binary)
        }
    }
}

fn bits_of(bytes: &[u8], at: usize, size: usize) -> u64 {
    let mut all = [0; 8];
    all[..size].copy_from_slice(&bytes[at * size..][..size]);
    u64::from_le_bytes(all)
}

fn is_nan(dtype: DType, bits: u64) -> bool {
    match dtype {
        DType::F64 => f64::from_bits(bits).is_nan(),
        DType::F32 | DType::F16 | DType::BF16 => widened(dtype, bits).is_nan(),
        _ => false,
    }
}

#[test]
fn text_has_the_bits_of_the_cpu() {
    let (cases, rest) = cases();
    println!("{} cases; by the library's functions: {}", cases.len(), rest.join(", "));
    let folder = std::env::temp_dir().join(format!("kiln-text-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    if let Some(binary) = compiled(&program(&cases), &folder) {
        compare(&binary, &cases);
    }
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

fn compare(binary: &Path, cases: &[Case]) {
    let mut child = Command::new(binary)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("what was compiled runs");
    let mut stdin = BufWriter::new(child.stdin.take().expect("it is piped"));
    for d in plain() {
        for side in 0..2 {
            (0..count(d)).for_each(|i| {
                stdin.write_all(&element(d, side, i).to_le_bytes()[..d.size()]).expect("it reads")
            });
        }
    }
    (0..SINGLE).for_each(|i| stdin.write_all(&[element(DType::Bool, 2, i) as u8]).expect("it reads"));
    drop(stdin);
    let mut stdout = child.stdout.take().expect("it is piped");
    let operands: Vec<[Vec<u64>; 2]> =
        plain().map(|d| [0, 1].map(|side| (0..count(d)).map(|i| element(d, side, i)).collect())).collect();
    let conditions: Vec<bool> = (0..SINGLE).map(|i| element(DType::Bool, 2, i) != 0).collect();
    for case in cases {
        let (n, size) = (count(case.from), case.to.size());
        let mut got = vec![0; n * size];
        stdout.read_exact(&mut got).expect("it writes every result");
        let [a, b] = &operands[case.from as usize];
        for i in 0..n {
            let (got, want) = (bits_of(&got, i, size), (case.want)(a[i], b[i], conditions[i]));
            let same = got == want || is_nan(case.to, got) && is_nan(case.to, want);
            assert!(
                same,
                "{}: of {:#x} and {:#x} {got:#x}, not {want:#x}\n{}",
                case.name, a[i], b[i], case.body
            );
        }
    }
    assert!(child.wait().expect("it ends").success());
}
