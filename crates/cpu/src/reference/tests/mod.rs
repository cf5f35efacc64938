//! Programs as text, operands and results as plain numbers.

mod classes;
mod errors;
mod numbers;
mod walk;

use super::*;
use kiln_ir::{DType, verify};

/// A value of these numbers, converted to the meta's dtype.
fn value(meta: Meta, x: &[f64]) -> Value {
    assert_eq!(x.len(), meta.shape.numel(), "{meta}");
    let wide = Value::new(meta.shape, x.to_vec());
    eval(&Op::Cast(meta.dtype), &[&wide]).unwrap().remove(0)
}

/// The results of a program's last operation, as f64.
fn results(text: &str, inputs: &[&[f64]]) -> Result<Vec<(Meta, Vec<f64>)>, EvalError> {
    let program = verify(kiln_ir::text::parse(text).unwrap()).unwrap();
    let given =
        program.program.inputs.iter().zip(inputs).map(|(&(id, meta), x)| (id, value(meta, x))).collect();
    let values = run(&program, &given)?;
    let Some(Item::Run(node)) = program.program.items.last() else { panic!("no operation") };
    let wide = |v: &Value| eval(&Op::Cast(DType::F64), &[v]).unwrap()[0].slice::<f64>().unwrap().to_vec();
    Ok(node.outs.iter().map(|id| (values[id].meta(), wide(&values[id]))).collect())
}

/// Checks metas and elements of the last operation's results; NaN is equal to NaN, and 0 is not -0.
#[track_caller]
fn check(text: &str, inputs: &[&[f64]], want: &[(&str, &[f64])]) {
    let got = results(text, inputs).unwrap();
    assert_eq!(got.len(), want.len());
    for ((meta, x), (want_meta, want)) in got.iter().zip(want) {
        assert_eq!(meta.to_string(), *want_meta, "{text}");
        let same = x.len() == want.len()
            && x.iter().zip(*want).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
        assert!(same, "{text}\n got {x:?}\nwant {want:?}");
    }
}

/// Numbers of mixed sign and size that are exact in every float dtype but sum inexactly.
fn uneven(n: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 37 % 101) as f64 - 50.0) * 2f64.powi((i * 13 % 7) as i32 - 5)).collect()
}
