//! Data to train on: data sets, the loader that makes batches of them, and what is done to images on the way.
//!
//! A [`Dataset`] gives a sample for an index: a vector, a file ([`Mnist`], [`Cifar`], [`Csv`], [`JsonLines`], [`Lines`],
//! [`Characters`], with the feature `images` also `ImageFolder`), or a type of one's own. A [`DataLoader`] shuffles,
//! transforms, batches, loads ahead and puts batches on a device. [`digits()`] are embedded; nothing is downloaded, and
//! nothing here talks to a network.

#![forbid(unsafe_code)]

mod array;
mod batches;
mod cifar;
mod collate;
mod dataset;
mod digits;
mod epoch;
mod error;
#[cfg(feature = "images")]
mod folder;
mod idx;
mod image;
mod input;
mod lines;
mod loader;
mod mnist;
mod progress;
mod random;
mod table;
mod text;
mod workers;

pub use self::image::Image;
pub use array::{Array, Rows};
pub use batches::batches;
pub use cifar::{Cifar, Labels};
pub use collate::{Collate, Misfit, Sequence};
pub use dataset::{Chain, Dataset, Map, Subset, TryMap, Zip, split};
pub use digits::{Digits, ParseError, Reason, Split, digits, parse};
pub use epoch::{Batches, Epoch};
pub use error::{DataError, Fault};
#[cfg(feature = "images")]
pub use folder::ImageFolder;
pub use idx::Idx;
pub use lines::{JsonLines, Lines};
pub use loader::DataLoader;
pub use mnist::{LabelledImages, Mnist};
pub use progress::{Progress, with_progress};
pub use random::Random;
pub use table::{Csv, CsvOptions, Row};
pub use text::{Characters, Windows};
