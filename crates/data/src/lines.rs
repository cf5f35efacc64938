//! Text files line by line, read when a line is asked for: plain files stay on disk, with the places of their lines in memory.

use crate::input::Input;
use crate::{DataError, Dataset, Fault};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest line that is read.
const LONGEST: u64 = 256 << 20;

/// The lines of a text file, plain or gzip. A sample is a line without its end.
///
/// ```
/// use kiln_data::{Dataset, Lines};
///
/// let lines = Lines::parse(b"one\ntwo\n")?;
/// assert_eq!((lines.len(), lines.sample(1)?), (2, "two".to_string()));
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Lines(Arc<Source>);

#[derive(Debug)]
struct Source {
    path: PathBuf,
    text: Text,
    /// Where lines begin and end, without what ends them, and their numbers from 1.
    places: Vec<Place>,
}

#[derive(Debug)]
enum Text {
    File(Mutex<File>),
    Memory(Vec<u8>),
}

#[derive(Clone, Copy, Debug)]
struct Place {
    start: u64,
    len: u32,
    line: u64,
}

impl Lines {
    /// Finds the lines of a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Lines, DataError> {
        Lines::of(Input::open(path.as_ref())?, Some(path.as_ref()), |_| true)
    }

    /// Finds the lines in bytes.
    pub fn parse(bytes: &[u8]) -> Result<Lines, DataError> {
        Lines::of(Input::memory(bytes)?, None, |_| true)
    }

    fn of(mut input: Input<'_>, file: Option<&Path>, wanted: fn(&[u8]) -> bool) -> Result<Lines, DataError> {
        let path = input.path().to_path_buf();
        let source = find(&mut input, file, wanted);
        let (text, places) = source.map_err(|fault| fault.at(&path))?;
        Ok(Lines(Arc::new(Source { path, text, places })))
    }

    /// The number of a line in its file, from 1.
    fn number(&self, index: usize) -> u64 {
        self.0.places.get(index).map_or(0, |place| place.line)
    }

    fn bytes(&self, index: usize) -> Result<Vec<u8>, DataError> {
        let place = self.0.places.get(index).ok_or(DataError::NoSample { len: self.0.places.len() })?;
        let read = match &self.0.text {
            Text::Memory(bytes) => return Ok(bytes[place.start as usize..][..place.len as usize].to_vec()),
            Text::File(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let mut line = vec![0; place.len as usize];
                file.seek(SeekFrom::Start(place.start))
                    .and_then(|_| file.read_exact(&mut line))
                    .map(|()| line)
            }
        };
        read.map_err(|e| Fault::from(e).at(&self.0.path))
    }

    fn wrong(&self, index: usize, message: String) -> DataError {
        Fault::Line { line: self.number(index), column: None, message }.at(&self.0.path)
    }
}

impl Dataset for Lines {
    type Sample = String;

    fn len(&self) -> usize {
        self.0.places.len()
    }

    fn sample(&self, index: usize) -> Result<String, DataError> {
        String::from_utf8(self.bytes(index)?).map_err(|e| self.wrong(index, e.utf8_error().to_string()))
    }

    fn origin(&self, index: usize) -> Option<String> {
        Some(format!("line {} of {}", self.number(index), self.0.path.display()))
    }
}

/// Goes through the input once. What is packed, or has no end that is known, is kept in memory.
fn find(
    input: &mut Input<'_>,
    file: Option<&Path>,
    wanted: fn(&[u8]) -> bool,
) -> Result<(Text, Vec<Place>), Fault> {
    let kept = file.is_none() || input.is_packed() || !input.is_file();
    let mut reader = BufReader::with_capacity(1 << 16, input);
    let (mut memory, mut places, mut line) = (Vec::new(), Vec::new(), Vec::new());
    let (mut start, mut number) = (0u64, 0u64);
    loop {
        line.clear();
        let read = reader.by_ref().take(LONGEST + 1).read_until(b'\n', &mut line)? as u64;
        if read == 0 {
            break;
        }
        number += 1;
        if read > LONGEST {
            let message = format!("it is longer than {LONGEST} bytes");
            return Err(Fault::Line { line: number, column: None, message });
        }
        let end = line.strip_suffix(b"\n").map_or(&line[..], |line| line.strip_suffix(b"\r").unwrap_or(line));
        if wanted(end) {
            places.push(Place { start, len: end.len() as u32, line: number });
        }
        if kept {
            memory.extend_from_slice(&line);
        }
        start += read;
    }
    let text = match file {
        Some(path) if !kept => Text::File(Mutex::new(File::open(path)?)),
        _ => Text::Memory(memory),
    };
    Ok((text, places))
}

/// JSON lines: a value on each line, plain or gzip. Blank lines are passed over.
///
/// `T` is any type that `serde` can read, [`serde_json::Value`] by default. A line that is no such value is an error when
/// its sample is asked for, and names the line.
///
/// ```
/// use kiln_data::{Dataset, JsonLines};
///
/// #[derive(serde::Deserialize)]
/// struct Review {
///     text: String,
///     stars: i64,
/// }
///
/// let reviews: JsonLines<Review> = JsonLines::parse(b"{\"text\": \"fine\", \"stars\": 4}\n")?;
/// let samples = reviews.map(|review| (review.text, review.stars));
/// assert_eq!(samples.sample(0)?, ("fine".to_string(), 4));
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[doc(alias("jsonl", "ndjson"))]
#[derive(Clone, Debug)]
pub struct JsonLines<T = serde_json::Value> {
    lines: Lines,
    of: PhantomData<fn() -> T>,
}

impl<T: serde::de::DeserializeOwned> JsonLines<T> {
    /// Finds the lines of a file.
    pub fn open(path: impl AsRef<Path>) -> Result<JsonLines<T>, DataError> {
        let lines = Lines::of(Input::open(path.as_ref())?, Some(path.as_ref()), has_value)?;
        Ok(JsonLines { lines, of: PhantomData })
    }

    /// Finds the lines in bytes.
    pub fn parse(bytes: &[u8]) -> Result<JsonLines<T>, DataError> {
        Ok(JsonLines { lines: Lines::of(Input::memory(bytes)?, None, has_value)?, of: PhantomData })
    }
}

fn has_value(line: &[u8]) -> bool {
    !line.trim_ascii().is_empty()
}

impl<T: serde::de::DeserializeOwned> Dataset for JsonLines<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.lines.len()
    }

    fn sample(&self, index: usize) -> Result<T, DataError> {
        let bytes = self.lines.bytes(index)?;
        serde_json::from_slice(&bytes).map_err(|e| self.lines.wrong(index, e.to_string()))
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.lines.origin(index)
    }
}
