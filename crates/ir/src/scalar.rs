//! One number with its dtype, stored as bits so that `Eq` and `Hash` hold for every value, NaN included.

use crate::DType;
use half::{bf16, f16};

/// A number of a given dtype, as bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scalar {
    dtype: DType,
    bits: u64,
}

impl Scalar {
    /// A scalar from its raw bits. Bits above the dtype's width are dropped; bool becomes 0 or 1.
    pub fn from_bits(dtype: DType, bits: u64) -> Scalar {
        let dtype = dtype.unpacked();
        let bits = match (dtype, dtype.size()) {
            (DType::Bool, _) => (bits != 0) as u64,
            (_, 8) => bits,
            (_, n) => bits & ((1 << (8 * n)) - 1),
        };
        Scalar { dtype, bits }
    }

    /// `value` rounded to `dtype`; integers saturate, NaN becomes 0 there. A quantised dtype stores f32.
    pub fn from_f64(dtype: DType, value: f64) -> Scalar {
        use DType::*;
        let bits = match dtype.unpacked() {
            F64 => value.to_bits(),
            F32 => (value as f32).to_bits() as u64,
            F16 => f16::from_f64(value).to_bits() as u64,
            BF16 => bf16::from_f64(value).to_bits() as u64,
            I64 => value as i64 as u64,
            I32 => value as i32 as u32 as u64,
            I16 => value as i16 as u16 as u64,
            I8 => value as i8 as u8 as u64,
            U64 => value as u64,
            U32 => value as u32 as u64,
            U16 => value as u16 as u64,
            U8 => value as u8 as u64,
            Bool => (value != 0.0) as u64,
            Q8 | Q4 => 0,
        };
        Scalar { dtype: dtype.unpacked(), bits }
    }

    /// `value` as `dtype`: exact for 64-bit integers, wrapped to narrower ones, rounded to floats.
    pub fn from_i64(dtype: DType, value: i64) -> Scalar {
        match dtype.unpacked() {
            d if d.is_float() => Scalar::from_f64(d, value as f64),
            d => Scalar::from_bits(d, value as u64),
        }
    }

    /// Its dtype.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Its bits, zero-extended.
    pub fn bits(self) -> u64 {
        self.bits
    }

    /// The value as f64; 64-bit integers round.
    pub fn to_f64(self) -> f64 {
        use DType::*;
        match self.dtype {
            F64 => f64::from_bits(self.bits),
            F32 => f32::from_bits(self.bits as u32) as f64,
            F16 => f16::from_bits(self.bits as u16).to_f64(),
            BF16 => bf16::from_bits(self.bits as u16).to_f64(),
            I64 | I32 | I16 | I8 => self.to_i64() as f64,
            U64 | U32 | U16 | U8 | Bool | Q8 | Q4 => self.bits as f64,
        }
    }

    /// The value as i64; floats truncate and saturate, u64 wraps.
    pub fn to_i64(self) -> i64 {
        use DType::*;
        match self.dtype {
            F64 | F32 | F16 | BF16 => self.to_f64() as i64,
            I64 => self.bits as i64,
            I32 => self.bits as i32 as i64,
            I16 => self.bits as i16 as i64,
            I8 => self.bits as i8 as i64,
            U64 | U32 | U16 | U8 | Bool | Q8 | Q4 => self.bits as i64,
        }
    }

    /// The bytes of one element of this dtype.
    pub fn to_bytes(self) -> smallvec::SmallVec<[u8; 8]> {
        smallvec::SmallVec::from_slice(&self.bits.to_le_bytes()[..self.dtype.size()])
    }

    /// Parses the `Display` form: `f32:1.5`, `i64:-3`, `bool:1`, or `f32:0x7fc00001` for NaN payloads.
    pub fn parse(text: &str) -> Option<Scalar> {
        let (dtype, value) = text.split_once(':')?;
        let dtype = DType::from_name(dtype)?;
        if dtype.is_quantised() {
            return None;
        }
        if let Some(hex) = value.strip_prefix("0x") {
            return Some(Scalar::from_bits(dtype, u64::from_str_radix(hex, 16).ok()?));
        }
        Some(match dtype.kind() {
            crate::Kind::Float => Scalar::from_f64(dtype, value.parse().ok()?),
            crate::Kind::Signed => Scalar::from_i64(dtype, value.parse().ok()?),
            _ => Scalar::from_bits(dtype, value.parse().ok()?),
        })
    }
}

impl std::fmt::Display for Scalar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let d = self.dtype;
        match d.kind() {
            crate::Kind::Float => {
                let value = self.to_f64();
                if value.is_nan() { write!(f, "{d}:{:#x}", self.bits) } else { write!(f, "{d}:{value:?}") }
            }
            crate::Kind::Signed => write!(f, "{d}:{}", self.to_i64()),
            _ => write!(f, "{d}:{}", self.bits),
        }
    }
}

impl std::fmt::Debug for Scalar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_parses_back_bit_for_bit() {
        for dtype in DType::ALL.into_iter().filter(|d| !d.is_quantised()) {
            for bits in
                [0, 1, 2, 0x7fc0_0001, 0x8000, u64::MAX, 0x3ff8_0000_0000_0000, 0x7c00, 0xfc00, 0x8000_0000]
            {
                let s = Scalar::from_bits(dtype, bits);
                assert_eq!(Scalar::parse(&s.to_string()), Some(s), "{s}");
            }
        }
    }
}
