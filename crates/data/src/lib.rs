//! Data to train on without a download.
//!
//! [`digits()`] gives 1797 real handwritten digits, embedded in the library (57 KB), already split into train and
//! test; [`batches()`] gives the order in which to visit the samples in an epoch. Both return plain vectors: this
//! crate knows nothing of tensors, files or the network, so examples, tests and servers can all use it.
//!
//! ```
//! let train = &kiln_data::digits().train;
//! for batch in kiln_data::batches(train.len(), 32, 7, 0) {
//!     let pixels: Vec<f32> = batch.iter().flat_map(|&i| train.image(i as usize)).copied().collect();
//!     let labels: Vec<i64> = batch.iter().map(|&i| train.labels[i as usize]).collect();
//!     assert_eq!((pixels.len(), labels.len()), (32 * 64, 32));
//! }
//! ```

#![forbid(unsafe_code)]

mod batches;
mod digits;

pub use batches::batches;
pub use digits::{Digits, ParseError, Reason, Split, digits, parse};
