//! Random numbers by position: (seed, path) → a stream of words, the same on every platform.
//!
//! The generator is splitmix64 read by position: the k-th word is a pure function of the key and k (Steele, Lea and
//! Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). So a sample's numbers do not depend on which
//! worker loads it, or on what was loaded before.

/// The random numbers of one sample in one epoch, for transforms.
///
/// [`DataLoader::transform`](crate::DataLoader::transform) hands one to each call. It depends on the loader's seed, the
/// epoch and the sample alone, so that a sample is cropped alike by any worker, and after a resume.
///
/// ```
/// use kiln_data::Random;
///
/// let (mut a, mut b) = (Random::new(7), Random::new(7));
/// assert_eq!(a.below(100), b.below(100));
/// assert!((0.0..1.0).contains(&a.uniform()));
/// ```
#[derive(Clone, Debug)]
pub struct Random {
    key: u64,
    at: u64,
}

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        Random { key: splitmix64(seed, 0), at: 0 }
    }

    /// The stream of a place below this one's start: neighbours share nothing.
    pub(crate) fn of(seed: u64, path: &[u64]) -> Random {
        Random { key: path.iter().fold(splitmix64(seed, 1), |key, &at| splitmix64(key, at)), at: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let word = splitmix64(self.key, self.at);
        self.at = self.at.wrapping_add(1);
        word
    }

    /// A number from 0 to below 1.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// An index below `bound`.
    ///
    /// # Panics
    /// If `bound` is 0.
    #[track_caller]
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "below: there is no index below 0");
        below(bound as u64, self.bits())
    }

    /// Yes with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        ((self.bits() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    /// A normally distributed number, mean 0 and deviation 1.
    pub fn normal(&mut self) -> f32 {
        // 1 - u is above 0, so that the logarithm is finite.
        let radius = (-2.0 * f64::from(1.0 - self.uniform()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * f64::from(self.uniform())).cos()) as f32
    }
}

/// The key of an epoch's order: two rounds, so that neighbours in `seed` and `epoch` share nothing. For one seed no two
/// epochs have the same key.
pub(crate) fn key(seed: u64, epoch: u64) -> u64 {
    splitmix64(splitmix64(seed, 0), epoch)
}

/// Scales a random word to `0..bound` by the high half of a product. Its bias is at most `bound / 2^64`, under
/// 2^-32 for any bound used here, so that no number is ever drawn twice and the position stays the only state.
pub(crate) fn below(bound: u64, random: u64) -> usize {
    ((u128::from(random) * u128::from(bound)) >> 64) as usize
}

/// The `k`-th output, from 0, of the splitmix64 generator with this seed.
pub(crate) fn splitmix64(seed: u64, k: u64) -> u64 {
    let mut z = seed.wrapping_add(k.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_agrees_with_published_values() {
        let first: Vec<u64> = (0..3).map(|k| splitmix64(1234567, k)).collect();
        assert_eq!(first, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn draws_have_the_moments_they_should() {
        let mut random = Random::of(3, &[1, 2]);
        let n = 20_000;
        let (mut sum, mut squares, mut yes, mut low) = (0.0, 0.0, 0, 0);
        for _ in 0..n {
            let x = f64::from(random.normal());
            (sum, squares) = (sum + x, squares + x * x);
            yes += usize::from(random.chance(0.3));
            low += usize::from(random.uniform() < 0.25) + usize::from(random.below(4) == 0);
        }
        let n = f64::from(n);
        assert!((sum / n).abs() < 0.04 && (squares / n - 1.0).abs() < 0.06, "{sum} {squares}");
        assert!((yes as f64 / n - 0.3).abs() < 0.02 && (low as f64 / n - 0.5).abs() < 0.02, "{yes} {low}");
        assert!(!random.chance(0.0) && random.chance(1.0));
    }

    #[test]
    fn neighbours_share_nothing() {
        let first = |seed, path: &[u64]| Random::of(seed, path).bits();
        let all =
            [first(1, &[0, 0]), first(1, &[0, 1]), first(1, &[1, 0]), first(2, &[0, 0]), first(0, &[0, 0])];
        assert!((1..all.len()).all(|at| !all[..at].contains(&all[at])), "{all:?}");
    }
}
