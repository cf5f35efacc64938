//! The server: sessions of clients, each on a device of its own.

pub mod registry;
pub mod session;
