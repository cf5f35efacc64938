//! `kiln-chaos`.
fn main() {}
