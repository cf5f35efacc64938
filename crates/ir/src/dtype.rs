//! Element types, and which one two operands meet in.

use serde::{Deserialize, Serialize};

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
#[allow(missing_docs)]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    /// Blocks of 32 elements along the last axis: an f16 scale and 32 signed bytes.
    Q8,
    /// Blocks of 32 elements along the last axis: an f16 scale and 32 four-bit values.
    Q4,
}

/// What kind of numbers a dtype holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Kind {
    Float,
    Signed,
    Unsigned,
    Bool,
    Quantised,
}

impl DType {
    /// Every dtype, in declaration order.
    pub const ALL: [DType; 15] = {
        use DType::*;
        [F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8, Bool, Q8, Q4]
    };

    /// The name used in text, files and messages.
    pub const fn name(self) -> &'static str {
        use DType::*;
        match self {
            F64 => "f64",
            F32 => "f32",
            F16 => "f16",
            BF16 => "bf16",
            I64 => "i64",
            I32 => "i32",
            I16 => "i16",
            I8 => "i8",
            U64 => "u64",
            U32 => "u32",
            U16 => "u16",
            U8 => "u8",
            Bool => "bool",
            Q8 => "q8",
            Q4 => "q4",
        }
    }

    /// The dtype with this name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// What kind of numbers it holds.
    pub const fn kind(self) -> Kind {
        use DType::*;
        match self {
            F64 | F32 | F16 | BF16 => Kind::Float,
            I64 | I32 | I16 | I8 => Kind::Signed,
            U64 | U32 | U16 | U8 => Kind::Unsigned,
            Bool => Kind::Bool,
            Q8 | Q4 => Kind::Quantised,
        }
    }

    /// Elements and bytes of the smallest unit of storage: one element, or a quantised block.
    pub const fn block(self) -> (usize, usize) {
        use DType::*;
        match self {
            F64 | I64 | U64 => (1, 8),
            F32 | I32 | U32 => (1, 4),
            F16 | BF16 | I16 | U16 => (1, 2),
            I8 | U8 | Bool => (1, 1),
            Q8 => (32, 34),
            Q4 => (32, 18),
        }
    }

    /// Bytes of one element; for a quantised dtype, of one block.
    pub const fn size(self) -> usize {
        self.block().1
    }

    /// Bytes that `n` elements take, rounded up to whole blocks.
    pub const fn bytes(self, n: usize) -> usize {
        let (elements, bytes) = self.block();
        n.div_ceil(elements) * bytes
    }

    /// f64, f32, f16 or bf16.
    pub const fn is_float(self) -> bool {
        matches!(self.kind(), Kind::Float)
    }

    /// A signed or unsigned integer, not bool.
    pub const fn is_int(self) -> bool {
        matches!(self.kind(), Kind::Signed | Kind::Unsigned)
    }

    /// q8 or q4.
    pub const fn is_quantised(self) -> bool {
        matches!(self.kind(), Kind::Quantised)
    }

    /// The dtype that an unpacked element has: f32 for quantised values, otherwise itself.
    pub const fn unpacked(self) -> DType {
        if self.is_quantised() { DType::F32 } else { self }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The dtype in which operands of two dtypes meet. Quantised values count as f32; bool gives way to everything; a
/// float wins over an integer; two floats meet in the wider (f16 and bf16 in f32); two integers of one signedness in
/// the wider; an unsigned and a signed one in the smallest signed type that holds both, and u64 with any signed in i64.
pub fn promote(a: DType, b: DType) -> DType {
    use DType::*;
    let (a, b) = (a.unpacked(), b.unpacked());
    if a == b {
        return a;
    }
    let by_rank = |a: DType, b: DType| if a.size() >= b.size() { a } else { b };
    match (a.kind(), b.kind()) {
        (Kind::Bool, _) => b,
        (_, Kind::Bool) => a,
        (Kind::Float, Kind::Float) if a.size() == b.size() => F32,
        (Kind::Float, Kind::Float) => by_rank(a, b),
        (Kind::Float, _) => a,
        (_, Kind::Float) => b,
        (Kind::Signed, Kind::Signed) | (Kind::Unsigned, Kind::Unsigned) => by_rank(a, b),
        (Kind::Signed, _) => meet_signs(a, b),
        (_, _) => meet_signs(b, a),
    }
}

fn meet_signs(signed: DType, unsigned: DType) -> DType {
    use DType::*;
    if signed.size() > unsigned.size() {
        return signed;
    }
    match unsigned.size() {
        1 => I16,
        2 => I32,
        _ => I64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_is_symmetric_and_has_an_upper_bound() {
        for a in DType::ALL {
            for b in DType::ALL {
                let c = promote(a, b);
                assert_eq!(c, promote(b, a), "{a} {b}");
                assert_eq!(c, promote(c, a), "{a} {b}");
            }
        }
        assert_eq!(promote(DType::U8, DType::I8), DType::I16);
        assert_eq!(promote(DType::F16, DType::BF16), DType::F32);
        assert_eq!(promote(DType::I64, DType::F16), DType::F16);
    }

    #[test]
    fn names_parse_back() {
        for d in DType::ALL {
            assert_eq!(DType::from_name(d.name()), Some(d));
        }
    }
}
