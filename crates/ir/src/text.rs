//! The text form: one item per line, which parses back.
//!
//! ```text
//! v0 = input f32[2,3]
//! v1 = sum v0 axes=[1] keep=true
//! v2, v3 = sort v0 axis=1 descending=true take=2
//! free v0
//! ```
//! Any word may name a value on the way in; `#` starts a comment.

use crate::{
    DType, Dims, Field, FieldSink, FieldSource, FormError, Id, Item, MAX_RANK, Meta, Node, Op, Program, Real,
    Scalar,
};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::fmt::{Display, Formatter, Write as _};

/// Why a text is not a program.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {reason}")]
#[allow(missing_docs)]
pub struct TextError {
    pub line: usize,
    pub reason: String,
}

/// Reads a program.
pub fn parse(text: &str) -> Result<Program, TextError> {
    let mut program = Program::default();
    let mut names: FxHashMap<String, Id> = FxHashMap::default();
    let mut taken: FxHashSet<Id> = FxHashSet::default();
    let mut next = 0;
    for (at, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let error = |reason: String| TextError { line: at + 1, reason };
        let known = |names: &FxHashMap<String, Id>, word: &str| {
            names.get(word).copied().ok_or_else(|| error(format!("`{word}` is not defined")))
        };
        if let Some(name) = line.strip_prefix("free ") {
            program.items.push(Item::Free(known(&names, name.trim())?));
            continue;
        }
        let (left, right) =
            line.split_once(" = ").ok_or_else(|| error("expected `name = operation …`".into()))?;
        let mut words = right.split_whitespace().peekable();
        let op_name = words.next().ok_or_else(|| error("expected an operation".into()))?;
        let mut ins: SmallVec<[Id; 3]> = SmallVec::new();
        let meta = (op_name == "input").then(|| words.next().unwrap_or(""));
        while let Some(word) = words.next_if(|w| !w.contains('=')) {
            ins.push(known(&names, word)?);
        }
        let mut outs: SmallVec<[Id; 2]> = SmallVec::new();
        for name in left.split(',').map(str::trim) {
            let id = name.strip_prefix('v').and_then(|n| n.parse().ok()).map(Id).filter(|_| is_printed(left));
            // A printed name whose number a freely named value has got already is a free name too.
            let id = id.filter(|id| !taken.contains(id)).unwrap_or(Id(next));
            taken.insert(id);
            next = next.max(id.0.saturating_add(1));
            if !is_word(name) || names.insert(name.to_string(), id).is_some() {
                return Err(error(format!("`{name}` is not a new name")));
            }
            outs.push(id);
        }
        if let Some(meta) = meta {
            let meta =
                parse_meta(meta).ok_or_else(|| error(format!("`{meta}` is not a dtype with a shape")))?;
            program.inputs.push((outs[0], meta));
            continue;
        }
        let op = build(op_name, words).map_err(error)?;
        program.items.push(Item::Run(Node { op, ins, outs }));
    }
    Ok(program)
}

/// Reads one operation without operands, as `Op`'s `Display` writes it.
pub fn parse_op(text: &str) -> Result<Op, TextError> {
    let mut words = text.split_whitespace();
    let name = words.next().unwrap_or("");
    build(name, words).map_err(|reason| TextError { line: 1, reason })
}

/// Reads a meta such as `f32[2,3]`.
pub fn parse_meta(text: &str) -> Option<Meta> {
    let (dtype, dims) = text.strip_suffix(']')?.split_once('[')?;
    Some(Meta { dtype: DType::from_name(dtype)?, shape: numbers(dims)? })
}

fn build<'a>(name: &str, words: impl Iterator<Item = &'a str>) -> Result<Op, String> {
    let mut source = Words(FxHashMap::default());
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| format!("expected `key=value`, got `{word}`"))?;
        source.0.insert(key, value);
    }
    let op = Op::build(name, &mut source).map_err(|e| e.to_string())?;
    match source.0.keys().next() {
        Some(key) => Err(format!("`{name}` has no field `{key}`")),
        None => Ok(op),
    }
}

fn is_word(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_')
}

fn is_printed(left: &str) -> bool {
    left.split(',').all(|n| n.trim().strip_prefix('v').is_some_and(|n| n.parse::<u64>().is_ok()))
}

fn numbers<T: std::str::FromStr + Copy + Default>(text: &str) -> Option<Dims<T>> {
    let list: Vec<T> = match text.trim() {
        "" => Vec::new(),
        text => text.split(',').map(|n| n.trim().parse().ok()).collect::<Option<_>>()?,
    };
    Dims::try_new(&list)
}

struct Words<'a>(FxHashMap<&'a str, &'a str>);

