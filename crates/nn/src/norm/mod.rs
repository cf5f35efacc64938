//! Normalisation: over a sample's features, over groups of channels, and over a batch with running statistics.

mod batch;
mod group;
mod instance;
mod layer;
mod local;
mod rms;
mod running;

pub use batch::{BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d};
pub use group::GroupNorm;
pub use instance::{InstanceNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d};
pub use layer::LayerNorm;
pub use local::LocalResponseNorm;
pub use rms::RmsNorm;
