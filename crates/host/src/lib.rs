//! The shell of a device: everything but arithmetic, which comes from [`Kernels`].
//!
//! A [`HostDevice`] takes batches in order (`queue.rs`), writes composites as primitives (`lowering.rs`), has windows planned and
//! replays their plans, keeps the table of values, and poisons what a failed operation would have given. It knows no machine:
//! memory, code and threads that compute are the kernels' own. They look at [`stop`] in long loops, and their threads compute
//! in the [`standard`] floating-point environment.

mod blocks;
mod device;
mod execute;
mod kernels;
mod launches;
mod lowering;
mod queue;
pub mod stop;
mod floats;
mod sync;

pub use blocks::{ArenaStats, Blocks, Exhausted, Grant, MAX_BYTES, class_size};
pub use device::HostDevice;
pub use floats::standard;
pub use kernels::{Arg, Faults, Kernels, panicked};
