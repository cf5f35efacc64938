//! Inputs made of other inputs.

use crate::Random;

/// Integers at which things break, as LEB128.
const LENGTHS: [u64; 10] =
    [0, 1, 127, 1 << 20, (1 << 20) + 1, 1 << 31, u32::MAX as u64, 1 << 32, 1 << 63, u64::MAX];

/// An input with a few changes.
pub fn mutated(inputs: &[Vec<u8>], random: &mut Random, longest: usize) -> Vec<u8> {
    let mut input = inputs.get(random.at(inputs.len())).cloned().unwrap_or_default();
    for _ in 0..1 + random.below(4) {
        change(&mut input, inputs, random);
    }
    input.truncate(longest);
    input
}

fn change(input: &mut Vec<u8>, inputs: &[Vec<u8>], random: &mut Random) {
    let at = random.at(input.len());
    match random.below(9) {
        0 if !input.is_empty() => input[at] ^= 1 << random.below(8),
        1 if !input.is_empty() => input[at] = random.bits() as u8,
        2 if !input.is_empty() => input[at] = input[at].wrapping_add(random.below(3) as u8).wrapping_sub(1),
        3 => input.truncate(at),
        4 => {
            let mut value = LENGTHS[random.at(LENGTHS.len())];
            let mut bytes = Vec::new();
            while value >= 0x80 {
                bytes.push(value as u8 | 0x80);
                value >>= 7;
            }
            bytes.push(value as u8);
            let end = (at + if random.one_in(2) { bytes.len() } else { 1 }).min(input.len());
            input.splice(at.min(end)..end, bytes);
        }
        5 => {
            let count = 1 + random.at(8);
            let bytes: Vec<u8> = (0..count).map(|_| random.bits() as u8).collect();
            input.splice(at..at, bytes);
        }
        6 => {
            let end = (at + 1 + random.at(16)).min(input.len());
            input.drain(at.min(end)..end);
        }
        7 => {
            let end = (at + 1 + random.at(64)).min(input.len());
            let part = input[at.min(end)..end].to_vec();
            let to = random.at(input.len());
            input.splice(to..to, part);
        }
        _ => {
            let Some(other) = inputs.get(random.at(inputs.len())) else { return };
            let from = random.at(other.len());
            input.truncate(at);
            input.extend_from_slice(&other[from.min(other.len())..]);
        }
    }
}
