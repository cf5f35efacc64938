//! Attributes of a case: PyTorch's keyword arguments as JSON, with defaults where a key is missing or null.

use kiln_tensor::{DType, Number};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize, Default)]
#[serde(transparent)]
pub(super) struct Attrs(Map<String, Value>);

impl Attrs {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// The value of a key read by `f`, or `None` if it is missing.
    fn read<T>(
        &self,
        key: &str,
        what: &str,
        f: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => {
                f(value).map(Some).ok_or_else(|| format!("attribute `{key}` is {value}, not {what}"))
            }
        }
    }

    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    pub fn is_list(&self, key: &str) -> bool {
        self.get(key).is_some_and(Value::is_array)
    }

    pub fn number(&self, key: &str) -> Result<Option<Number>, String> {
        self.read(key, "a number", number)
    }

    pub fn real(&self, key: &str) -> Result<Option<f64>, String> {
        Ok(self.number(key)?.map(Number::to_f64))
    }

    pub fn int(&self, key: &str) -> Result<Option<isize>, String> {
        self.read(key, "an integer", int)
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>, String> {
        self.read(key, "a size", |value| int(value)?.try_into().ok())
    }

    /// A list of integers, or one alone.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<isize>>, String> {
        self.read(key, "integers", |value| list(value, int))
    }

    /// A list of sizes, or one alone.
    pub fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>, String> {
        self.read(key, "sizes", |value| list(value, |item| int(item)?.try_into().ok()))
    }

    /// A list of sizes of which some may be left open, or one alone.
    pub fn open_sizes(&self, key: &str) -> Result<Option<Vec<Option<usize>>>, String> {
        self.read(key, "sizes", |value| {
            list(value, |item| match item {
                Value::Null => Some(None),
                item => Some(Some(int(item)?.try_into().ok()?)),
            })
        })
    }

    /// Two lists of integers, or two integers.
    pub fn pairs(&self, key: &str) -> Result<Option<Pairs>, String> {
        self.read(key, "two lists of integers", |value| match &value.as_array()?[..] {
            [a, b] => Some((list(a, int)?, list(b, int)?)),
            _ => None,
        })
    }

    /// A list of numbers, or one alone.
    pub fn reals(&self, key: &str) -> Result<Option<Vec<f64>>, String> {
        self.read(key, "numbers", |value| list(value, |item| number(item).map(Number::to_f64)))
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(format!("attribute `{key}` is {value}, not a word")),
        }
    }

    pub fn dtype(&self, key: &str) -> Result<Option<DType>, String> {
        self.read(key, "a dtype", |value| DType::from_name(value.as_str()?))
    }
}

/// Two lists of axes that belong together.
type Pairs = (Vec<isize>, Vec<isize>);

/// What must be there.
pub(super) trait Must<T> {
    fn must(self, key: &str) -> Result<T, String>;
}

impl<T> Must<T> for Result<Option<T>, String> {
    fn must(self, key: &str) -> Result<T, String> {
        self?.ok_or_else(|| format!("attribute `{key}` is missing"))
    }
}

fn number(value: &Value) -> Option<Number> {
    match value {
        Value::Number(n) => n.as_i64().map(Number::Int).or_else(|| n.as_f64().map(Number::Float)),
        Value::String(word) => match word.as_str() {
            "inf" => Some(Number::Float(f64::INFINITY)),
            "-inf" => Some(Number::Float(f64::NEG_INFINITY)),
            "nan" => Some(Number::Float(f64::NAN)),
            _ => None,
        },
        Value::Bool(b) => Some(Number::Int(*b as i64)),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn int(value: &Value) -> Option<isize> {
    value.as_i64()?.try_into().ok()
}

fn list<T>(value: &Value, f: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Array(items) => items.iter().map(f).collect(),
        item => Some(vec![f(item)?]),
    }
}

/// Python writes infinities and NaN as bare words, which JSON does not have: here they become strings.
pub(super) fn with_words_for_infinities(line: &[u8]) -> Vec<u8> {
    let words: [(&[u8], &[u8]); 3] =
        [(b"-Infinity", b"\"-inf\""), (b"Infinity", b"\"inf\""), (b"NaN", b"\"nan\"")];
    let mut out = Vec::with_capacity(line.len());
    let (mut at, mut quoted) = (0, false);
    while at < line.len() {
        let rest = &line[at..];
        if let Some((word, put)) = words.iter().find(|(word, _)| !quoted && rest.starts_with(word)) {
            out.extend_from_slice(put);
            at += word.len();
            continue;
        }
        // An escaped character inside a string is not its end.
        let step = if quoted && rest[0] == b'\\' { 2.min(rest.len()) } else { 1 };
        quoted ^= rest[0] == b'"';
        out.extend_from_slice(&rest[..step]);
        at += step;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_words_become_strings_outside_of_strings() {
        let line = br#"{"p": -Infinity, "q": [NaN, Infinity], "t": "NaN \" Infinity"}"#;
        let value: Value = serde_json::from_slice(&with_words_for_infinities(line)).unwrap();
        assert_eq!(value["p"], "-inf");
        assert_eq!(value["q"][0], "nan");
        assert_eq!(value["t"], "NaN \" Infinity");
    }
}
