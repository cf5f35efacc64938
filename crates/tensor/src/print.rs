//! Values as text. `Display` shows the elements, the middle of long axes left out; `Debug` adds dtype, shape and device.
//! Printing reads the tensor, and says why where it cannot be read.

use crate::{DType, Error, Tensor};
use std::fmt::{Display, Formatter, Result, Write};

/// Axes longer than this are shortened to their ends when the whole is large.
const EDGE: usize = 3;
/// Tensors with more elements than this are shortened.
const WHOLE: usize = 1000;

impl Display for Tensor {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match words(self, f.precision()) {
            Ok(words) => rows(f, &self.shape(), &words, 0, 0, 1),
            Err(e) => write!(f, "<unreadable: {e}>"),
        }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let tracked = if self.is_tracked() { ", tracked" } else { "" };
        write!(f, "Tensor({} on {}{tracked})\n{self}", self.meta(), self.device())
    }
}

/// All elements as text of one width.
fn words(tensor: &Tensor, precision: Option<usize>) -> std::result::Result<Vec<String>, Error> {
    let tensor = tensor.detach();
    let plain = tensor.dtype().unpacked();
    let mut words: Vec<String> = if plain == DType::Bool {
        tensor.to_vec::<bool>()?.iter().map(|b| b.to_string()).collect()
    } else if plain == DType::U64 {
        tensor.to_vec::<u64>()?.iter().map(|x| x.to_string()).collect()
    } else if plain.is_int() {
        tensor.to_dtype(DType::I64).to_vec::<i64>()?.iter().map(|x| x.to_string()).collect()
    } else {
        floats(&tensor.to_dtype(DType::F64).to_vec::<f64>()?, precision.unwrap_or(4))
    };
    let width = words.iter().map(String::len).max().unwrap_or(0);
    words.iter_mut().for_each(|w| w.insert_str(0, &" ".repeat(width - w.len())));
    Ok(words)
}

fn floats(items: &[f64], precision: usize) -> Vec<String> {
    let finite = || items.iter().filter(|x| x.is_finite() && **x != 0.0).map(|x| x.abs());
    let (least, most) = finite().fold((f64::MAX, 0f64), |(a, b), x| (a.min(x), b.max(x)));
    let scientific = most >= 1e6 || most > 0.0 && (most < 1e-3 || least < 1e-5);
    let whole = items.iter().all(|x| !x.is_finite() || x.fract() == 0.0) && most < 1e6;
    let text = |x: &f64| match (x.is_finite(), whole, scientific) {
        (false, ..) => x.to_string().to_lowercase(),
        (true, true, _) => format!("{x:.1}"),
        (true, _, true) => format!("{x:.precision$e}"),
        _ => format!("{x:.precision$}"),
    };
    items.iter().map(text).collect()
}

fn rows(
    f: &mut Formatter<'_>,
    shape: &[usize],
    words: &[String],
    axis: usize,
    at: usize,
    indent: usize,
) -> Result {
    let Some(&length) = shape.get(axis) else {
        return f.write_str(words.get(at).map_or("", |w| w.trim_start()));
    };
    let inner: usize = shape[axis + 1..].iter().product();
    let last = axis + 1 == shape.len();
    let shortened = words.len() > WHOLE && length > 2 * EDGE;
    f.write_char('[')?;
    let mut first = true;
    for i in 0..length {
        if shortened && (EDGE..length - EDGE).contains(&i) {
            if i == EDGE {
                write!(f, "{}…", if last { ", ".to_string() } else { format!(",\n{}", " ".repeat(indent)) })?;
            }
            continue;
        }
        if !first {
            let gap = if last {
                " ".to_string()
            } else {
                "\n".repeat(shape.len() - axis - 1) + &" ".repeat(indent)
            };
            write!(f, ",{gap}")?;
        }
        first = false;
        match last {
            true => f.write_str(&words[at + i])?,
            false => rows(f, shape, words, axis + 1, at + i * inner, indent + 1)?,
        }
    }
    f.write_char(']')
}
