//! Elementwise operations as source text: a writer behind the traits of [`crate::math`], as generated machine code is.
//!
//! In: operations on named values, one after the other. Out: statements in single static assignment, as
//! `float t7 = fmaf(t3, t4, t5);`, for a C compiler that neither contracts nor reorders (`-ffp-contract=off`, no
//! `-ffast-math`; no such flags for CUDA, whose text uses intrinsics), and the prelude they rely on. Results have the
//! CPU's bits on every IEEE machine, NaN's own bits aside, unless [`Text::is_exact`] says that a function of the target's
//! library was called. Absent: quantised dtypes, loops, addresses.
//!
//! ```
//! use kiln_ir::math::text::{Dialect, Text, prelude};
//! use kiln_ir::{Binary, DType, Unary};
//!
//! let mut text = Text::new(Dialect::C);
//! let x = text.load(DType::F16, "x[i]");
//! let b = text.named(DType::F32, "b");
//! let wide = text.cast(x, DType::F32).unwrap();
//! let sum = text.binary(Binary::Add, wide, b).unwrap();
//! let y = text.unary(Unary::Relu, sum).unwrap();
//! text.store("y[i]", y);
//! let kernel = format!(
//!     "{}void kernel(const unsigned short *x, float b, float *y, long n) {{\n\
//!      for (long i = 0; i < n; i++) {{\n{}}}\n}}\n",
//!     prelude(Dialect::C),
//!     text.body()
//! );
//! assert!(kernel.contains("float t0 = kiln_f16_to_f32(x[i]);\nfloat t1 = t0 + b;\n"));
//! ```

mod cast;
mod form;
mod number;
mod prelude;
mod write;

use crate::{Binary, DType, Domain, Kind, RandomKind, Scalar, Unary};
use number::*;
use write::{Atom, Typed, Writer};

pub use prelude::prelude;

use super::value;
use super::{Compare, Num};

/// The languages that text is written in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dialect {
    /// C11 with `math.h`.
    C,
    /// CUDA C++ for compute capability 8.0 or newer, without any header.
    Cuda,
}

/// A value in a text: a number that is written out where it is used, or a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Value {
    dtype: DType,
    atom: Atom,
}

impl Value {
    /// Its dtype.
    pub fn dtype(self) -> DType {
        self.dtype
    }
}

/// Statements that are being written. Their names are `t0`, `t1` and so on; prelude names begin with `kiln_`.
///
/// Methods that apply an operation return `None` where dtypes do not fit it, as `infer` would have said, or are quantised.
pub struct Text(Writer);

/// The type that values of a dtype have in statements. f16 and bf16 are held as the f32 that they stand for.
pub fn register_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 | DType::BF16 | DType::Q8 | DType::Q4 => "float",
        DType::Bool => "bool",
        other => storage_type(other),
    }
}

/// The type that an element of a dtype has in memory. Quantised values are bytes.
pub fn storage_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::I16 => "short",
        DType::I8 => "signed char",
        DType::U64 => "unsigned long long",
        DType::U32 => "unsigned int",
        DType::F16 | DType::BF16 | DType::U16 => "unsigned short",
        DType::U8 | DType::Bool | DType::Q8 | DType::Q4 => "unsigned char",
    }
}

impl Text {
    /// No statements yet.
    pub fn new(dialect: Dialect) -> Text {
        Text(Writer::new(dialect))
    }

    /// The statements so far.
    pub fn body(&self) -> &str {
        &self.0.body
    }

