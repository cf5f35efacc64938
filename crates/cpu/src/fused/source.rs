//! Where an instruction of a fused program finds its operands, and how that is written down.

use kiln_ir::wire::{Reader, Writer};
use smallvec::SmallVec;

/// An operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// From memory: operand `1` of node `0`.
    Load(u32, u32),
    /// The number that node `0` gives everywhere.
    Number(u32),
    /// The result of an instruction.
    Value(u32),
}

pub(super) fn encode(args: &[Source], w: &mut Writer) {
    w.int(args.len() as u64);
    for arg in args {
        let (kind, a, b) = match *arg {
            Source::Load(a, b) => (0, a, b),
            Source::Number(a) => (1, a, 0),
            Source::Value(a) => (2, a, 0),
        };
        [kind, a as u64, b as u64].into_iter().for_each(|x| w.int(x));
    }
}

/// The operands of instruction `at` of a program over `nodes` nodes; nothing if they name what is not there.
pub(super) fn decode(r: &mut Reader<'_>, nodes: u32, at: usize) -> Option<SmallVec<[Source; 3]>> {
    let count = r.length(3).ok()?;
    let read = |_| match (int(r)?, int(r)?, int(r)?) {
        (0, a, b) if a < nodes => Some(Source::Load(a, b)),
        (1, a, _) if a < nodes => Some(Source::Number(a)),
        (2, a, _) if (a as usize) < at => Some(Source::Value(a)),
        _ => None,
    };
    (0..count).map(read).collect()
}

pub(super) fn int(r: &mut Reader<'_>) -> Option<u32> {
    r.int().ok().and_then(|x| u32::try_from(x).ok())
}

/// What a saved program must stand: it is read back as it was, and bytes that were cut or changed are refused or still
/// name only what is there, never a panic.
#[cfg(test)]
pub(super) fn check_form<P: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    program: &P,
    decode: fn(&[u8]) -> Option<P>,
) {
    assert_eq!(decode(bytes).as_ref(), Some(program));
    for end in 0..bytes.len() {
        assert_eq!(decode(&bytes[..end]), None, "cut at {end}");
    }
    for at in 0..bytes.len() {
        let mut changed = bytes.to_vec();
        changed[at] ^= 0x55;
        let _ = decode(&changed);
    }
}
