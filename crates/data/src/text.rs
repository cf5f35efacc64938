//! Text as characters: a vocabulary, the text in its numbers, and windows of it to predict the next character in.

use crate::input::Input;
use crate::{DataError, Dataset, Fault};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// A text as numbers, one for each character.
///
/// ```
/// use kiln_data::{Characters, Dataset};
///
/// let text = Characters::new("hello");
/// assert_eq!(text.vocabulary(), ['e', 'h', 'l', 'o']);
/// assert_eq!(text.tokens(), [1, 0, 2, 2, 3]);
/// assert_eq!(text.decode(&[1, 3]), "ho");
/// let windows = text.windows(2);
/// assert_eq!(windows.sample(1).unwrap(), (vec![2, 2], vec![2, 3]));
/// ```
#[derive(Clone, Debug)]
pub struct Characters {
    vocabulary: Arc<[char]>,
    tokens: Arc<[i64]>,
}

impl Characters {
    /// Reads a text file, plain or gzip.
    pub fn open(path: impl AsRef<Path>) -> Result<Characters, DataError> {
        let mut input = Input::open(path.as_ref())?;
        let bytes = input.rest().map_err(|fault| fault.at(input.path()))?;
        let text = String::from_utf8(bytes).map_err(|e| {
            let at = e.utf8_error().valid_up_to() as u64;
            Fault::Utf8 { at }.at(input.path())
        })?;
        Ok(Characters::new(&text))
    }

    /// The characters of a text. Its vocabulary is what occurs in it, sorted.
    pub fn new(text: &str) -> Characters {
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<char>>().into_iter().collect();
        let token = |c: char| vocabulary.binary_search(&c).unwrap_or_default() as i64;
        let tokens = text.chars().map(token).collect();
        Characters { vocabulary: vocabulary.into(), tokens }
    }

    /// The characters, in the order of their numbers.
    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    /// The text.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// The numbers of another text; nothing if it has a character that this one has not.
    pub fn encode(&self, text: &str) -> Option<Vec<i64>> {
        text.chars().map(|c| self.vocabulary.binary_search(&c).ok().map(|at| at as i64)).collect()
    }

    /// The text of numbers; what is no character becomes U+FFFD.
    pub fn decode(&self, tokens: &[i64]) -> String {
        let character = |&token: &i64| usize::try_from(token).ok().and_then(|at| self.vocabulary.get(at));
        tokens.iter().map(|token| character(token).copied().unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }

    /// Windows of `len` characters, one after the other, each with the same window moved on by one: what a model of the
    /// next character is trained with.
    ///
    /// # Panics
    /// If `len` is 0.
    #[track_caller]
    pub fn windows(&self, len: usize) -> Windows {
        Windows::new(self.tokens.clone(), len)
    }
}

/// Windows of numbers and of those that follow, see [`Characters::windows`]. What is left at the end is not a sample.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Arc<[i64]>,
    len: usize,
}

impl Windows {
    /// Windows of any numbers, such as a tokenizer's.
    ///
    /// # Panics
    /// If `len` is 0.
    #[track_caller]
    pub fn new(tokens: impl Into<Arc<[i64]>>, len: usize) -> Windows {
        assert!(len > 0, "a window needs at least one token");
        Windows { tokens: tokens.into(), len }
    }
}

impl Dataset for Windows {
    type Sample = (Vec<i64>, Vec<i64>);

    fn len(&self) -> usize {
        self.tokens.len().saturating_sub(1) / self.len
    }

    fn sample(&self, index: usize) -> Result<Self::Sample, DataError> {
        if index >= self.len() {
            return Err(DataError::NoSample { len: self.len() });
        }
        let at = |start: usize| self.tokens[start..start + self.len].to_vec();
        Ok((at(index * self.len), at(index * self.len + 1)))
    }

    fn origin(&self, index: usize) -> Option<String> {
        Some(format!("token {} of the text", index.saturating_mul(self.len)))
    }
}
