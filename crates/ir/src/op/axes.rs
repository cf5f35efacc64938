//! Sets of axes.

/// A set of axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AxisSet(pub(crate) u8);

impl AxisSet {
    /// The first `rank` axes.
    pub fn all(rank: usize) -> AxisSet {
        AxisSet(if rank >= 8 { 0xff } else { (1 << rank) - 1 })
    }
    /// The set with just this axis, which is below [`crate::MAX_RANK`].
    pub fn one(axis: usize) -> AxisSet {
        AxisSet(1 << axis)
    }
    /// The set with `axis` in it too.
    pub fn with(self, axis: usize) -> AxisSet {
        AxisSet(self.0 | (1 << axis))
    }
    /// Whether `axis` is in it.
    pub fn has(self, axis: usize) -> bool {
        axis < 8 && self.0 >> axis & 1 == 1
    }
    /// Its axes, ascending.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = usize> {
        (0..8).filter(move |&i| self.has(i))
    }
    /// How many axes.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }
    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// One past the highest axis.
    pub fn bound(self) -> usize {
        8 - self.0.leading_zeros() as usize
    }
}

impl std::fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
