//! The names that a session has defined, so that none comes twice.
//!
//! Names are drawn from a counter, but in blocks, and those of several lanes and devices come mixed: what is kept is which
//! stretches were used, which soon grow together. A session that is rebuilt elsewhere begins there with none.

use kiln_ir::Id;
use std::collections::BTreeMap;

/// Stretches that are kept. A client that leaves more gaps may use its oldest names again, which is only untidy: devices bear it.
const MOST: usize = 1 << 14;

/// Which names were defined.
#[derive(Default)]
pub struct Names {
    /// The first of each stretch, and its last.
    used: BTreeMap<u64, u64>,
}

impl Names {
    /// Notes a name; no if it was defined before.
    pub fn add(&mut self, id: Id) -> bool {
        let id = id.0;
        let before = self.used.range(..=id).next_back().map(|(&first, &last)| (first, last));
        let first = match before {
            Some((_, last)) if id <= last => return false,
            Some((first, last)) if id == last + 1 => first,
            _ => id,
        };
        let last = id.checked_add(1).and_then(|next| self.used.remove(&next)).unwrap_or(id);
        self.used.insert(first, last);
        if self.used.len() > MOST {
            self.used.pop_first();
        }
        true
    }

    /// Whether a name was defined.
    pub fn has(&self, id: Id) -> bool {
        self.used.range(..=id.0).next_back().is_some_and(|(_, &last)| id.0 <= last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_several_lanes_come_mixed_and_never_twice() {
        let mut names = Names::default();
        // Blocks of two lanes in turn, and one that comes late.
        for i in 0..1000 {
            assert!(names.add(Id(i)) && names.add(Id(1 << 16 | i)) && names.add(Id(5 << 16 | i)));
        }
        assert!(names.add(Id(3 << 16)));
        assert_eq!(names.used.len(), 4);
        for id in [0, 999, 1 << 16, 1 << 16 | 500, 3 << 16, 5 << 16 | 999] {
            assert!(names.has(Id(id)) && !names.add(Id(id)), "{id}");
        }
        assert!(![1000, 2 << 16, u64::MAX].into_iter().any(|id| names.has(Id(id))));
        for id in (1000..1 << 16).rev() {
            assert!(names.add(Id(id)), "{id}");
        }
        assert_eq!(names.used.len(), 3);
        assert!(!names.add(Id(40_000)) && names.add(Id(u64::MAX)) && !names.add(Id(u64::MAX)));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut names = Names::default();
        for i in 0..2 * MOST as u64 {
            assert!(names.add(Id(2 * i)));
        }
        assert_eq!(names.used.len(), MOST);
        assert!(!names.add(Id(4 * MOST as u64 - 2)));
    }
}