impl FieldSource for Words<'_> {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        let bad = FormError::BadField { key };
        let text = self.0.remove(key).ok_or(bad.clone())?;
        let list = || text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        let read = || -> Option<Field> {
            Some(match like {
                Field::Shape(_) => Field::Shape(numbers(list()?)?),
                Field::Scalar(_) => Field::Scalar(Scalar::parse(text)?),
                Field::DType(_) => Field::DType(DType::from_name(text)?),
                Field::Axis(_) => Field::Axis(text.parse().ok()?),
                Field::Axes(_) => {
                    let axes: Dims<u8> = numbers(list()?)?;
                    let fits = axes.iter().all(|&a| (a as usize) < MAX_RANK);
                    Field::Axes(
                        fits.then(|| {
                            axes.iter().fold(crate::AxisSet::default(), |s, &a| s.with(a as usize))
                        })?,
                    )
                }
                Field::Order(_) => Field::Order(numbers(list()?)?),
                Field::Flag(_) => Field::Flag(text.parse().ok()?),
                Field::Bound(_) => Field::Bound(text.parse().ok()?),
                Field::Word(_) => Field::Word(text.parse().ok()?),
                Field::Real(_) => match text.strip_prefix("0x") {
                    Some(hex) => Field::Real(Real::new(f64::from_bits(u64::from_str_radix(hex, 16).ok()?))),
                    None => Field::Real(Real::new(text.parse().ok()?)),
                },
                Field::Triple(_) => {
                    let list: Dims<u32> = numbers(list()?)?;
                    Field::Triple(list[..].try_into().ok()?)
                }
                Field::Count(_) => Field::Count(text.parse().ok()?),
                Field::Name(_) => Field::Name(String::from_utf8(unhex(text)?).ok()?),
                Field::Bytes(_) => Field::Bytes(unhex(text)?),
            })
        };
        read().ok_or(bad)
    }
}

struct Printed<'a, 'b>(&'a mut Formatter<'b>, std::fmt::Result);

impl FieldSink for Printed<'_, '_> {
    fn put(&mut self, key: &'static str, field: Field) {
        let f = &mut self.0;
        let done = match field {
            Field::Shape(shape) => write!(f, " {key}=[{}]", joined(&shape)),
            Field::Scalar(x) => write!(f, " {key}={x}"),
            Field::DType(x) => write!(f, " {key}={x}"),
            Field::Axis(x) => write!(f, " {key}={x}"),
            Field::Axes(x) => write!(f, " {key}=[{}]", joined(&x.iter().collect::<Vec<_>>())),
            Field::Order(x) => write!(f, " {key}=[{}]", joined(&x)),
            Field::Flag(x) => write!(f, " {key}={x}"),
            Field::Bound(x) => write!(f, " {key}={x}"),
            Field::Word(x) => write!(f, " {key}={x}"),
            Field::Real(x) if x.get().is_nan() => write!(f, " {key}={:#x}", x.get().to_bits()),
            Field::Real(x) => write!(f, " {key}={:?}", x.get()),
            Field::Triple(x) => write!(f, " {key}=[{}]", joined(&x)),
            Field::Count(x) => write!(f, " {key}={x}"),
            Field::Name(x) => write!(f, " {key}={}", hex(x.as_bytes())),
            Field::Bytes(x) => write!(f, " {key}={}", hex(&x)),
        };
        self.1 = self.1.and(done);
    }
}

fn joined<T: Display>(list: &[T]) -> String {
    let mut out = String::new();
    for (i, x) in list.iter().enumerate() {
        let _ = write!(out, "{}{x}", if i == 0 { "" } else { "," });
    }
    out
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::from("x"), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix('x').filter(|t| t.len() % 2 == 0 && t.is_ascii())?;
    (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).ok()).collect()
}

impl Display for Op {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.form_name())?;
        let mut printed = Printed(f, Ok(()));
        self.fields(&mut printed);
        printed.1
    }
}

impl Display for Node {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        for (i, id) in self.outs.iter().enumerate() {
            write!(f, "{}{id}", if i == 0 { "" } else { ", " })?;
        }
        write!(f, " = {}", self.op.form_name())?;
        for id in &self.ins {
            write!(f, " {id}")?;
        }
        let mut printed = Printed(f, Ok(()));
        self.op.fields(&mut printed);
        printed.1
    }
}

impl Display for Item {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Item::Run(node) => node.fmt(f),
            Item::Free(id) => write!(f, "free {id}"),
        }
    }
}

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        for (id, meta) in &self.inputs {
            writeln!(f, "{id} = input {meta}")?;
        }
        self.items.iter().try_for_each(|item| writeln!(f, "{item}"))
    }
}
