//! Shards and the tree in which what belongs to them is combined.
//!
//! The tree over K shards is that of a reduction's chunks: neighbours are combined, an odd last one is carried, until
//! one remains. A node of it is named by level and place: it covers the shards from `place << level` on, `1 << level` of
//! them, or fewer at the end.

use std::ops::Range;

/// How a job is cut: K shards over W workers, each with neighbouring ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shards {
    /// Logical shards of the job.
    pub count: usize,
    /// Workers that share them.
    pub workers: usize,
}

impl Shards {
    /// `count` shards over `workers` workers; nothing if there are fewer shards than workers, or no worker.
    pub fn new(count: usize, workers: usize) -> Option<Shards> {
        (workers > 0 && count >= workers).then_some(Shards { count, workers })
    }

    /// The shards of a worker.
    pub fn of(&self, worker: usize) -> Range<usize> {
        part(self.count, self.workers, worker)
    }

    /// Where the samples of a shard are in a global batch of `samples`.
    pub fn samples(&self, samples: usize, shard: usize) -> Range<usize> {
        part(samples, self.count, shard)
    }
}

/// Part `i` of `n` things cut into `parts` as evenly as possible, the longer ones first.
fn part(n: usize, parts: usize, i: usize) -> Range<usize> {
    let (least, more) = (n / parts, n % parts);
    let start = i * least + i.min(more);
    start..start + least + usize::from(i < more)
}

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

/// Combines neighbouring shards as they come: a binary counter, so that only a few partials are held.
#[derive(Clone, Debug)]
pub struct Counter<T> {
    partials: Vec<Partial<T>>,
}

impl<T> Default for Counter<T> {
    fn default() -> Counter<T> {
        Counter { partials: Vec::new() }
    }
}

impl<T> Counter<T> {
    /// Takes the next shard. `join` gets the left and the right one.
    pub fn push(&mut self, shard: usize, value: T, join: &mut impl FnMut(T, T) -> T) {
        self.partials.push(Partial { first: shard, shards: 1, value });
        while let [.., left, right] = &self.partials[..]
            && left.shards == right.shards
            // Only brothers are joined: the left one starts where a pair of this size starts.
            && left.first % (2 * left.shards) == 0
            && left.first + left.shards == right.first
        {
            join_last(&mut self.partials, join);
        }
    }

    /// The largest complete nodes of the tree that the shards made.
    pub fn finish(self) -> Vec<Partial<T>> {
        self.partials
    }
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
                let shards = Shards::new(count, workers).unwrap();
                let mut join = |a: String, b: String| format!("({a}{b})");
                let mut partials = Vec::new();
                for worker in 0..workers {
                    let mut counter = Counter::default();
                    for shard in shards.of(worker) {
                        counter.push(shard, shard.to_string(), &mut join);
                    }
                    partials.extend(counter.finish());
                }
                assert_eq!(combine(count, partials, join), Some(tree(count)), "{count} shards, {workers} workers");
            }
        }
    }

    #[test]
    fn shards_and_samples_are_all_dealt_out_once() {
        for (count, workers) in [(1, 1), (8, 3), (7, 7), (10, 4)] {
            let shards = Shards::new(count, workers).unwrap();
            let dealt: Vec<usize> = (0..workers).flat_map(|w| shards.of(w)).collect();
            assert_eq!(dealt, (0..count).collect::<Vec<_>>());
            for samples in [0, 1, 5, 64, 100] {
                let dealt: Vec<usize> = (0..count).flat_map(|s| shards.samples(samples, s)).collect();
                assert_eq!(dealt, (0..samples).collect::<Vec<_>>());
            }
        }
        assert_eq!(Shards::new(2, 3), None);
        assert_eq!(Shards::new(2, 0), None);
    }

    #[test]
    fn missing_shards_are_noticed() {
        let partial = |first, shards| Partial { first, shards, value: 0 };
        assert_eq!(combine(3, vec![partial(0, 2)], |a, b| a + b), None);
        assert_eq!(combine(3, vec![partial(0, 1), partial(2, 1)], |a, b| a + b), None);
        assert_eq!(combine(0, vec![], |a: i32, b| a + b), None);
    }
}
