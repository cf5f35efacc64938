//! One or more programs for each class of operation.

use super::*;

const NAN: f64 = f64::NAN;

#[test]
fn sources() {
    check("a = full shape=[2,1] value=bf16:1.5", &[], &[("bf16[2,1]", &[1.5, 1.5])]);
    check("a = full shape=[] value=bool:1", &[], &[("bool[]", &[1.0])]);
    check("a = full shape=[0,3] value=i8:-1", &[], &[("i8[0,3]", &[])]);
    check("a = iota shape=[2,3] dtype=f16 axis=1", &[], &[("f16[2,3]", &[0., 1., 2., 0., 1., 2.])]);
    check("a = iota shape=[2,2] dtype=u8 axis=0", &[], &[("u8[2,2]", &[0., 0., 1., 1.])]);
    let got = results("a = iota shape=[300] dtype=i8 axis=0", &[]).unwrap();
    assert_eq!((got[0].1[127], got[0].1[128], got[0].1[256]), (127.0, -128.0, 0.0));
}

#[test]
fn random_streams() {
    use kiln_ir::philox;
    let first = |text: &str| results(text, &[]).unwrap().remove(0).1;
    let at = "shape=[5] key=7 offset=3";
    assert_eq!(first(&format!("a = random_bits dtype=u32 {at}"))[4], philox::word(7, 3, 4) as f64);
    assert_eq!(first(&format!("a = random_bits dtype=i8 {at}"))[4], philox::word(7, 3, 4) as i8 as f64);
    assert_eq!(first(&format!("a = random_bits dtype=i64 {at}"))[4], philox::wide(7, 3, 4) as i64 as f64);
    assert_eq!(
        first(&format!("a = random_uniform dtype=f64 {at}"))[4],
        philox::uniform_wide(philox::wide(7, 3, 4))
    );
    assert_eq!(
        first(&format!("a = random_uniform dtype=f32 {at}"))[4],
        philox::uniform(philox::word(7, 3, 4)) as f64
    );
    assert_eq!(first(&format!("a = random_normal dtype=f32 {at}"))[4], philox::normal(7, 3, 4) as f32 as f64);
    for (dtype, steps) in [("f16", 2048.0), ("bf16", 256.0)] {
        let x = first(&format!("a = random_uniform dtype={dtype} shape=[4000] key=1 offset=0"));
        assert!(x.iter().all(|x| (0.0..1.0).contains(x) && (x * steps).fract() == 0.0), "{dtype}");
        assert!((x.iter().sum::<f64>() / 4000.0 - 0.5).abs() < 0.02, "{dtype}");
    }
}

#[test]
fn movements() {
    let x = [0., 1., 2., 3., 4., 5.];
    let one = |line: &str, meta: &str, want: &[f64]| {
        check(&format!("a = input i32[2,3]\nb = {line}"), &[&x], &[(meta, want)])
    };
    one("reshape a shape=[3,1,2]", "i32[3,1,2]", &x);
    one("permute a order=[1,0]", "i32[3,2]", &[0., 3., 1., 4., 2., 5.]);
    one("expand a shape=[2,2,3]", "i32[2,2,3]", &[x, x].concat());
    one("slice a axis=1 start=0 end=3 step=2", "i32[2,2]", &[0., 2., 3., 5.]);
    one("slice a axis=1 start=1 end=3 step=9223372036854775807", "i32[2,1]", &[1., 4.]);
    one("slice a axis=0 start=2 end=2 step=1", "i32[0,3]", &[]);
    one("flip a axes=[1]", "i32[2,3]", &[2., 1., 0., 5., 4., 3.]);
    one("flip a axes=[0,1]", "i32[2,3]", &[5., 4., 3., 2., 1., 0.]);
    one("cat a a axis=1", "i32[2,6]", &[0., 1., 2., 0., 1., 2., 3., 4., 5., 3., 4., 5.]);
    let text = "a = input bool[2,3]\nv = input bool[2,1]\nb = assign a v axis=1 start=1 end=3 step=2";
    check(text, &[&[0.; 6], &[1., 1.]], &[("bool[2,3]", &[0., 1., 0., 0., 1., 0.])]);
    let text = "a = input f16[2,0]\nv = input f16[2,2]\nb = cat a v axis=1";
    check(text, &[&[], &[1., 2., 3., 4.]], &[("f16[2,2]", &[1., 2., 3., 4.])]);
    check(
        "a = input u8[1,3,1,2,1,1,1,1]\nb = permute a order=[7,6,5,4,3,2,1,0]",
        &[&x],
        &[("u8[1,1,1,1,2,1,3,1]", &[0., 2., 4., 1., 3., 5.])],
    );
}

