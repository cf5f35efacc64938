//! The methods of [`Tensor`], by theme. Each means what PyTorch's function of that name means.
//!
//! A method resolves axes and dtypes, then applies one operation of the IR or composes a few; the derivative follows
//! from theirs. Where a formula would leak NaN into a gradient, the unsafe operand is replaced before the operation,
//! not after. What does not fit panics at the caller's line.

mod axes;
mod join;
mod pad;
mod shape;
mod slice;

mod activation;
mod elementwise;
mod reduce;
mod statistics;

mod index;
mod order;

mod conv;
mod linear;
mod loss;
mod norm;
mod pool;
mod quant;
mod resize;

pub use axes::{Axes, Dimensions, Extents};
pub use conv::{ConvOptions, Padding};
pub use loss::{ClassOptions, Reduction};
pub use pad::PadMode;
pub use pool::PoolOptions;
pub use resize::Interpolate;
pub use slice::{TensorIndex, TensorIndices, step_by};
