//! Conversions between plain types over slices, by two steps: an element becomes one of five kinds, exactly, and a kind
//! becomes any number as Rust's `as` does: 60 loops, not 13 × 12.
//!
//! No result is rounded twice: the first step loses nothing. All integers but u64 would fit in i64, but its conversion
//! to f32 has no vector instruction before AVX-512; i32's has. f16 and bf16 are reached through f32, from f64 and
//! integers too, as PyTorch does.
#![forbid(unsafe_code)]
// As in `slices`.
#![allow(clippy::needless_range_loop)]

use half::{bf16, f16};

/// An element of a plain dtype.
pub trait Plain: Copy + Default {
    /// A type that holds all its values.
    type Kind: Kind;
    /// The elements as their kind: themselves, or written to `scratch`, which is as long.
    fn kind<'a>(x: &'a [Self], scratch: &'a mut [Self::Kind]) -> &'a [Self::Kind];
}

/// What conversions start from.
pub trait Kind:
    Copy
    + Default
    + PartialEq
    + To<f64>
    + To<f32>
    + To<f16>
    + To<bf16>
    + To<i64>
    + To<i32>
    + To<i16>
    + To<i8>
    + To<u64>
    + To<u32>
    + To<u16>
    + To<u8>
{
}

/// Conversion of one element, which rounds, truncates, saturates or wraps once.
pub trait To<D> {
    /// The converted element.
    fn to(self) -> D;
}

/// Every element converted.
pub fn convert<K: Kind + To<D>, D>(x: &[K], y: &mut [D]) {
    let x = &x[..y.len()];
    for i in 0..y.len() {
        y[i] = x[i].to();
    }
}

/// Whether each element is not 0.
pub fn truth<K: Kind>(x: &[K], y: &mut [u8]) {
    let x = &x[..y.len()];
    for i in 0..y.len() {
        y[i] = (x[i] != K::default()) as u8;
    }
}

macro_rules! kinds {
    ($($kind:ident)* => $to:tt) => { $(kinds!(@one $kind $to);)* };
    (@one $kind:ident [$($to:ident)*]) => {
        impl Kind for $kind {}
        impl Plain for $kind {
            type Kind = $kind;
            fn kind<'a>(x: &'a [$kind], _: &'a mut [$kind]) -> &'a [$kind] {
                x
            }
        }
        $(impl To<$to> for $kind {
            #[inline(always)]
            fn to(self) -> $to { self as $to }
        })*
        impl To<f16> for $kind {
            #[inline(always)]
            fn to(self) -> f16 { f16::from_f32(self as f32) }
        }
        impl To<bf16> for $kind {
            #[inline(always)]
            fn to(self) -> bf16 { bf16::from_f32(self as f32) }
        }
    };
}
kinds!(f64 f32 i64 i32 u64 => [f64 f32 i64 i32 i16 i8 u64 u32 u16 u8]);

macro_rules! held {
    ($($t:ident in $kind:ident, $value:expr;)*) => {$(
        impl Plain for $t {
            type Kind = $kind;
            fn kind<'a>(x: &'a [$t], scratch: &'a mut [$kind]) -> &'a [$kind] {
                for (y, &x) in scratch.iter_mut().zip(x) {
                    *y = $value(x);
                }
                scratch
            }
        }
    )*};
}
held! {
    f16 in f32, f16::to_f32; bf16 in f32, bf16::to_f32;
    u32 in i64, i64::from;
    i16 in i32, i32::from; i8 in i32, i32::from; u16 in i32, i32::from; u8 in i32, i32::from; bool in i32, i32::from;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both steps of a conversion against the one that `as` does.
    macro_rules! check {
        ($($from:ident)* => $to:tt) => { $(check!(@one $from $to);)* };
        (@one $from:ident [$($to:ident)*]) => {{
            let one = 1u64;
            let bits: Vec<u64> = (0..64)
                .flat_map(|i| [one << i, (one << i) - 1, (one << i) + 1, !(one << i), (one << i) | (one << (i / 2)) | 1])
                .chain([0, u64::MAX, 0x7ff8 << 48, 0x3ff8 << 48, 0x41ef_ffff_ffff_ffff, 0x7fc0_0000, 0xff80_0000])
                .collect();
            let x: Vec<$from> = bits.iter().flat_map(|&b| [b as $from, f64::from_bits(b) as $from, f32::from_bits(b as u32) as $from]).collect();
            let mut scratch = vec![Default::default(); x.len()];
            let kind = <$from as Plain>::kind(&x, &mut scratch);
            $({
                let mut y = vec![$to::default(); x.len()];
                convert(kind, &mut y);
                for (&x, &y) in x.iter().zip(&y) {
                    let want = x as $to;
                    assert!(y == want || (y != y && want != want), "{x:?}: {y:?}, not {want:?}");
                }
            })*
        }};
    }

    #[test]
    #[allow(clippy::eq_op)]
    fn two_steps_are_one() {
        check!(f64 f32 i64 i32 i16 i8 u64 u32 u16 u8 => [f64 f32 i64 i32 i16 i8 u64 u32 u16 u8]);
    }

    #[test]
    fn long_integers_round_once_to_f32() {
        // Through f64 this would round down to even: 2^54 + 2^30 + 1 is just above the middle of two f32.
        let x = [(1i64 << 54) + (1 << 30) + 1];
        let mut y = [0f32];
        convert(<i64 as Plain>::kind(&x, &mut [0]), &mut y);
        assert_eq!(y[0], (1i64 << 54) as f32 + (1i64 << 31) as f32);
        assert_ne!(y[0], x[0] as f64 as f32);
    }
}