#[test]
fn selection_broadcasts() {
    let text = "c = input bool[2,1]\na = input i16[3]\nb = input i16[]\nd = select c a b";
    check(text, &[&[1., 0.], &[1., 2., 3.], &[9.]], &[("i16[2,3]", &[1., 2., 3., 9., 9., 9.])]);
}

#[test]
fn reductions() {
    let x = [1., 5., 2., 5., -3., 0.];
    let one = |line: &str, meta: &str, want: &[f64]| {
        check(&format!("a = input f32[2,3]\nb = {line}"), &[&x], &[(meta, want)])
    };
    one("sum a axes=[1] keep=false", "f32[2]", &[8., 2.]);
    one("sum a axes=[0] keep=true", "f32[1,3]", &[6., 2., 2.]);
    one("sum a axes=[] keep=false", "f32[2,3]", &x);
    one("mean a axes=[0,1] keep=false", "f32[]", &[(10f32 / 6.0) as f64]);
    one("prod a axes=[1] keep=false", "f32[2]", &[10., -0.]);
    one("max a axes=[0] keep=false", "f32[3]", &[5., 5., 2.]);
    one("min a axes=[1] keep=true", "f32[2,1]", &[1., -3.]);
    one("argmax a axes=[1] keep=false", "i64[2]", &[1., 0.]);
    one("argmin a axes=[0] keep=true", "i64[1,3]", &[0., 1., 1.]);
    let text = "a = input bool[2,2]\nb = ";
    check(&format!("{text}any a axes=[1] keep=false"), &[&[0., 1., 0., 0.]], &[("bool[2]", &[1., 0.])]);
    check(&format!("{text}all a axes=[1] keep=false"), &[&[0., 1., 1., 1.]], &[("bool[2]", &[0., 1.])]);
    check(&format!("{text}max a axes=[1] keep=false"), &[&[0., 1., 0., 0.]], &[("bool[2]", &[1., 0.])]);
    check(&format!("{text}argmin a axes=[1] keep=false"), &[&[1., 0., 1., 1.]], &[("i64[2]", &[1., 0.])]);
}

#[test]
fn reductions_of_nothing_and_of_nan() {
    check("a = input f32[2,0]\nb = sum a axes=[1] keep=false", &[&[]], &[("f32[2]", &[0., 0.])]);
    check("a = input f16[0]\nb = mean a axes=[0] keep=false", &[&[]], &[("f16[]", &[NAN])]);
    check("a = input i8[0,2]\nb = prod a axes=[0] keep=false", &[&[]], &[("i8[2]", &[1., 1.])]);
    check("a = input bool[0]\nb = all a axes=[0] keep=false", &[&[]], &[("bool[]", &[1.])]);
    check("a = input f32[0,3]\nb = max a axes=[1] keep=false", &[&[]], &[("f32[0]", &[])]);
    let x = [1., NAN, 3., NAN];
    check("a = input bf16[4]\nb = max a axes=[0] keep=false", &[&x], &[("bf16[]", &[NAN])]);
    check("a = input f64[4]\nb = argmax a axes=[0] keep=false", &[&x], &[("i64[]", &[1.])]);
    check("a = input f64[4]\nb = argmin a axes=[0] keep=false", &[&x], &[("i64[]", &[1.])]);
}

