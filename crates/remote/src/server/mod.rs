//! The server: sessions of clients, each on a device of its own.

mod assembly;
mod fetch;
mod http;
pub mod moves;
pub mod registry;
pub mod schedule;
mod serve;
pub mod session;

pub use serve::{Bound, Event, Listen, Server};
