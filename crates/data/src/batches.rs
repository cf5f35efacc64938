//! The order of an epoch: (count, batch size, seed, epoch) → batches of indices.
//!
//! Nothing is kept between calls, so training that stops can go on at any epoch, and every worker of a group finds
//! the same order by itself.

use crate::random::{below, key, splitmix64};

/// Shuffles the indices `0..n` and cuts them into batches of `batch`; the last one is shorter where `n` does not
/// divide evenly.
///
/// The order depends on `n`, `seed` and `epoch` only, on every platform: equal arguments give equal batches, and
/// another size of batch cuts the same order elsewhere. Each epoch visits every index once. Without samples there
/// are no batches.
///
/// ```
/// let batches = kiln_data::batches(10, 4, 7, 0);
/// assert_eq!(batches, [vec![8, 6, 5, 0], vec![2, 4, 3, 1], vec![9, 7]]);
/// ```
///
/// # Panics
///
/// If `batch` is 0, or `n` is more than `u32::MAX`.
#[track_caller]
pub fn batches(n: usize, batch: usize, seed: u64, epoch: u64) -> Vec<Vec<u32>> {
    assert!(batch > 0, "a batch needs at least one sample");
    let Ok(n) = u32::try_from(n) else { panic!("{n} samples are more than a 32-bit index can name") };
    order(n, seed, epoch).chunks(batch).map(<[u32]>::to_vec).collect()
}

/// The order of an epoch.
pub(crate) fn order(n: u32, seed: u64, epoch: u64) -> Vec<u32> {
    shuffled(n, key(seed, epoch))
}

/// Fisher–Yates from the back: the place `i` is filled from the `i + 1` indices that are left.
fn shuffled(n: u32, key: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..n).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, below(i as u64 + 1, splitmix64(key, i as u64)));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_is_a_permutation() {
        for n in [0, 1, 2, 3, 31, 32, 33, 1440] {
            for epoch in [0, 1, u64::MAX] {
                let mut order = batches(n, 32, u64::MAX, epoch).concat();
                order.sort_unstable();
                assert!(order.iter().map(|&i| i as usize).eq(0..n), "n = {n}, epoch = {epoch}");
            }
        }
    }

    #[test]
    fn only_the_last_batch_is_short() {
        let lengths = |n, batch| batches(n, batch, 1, 2).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths(10, 4), [4, 4, 2]);
        assert_eq!(lengths(8, 4), [4, 4]);
        assert_eq!(lengths(3, 4), [3]);
        assert_eq!(lengths(3, usize::MAX), [3]);
        assert!(lengths(0, 4).is_empty());
    }

    #[test]
    fn order_is_keyed_by_seed_and_epoch_only() {
        let order = |batch, seed, epoch| batches(1440, batch, seed, epoch).concat();
        assert_eq!(order(32, 7, 3), order(32, 7, 3));
        assert_eq!(order(32, 7, 3), order(100, 7, 3));
        assert_ne!(order(32, 7, 3), order(32, 7, 4));
        assert_ne!(order(32, 7, 3), order(32, 8, 3));
        assert_ne!(order(32, 3, 7), order(32, 7, 3));
    }

    /// Pinned, because a stored run is only repeatable while the order stays as it was.
    #[test]
    fn order_never_changes() {
        assert_eq!(batches(10, 10, 7, 1), [[3, 4, 0, 5, 2, 9, 6, 7, 8, 1]]);
        assert_eq!(batches(10, 10, 8, 0), [[1, 7, 8, 0, 9, 3, 5, 2, 6, 4]]);
    }

    #[test]
    fn each_index_comes_first_about_as_often() {
        let mut counts = [0; 5];
        for epoch in 0..5000 {
            counts[batches(5, 5, 0, epoch)[0][0] as usize] += 1;
        }
        // 1000 expected with a deviation of 28: five deviations either way.
        assert!(counts.iter().all(|count| (860..=1140).contains(count)), "{counts:?}");
    }

    #[test]
    #[should_panic(expected = "at least one sample")]
    fn empty_batches_are_refused() {
        batches(10, 0, 0, 0);
    }
}
