//! The CPU: the plain interpreter (`reference/`), which says what every operation means, and the fast device beside it.
//!
//! A submission reaches [`kiln_host::HostDevice`], which keeps values, order and poison; arithmetic comes from its kernels:
//! the interpreter's for the device `reference`, those of `cpu.rs` for the device `cpu`. The fast kernels work on
//! strided views (`view.rs`) of buffers from a caching arena (`arena/`), share work out over one pool of threads
//! (`pool.rs`), and give the interpreter's bits whatever the strides, tiles and threads, and whatever floating-point
//! environment the calling thread has: subnormals are kept and rounding is to nearest ([`kiln_host::standard`]).

mod interpreter;
pub mod reference;

mod cpu;
pub mod arena;
pub mod pool;
mod view;

mod tile;
mod versions;
pub mod slices;
mod convert;
mod elementwise;
mod movement;
mod indexed;
mod reduction;
pub mod gemm;

mod product;
mod convolution;
mod pooling;
mod memory;
mod sync;
mod composite;
mod fused;
mod guard;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub mod emit;

use kiln_host::stop;

pub use cpu::{CPUS, Cpu, CpuKernels};
pub use interpreter::{Interpreter, Reference};

/// Names everything that decides the bits of this crate's results.
pub const NUMERICS: &str = "cpu-2";
