//! Errors on the wire. Those that a device gives travel as what they are; others as their text.

use super::ProtocolError;
use kiln_device::Error;
use kiln_ir::math::DivideError;
use kiln_ir::wire::{Reader, WireError, Writer};
use kiln_ir::{DType, Id, Meta, OpError, Shape};
use std::sync::Arc;
use std::time::Duration;

/// Causes inside causes that are kept.
const DEEPEST: usize = 8;
/// Bytes of text that are taken in of the first failure, and of what stands around it.
pub const MOST_TEXT: usize = 4 << 10;

/// Text that still may come.
struct TextBudget(usize);

impl TextBudget {
    fn text(&mut self, r: &mut Reader<'_>) -> Result<String, ProtocolError> {
        let mut text = r.text()?;
        if text.len() > self.0 {
            let end = (0..=self.0).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            text.truncate(end);
            text.shrink_to_fit();
        }
        self.0 -= text.len();
        Ok(text)
    }
}

/// Writes an error. Origins stay behind: the recording side knows them.
pub fn encode(error: &Error, w: &mut Writer) {
    let code = |w: &mut Writer, code: u64, text: &str| {
        w.int(code);
        w.text(text);
    };
    match error {
        Error::Failed { op, value, cause, .. } => {
            code(w, 1, op);
            w.int(value.0);
            encode(cause, w);
        }
        Error::Index { op, index, length } => {
            code(w, 2, op);
            w.int(*index as u64);
            w.int(*length as u64);
        }
        Error::Divide { op, error } => {
            code(w, 3, op);
            w.int((*error == DivideError::Overflow) as u64);
        }
        Error::Custom { op, message } => {
            code(w, 4, op);
            w.text(message);
        }
        Error::Panicked { op, message } => {
            code(w, 5, op);
            w.text(message);
        }
        Error::Unsupported { op, device } => {
            code(w, 6, op);
            w.text(device);
        }
        Error::OutOfMemory { asked, free, limit } => {
            w.int(7);
            [*asked, *free, *limit].iter().for_each(|&x| w.int(x as u64));
        }
        Error::Timeout(limit) => {
            w.int(8);
            w.int(limit.as_millis() as u64);
        }
        Error::Stopped => w.int(9),
        Error::UnknownValue(id) => {
            w.int(10);
            w.int(id.0);
        }
        Error::Op(error) => {
            w.int(11);
            encode_op(error, w);
        }
        Error::StepRefused { at, cause, .. } => {
            w.int(12);
            w.int(*at as u64);
            w.int(cause.is_some() as u64);
            cause.iter().for_each(|cause| encode(cause, w));
        }
        Error::TooLong { op, bytes, most } => {
            code(w, 13, op);
            w.int(*bytes as u64);
            w.int(*most as u64);
        }
        Error::Peer { message } => code(w, 0, message),
        other => code(w, 0, &other.to_string()),
    }
}

/// Writes why an operation does not fit. What has a reason in words goes as words.
fn encode_op(error: &OpError, w: &mut Writer) {
    let shaped = |w: &mut Writer, shape: &Shape| w.meta(&Meta { dtype: DType::Bool, shape: *shape });
    let mut code = |code: u64, text: &str| {
        w.int(code);
        w.text(text);
    };
    match error {
        OpError::DType { op, dtype } => {
            code(1, op);
            w.text(dtype.name());
        }
        OpError::Index { op, dtype } => {
            code(12, op);
            w.text(dtype.name());
        }
        OpError::DTypeMismatch { op, lhs, rhs } => {
            code(2, op);
            w.text(lhs.name());
            w.text(rhs.name());
        }
        OpError::ShapeMismatch { op, lhs, rhs } => {
            code(3, op);
            shaped(w, lhs);
            shaped(w, rhs);
        }
        OpError::Axis { op, axis, shape } => {
            code(4, op);
            w.int(*axis as u64);
            shaped(w, shape);
        }
        OpError::Range { op, start, end, step, length } => {
            code(5, op);
            [*start, *end, *step, *length].iter().for_each(|&x| w.int(x as u64));
        }
        OpError::Empty { op, shape } => {
            code(6, op);
            shaped(w, shape);
        }
        OpError::Rank { op, rank } => {
            code(7, op);
            w.int(*rank as u64);
        }
        OpError::TooLarge { shape } => {
            code(8, "");
            shaped(w, shape);
        }
        OpError::Quantised { dtype, shape } => {
            code(9, dtype.name());
            shaped(w, shape);
        }
        OpError::UnknownCustom { name } => code(10, name),
        OpError::Custom { op, message } => {
            code(11, op);
            w.text(message);
        }
        OpError::Arity { op, .. } | OpError::Shape { op, .. } | OpError::Attribute { op, .. } => {
            code(11, op);
            let text = error.to_string();
            w.text(text.strip_prefix(op.as_str()).unwrap_or(&text).trim_start_matches([':', ' ']));
        }
    }
}

