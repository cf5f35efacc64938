//! Where statements are collected. The traits have no place for a writer, so the one at work is a thread's own.

use super::{Dialect, register_type};
use crate::DType;
use std::cell::RefCell;

/// A number, as bits of the type that it is held in, or a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Atom {
    Number(u64),
    Name(u32),
}

/// What stands for a number of one type.
pub(super) trait Typed: Copy {
    const DTYPE: DType;
    fn atom(self) -> Atom;
    fn from_atom(atom: Atom) -> Self;

    fn arg(self) -> (DType, Atom) {
        (Self::DTYPE, self.atom())
    }
}

pub(super) struct Writer {
    pub dialect: Dialect,
    pub body: String,
    pub exact: bool,
    names: Vec<String>,
    temporaries: u32,
}

thread_local! {
    static WRITER: RefCell<Writer> = const { RefCell::new(Writer::new(Dialect::C)) };
}

impl Writer {
    pub const fn new(dialect: Dialect) -> Writer {
        Writer { dialect, body: String::new(), exact: true, names: Vec::new(), temporaries: 0 }
    }

    /// Has `f` write here.
    pub fn write<R>(&mut self, f: impl FnOnce() -> R) -> R {
        WRITER.with_borrow_mut(|writer| std::mem::swap(writer, self));
        let result = f();
        WRITER.with_borrow_mut(|writer| std::mem::swap(writer, self));
        result
    }

    pub fn name(&mut self, name: String) -> Atom {
        self.names.push(name);
        Atom::Name(self.names.len() as u32 - 1)
    }

    /// A new name for the value of an expression.
    pub fn statement(&mut self, kind: &str, expression: &str) -> Atom {
        let name = format!("t{}", self.temporaries);
        self.temporaries += 1;
        self.body.push_str(&format!("{kind} {name} = {expression};\n"));
        self.name(name)
    }

    pub fn expression(&self, dtype: DType, atom: Atom) -> String {
        match atom {
            Atom::Name(name) => self.names[name as usize].clone(),
            Atom::Number(bits) => number(dtype, bits),
        }
    }

    /// `form` with its `#` replaced by operands, one after the other.
    fn filled(&self, form: &str, args: &[(DType, Atom)]) -> String {
        let mut parts = form.split('#');
        let mut out = String::from(parts.next().unwrap_or(""));
        for (&(dtype, atom), part) in args.iter().zip(parts) {
            out.push_str(&self.expression(dtype, atom));
            out.push_str(part);
        }
        out
    }
}

/// The language of the text that is being written.
pub(super) fn dialect() -> Dialect {
    WRITER.with_borrow(|writer| writer.dialect)
}

/// Says that what is written may round otherwise than the CPU.
pub(super) fn inexact() {
    WRITER.with_borrow_mut(|writer| writer.exact = false);
}

/// A new value, by a form with a `#` for each operand.
pub(super) fn make<T: Typed>(form: &str, args: &[(DType, Atom)]) -> Atom {
    WRITER.with_borrow_mut(|writer| {
        let expression = writer.filled(form, args);
        writer.statement(register_type(T::DTYPE), &expression)
    })
}

/// A number written out.
fn number(dtype: DType, bits: u64) -> String {
    let (text, negative) = match dtype {
        DType::F64 => {
            let x = f64::from_bits(bits);
            match x.is_finite() {
                true => (format!("{x:?}"), x.is_sign_negative()),
                false => (format!("kiln_double({bits:#x}ull)"), false),
            }
        }
        DType::F32 | DType::F16 | DType::BF16 | DType::Q8 | DType::Q4 => {
            let x = f32::from_bits(bits as u32);
            match x.is_finite() {
                // As many digits as f64 needs: then it does not matter whether a compiler rounds once or twice.
                true => (format!("{:?}f", x as f64), x.is_sign_negative()),
                false => (format!("kiln_float({bits:#x}u)"), false),
            }
        }
        DType::I64 if bits == 1 << 63 => (format!("(long long){bits:#x}ull"), true),
        DType::I64 => (format!("{}ll", bits as i64), (bits as i64) < 0),
        DType::I32 if bits as u32 == 1 << 31 => ("(int)0x80000000u".into(), true),
        DType::I32 => (format!("{}", bits as i32), (bits as i32) < 0),
        DType::I16 => (format!("{}", bits as i16), (bits as i16) < 0),
        DType::I8 => (format!("{}", bits as i8), (bits as i8) < 0),
        DType::U64 => (format!("{bits}ull"), false),
        DType::U32 => (format!("{}u", bits as u32), false),
        DType::U16 => (format!("{}", bits as u16), false),
        DType::U8 => (format!("{}", bits as u8), false),
        DType::Bool => (if bits != 0 { "true" } else { "false" }.into(), false),
    };
    if negative { format!("({text})") } else { text }
}
