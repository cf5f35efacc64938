//! Which rank holds which logical shards, and the one tree over the shards that orders every reduction.
//!
//! A node of the tree at level l covers shards `i << l` up to `(i + 1) << l`, cut at the last shard: neighbours are
//! combined, an odd last one is carried. The tree depends on the number of shards alone, so any number of ranks gives
//! the same bits. A rank combines what it can by itself and contributes one partial for each maximal subtree it holds.

use crate::Error;
use std::ops::Range;

/// K shards over W ranks, contiguous per rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    shards: usize,
    ranks: usize,
}

impl Layout {
    /// Each rank holds at least one shard.
    pub fn new(shards: usize, ranks: usize) -> Result<Layout, Error> {
        if ranks == 0 || shards < ranks {
            return Err(Error::Shards { shards, ranks });
        }
        Ok(Layout { shards, ranks })
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// How many ranks hold them.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The shards of a rank.
    pub fn held(&self, rank: usize) -> Range<usize> {
        rank * self.shards / self.ranks..(rank + 1) * self.shards / self.ranks
    }

    /// What a rank contributes: the shards under each maximal subtree it holds, in order.
    pub fn parts(&self, rank: usize) -> Vec<Range<usize>> {
        let mut stack = Vec::new();
        for shard in self.held(rank) {
            self.push(&mut stack, shard..shard + 1);
        }
        stack
    }

    /// The binary counter of a rank: after the value of this shard is put on its stack, how many times the two topmost
    /// become one. After its last shard the stack holds its [`parts`](Layout::parts).
    pub fn merges(&self, rank: usize, shard: usize) -> usize {
        let mut stack = Vec::new();
        for earlier in self.held(rank).start..shard {
            self.push(&mut stack, earlier..earlier + 1);
        }
        self.push(&mut stack, shard..shard + 1)
    }

    /// The same counter over the contributions of all ranks: how many merges follow each.
    pub(crate) fn program(&self) -> Vec<usize> {
        let mut stack = Vec::new();
        let parts = (0..self.ranks).flat_map(|rank| self.parts(rank));
        parts.map(|part| self.push(&mut stack, part)).collect()
    }

    /// The elements of a rank where `n` are cut into one piece a shard.
    pub fn piece(&self, rank: usize, n: usize) -> Range<usize> {
        let at = |shard: usize| (n as u128 * shard as u128 / self.shards as u128) as usize;
        let held = self.held(rank);
        at(held.start)..at(held.end)
    }

    /// The elements that a rank combines for all where `n` are shared out evenly, in whole lines of 64.
    pub(crate) fn segment(&self, rank: usize, n: usize) -> Range<usize> {
        let lines = n.div_ceil(64);
        let at = |rank: usize| (lines * rank / self.ranks * 64).min(n);
        at(rank)..at(rank + 1)
    }

    fn push(&self, stack: &mut Vec<Range<usize>>, part: Range<usize>) -> usize {
        stack.push(part);
        let mut merges = 0;
        while let [.., left, right] = &stack[..] {
            if !self.siblings(left, right) {
                break;
            }
            let joined = left.start..right.end;
            stack.truncate(stack.len() - 2);
            stack.push(joined);
            merges += 1;
        }
        merges
    }

    fn siblings(&self, left: &Range<usize>, right: &Range<usize>) -> bool {
        let width = (right.end - left.start).next_power_of_two();
        left.start.is_multiple_of(width)
            && left.end == left.start + width / 2
            && right.end == (left.start + width).min(self.shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree by its definition, level by level.
    fn by_levels(shards: usize) -> String {
        let mut level: Vec<String> = (0..shards).map(|s| s.to_string()).collect();
        while level.len() > 1 {
            level = level
                .chunks(2)
                .map(|p| if let [a, b] = p { format!("({a} {b})") } else { p[0].clone() })
                .collect();
        }
        level.remove(0)
    }

    fn counted(stack: &mut Vec<String>, value: String, merges: usize) {
        stack.push(value);
        for _ in 0..merges {
            let right = stack.pop().expect("two");
            let left = stack.pop().expect("two");
            stack.push(format!("({left} {right})"));
        }
    }

    #[test]
    fn any_number_of_ranks_builds_the_same_tree() {
        for shards in 1..=20 {
            for ranks in 1..=shards {
                let layout = Layout::new(shards, ranks).unwrap();
                let mut leaves = Vec::new();
                for rank in 0..ranks {
                    let mut stack = Vec::new();
                    for shard in layout.held(rank) {
                        counted(&mut stack, shard.to_string(), layout.merges(rank, shard));
                    }
                    assert_eq!(stack.len(), layout.parts(rank).len());
                    leaves.extend(stack);
                }
                let mut stack = Vec::new();
                for (leaf, merges) in leaves.into_iter().zip(layout.program()) {
                    counted(&mut stack, leaf, merges);
                }
                assert_eq!(stack, [by_levels(shards)], "{shards} shards, {ranks} ranks");
            }
        }
    }

    #[test]
    fn pieces_and_segments_cover_everything_once() {
        for (shards, ranks, n) in [(8, 3, 0), (8, 3, 7), (5, 5, 1000), (8, 8, 63), (3, 2, 129), (7, 4, 4096)]
        {
            let layout = Layout::new(shards, ranks).unwrap();
            for cut in [Layout::piece, Layout::segment] {
                let mut at = 0;
                for rank in 0..ranks {
                    let range = cut(&layout, rank, n);
                    assert_eq!(range.start, at);
                    at = range.end;
                }
                assert_eq!(at, n);
            }
        }
    }

    #[test]
    fn fewer_shards_than_ranks_are_refused() {
        assert_eq!(Layout::new(2, 3), Err(Error::Shards { shards: 2, ranks: 3 }));
    }
}
