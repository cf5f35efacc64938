//! Shards and the tree in which what belongs to them is combined.
//!
//! The tree over K shards is that of a reduction's chunks: neighbours are combined, an odd last one is carried, until
//! one remains. A node of it is named by level and place: it covers the shards from `place << level` on, `1 << level` of
//! them, or fewer at the end.

use kiln_group::Layout;
use std::ops::Range;

/// The combination of all shards below one node of the tree.
#[derive(Clone, PartialEq, Debug)]
pub struct Partial<T> {
    /// Its first shard.
    pub first: usize,
    /// How many shards it covers.
    pub shards: usize,
    /// What they came to.
    pub value: T,
}

/// What a rank's shards come to: one partial for each part that it contributes, see [`Layout::parts`]. `value` gives the
/// value of a shard; only a few are held at a time.
pub fn partials<T>(
    layout: &Layout,
    rank: usize,
    mut value: impl FnMut(usize) -> T,
    mut join: impl FnMut(T, T) -> T,
) -> Vec<Partial<T>> {
    let mut stack = Vec::new();
    for shard in layout.held(rank) {
        stack.push(Partial { first: shard, shards: 1, value: value(shard) });
        for _ in 0..layout.merges(rank, shard) {
            join_last(&mut stack, &mut join);
        }
    }
    stack
}

/// Where the samples of a shard are in a global batch of `samples`.
pub fn samples(layout: &Layout, samples: usize, shard: usize) -> Range<usize> {
    let at = |shard: usize| samples * shard / layout.shards();
    at(shard)..at(shard + 1)
}

fn join_last<T>(partials: &mut Vec<Partial<T>>, join: &mut impl FnMut(T, T) -> T) {
    if let (Some(right), Some(left)) = (partials.pop(), partials.pop()) {
        let (first, shards) = (left.first, left.shards + right.shards);
        partials.push(Partial { first, shards, value: join(left.value, right.value) });
    }
}

/// The value of the whole tree from partials that cover all shards in order; nothing if they do not.
pub fn combine<T>(count: usize, partials: Vec<Partial<T>>, mut join: impl FnMut(T, T) -> T) -> Option<T> {
    let mut due = 0;
    let mut stack: Vec<Partial<T>> = Vec::new();
    for partial in partials {
        if partial.first != due || partial.shards == 0 {
            return None;
        }
        due += partial.shards;
        stack.push(partial);
        while let [.., left, right] = &stack[..]
            && left.shards == right.shards
            && left.first % (2 * left.shards) == 0
        {
            join_last(&mut stack, &mut join);
        }
    }
    if due != count {
        return None;
    }
    // What is left at the end was carried: it joins from the right.
    while stack.len() > 1 {
        join_last(&mut stack, &mut join);
    }
    stack.pop().map(|whole| whole.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree written down as it is defined.
    fn tree(count: usize) -> String {
        let mut level: Vec<String> = (0..count).map(|i| i.to_string()).collect();
        while level.len() > 1 {
            let pair = |p: &[String]| if let [a, b] = p { format!("({a}{b})") } else { p[0].clone() };
            level = level.chunks(2).map(pair).collect();
        }
        level.remove(0)
    }

    #[test]
    fn every_number_of_workers_gives_the_one_tree() {
        for count in 1..=17 {
            for workers in 1..=count {
                let layout = Layout::new(count, workers).unwrap();
                let join = |a: String, b: String| format!("({a}{b})");
                let of = |worker| partials(&layout, worker, |shard| shard.to_string(), join);
                let all: Vec<_> = (0..workers).flat_map(of).collect();
                assert_eq!(combine(count, all, join), Some(tree(count)), "{count} shards, {workers} workers");
            }
        }
    }

    #[test]
    fn samples_are_all_dealt_out_once() {
        for count in [1, 3, 8] {
            let layout = Layout::new(count, 1).unwrap();
            for n in [0, 1, 5, 64, 100] {
                let dealt: Vec<usize> = (0..count).flat_map(|s| samples(&layout, n, s)).collect();
                assert_eq!(dealt, (0..n).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn missing_shards_are_noticed() {
        let partial = |first, shards| Partial { first, shards, value: 0 };
        assert_eq!(combine(3, vec![partial(0, 2)], |a, b| a + b), None);
        assert_eq!(combine(3, vec![partial(0, 1), partial(2, 1)], |a, b| a + b), None);
        assert_eq!(combine(0, vec![], |a: i32, b| a + b), None);
    }
}
