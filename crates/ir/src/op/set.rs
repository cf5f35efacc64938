//! A set of operations, told apart by name and not by fields: what a device or a peer knows.

use super::Op;
use super::list::STRUCTURED;
use crate::{Binary, Unary};

/// Operations by name, as a bit each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OpSet([u64; OpSet::WORDS]);

impl OpSet {
    /// How many names there are.
    pub const NAMES: usize = STRUCTURED.len() + Unary::ALL.len() + Binary::ALL.len() + 1;
    /// Words of 64 bits that they take.
    pub const WORDS: usize = OpSet::NAMES.div_ceil(64);

    /// The set of the operations with these numbers ([`Op::number`]).
    pub fn of(numbers: impl IntoIterator<Item = usize>) -> OpSet {
        let mut set = OpSet::default();
        numbers.into_iter().for_each(|n| set.0[n / 64] |= 1 << (n % 64));
        set
    }

    /// Whether the operation with this number is in it.
    pub fn has(&self, number: usize) -> bool {
        self.0[number / 64] >> (number % 64) & 1 != 0
    }

    /// Its bits, number by number.
    pub fn words(&self) -> [u64; OpSet::WORDS] {
        self.0
    }
}

impl Op {
    /// The place of its name among [`Op::names`]: found without looking at the name.
    pub fn number(&self) -> usize {
        match self {
            Op::Unary(op) => STRUCTURED.len() + *op as usize,
            Op::Binary(op) => STRUCTURED.len() + Unary::ALL.len() + *op as usize,
            Op::Custom(_) => OpSet::NAMES - 1,
            structured => structured.structured_number(),
        }
    }
}

/// The place of a structured operation's name, for constants.
pub(super) const fn structured_place(name: &str) -> usize {
    let mut place = 0;
    while place < STRUCTURED.len() {
        let (a, b) = (STRUCTURED[place].as_bytes(), name.as_bytes());
        let mut same = if a.len() == b.len() { 0 } else { usize::MAX };
        while same < a.len() && a[same] == b[same] {
            same += 1;
        }
        if same == a.len() {
            return place;
        }
        place += 1;
    }
    panic!("no such structured operation")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    #[test]
    fn numbers_are_places_among_the_names() {
        let names = Op::names();
        assert_eq!(names.len(), OpSet::NAMES);
        let of_unary = Unary::ALL.iter().map(|&op| Op::Unary(op));
        let of_binary = Binary::ALL.iter().map(|&op| Op::Binary(op));
        let some = [
            Op::Select,
            Op::Commit,
            Op::Guard { finite: true },
            Op::Move(super::super::Move::Reshape(Shape::default())),
        ];
        for op in of_unary.chain(of_binary).chain(some) {
            assert_eq!(names[op.number()], op.form_name());
        }
        for (number, name) in STRUCTURED.iter().enumerate() {
            assert_eq!(structured_place(name), number);
        }
    }

    #[test]
    fn a_set_has_what_was_put_there() {
        let set = OpSet::of([0, 63, 64, OpSet::NAMES - 1]);
        let has: Vec<usize> = (0..OpSet::NAMES).filter(|&n| set.has(n)).collect();
        assert_eq!(has, [0, 63, 64, OpSet::NAMES - 1]);
    }
}
