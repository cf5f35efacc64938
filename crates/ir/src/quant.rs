//! Quantised blocks: 32 elements share one f16 scale.
//!
//! q8 is the scale and 32 signed bytes: `x = scale * q`. q4 is the scale and 16 bytes, element `i` in the low half of
//! byte `i` for the first sixteen and in the high half for the others: `x = scale * (q - 8)`. These are the layouts of
//! GGUF's Q8_0 and Q4_0, so that such files load without conversion.

use crate::DType;
use half::f16;

/// Elements in a block.
pub const BLOCK: usize = 32;

/// Packs whole blocks of `x` into `out`, which has [`DType::bytes`] of `x.len()` bytes.
pub fn quantize(dtype: DType, x: &[f32], out: &mut [u8]) {
    let size = dtype.size();
    for (x, out) in x.chunks_exact(BLOCK).zip(out.chunks_exact_mut(size)) {
        match dtype {
            DType::Q8 => pack8(x, out),
            _ => pack4(x, out),
        }
    }
}

/// Unpacks whole blocks into `out`.
pub fn dequantize(dtype: DType, blocks: &[u8], out: &mut [f32]) {
    let size = dtype.size();
    for (block, out) in blocks.chunks_exact(size).zip(out.chunks_exact_mut(BLOCK)) {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        match dtype {
            DType::Q8 => out.iter_mut().zip(&block[2..]).for_each(|(o, &q)| *o = scale * (q as i8) as f32),
            _ => {
                for i in 0..BLOCK / 2 {
                    out[i] = scale * ((block[2 + i] & 15) as f32 - 8.0);
                    out[i + BLOCK / 2] = scale * ((block[2 + i] >> 4) as f32 - 8.0);
                }
            }
        }
    }
}

fn pack8(x: &[f32], out: &mut [u8]) {
    let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (o, v) in out[2..].iter_mut().zip(x) {
        *o = (v * inverse).round_ties_even() as i8 as u8;
    }
}

fn pack4(x: &[f32], out: &mut [u8]) {
    // The element of largest magnitude maps to -8 exactly, which uses the whole range of four bits.
    let peak = x.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let scale = peak / -8.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    let level = |v: f32| (v * inverse + 8.5).clamp(0.0, 15.0) as u8;
    for i in 0..BLOCK / 2 {
        out[2 + i] = level(x[i]) | level(x[i + BLOCK / 2]) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_within_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        for (dtype, step) in [(DType::Q8, 3.0 / 127.0), (DType::Q4, 3.0 / 8.0)] {
            let mut packed = vec![0; dtype.bytes(64)];
            quantize(dtype, &x, &mut packed);
            let mut back = vec![0.0; 64];
            dequantize(dtype, &packed, &mut back);
            for (a, b) in x.iter().zip(&back) {
                assert!(
                    (a - b).abs() <= step * 0.51 + if dtype == DType::Q4 { step * 0.5 } else { 0.01 },
                    "{dtype}: {a} {b}"
                );
            }
        }
    }

    #[test]
    fn zero_blocks_stay_zero() {
        for dtype in [DType::Q8, DType::Q4] {
            let mut packed = vec![1; dtype.bytes(32)];
            quantize(dtype, &[0.0; 32], &mut packed);
            let mut back = vec![1.0; 32];
            dequantize(dtype, &packed, &mut back);
            assert!(back.iter().all(|&v| v == 0.0));
        }
    }
}
