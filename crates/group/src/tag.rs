//! A hash of named things that every build gives alike: ranks compare what they have computed of it each for itself.

/// A 64-bit hash of fields, in order; the boundaries between them count. The same in every version of Rust and on every
/// machine, unlike the standard library's hashers. It is no defence against somebody who wants two things to meet.
///
/// ```
/// use kiln_group::Tag;
/// let of = |fields: &[&str]| fields.iter().fold(Tag::default(), |tag, field| tag.add(field)).finish();
/// assert_eq!(of(&["weight", "bias"]), of(&["weight", "bias"]));
/// assert_ne!(of(&["weight", "bias"]), of(&["weightb", "ias"]));
/// ```
#[derive(Clone, Debug)]
pub struct Tag(u64);

impl Default for Tag {
    fn default() -> Tag {
        Tag(0xcbf2_9ce4_8422_2325)
    }
}

impl Tag {
    /// With one more field.
    #[allow(clippy::should_implement_trait)]
    pub fn add(mut self, field: impl AsRef<[u8]>) -> Tag {
        let field = field.as_ref();
        let length = (field.len() as u64).to_le_bytes();
        for &byte in length.iter().chain(field) {
            self.0 = (self.0 ^ byte as u64).wrapping_mul(0x100_0000_01b3);
        }
        self
    }

    /// With one more number.
    pub fn add_number(self, number: u64) -> Tag {
        self.add(number.to_le_bytes())
    }

    /// The hash.
    pub fn finish(&self) -> u64 {
        // Every bit of what was added reaches every bit of this.
        let mut hash = self.0;
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What ranks that another compiler has built would say.
    #[test]
    fn the_numbers_stay() {
        assert_eq!(Tag::default().finish(), 0xf52a_15e9_a9b5_e89b);
        let tag = Tag::default().add("model.weight").add("f32[3, 4]").add_number(7);
        assert_eq!(tag.finish(), 0x394b_7be9_b313_f47d);
    }
}
