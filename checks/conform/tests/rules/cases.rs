//! Which cases the rules are tried on: the suite's lines, and elementwise operations in a few shapes.

pub use kiln_conform::cases::parse as case;
use kiln_ir::{Binary, Domain, Unary};

/// All of them.
pub fn all() -> Vec<String> {
    elementwise().into_iter().chain(kiln_conform::cases::all().map(str::to_string)).collect()
}

/// Elementwise lines from the tables.
pub fn elementwise() -> Vec<String> {
    let mut lines = Vec::new();
    for op in Unary::ALL {
        let dtype = if op.domain() == Domain::Bits { "bool" } else { "f32" };
        lines.extend(["[]", "[0,2]", "[3]"].map(|shape| format!("{} : {dtype}{shape}", op.name())));
    }
    for op in Binary::ALL {
        let d = if op.domain() == Domain::Bits { "bool" } else { "f32" };
        let pairs = [("[]", "[]"), ("[2,3]", "[2,3]"), ("[2,1]", "[3]"), ("[]", "[2]"), ("[1,2]", "[0,1,1]")];
        lines.extend(pairs.map(|(a, b)| format!("{} : {d}{a} {d}{b}", op.name())));
    }
    lines
}
