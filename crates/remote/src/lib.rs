//! Remote devices: a server executes the stream that a client records.
//!
//! `protocol/` is bytes and time in, actions out, without a socket or a clock; the rest connects it to the world.
#![deny(unsafe_code)]
// What comes next from a link is no iterator: what is sent meanwhile decides it.
#![allow(clippy::should_implement_trait)]

pub mod address;
pub mod client;
pub mod protocol;
pub mod server;
pub mod transport;

pub use address::Address;
pub use client::Remote;