fn decode_op(r: &mut Reader<'_>, budget: &mut TextBudget) -> Result<OpError, ProtocolError> {
    let size = |r: &mut Reader<'_>| r.int().map(|x| usize::try_from(x).unwrap_or(usize::MAX));
    let shape = |r: &mut Reader<'_>| r.meta().map(|meta| meta.shape);
    let bad = WireError::Malformed { what: "dtype" };
    let named = |name: &str| DType::from_name(name).ok_or(bad.clone());
    let (code, op) = (r.int()?, budget.text(r)?);
    Ok(match code {
        1 => OpError::DType { op, dtype: named(&r.text()?)? },
        2 => OpError::DTypeMismatch { op, lhs: named(&r.text()?)?, rhs: named(&r.text()?)? },
        3 => OpError::ShapeMismatch { op, lhs: shape(r)?, rhs: shape(r)? },
        4 => OpError::Axis { op, axis: r.int()? as i64, shape: shape(r)? },
        5 => OpError::Range { op, start: size(r)?, end: size(r)?, step: size(r)?, length: size(r)? },
        6 => OpError::Empty { op, shape: shape(r)? },
        7 => OpError::Rank { op, rank: size(r)? },
        8 => OpError::TooLarge { shape: shape(r)? },
        9 => OpError::Quantised { dtype: named(&op)?, shape: shape(r)? },
        10 => OpError::UnknownCustom { name: op },
        11 => OpError::Custom { op, message: budget.text(r)? },
        12 => OpError::Index { op, dtype: named(&r.text()?)? },
        // A later version may have more kinds.
        code => {
            r.rest();
            OpError::Custom { op, message: format!("an error of kind {code}") }
        }
    })
}

/// What stands around the first failure.
enum Outer {
    Failed(String, Id),
    Step(usize),
}

/// Reads an error. Of causes inside causes the outer ones and the first failure are kept.
pub fn decode(r: &mut Reader<'_>) -> Result<Error, ProtocolError> {
    let step = |at, cause| Error::StepRefused { at, path: String::new(), origin: None, cause };
    let mut outer = Vec::new();
    let mut budget = TextBudget(MOST_TEXT);
    // No recursion: a peer decides how deep it is.
    let cause = loop {
        let level = match r.int()? {
            1 if outer.len() < DEEPEST => Outer::Failed(budget.text(r)?, Id(r.int()?)),
            1 => Outer::Failed(r.text()?, Id(r.int()?)),
            12 => {
                let at = usize::try_from(r.int()?).unwrap_or(usize::MAX);
                match r.int()? {
                    0 => break step(at, None),
                    _ => Outer::Step(at),
                }
            }
            code => break first(code, r, &mut TextBudget(MOST_TEXT))?,
        };
        if outer.len() < DEEPEST {
            outer.push(level);
        }
    };
    Ok(outer.into_iter().rev().fold(cause, |cause, level| match (level, Arc::new(cause)) {
        (Outer::Failed(op, value), cause) => Error::Failed { op, value, origin: None, cause },
        (Outer::Step(at), cause) => step(at, Some(cause)),
    }))
}

/// What made it fail.
fn first(code: u64, r: &mut Reader<'_>, budget: &mut TextBudget) -> Result<Error, ProtocolError> {
    let size = |r: &mut Reader<'_>| r.int().map(|x| usize::try_from(x).unwrap_or(usize::MAX));
    Ok(match code {
        2 => Error::Index { op: budget.text(r)?, index: r.int()? as i64, length: size(r)? },
        3 => {
            let op = budget.text(r)?;
            Error::Divide {
                op,
                error: if r.int()? == 0 { DivideError::ByZero } else { DivideError::Overflow },
            }
        }
        4 => Error::Custom { op: budget.text(r)?, message: budget.text(r)? },
        5 => Error::Panicked { op: budget.text(r)?, message: budget.text(r)? },
        6 => Error::Unsupported { op: budget.text(r)?, device: budget.text(r)? },
        7 => Error::OutOfMemory { asked: size(r)?, free: size(r)?, limit: size(r)? },
        8 => Error::Timeout(Duration::from_millis(r.int()?)),
        9 => Error::Stopped,
        10 => Error::UnknownValue(Id(r.int()?)),
        11 => Error::Op(decode_op(r, budget)?),
        13 => Error::TooLong { op: budget.text(r)?, bytes: size(r)?, most: size(r)? },
        0 => Error::Peer { message: budget.text(r)? },
        // A later version may have more kinds.
        code => {
            r.rest();
            Error::Peer { message: format!("an error of kind {code}") }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_of_any_depth_are_read_and_the_first_is_kept() {
        for depth in [0, 1, DEEPEST, DEEPEST + 1, 5000] {
            let mut error = Error::TooLong { op: "cat".into(), bytes: 7, most: 5 };
            let root = error.clone();
            for level in 0..depth {
                let (op, value) = (format!("op{level}"), Id(level as u64));
                error = Error::Failed { op, value, origin: None, cause: Arc::new(error) };
            }
            let mut w = Writer::default();
            encode(&error, &mut w);
            let mut r = Reader::new(&w.bytes);
            let mut got = &decode(&mut r).unwrap();
            assert!(r.is_empty());
            assert_eq!((got.root(), depth <= DEEPEST), (&root, *got == error));
            let mut kept = 0;
            while let Error::Failed { op, cause, .. } = got {
                kept += 1;
                assert_eq!(*op, format!("op{}", depth - kept), "the outer ones are kept");
                got = cause;
            }
            assert_eq!(kept, depth.min(DEEPEST));
        }
    }

    #[test]
    fn a_text_without_an_end_is_cut() {
        let long = "ä".repeat(300_000);
        let inner = Error::Custom { op: long.clone(), message: long.clone() };
        let error = Error::Failed { op: long.clone(), value: Id(3), origin: None, cause: Arc::new(inner) };
        for error in [error, Error::Peer { message: long.clone() }] {
            let mut w = Writer::default();
            encode(&error, &mut w);
            let mut r = Reader::new(&w.bytes);
            let back = decode(&mut r).unwrap();
            assert!(r.is_empty());
            let text = back.to_string();
            assert!(text.len() <= 3 * MOST_TEXT && text.contains("ää"), "{} bytes", text.len());
        }
    }
}
