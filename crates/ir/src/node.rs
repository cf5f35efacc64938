//! The stream's elements.

use crate::Op;
use smallvec::SmallVec;

/// Names a value within one recording side; never used twice there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub u64);

impl Id {
    /// Names from here on belong to devices that rewrite a stream: nobody else may define them, and nobody may send
    /// them. A recording side counts from 0 and never gets here.
    pub const RESERVED: Id = Id(1 << 62);
    /// The first name of values inside composites that are written out.
    pub const INNER: Id = Id(1 << 62);
    /// The first name of values that are computed again rather than kept.
    pub const AGAIN: Id = Id(1 << 63);
    /// The first name for tools that use a device beside a recording side, such as the conformance suite. Not reserved: they
    /// send them like any other.
    pub const TOOLS: Id = Id(1 << 48);

    /// Whether only a device may define it.
    pub fn is_reserved(self) -> bool {
        self >= Id::RESERVED
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "v{}", self.0)
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

/// One operation on values.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// Its operands.
    pub ins: SmallVec<[Id; 3]>,
    /// The values it defines.
    pub outs: SmallVec<[Id; 2]>,
}

impl Node {
    /// A node of these parts.
    pub fn new(op: Op, ins: &[Id], outs: &[Id]) -> Node {
        Node { op, ins: SmallVec::from_slice(ins), outs: SmallVec::from_slice(outs) }
    }
}

/// One element of the stream.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Item {
    /// Computes values.
    Run(Node),
    /// Ends a value: nothing after this uses it.
    Free(Id),
}
