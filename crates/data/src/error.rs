//! What can be wrong with data: which file, which sample, and why.

use kiln_tensor::{DType, Shape};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why data cannot be had.
///
/// A [`DataLoader`](crate::DataLoader) wraps it in [`DataError::Sample`], so that it says which sample was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file cannot be read, or is not what it should be.
    #[error("{}: {fault}", path.display())]
    File {
        /// The file; `memory` for bytes that were given.
        path: PathBuf,
        /// What is wrong.
        fault: Fault,
    },
    /// A sample cannot be had.
    #[error("sample {index}{}: {cause}", of(origin))]
    Sample {
        /// Its index in the data set.
        index: usize,
        /// Where it comes from, as [`Dataset::origin`](crate::Dataset::origin) says.
        origin: Option<String>,
        /// Why.
        cause: Box<DataError>,
    },
    /// A batch cannot be put together, for no reason that lies in one sample.
    #[error("batch {batch}, samples {samples:?}: {cause}")]
    Batch {
        /// Its number in the epoch, from 0.
        batch: usize,
        /// The samples in it.
        samples: Vec<usize>,
        /// Why.
        cause: Box<DataError>,
    },
    /// The code that makes a sample panicked.
    #[error("it panicked: {message}")]
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// A sample has another shape than the first of its batch.
    #[error("its shape is {found:?}, the first of the batch has {first:?}; `pad` fills shorter ones up")]
    Shape {
        /// The first sample's.
        first: Shape,
        /// This one's.
        found: Shape,
    },
    /// Samples are too large to be a tensor.
    #[error("a batch of {samples} of shape {shape:?} is too large for a tensor")]
    TooLarge {
        /// How many.
        samples: usize,
        /// Their shape, padded.
        shape: Shape,
    },
    /// No worker has brought a batch in the time given.
    #[error("batch {batch} was not there after {waited:?}")]
    Timeout {
        /// Its number in the epoch, from 0.
        batch: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// An index beyond the data set.
    #[error("there are {len} samples")]
    NoSample {
        /// How many there are.
        len: usize,
    },
    /// Something else, from a data set or transform of the program's own.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

impl DataError {
    /// An error of the program's own.
    ///
    /// ```
    /// use kiln_data::DataError;
    ///
    /// let error = DataError::other("no such person");
    /// assert_eq!(error.to_string(), "no such person");
    /// ```
    pub fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> DataError {
        DataError::Other(error.into())
    }

    /// The cause below [`DataError::Sample`] and [`DataError::Batch`].
    pub fn root(&self) -> &DataError {
        match self {
            DataError::Sample { cause, .. } | DataError::Batch { cause, .. } => cause.root(),
            other => other,
        }
    }

    /// What is wrong with the file, if a file is the cause.
    pub fn fault(&self) -> Option<&Fault> {
        match self.root() {
            DataError::File { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

fn of(origin: &Option<String>) -> String {
    origin.as_ref().map_or_else(String::new, |origin| format!(" ({origin})"))
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The system says no.
    #[error("{message}")]
    Io {
        /// The sort of failure.
        kind: std::io::ErrorKind,
        /// What the system says.
        message: String,
    },
    /// None of the names that a set's file may have is there.
    #[error("there is none of {names:?} in this folder")]
    Missing {
        /// The names.
        names: Vec<String>,
    },
    /// Its first bytes are not those of the format.
    #[error("it begins with {found:02x?}, which is no {format}")]
    Magic {
        /// The format that was expected.
        format: &'static str,
        /// The first bytes.
        found: Vec<u8>,
    },
    /// It is shorter or longer than its own header says.
    #[error("it has {have} bytes of content where its header says {want}")]
    Length {
        /// The bytes that the header promises.
        want: u64,
        /// The bytes that there are; of longer files, some that are too many.
        have: u64,
    },
    /// Its length is no multiple of its records' length.
    #[error("it has {have} bytes, no multiple of records of {record}")]
    Records {
        /// Bytes in a record.
        record: usize,
        /// Bytes in the file.
        have: u64,
    },
    /// The header's extents are more than a tensor can have.
    #[error("its extents {extents:?} are more than a tensor can have")]
    Extents {
        /// The extents.
        extents: Vec<u64>,
    },
    /// It holds another sort of numbers, or other extents, than the data set needs.
    #[error("it holds {found:?} of {extents:?} where {want} are needed")]
    Content {
        /// Its numbers.
        found: DType,
        /// Its extents.
        extents: Vec<usize>,
        /// What is needed, in words.
        want: &'static str,
    },
    /// Two files of a set have different numbers of samples.
    #[error("it has {found} labels for {want} images")]
    Labels {
        /// Images.
        want: usize,
        /// Labels.
        found: usize,
    },
    /// A label that is no class.
    #[error("record {record} has label {label}, there are {classes} classes")]
    Label {
        /// The record, from 0.
        record: usize,
        /// Its label.
        label: i64,
        /// The classes.
        classes: usize,
    },
    /// It grows beyond what can be meant when it is unpacked.
    #[error("its {packed} compressed bytes unpack to more than {most}")]
    Bomb {
        /// Compressed bytes read so far.
        packed: u64,
        /// The most they may unpack to.
        most: u64,
    },
    /// A line that cannot be read.
    #[error("line {line}{}: {message}", column.as_ref().map_or_else(String::new, |c| format!(", column {c:?}")))]
    Line {
        /// The line, from 1.
        line: u64,
        /// The column's name, where there is one.
        column: Option<String>,
        /// What is wrong, in the reader's words.
        message: String,
    },
    /// It has no such column.
    #[error("there is no column {column:?}, there are {columns:?}")]
    Column {
        /// The name that was asked for.
        column: String,
        /// Those that there are.
        columns: Vec<String>,
    },
    /// Text that is not UTF-8.
    #[error("byte {at} is not UTF-8")]
    Utf8 {
        /// The place of the first byte that is not.
        at: u64,
    },
    /// An image that cannot be decoded.
    #[error("{message}")]
    Image {
        /// What the decoder says.
        message: String,
    },
}

impl Fault {
    /// The error of this file.
    pub(crate) fn at(self, path: impl AsRef<Path>) -> DataError {
        DataError::File { path: path.as_ref().into(), fault: self }
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Fault {
        // What a reader of ours says travels through readers that know only of the system's errors.
        let (kind, message) = (error.kind(), error.to_string());
        match error.into_inner().map(|inner| inner.downcast::<Fault>()) {
            Some(Ok(fault)) => *fault,
            _ => Fault::Io { kind, message },
        }
    }
}