    /// The statements since they were last taken; names go on.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.0.body)
    }

    /// Whether every result has the CPU's bits: no function of the target's library was called that rounds in its own way.
    pub fn is_exact(&self) -> bool {
        self.0.exact
    }

    /// A line of the caller's own between statements, such as a loop's head.
    pub fn line(&mut self, line: &str) {
        self.0.body.push_str(line);
        self.0.body.push('\n');
    }

    /// What stands for a value in an expression.
    pub fn expression(&self, value: Value) -> String {
        self.0.expression(value.dtype, value.atom)
    }

    /// The value of an expression without side effects that has the [`register_type`] of `dtype`, such as a variable's
    /// name. It is written out at each use.
    pub fn named(&mut self, dtype: DType, expression: &str) -> Value {
        Value { dtype, atom: self.0.name(expression.into()) }
    }

    /// The same, evaluated once, here.
    pub fn evaluated(&mut self, dtype: DType, expression: &str) -> Value {
        Value { dtype, atom: self.0.statement(register_type(dtype), expression) }
    }

    /// A number.
    pub fn number(&mut self, value: Scalar) -> Value {
        let bits = match value.dtype() {
            // Held as f32.
            DType::F16 | DType::BF16 => (value.to_f64() as f32).to_bits() as u64,
            _ => value.bits(),
        };
        Value { dtype: value.dtype(), atom: Atom::Number(bits) }
    }

    /// The element in memory that an expression of the [`storage_type`] names.
    pub fn load(&mut self, dtype: DType, place: &str) -> Value {
        let expression = match dtype {
            DType::F16 => format!("kiln_f16_to_f32({place})"),
            DType::BF16 => format!("kiln_bf16_to_f32({place})"),
            DType::Bool => format!("{place} != 0"),
            _ => place.into(),
        };
        self.evaluated(dtype, &expression)
    }

    /// A value as an expression of its [`storage_type`].
    pub fn stored(&self, value: Value) -> String {
        let expression = self.expression(value);
        match value.dtype {
            DType::F16 => format!("kiln_f32_to_f16({expression})"),
            DType::BF16 => format!("kiln_f32_to_bf16({expression})"),
            _ => expression,
        }
    }

    /// Writes a value to an element in memory.
    pub fn store(&mut self, place: &str, value: Value) {
        let line = format!("{place} = {};", self.stored(value));
        self.line(&line);
    }

    /// A variable that begins with a value and may be assigned to.
    pub fn variable(&mut self, value: Value) -> Value {
        let expression = self.expression(value);
        self.evaluated(value.dtype, &expression)
    }

    /// Gives a [`Text::variable`] another value of its dtype.
    pub fn assign(&mut self, variable: Value, value: Value) {
        let line = format!("{} = {};", self.expression(variable), self.expression(value));
        self.line(&line);
    }

    /// A one-operand operation.
    pub fn unary(&mut self, op: Unary, x: Value) -> Option<Value> {
        let (dtype, atom) = (x.dtype, x.atom);
        let y = self.0.write(|| match (op.domain(), dtype.kind()) {
            (Domain::Float, Kind::Float) => {
                of_float(dtype, atom, |x| value::unary_float(op, x), |x| value::unary_float(op, x))
            }
            (Domain::Num, Kind::Float) => {
                of_float(dtype, atom, |x| value::unary_num(op, x), |x| value::unary_num(op, x))
            }
            (Domain::Num, Kind::Signed | Kind::Unsigned) => {
                with_integer!(dtype, T => value::unary_num(op, T(atom))?.0.into())
            }
            (Domain::Bits, Kind::Bool) => value::unary_bits(op, Truth(atom))?.0.into(),
            (Domain::Bits, Kind::Signed | Kind::Unsigned) => {
                with_integer!(dtype, T => value::unary_bits(op, T(atom))?.0.into())
            }
            (Domain::Test, Kind::Float | Kind::Signed | Kind::Unsigned) => {
                with_number!(dtype, T => value::unary_test(op, T(atom))?.0.into())
            }
            _ => None,
        })?;
        Some(Value { dtype: if op.domain() == Domain::Test { DType::Bool } else { dtype }, atom: y })
    }

    /// A two-operand operation on values of one dtype. An integer divided by zero is 0: see [`Text::divide_faults`].
    pub fn binary(&mut self, op: Binary, a: Value, b: Value) -> Option<Value> {
        if a.dtype != b.dtype {
            return None;
        }
        let (dtype, a, b) = (a.dtype, a.atom, b.atom);
        let y = self.0.write(|| match (op.domain(), dtype.kind()) {
            (Domain::Float, Kind::Float) => of_floats(
                dtype,
                a,
                b,
                |a, b| value::binary_float(op, a, b),
                |a, b| value::binary_float(op, a, b),
            ),
            (Domain::Num, Kind::Float) => {
                of_floats(dtype, a, b, |a, b| value::binary_num(op, a, b), |a, b| value::binary_num(op, a, b))
            }
            (Domain::Num, Kind::Signed | Kind::Unsigned) => {
                with_integer!(dtype, T => value::binary_num(op, T(a), T(b))?.0.into())
            }
            (Domain::Bits, Kind::Bool) => value::binary_bits(op, Truth(a), Truth(b))?.0.into(),
            (Domain::Bits, Kind::Signed | Kind::Unsigned) => {
                with_integer!(dtype, T => value::binary_bits(op, T(a), T(b))?.0.into())
            }
            (Domain::Compare, Kind::Bool) => value::binary_compare(op, Truth(a), Truth(b))?.0.into(),
            (Domain::Compare, Kind::Float | Kind::Signed | Kind::Unsigned) => {
                with_number!(dtype, T => value::binary_compare(op, T(a), T(b))?.0.into())
            }
            _ => None,
        })?;
        Some(Value { dtype: if op.domain() == Domain::Compare { DType::Bool } else { dtype }, atom: y })
    }

    /// Whether an integer operation has no value because its divisor is zero, and whether because its quotient does not
    /// fit; `None` where neither can be.
    pub fn divide_faults(&mut self, op: Binary, a: Value, b: Value) -> Option<(Value, Value)> {
        let (dtype, a, b) = (a.dtype, a.atom, b.atom);
        if !op.divides() || !dtype.is_int() {
            return None;
        }
        let (zero, large) = self.0.write(|| {
            with_integer!(dtype, T => {
                let large = if op == Binary::FloorDivide && dtype.kind() == Kind::Signed {
                    let least = T(Atom::Number(1 << (8 * dtype.size() - 1)));
                    super::Bits::and(T(a).equals(least), T(b).equals(T::ZERO.sub(T::ONE)))
                } else {
                    Truth(Atom::Number(0))
                };
                Some((T(b).equals(T::ZERO).0, large.0))
            })
        })?;
        Some((Value { dtype: DType::Bool, atom: zero }, Value { dtype: DType::Bool, atom: large }))
    }

    /// `a` where the bool value `condition` holds, else `b`.
    pub fn select(&mut self, condition: Value, a: Value, b: Value) -> Option<Value> {
        let fits = condition.dtype == DType::Bool && a.dtype == b.dtype && !a.dtype.is_quantised();
        fits.then(|| {
            let [condition, first, second] = [condition, a, b].map(|x| self.expression(x));
            self.evaluated(a.dtype, &format!("{condition} ? {first} : {second}"))
        })
    }

    /// A conversion: floats truncate to integers and saturate, NaN is 0 there; integers wrap; all but 0 is true.
    pub fn cast(&mut self, x: Value, to: DType) -> Option<Value> {
        let atom = self.0.write(|| cast::cast(x.dtype, x.atom, to))?;
        Some(Value { dtype: to, atom })
    }

    /// `a * b + c`, with one rounding for floats.
    pub fn fma(&mut self, a: Value, b: Value, c: Value) -> Option<Value> {
        if a.dtype != b.dtype || a.dtype != c.dtype {
            return None;
        }
        let (dtype, [a, b, c]) = (a.dtype, [a, b, c].map(|x| x.atom));
        let atom = self.0.write(|| match dtype.kind() {
            Kind::Float if dtype == DType::F64 => Some(super::Float::fma(F64(a), F64(b), F64(c)).0),
            Kind::Float => Some(rounded(dtype, super::Float::fma(F32(a), F32(b), F32(c)))),
            Kind::Signed | Kind::Unsigned => with_integer!(dtype, T => Some(T(a).mul(T(b)).add(T(c)).0)),
            Kind::Bool | Kind::Quantised => None,
        })?;
        Some(Value { dtype, atom })
    }

    /// Element `index` of a random stream. The three are expressions of type `unsigned long long`. Bits and uniforms are the
    /// CPU's; normals are computed in f64 by the target's logarithm and cosine, and differ in the last place at most in f32.
    pub fn random(
        &mut self,
        kind: RandomKind,
        dtype: DType,
        key: &str,
        offset: &str,
        index: &str,
    ) -> Option<Value> {
        let arguments = format!("({key}, {offset}, {index})");
        let (drawn, function) = match (kind, dtype) {
            (RandomKind::Bits, d) if !d.is_int() => return None,
            (_, d) if !d.is_float() && kind != RandomKind::Bits => return None,
            (RandomKind::Bits, d) if d.size() == 8 => (DType::U64, "kiln_wide"),
            (RandomKind::Bits, _) => (DType::U32, "kiln_word"),
            (RandomKind::Uniform, DType::F64) => (DType::F64, "kiln_uniform_f64"),
            (RandomKind::Uniform, DType::F16) => (DType::F16, "kiln_uniform_f16"),
            (RandomKind::Uniform, DType::BF16) => (DType::BF16, "kiln_uniform_bf16"),
            (RandomKind::Uniform, _) => (DType::F32, "kiln_uniform_f32"),
            (RandomKind::Normal, _) => {
                self.0.exact = false;
                (DType::F64, "kiln_normal")
            }
        };
        let x = self.evaluated(drawn, &format!("{function}{arguments}"));
        if drawn == dtype { Some(x) } else { self.cast(x, dtype) }
    }
}

/// A function of a float: in f64, or in f32 and rounded to the dtype.
fn of_float(
    dtype: DType,
    x: Atom,
    double: impl Fn(F64) -> Option<F64>,
    single: impl Fn(F32) -> Option<F32>,
) -> Option<Atom> {
    if dtype == DType::F64 { double(F64(x)).map(|y| y.0) } else { single(F32(x)).map(|y| rounded(dtype, y)) }
}

/// The same, of two.
fn of_floats(
    dtype: DType,
    a: Atom,
    b: Atom,
    double: impl Fn(F64, F64) -> Option<F64>,
    single: impl Fn(F32, F32) -> Option<F32>,
) -> Option<Atom> {
    if dtype == DType::F64 {
        double(F64(a), F64(b)).map(|y| y.0)
    } else {
        single(F32(a), F32(b)).map(|y| rounded(dtype, y))
    }
}

/// An f32 rounded as values of that dtype are.
fn rounded(dtype: DType, x: F32) -> Atom {
    match dtype {
        DType::F16 => write::make::<F32>("kiln_round_f16(#)", &[x.arg()]),
        DType::BF16 => write::make::<F32>("kiln_round_bf16(#)", &[x.arg()]),
        _ => x.0,
    }
}
