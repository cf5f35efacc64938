//! Errors on the wire. Those that a device gives travel as what they are; others as their text.

use super::ProtocolError;
use kiln_device::Error;
use kiln_ir::Id;
use kiln_ir::math::DivideError;
use kiln_ir::wire::{Reader, WireError, Writer};
use std::sync::Arc;
use std::time::Duration;

/// Causes inside causes that are believed.
const DEEPEST: usize = 8;

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
        other => code(w, 0, &other.to_string()),
    }
}

/// Reads an error.
pub fn decode(r: &mut Reader<'_>) -> Result<Error, ProtocolError> {
    nested(r, 0)
}

fn nested(r: &mut Reader<'_>, depth: usize) -> Result<Error, ProtocolError> {
    if depth > DEEPEST {
        return Err(WireError::Malformed { what: "error" }.into());
    }
    let size = |r: &mut Reader<'_>| r.int().map(|x| usize::try_from(x).unwrap_or(usize::MAX));
    Ok(match r.int()? {
        1 => {
            let (op, value) = (r.text()?, Id(r.int()?));
            Error::Failed { op, value, origin: None, cause: Arc::new(nested(r, depth + 1)?) }
        }
        2 => Error::Index { op: r.text()?, index: r.int()? as i64, length: size(r)? },
        3 => {
            let op = r.text()?;
            Error::Divide {
                op,
                error: if r.int()? == 0 { DivideError::ByZero } else { DivideError::Overflow },
            }
        }
        4 => Error::Custom { op: r.text()?, message: r.text()? },
        5 => Error::Panicked { op: r.text()?, message: r.text()? },
        6 => Error::Unsupported { op: r.text()?, device: r.text()? },
        7 => Error::OutOfMemory { asked: size(r)?, free: size(r)?, limit: size(r)? },
        8 => Error::Timeout(Duration::from_millis(r.int()?)),
        9 => Error::Stopped,
        10 => Error::UnknownValue(Id(r.int()?)),
        0 => Error::Peer { message: r.text()? },
        // A later version may have more kinds.
        code => {
            r.rest();
            Error::Peer { message: format!("an error of kind {code}") }
        }
    })
}