#[test]
fn scans() {
    let x = [1., 2., 3., 4., 5., 6.];
    let one = |line: &str, want: &[f64]| {
        check(&format!("a = input f32[3,2]\nb = {line}"), &[&x], &[("f32[3,2]", want)])
    };
    one("cumsum a axis=0 reverse=false", &[1., 2., 4., 6., 9., 12.]);
    one("cumsum a axis=0 reverse=true", &[9., 12., 8., 10., 5., 6.]);
    one("cumprod a axis=1 reverse=false", &[1., 2., 3., 12., 5., 30.]);
    one("linear_scan a a axis=0 reverse=false", &[1., 2., 6., 12., 35., 78.]);
    one("linear_scan a a axis=1 reverse=true", &[3., 2., 15., 4., 35., 6.]);
    check(
        "a = input u8[3]\nb = cumsum a axis=0 reverse=false",
        &[&[200., 100., 1.]],
        &[("u8[3]", &[200., 44., 45.])],
    );
    // The running sum is not rounded between elements: 2049 is no f16, 2050 is.
    check(
        "a = input f16[3]\nb = cumsum a axis=0 reverse=false",
        &[&[2048., 1., 1.]],
        &[("f16[3]", &[2048., 2048., 2050.])],
    );
}

#[test]
fn products_of_matrices() {
    let (a, b) = ([1., 2., 3., 4., 5., 6.], [1., 0., 2., 1., 3., -1.]);
    let text = "a = input f32[2,3]\nb = input f32[3,2]\nc = dot a b transpose=false";
    check(text, &[&a, &b], &[("f32[2,2]", &[14., -1., 32., -1.])]);
    let text = "a = input i8[2,3]\nb = input i8[2,3]\nc = dot a b transpose=true";
    check(text, &[&a, &b], &[("i8[2,2]", &[7., 4., 16., 13.])]);
    let text = "a = input f64[2,1,1,2]\nb = input f64[3,2,1]\nc = dot a b transpose=false";
    check(text, &[&[1., 2., 3., 4.], &a], &[("f64[2,3,1,1]", &[5., 11., 17., 11., 25., 39.])]);
    let text = "a = input f16[2,0]\nb = input f16[0,2]\nc = dot a b transpose=false";
    check(text, &[&[], &[]], &[("f16[2,2]", &[0.; 4])]);
    let text = "a = input f32[0,2,3]\nb = input f32[3,2]\nc = dot a b transpose=false";
    check(text, &[&[], &b], &[("f32[0,2,2]", &[])]);
}

#[test]
fn convolution_in_one_dimension() {
    let conv = "stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1]";
    let (x, w) = ([1., 2., 3., 4., 5.], [1., 10., 100.]);
    let text =
        format!("x = input f32[1,1,5]\nw = input f32[1,1,3]\ny = conv x w {conv} extent=[0,0,0] groups=1");
    check(&text, &[&x, &w], &[("f32[1,1,3]", &[210., 432., 54.])]);
    let y = [1., 2., 3.];
    let text = format!(
        "y = input f32[1,1,3]\nw = input f32[1,1,3]\nx = conv_input y w {conv} extent=[5,0,0] groups=1"
    );
    check(&text, &[&y, &w], &[("f32[1,1,5]", &[10., 102., 20., 203., 30.])]);
    let text = format!(
        "x = input f32[1,1,5]\ny = input f32[1,1,3]\nw = conv_weight x y {conv} extent=[3,0,0] groups=1"
    );
    check(&text, &[&x, &y], &[("f32[1,1,3]", &[16., 22., 10.])]);
}

