//! The client: a device whose work is done by a server.

pub mod core;
mod drive;
mod exit;
pub mod faults;
pub mod journal;
mod known;
pub mod moves;
mod pool;
mod remote;
pub mod spill;
mod watch;

pub use remote::{Patience, Remote};
pub use watch::watch;
