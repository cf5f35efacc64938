//! What a text relies on: conversions, integer quotients and random numbers as they stand in files beside this one, and
//! the functions of f32, written by the same polynomials as the CPU's.

use super::Dialect;
use super::number::{F32, FUNCTIONS};
use super::write::{Typed, Writer};
use crate::DType;
use std::sync::OnceLock;

const COMMON: &str = include_str!("prelude.c");

/// The text that must stand before what is written in a dialect. It includes no header of Kiln's own, and in CUDA none
/// at all.
pub fn prelude(dialect: Dialect) -> &'static str {
    static WRITTEN: [OnceLock<String>; 2] = [const { OnceLock::new() }; 2];
    let (at, own) = match dialect {
        Dialect::C => (0, include_str!("prelude_c.c")),
        Dialect::Cuda => (1, include_str!("prelude_cuda.cu")),
    };
    WRITTEN[at].get_or_init(|| {
        let functions: String = FUNCTIONS.iter().map(|f| function(dialect, f.0, f.1, f.2)).collect();
        format!("{own}{COMMON}{functions}")
    })
}

/// The definition of a function of f32.
fn function(dialect: Dialect, name: &str, arity: usize, value: fn(F32, F32) -> F32) -> String {
    let mut writer = Writer::new(dialect);
    let [a, b] = ["a", "b"].map(|name| F32(writer.name(name.into())));
    let y = writer.write(|| value(a, b));
    let parameters = if arity == 1 { "float a" } else { "float a, float b" };
    let result = writer.expression(DType::F32, y.atom());
    format!("KILN float kiln_{name}_f32({parameters}) {{\n{}return {result};\n}}\n\n", writer.body)
}
