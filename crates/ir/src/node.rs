//! The stream's elements.

use crate::Op;
use smallvec::SmallVec;

/// Names a value within one recording side; never used twice there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub u64);

/// A range of names with one owner; all of them are constants of [`Id`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdRange {
    /// The first name.
    pub first: Id,
    /// The last name.
    pub last: Id,
}

/// Who draws which names. A server draws none: it takes those of its clients, and its device those of a device.
impl Id {
    /// A recording side, which counts upwards: all threads of a process draw from one counter.
    pub const RECORDED: IdRange = IdRange { first: Id(0), last: Id((1 << 48) - 1) };
    /// Tools that use a device beside a recording side, such as the conformance suite. They are sent like recorded ones.
    pub const TOOLS: IdRange = IdRange { first: Id(1 << 48), last: Id((1 << 62) - 1) };
    /// A device, for values inside composites that it lowers.
    pub const LOWERED: IdRange = IdRange { first: Id(1 << 62), last: Id((1 << 63) - 1) };
    /// A device, for copies of values that are computed a second time rather than kept.
    pub const RECOMPUTED: IdRange = IdRange { first: Id(1 << 63), last: Id(u64::MAX - 1) };
    /// Every range, ascending.
    pub const RANGES: [IdRange; 4] = [Id::RECORDED, Id::TOOLS, Id::LOWERED, Id::RECOMPUTED];
    /// The name of no value: what a failure of a node without results is told of.
    pub const NONE: Id = Id(u64::MAX);

    /// Whether only a device may define it, and nobody may send it.
    pub fn is_reserved(self) -> bool {
        self >= Id::LOWERED.first
    }
}

impl IdRange {
    /// The name `n` places behind the first.
    pub const fn at(self, n: u64) -> Id {
        debug_assert!(n <= self.last.0 - self.first.0, "a range of names is used up");
        Id(self.first.0 + n)
    }

    /// Whether `id` is in it.
    pub const fn has(self, id: Id) -> bool {
        self.first.0 <= id.0 && id.0 <= self.last.0
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_one_owner() {
        let mut next = 0;
        for range in Id::RANGES {
            assert_eq!(range.first.0, next, "no gap and no overlap before {range:?}");
            assert!(range.first < range.last);
            next = range.last.0 + 1;
        }
        assert_eq!(Id(next), Id::NONE);
    }

    #[test]
    fn names_of_devices_are_reserved_and_others_are_not() {
        for range in Id::RANGES {
            let device = range == Id::LOWERED || range == Id::RECOMPUTED;
            assert_eq!([range.first, range.last].map(Id::is_reserved), [device; 2], "{range:?}");
            assert_eq!(Id::RANGES.map(|r| r.has(range.at(7))), Id::RANGES.map(|r| r == range));
        }
        assert!(Id::NONE.is_reserved());
    }
}
