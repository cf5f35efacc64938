//! The elementwise tables, one loop for each operation and type: the operation is chosen once, then its value column
//! is mapped over the elements.

use super::EvalError;
use super::array::{Array, Element, Value, with_floats, with_ints, with_numbers, with_plain};
use super::number::Number;
use super::view::View;
use kiln_ir::math::{Bits, DivideError, Float, Num};
use kiln_ir::{Binary, Domain, Shape, Unary};
use std::borrow::Cow;

/// The elements of a one-operand operation.
pub fn unary(op: Unary, x: &Array) -> Array {
    match op.domain() {
        Domain::Float => with_floats!(x, x => unary_float(op, x).into()),
        Domain::Num => with_numbers!(x, x => unary_num(op, x).into()),
        Domain::Bits => {
            with_ints!(x, x => unary_bits(op, x).into(), Array::Bool(x) => unary_bits(op, x).into())
        }
        Domain::Test => with_numbers!(x, x => unary_test(op, x).into()),
        Domain::Compare => unreachable!("comparisons take two operands"),
    }
}

/// The elements of a two-operand operation whose operands broadcast to `shape`.
pub fn binary(op: Binary, a: &Value, b: &Value, shape: &Shape) -> Result<Array, EvalError> {
    Ok(match op.domain() {
        Domain::Float => with_floats!(&a.data, x => {
            let (x, y) = both(x, a, b, shape);
            binary_float(op, &x, &y).into()
        }),
        Domain::Num => with_numbers!(&a.data, x => {
            let (x, y) = both(x, a, b, shape);
            if op.divides() {
                check_divisors(op, &x, &y)?;
            }
            binary_num(op, &x, &y).into()
        }),
        Domain::Bits => with_ints!(&a.data,
            x => {
                let (x, y) = both(x, a, b, shape);
                binary_bits(op, &x, &y).into()
            },
            Array::Bool(x) => {
                let (x, y) = both(x, a, b, shape);
                binary_bits(op, &x, &y).into()
            },
        ),
        Domain::Compare => with_plain!(&a.data, x => {
            let (x, y) = both(x, a, b, shape);
            binary_compare(op, &x, &y).into()
        }),
        Domain::Test => unreachable!("tests take one operand"),
    })
}

/// Where `cond` holds `a`, else `b`; all broadcast to `shape`.
pub fn select(cond: &Value, a: &Value, b: &Value, shape: &Shape) -> Array {
    let cond = expanded(cond.data.typed::<bool>(), &cond.shape, shape);
    with_plain!(&a.data, x => {
        let (x, y) = both(x, a, b, shape);
        let chosen: Vec<_> = cond.iter().zip(x.iter().zip(&y[..])).map(|(&c, (&x, &y))| if c { x } else { y }).collect();
        chosen.into()
    })
}

fn both<'a, T: Element>(x: &'a [T], a: &Value, b: &'a Value, shape: &Shape) -> (Cow<'a, [T]>, Cow<'a, [T]>) {
    (expanded(x, &a.shape, shape), expanded(b.data.typed(), &b.shape, shape))
}

fn expanded<'a, T: Element>(x: &'a [T], from: &Shape, to: &Shape) -> Cow<'a, [T]> {
    View::whole(from).expanded(to).read(x)
}

/// Refuses integer quotients that have no value. Remainders by -1 are all 0, so only a quotient overflows.
fn check_divisors<T: Number>(op: Binary, a: &[T], b: &[T]) -> Result<(), EvalError> {
    let quotient = op == Binary::FloorDivide;
    for (a, b) in a.iter().zip(b) {
        match a.widen().divides(b.widen()) {
            Err(DivideError::Overflow) if !quotient => {}
            Err(error) => return Err(EvalError::Divide { op: op.name().into(), error }),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Keeps the loop of a table row whose domain is the wanted one.
macro_rules! in_domain {
    (Float Float $body:expr) => {
        $body
    };
    (Num Num $body:expr) => {
        $body
    };
    (Bits Bits $body:expr) => {
        $body
    };
    (Test Test $body:expr) => {
        $body
    };
    (Compare Compare $body:expr) => {
        $body
    };
    ($want:ident $domain:ident $body:expr) => {
        unreachable!(concat!("a ", stringify!($domain), " operation among ", stringify!($want)))
    };
}

macro_rules! unary_loops {
    ($($variant:ident $name:ident $domain:ident $value:expr, $code:literal, $rule:expr, $text:literal;)*) => {
        fn unary_float<T: Number<Wide: Float>>(op: Unary, x: &[T]) -> Vec<T> {
            match op { $(Unary::$variant => in_domain!(Float $domain map(x, $value)),)* }
        }
        fn unary_num<T: Number>(op: Unary, x: &[T]) -> Vec<T> {
            match op { $(Unary::$variant => in_domain!(Num $domain map(x, $value)),)* }
        }
        fn unary_test<T: Number>(op: Unary, x: &[T]) -> Vec<bool> {
            match op { $(Unary::$variant => in_domain!(Test $domain map_wide(x, $value)),)* }
        }
        fn unary_bits<T: Element + Bits>(op: Unary, x: &[T]) -> Vec<T> {
            match op { $(Unary::$variant => in_domain!(Bits $domain map_plain(x, $value)),)* }
        }
    };
}
kiln_ir::unary_table!(unary_loops);

macro_rules! binary_loops {
    ($($variant:ident $name:ident $domain:ident $value:expr, $code:literal, $rule:expr, $text:literal;)*) => {
        fn binary_float<T: Number<Wide: Float>>(op: Binary, a: &[T], b: &[T]) -> Vec<T> {
            match op { $(Binary::$variant => in_domain!(Float $domain zip(a, b, $value)),)* }
        }
        fn binary_num<T: Number>(op: Binary, a: &[T], b: &[T]) -> Vec<T> {
            match op { $(Binary::$variant => in_domain!(Num $domain zip(a, b, $value)),)* }
        }
        fn binary_compare<T: Element>(op: Binary, a: &[T], b: &[T]) -> Vec<bool> {
            match op { $(Binary::$variant => in_domain!(Compare $domain zip_plain(a, b, $value)),)* }
        }
        fn binary_bits<T: Element + Bits>(op: Binary, a: &[T], b: &[T]) -> Vec<T> {
            match op { $(Binary::$variant => in_domain!(Bits $domain zip_plain(a, b, $value)),)* }
        }
    };
}
kiln_ir::binary_table!(binary_loops);

fn map<T: Number>(x: &[T], f: impl Fn(T::Wide) -> T::Wide) -> Vec<T> {
    x.iter().map(|x| T::narrow(f(x.widen()))).collect()
}

fn map_wide<T: Number>(x: &[T], f: impl Fn(T::Wide) -> bool) -> Vec<bool> {
    x.iter().map(|x| f(x.widen())).collect()
}

fn map_plain<T: Copy>(x: &[T], f: impl Fn(T) -> T) -> Vec<T> {
    x.iter().map(|&x| f(x)).collect()
}

fn zip<T: Number>(a: &[T], b: &[T], f: impl Fn(T::Wide, T::Wide) -> T::Wide) -> Vec<T> {
    a.iter().zip(b).map(|(a, b)| T::narrow(f(a.widen(), b.widen()))).collect()
}

fn zip_plain<T: Copy, U>(a: &[T], b: &[T], f: impl Fn(T, T) -> U) -> Vec<U> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}
