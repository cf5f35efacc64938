//! Model files: read straight to a device, and written.
//!
//! A model is saved in one line and loaded in one line ([`ModelFile`]). What others wrote is read by its content:
//! safetensors, also in several files with an index or in a folder of Hugging Face's, PyTorch's `.pt` and `.pth`, NumPy's
//! `.npy` and `.npz` ([`TensorFile`]). No code of a pickle is run. Written are safetensors and `.npz`; and a job's state after some steps is a [`Checkpoint`].
//!
//! ```
//! use kiln_nn::{Linear, Module};
//! use kiln_store::{Load, ModelFile};
//! # use kiln_tensor::Device;
//! # let device = Device::cpu();
//! # let path = std::env::temp_dir().join(format!("kiln-doc-model-{}.safetensors", std::process::id()));
//!
//! let model = Linear::new(4, 2, &device);
//! model.save(&path)?;
//!
//! let mut other = Linear::new(4, 2, &device);
//! other.load(&path)?;
//!
//! // What fits of somebody else's file, whose names differ.
//! let report = other.load_with(&path, Load::partial().rename("head\\.(.*)", "$1"))?;
//! println!("{report}");
//! # std::fs::remove_file(&path).unwrap();
//! # Ok::<(), kiln_store::StoreError>(())
//! ```
#![forbid(unsafe_code)]

mod checkpoint;
mod error;
mod file;
mod load;
mod numpy;
mod pickle;
mod safetensors;
mod save;
mod torch;

pub use checkpoint::{Checkpoint, CheckpointError};
pub use error::{Result, StoreError};
pub use file::TensorFile;
pub use load::{Load, ModelFile};
pub use save::{save, save_sharded, save_with};
