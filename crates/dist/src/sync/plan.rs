//! Which parameter lies where in which bucket.

use super::Config;
use kiln_group::Tag;
use kiln_ir::{DType, Meta};

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
    /// Where it is cut into ranges that leave by themselves, in bytes.
    pub cuts: Vec<usize>,
}

impl Bucket {
    pub fn bytes(&self) -> usize {
        self.dtype.bytes(self.length)
    }

    fn push(&mut self, entry: usize, entries: &[Entry]) {
        let Entry { meta, wire, .. } = &entries[entry];
        self.members.push((entry, self.length));
        self.length += meta.shape.numel().next_multiple_of(LINE / wire.size().max(1));
    }

    /// Small members go last: a device tells of the rows of a large product one by one, of much else only when all of a
    /// window is computed.
    fn settle(&mut self, entries: &[Entry]) {
        let mut members = std::mem::take(&mut self.members);
        members.sort_by_key(|&(entry, _)| entries[entry].meta.bytes() < LEAST);
        self.length = 0;
        members.into_iter().for_each(|(entry, _)| self.push(entry, entries));
        let tag = self.members.iter().fold(Tag::default(), |tag, &(entry, start)| {
            let Entry { path, meta, wire } = &entries[entry];
            tag.add(path).add(meta.to_string()).add(wire.to_string()).add_number(start as u64)
        });
        self.tag = tag.finish();
    }
}

/// The buckets of all values, in the order in which they leave.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Plan {
    /// The parameters in the model's order, what buffers became and how much that counts, and last the loss.
    pub entries: Vec<Entry>,
    pub buckets: Vec<Bucket>,
    /// The bucket of each entry.
    pub home: Vec<usize>,
    /// Whether the order is that in which rank 0's first backward made the gradients.
    pub settled: bool,
}

/// Values begin on a cache line.
const LINE: usize = 64;
/// Into how many ranges a bucket is cut. With 4 or 16 a slow link was hidden less: a range takes time, and so does each
/// call.
const RANGES: usize = 8;
/// The least bytes of one.
const LEAST: usize = 64 << 10;

impl Plan {
    /// Buckets filled in this order of the entries.
    fn new(config: &Config, entries: Vec<Entry>, order: &[usize]) -> Plan {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut home = vec![0; entries.len()];
        for &entry in order {
            let wire = &entries[entry].wire;
            // The open bucket of a dtype is the last of it.
            let open = buckets.iter().rposition(|b| b.dtype == *wire);
            let at = match open {
                Some(at) if wire.bytes(buckets[at].length) < capacity(config, at) => at,
                _ => {
                    buckets.push(Bucket {
                        dtype: *wire,
                        members: Vec::new(),
                        length: 0,
                        tag: 0,
                        cuts: Vec::new(),
                    });
                    buckets.len() - 1
                }
            };
            buckets[at].push(entry, &entries);
            home[entry] = at;
        }
        for bucket in &mut buckets {
            bucket.settle(&entries);
        }
        Plan { entries, buckets, home, settled: false }
    }

    /// The plan for the order that was found. Where computing and exchanging overlap, the last bucket of some size is
    /// cut: little is computed after it that could cover its exchange, so each range leaves as soon as it is computed.
    pub fn settled(config: &Config, entries: Vec<Entry>, order: &[usize], overlaps: bool) -> Plan {
        let mut plan = Plan { settled: true, ..Plan::new(config, entries, order) };
        if let Some(bucket) = plan.buckets.iter_mut().rfind(|bucket| overlaps && bucket.bytes() > LEAST) {
            let range = bucket.bytes().div_ceil(RANGES).max(LEAST).next_multiple_of(LINE);
            bucket.cuts = (1..).map(|i| i * range).take_while(|&at| at < bucket.bytes()).collect();
        }
        plan
    }

    /// The order before anything is known: gradients become final from the model's end to its beginning.
    pub fn backwards(config: &Config, entries: Vec<Entry>) -> Plan {
        let order: Vec<usize> = (0..entries.len()).rev().collect();
        Plan::new(config, entries, &order)
    }

    /// The entry of the loss.
    pub fn loss(&self) -> usize {
        self.entries.len() - 1
    }
}

fn capacity(config: &Config, bucket: usize) -> usize {
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
        let other = Plan::settled(&config, entries, &[3, 4, 2, 1, 0], false);
        assert_ne!(other.buckets[0].tag, plan.buckets[0].tag, "another order is another bucket");
    }

    #[test]
    fn the_last_large_bucket_is_cut_where_that_can_hide_something() {
        let cuts = |n: usize, overlaps: bool| {
            let config = Config { others: 1 << 16, ..Config::default() };
            let entries = [("first", 1 << 18), ("large", n), ("last", 1)];
            let entries = entries.map(|(path, n)| entry(path, n, DType::F32)).to_vec();
            let plan = Plan::settled(&config, entries, &[0, 1, 2], overlaps);
            plan.buckets.into_iter().map(|bucket| bucket.cuts).collect::<Vec<_>>()
        };
        let eighths = |bytes: usize| (1..8).map(|i| i * bytes / 8).collect::<Vec<_>>();
        assert_eq!(cuts(1 << 20, true), [vec![], eighths(4 << 20), vec![]]);
        assert!(cuts(1 << 20, false).concat().is_empty());
        assert_eq!(cuts(1 << 14, true), [eighths(1 << 20), vec![], vec![]], "too small");
        assert_eq!(cuts((1 << 15) + 1, true)[1], [1 << 16, 2 << 16]);
        let odd = &cuts(1_000_003, true)[1];
        assert!(odd.iter().all(|cut| cut % LINE == 0) && odd.len() == RANGES - 1, "{odd:?}");
    }
}
