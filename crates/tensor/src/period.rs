//! Where a full lane is sealed: a loop that neither reads nor marks its rounds looks the same in every window only if windows
//! begin at the same place of a round.

use kiln_ir::Item;
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};

/// How many items at the end belong to a round that is not complete, where the last half of `items` or more are rounds
/// that look alike; 0 where no rounds are seen.
pub(crate) fn begun(items: &[Item]) -> usize {
    let looks: Vec<u64> = items.iter().rev().map(look).collect();
    let same = repeats(&looks);
    let recurs = |&period: &usize| same[period] >= period && 2 * (same[period] + period) >= looks.len();
    (1..looks.len()).find(recurs).map_or(0, |period| same[period] % period)
}

/// What an item looks like: not which values it uses, which differ from round to round.
fn look(item: &Item) -> u64 {
    let mut hasher = FxHasher::default();
    match item {
        Item::Free(_) => 0.hash(&mut hasher),
        Item::Run(node) => (node.op.name(), node.ins.len(), node.outs.len()).hash(&mut hasher),
    }
    hasher.finish()
}

/// For each place, how far what follows equals the beginning (the Z function).
fn repeats(looks: &[u64]) -> Vec<usize> {
    let mut same = vec![0; looks.len()];
    let (mut from, mut to) = (0, 0);
    for at in 1..looks.len() {
        let mut len = if at < to { same[at - from].min(to - at) } else { 0 };
        while at + len < looks.len() && looks[len] == looks[at + len] {
            len += 1;
        }
        same[at] = len;
        if at + len > to {
            (from, to) = (at, at + len);
        }
    }
    same
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_ir::{Id, Node, Op, Unary};
    use smallvec::smallvec;

    fn items(text: &str) -> Vec<Item> {
        let item = |(at, letter): (usize, char)| {
            let op = match letter {
                'e' => Op::Unary(Unary::Exp),
                't' => Op::Unary(Unary::Tanh),
                _ => return Item::Free(Id(at as u64)),
            };
            Item::Run(Node { op, ins: smallvec![Id(at as u64)], outs: smallvec![Id(at as u64 + 1)] })
        };
        text.chars().enumerate().map(item).collect()
    }

    #[test]
    fn rounds_are_found_behind_whatever_came_before_them() {
        for (text, want) in [
            ("", 0),
            ("e", 0),
            ("et", 0),
            ("etff", 0),
            ("eeee", 0),
            ("etfetfetf", 0),
            ("etfetfetfe", 1),
            ("etfetfetfet", 2),
            ("teftteetfetfetfetfe", 1),
            // Rounds of one item make up less than half.
            ("etfteftettfeee", 0),
        ] {
            assert_eq!(begun(&items(text)), want, "{text}");
        }
    }
}
