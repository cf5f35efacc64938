//! The methods of [`Tensor`], by theme. Each means what PyTorch's function of that name means.
//!
//! A method resolves axes and dtypes, then applies one operation of the IR or composes a few; the derivative follows
//! from theirs. Where a formula would leak NaN into a gradient, the unsafe operand is replaced before the operation,
//! not after. What does not fit panics at the caller's line.

mod arrange;
mod axes;
mod diagonal;
mod join;
mod pad;
mod shape;
mod slice;

mod activation;
mod arithmetic;
mod elementwise;
mod extremes;
mod reduce;
mod special;
mod statistics;

mod advanced;
mod index;
mod order;
mod sets;

mod conv;
mod distance;
mod einsum;
mod fold;
mod grid;
mod linear;
mod loss;
mod norm;
mod pool;
mod quant;
mod resize;
mod windows;

pub use axes::{Axes, Dimensions, Extents};
pub use conv::{ConvOptions, Padding};
pub use einsum::einsum;
pub use extremes::Quantile;
pub use grid::{GridMode, GridOptions, GridPadding};
pub use loss::{ClassOptions, CtcOptions, MarginOptions, PoissonOptions, Reduction, TripletOptions};
pub use pad::PadMode;
pub use pool::PoolOptions;
pub use resize::Interpolate;
pub use sets::Unique;
pub use slice::{TensorIndex, TensorIndices, step_by};