/// <conv(x, w), y> = <x, input(y, w)> = <w, weight(x, y)> over integers, where no sum rounds.
#[test]
fn adjoints_of_convolution_agree() {
    let cases = [
        (
            "[2,4,7]",
            "[6,2,3]",
            "[2,6,3]",
            "stride=[2,1,1] low=[1,0,0] high=[0,0,0] dilation=[1,1,1]",
            2,
            "[7,0,0]",
            "[3,0,0]",
        ),
        (
            "[1,3,5,6]",
            "[4,3,2,3]",
            "[1,4,2,4]",
            "stride=[2,1,1] low=[1,0,0] high=[0,2,0] dilation=[2,2,1]",
            1,
            "[5,6,0]",
            "[2,3,0]",
        ),
        (
            "[2,3,3,4,2]",
            "[3,1,2,2,1]",
            "[2,3,2,2,4]",
            "stride=[1,2,1] low=[0,0,1] high=[0,0,1] dilation=[1,1,3]",
            3,
            "[3,4,2]",
            "[2,2,1]",
        ),
    ];
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let fill = |shape: &str, seed: usize| -> Vec<f64> {
        let n = kiln_ir::text::parse_meta(&format!("i32{shape}")).unwrap().shape.numel();
        (0..n).map(|i| ((i * 7 + seed) % 11) as f64 - 5.0).collect()
    };
    for (sx, sw, sy, conv, groups, ex, ew) in cases {
        let (x, w, y) = (fill(sx, 1), fill(sw, 2), fill(sy, 3));
        let run = |a: &str, b: &str, op: &str, extent: &str, ins: &[&[f64]]| {
            let text = format!(
                "a = input i32{a}\nb = input i32{b}\nc = {op} a b {conv} extent={extent} groups={groups}"
            );
            results(&text, ins).unwrap().remove(0)
        };
        let (meta, forward) = run(sx, sw, "conv", "[0,0,0]", &[&x, &w]);
        assert_eq!(meta.to_string(), format!("i32{sy}"));
        let (meta, input) = run(sy, sw, "conv_input", ex, &[&y, &w]);
        assert_eq!(meta.to_string(), format!("i32{sx}"));
        let (meta, weight) = run(sx, sy, "conv_weight", ew, &[&x, &y]);
        assert_eq!(meta.to_string(), format!("i32{sw}"));
        assert_eq!(dot(&forward, &y), dot(&x, &input), "{conv}");
        assert_eq!(dot(&forward, &y), dot(&w, &weight), "{conv}");
    }
}

#[test]
fn pooling() {
    let text = |dtype: &str, op: &str, x: &str, extent: &str| {
        format!("x = input {dtype}[1,1,{x}]\ny = {op} x kernel=[3,1,1] stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent={extent}")
            .replace("y = max_pool", "y, i = max_pool")
    };
    let x = [-3., -1., -1., -5., -4.];
    check(
        &text("f32", "max_pool", "5", "[0,0,0]"),
        &[&x],
        &[("f32[1,1,3]", &[-1., -1., -4.]), ("i64[1,1,3]", &[1., 1., 4.])],
    );
    check(&text("i8", "sum_pool", "5", "[0,0,0]"), &[&x], &[("i8[1,1,3]", &[-4., -7., -9.])]);
    check(
        &text("f32", "sum_pool_input", "3", "[5,0,0]"),
        &[&[1., 2., 4.]],
        &[("f32[1,1,5]", &[1., 3., 2., 6., 4.])],
    );
    let nans = [NAN, 2., NAN, 3., 1.];
    check(
        &text("f16", "max_pool", "5", "[0,0,0]"),
        &[&nans],
        &[("f16[1,1,3]", &[NAN, NAN, 3.]), ("i64[1,1,3]", &[0., 2., 3.])],
    );
    let plane = "x = input i32[1,2,2,3]\ny, i = max_pool x kernel=[2,2,1] stride=[1,1,1] low=[0,0,0] high=[0,0,0] dilation=[1,1,1] extent=[0,0,0]";
    let x: Vec<f64> = (0..12).map(|i| (i * 5 % 12) as f64).collect();
    check(plane, &[&x], &[("i32[1,2,1,2]", &[8., 10., 11., 11.]), ("i64[1,2,1,2]", &[4., 2., 1., 1.])]);
}

