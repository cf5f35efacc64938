//! Whether a device computes what it should: golden cases from another system (`golden`), and every operation of the
//! tables against the plain interpreter (`suite`), on any device.
#![forbid(unsafe_code)]

pub mod cases;
pub mod golden;
pub mod suite;
