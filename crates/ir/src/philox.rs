//! Philox 4x32-10: random numbers as a pure function of (key, counter), after Salmon et al., "Parallel random numbers:
//! as easy as 1, 2, 3" (SC11). The counter is the logical element index, so that layout, threads and devices never
//! change a draw.

/// Four random words for a counter under a key.
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    let mut c = counter;
    for round in 0..10 {
        if round > 0 {
            k0 = k0.wrapping_add(0x9E37_79B9);
            k1 = k1.wrapping_add(0xBB67_AE85);
        }
        let p0 = c[0] as u64 * 0xD251_1F53;
        let p1 = c[2] as u64 * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k1, p0 as u32];
    }
    c
}

/// The four words of block `block` of the stream at `offset`.
pub fn block(key: u64, offset: u64, block: u64) -> [u32; 4] {
    philox(key, [block as u32, (block >> 32) as u32, offset as u32, (offset >> 32) as u32])
}

/// Word `i` of the stream at `offset`.
pub fn word(key: u64, offset: u64, i: u64) -> u32 {
    block(key, offset, i / 4)[(i % 4) as usize]
}

/// 64 bits for element `i`: words `2i` and `2i + 1`.
pub fn wide(key: u64, offset: u64, i: u64) -> u64 {
    let words = block(key, offset, i / 2);
    let at = (i % 2) as usize * 2;
    words[at] as u64 | (words[at + 1] as u64) << 32
}

/// A float in [0, 1) with 24 random bits, from one word.
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// A float in [0, 1) with 53 random bits, from 64.
pub fn uniform_wide(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
}

/// Element `i` of a standard normal stream: Box–Muller on 64 bits of its own, computed in f64.
pub fn normal(key: u64, offset: u64, i: u64) -> f64 {
    let words = wide(key, offset, i);
    let u1 = ((words as u32) as f64 + 1.0) * (1.0 / 4_294_967_296.0);
    let u2 = (words >> 32) as f64 * (1.0 / 4_294_967_296.0);
    libm::sqrt(-2.0 * libm::log(u1)) * libm::cos(std::f64::consts::TAU * u2)
}

/// A key for a stream named by words: any change of a word gives an unrelated stream.
pub fn derive(key: u64, path: &[u64]) -> u64 {
    path.iter().fold(key, |key, &part| {
        let words = philox(key, [part as u32, (part >> 32) as u32, 0x6b69_6c6e, 0]);
        words[0] as u64 | (words[1] as u64) << 32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_published_vectors() {
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox(u64::MAX, [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox(0x299f_31d0_a409_3822, [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn normals_have_the_right_moments() {
        let n = 100_000;
        let draws: Vec<f64> = (0..n).map(|i| normal(7, 3, i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let var = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.02 && (var - 1.0).abs() < 0.02, "{mean} {var}");
    }
}
