//! The client: a device whose work is done by a server.

pub mod core;
pub mod journal;
