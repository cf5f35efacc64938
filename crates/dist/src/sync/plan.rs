//! Which parameter lies where in which bucket.

use super::Config;
use kiln_ir::{DType, Meta};
use std::hash::{DefaultHasher, Hash, Hasher};

/// One value that travels.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Entry {
    pub path: String,
    pub meta: Meta,
    /// What it travels as.
    pub wire: DType,
}

/// Values of one dtype that travel together.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Bucket {
    pub dtype: DType,
    /// Entries, and where each begins, in elements.
    pub members: Vec<(usize, usize)>,
    /// Elements.
    pub length: usize,
    /// Names what is in it: ranks whose buckets differ must not mix.
    pub tag: u64,
}

/// The buckets of all values, in the order in which they leave.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Plan {
    /// The parameters in the model's order, and last the loss.
    pub entries: Vec<Entry>,
    pub buckets: Vec<Bucket>,
    /// The bucket of each entry.
    pub home: Vec<usize>,
    /// Whether the order is that in which rank 0's first backward made the gradients.
    pub settled: bool,
}

/// Values begin on a cache line.
const LINE: usize = 64;

impl Plan {
    /// Buckets filled in this order of the entries.
    pub fn new(config: &Config, entries: Vec<Entry>, order: &[usize], settled: bool) -> Plan {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut home = vec![0; entries.len()];
        for &entry in order {
            let Entry { meta, wire, .. } = &entries[entry];
            // The open bucket of a dtype is the last of it.
            let open = buckets.iter().rposition(|b| b.dtype == *wire);
            let at = match open {
                Some(at) if wire.bytes(buckets[at].length) < room(config, at) => at,
                _ => {
                    buckets.push(Bucket { dtype: *wire, members: Vec::new(), length: 0, tag: 0 });
                    buckets.len() - 1
                }
            };
            let bucket = &mut buckets[at];
            bucket.members.push((entry, bucket.length));
            bucket.length += meta.shape.numel().next_multiple_of(LINE / wire.size().max(1));
            home[entry] = at;
        }
        for bucket in &mut buckets {
            let mut hasher = DefaultHasher::new();
            for &(entry, start) in &bucket.members {
                let Entry { path, meta, wire } = &entries[entry];
                (path, meta.to_string(), wire.to_string(), start).hash(&mut hasher);
            }
            bucket.tag = hasher.finish();
        }
        Plan { entries, buckets, home, settled }
    }

    /// The order before anything is known: gradients become final from the model's end to its beginning.
    pub fn backwards(config: &Config, entries: Vec<Entry>) -> Plan {
        let order: Vec<usize> = (0..entries.len()).rev().collect();
        Plan::new(config, entries, &order, false)
    }

    /// How many entries are parameters.
    pub fn parameters(&self) -> usize {
        self.entries.len() - 1
    }
}

fn room(config: &Config, bucket: usize) -> usize {
    if bucket == 0 { config.first } else { config.others }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, n: usize, wire: DType) -> Entry {
        Entry { path: path.into(), meta: Meta::new(wire, [n]), wire }
    }

    #[test]
    fn the_first_bucket_is_small_and_dtypes_do_not_mix() {
        let config = Config { first: 256, others: 1024, ..Config::default() };
        let sizes = [100, 30, 40, 200, 5];
        let entries: Vec<Entry> =
            sizes.iter().enumerate().map(|(i, &n)| entry(&i.to_string(), n, DType::F32)).collect();
        let plan = Plan::backwards(&config, entries.clone());
        let members: Vec<Vec<usize>> =
            plan.buckets.iter().map(|b| b.members.iter().map(|m| m.0).collect()).collect();
        assert_eq!(members, [vec![4, 3], vec![2, 1, 0]]);
        assert_eq!(plan.home, [1, 1, 1, 0, 0]);
        assert_eq!(plan.buckets[0].members[1].1, 16, "values begin on a cache line");
        let mut mixed = entries.clone();
        mixed[1].wire = DType::BF16;
        assert_eq!(Plan::backwards(&config, mixed).buckets.len(), 3);
        let other = Plan::new(&config, entries, &[3, 4, 2, 1, 0], true);
        assert_ne!(other.buckets[0].tag, plan.buckets[0].tag, "another order is another bucket");
    }
}
