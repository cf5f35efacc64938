//! The server: sessions of clients, each on a device of its own.

mod assembly;
pub mod executor;
mod fetch;
mod http;
mod listen;
pub mod moves;
mod names;
pub mod registry;
pub mod schedule;
mod serve;
pub mod session;
mod status;
mod strangers;

pub use listen::{Listen, Sockets};
pub use serve::{Event, Server};