#[test]
fn indexed_reads_and_writes() {
    let x = [0., 1., 2., 3., 4., 5.];
    let text = "x = input f32[2,3]\ni = input i64[1,3]\ny = gather x i axis=0";
    check(text, &[&x, &[1., 0., 1.]], &[("f32[1,3]", &[3., 1., 5.])]);
    let text = "x = input f32[2,3]\ni = input u8[2,1]\ny = gather x i axis=1";
    check(text, &[&x, &[2., 0.]], &[("f32[2,1]", &[2., 3.])]);
    let text = "x = input bool[2,3]\ni = input i32[2,2]\ny = take x i axis=1";
    check(
        text,
        &[&[1., 0., 0., 0., 0., 1.], &[0., 1., 2., 0.]],
        &[("bool[2,2,2]", &[1., 0., 0., 1., 0., 0., 1., 0.])],
    );
    let text = "x = input i16[3]\ni = input i64[]\ny = take x i axis=0";
    check(text, &[&[4., 5., 6.], &[2.]], &[("i16[]", &[6.])]);
    let text = "x = input f32[3]\ni = input i8[4]\ns = input f32[4]\ny = scatter x i s axis=0";
    check(text, &[&[7., 8., 9.], &[0., 2., 0., 2.], &[1., 2., 3., 4.]], &[("f32[3]", &[3., 8., 4.])]);
    let text = "x = input u8[3]\ni = input i8[4]\ns = input u8[4]\ny = scatter_add x i s axis=0";
    check(text, &[&[7., 8., 255.], &[0., 2., 0., 2.], &[1., 2., 3., 4.]], &[("u8[3]", &[11., 8., 5.])]);
    let text = "x = input f32[2,3]\ni = input i64[2]\ns = input f32[2,2]\ny = take_add x i s axis=1";
    check(text, &[&x, &[2., 2.], &[1., 2., 3., 4.]], &[("f32[2,3]", &[0., 1., 5., 3., 4., 12.])]);
    // Added in f32 and rounded once: 2048 + 1 + 1 is 2050, though 2049 is no f16.
    let text = "x = input f16[1]\ni = input i64[2]\ns = input f16[2]\ny = scatter_add x i s axis=0";
    check(text, &[&[2048.], &[0., 0.], &[1., 1.]], &[("f16[1]", &[2050.])]);
}

#[test]
fn sorting_is_stable_and_puts_nan_above() {
    let x = [3., NAN, -0., 0., 1., NAN, 3.];
    let text = |flag: &str, take: usize| {
        format!("x = input f32[7]\ny, i = sort x axis=0 descending={flag} take={take}")
    };
    check(
        &text("false", 7),
        &[&x],
        &[("f32[7]", &[-0., 0., 1., 3., 3., NAN, NAN]), ("i64[7]", &[2., 3., 4., 0., 6., 1., 5.])],
    );
    check(&text("true", 5), &[&x], &[("f32[5]", &[NAN, NAN, 3., 3., 1.]), ("i64[5]", &[1., 5., 0., 6., 4.])]);
    check(&text("true", 0), &[&x], &[("f32[0]", &[]), ("i64[0]", &[])]);
    let text = "x = input bool[3,2]\ny, i = sort x axis=0 descending=false take=2";
    check(
        text,
        &[&[1., 0., 0., 1., 1., 0.]],
        &[("bool[2,2]", &[0., 0., 1., 0.]), ("i64[2,2]", &[1., 0., 0., 2.])],
    );
}

#[test]
fn composites() {
    let half = 0.5;
    check("x = input f16[2,2]\ny = softmax x axis=1", &[&[1., 1., 7., 7.]], &[("f16[2,2]", &[half; 4])]);
    check("x = input f32[2,0]\ny = log_softmax x axis=1", &[&[]], &[("f32[2,0]", &[])]);
    let text = "x = input f64[1,2]\nw = input f64[2]\nb = input f64[2]\ny = layer_norm x w b axes=1 eps=0.0";
    check(text, &[&[1., 3.], &[2., 4.], &[10., 20.]], &[("f64[1,2]", &[8., 24.])]);
    check("x = input f32[2]\ny = rms_norm x axes=1 eps=0.0", &[&[2., -2.]], &[("f32[2]", &[1., -1.])]);
    let text = "q = input f32[2,1]\nk = input f32[2,1]\nv = input f32[2,1]\ny = attention q k v causal=true scale=1.0";
    check(text, &[&[0., 0.], &[1., 2.], &[4., 8.]], &[("f32[2,1]", &[4., 6.])]);
}
