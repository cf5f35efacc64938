//! Conversions, as the CPU's `convert` does them: f16 and bf16 are reached through f32.

use super::number::*;
use super::write::{Atom, make};
use super::{register_type, rounded};
use crate::{DType, Kind};

/// A value of one dtype as one of another.
pub(super) fn cast(from: DType, x: Atom, to: DType) -> Option<Atom> {
    if from.is_quantised() || to.is_quantised() {
        return None;
    }
    if from == to {
        return Some(x);
    }
    let held = |dtype: DType| if dtype.is_float() && dtype != DType::F64 { DType::F32 } else { dtype };
    match (from.kind(), to.kind()) {
        (_, Kind::Bool) if from.is_float() => Some(make::<Truth>("# != 0", &[(held(from), x)])),
        (_, Kind::Bool) => Some(make::<Truth>("# != 0", &[(from, x)])),
        (_, Kind::Float) if to == DType::F64 => Some(make::<F64>("(double)#", &[(held(from), x)])),
        (_, Kind::Float) => {
            let single = if held(from) == DType::F32 { x } else { make::<F32>("(float)#", &[(from, x)]) };
            Some(rounded(to, F32(single)))
        }
        (Kind::Float, _) => {
            let form = format!("kiln_{}_to_{}(#)", held(from), to);
            with_integer!(to, T => Some(make::<T>(&form, &[(held(from), x)])))
        }
        (_, _) => {
            let form = format!("({})#", register_type(to));
            with_integer!(to, T => Some(make::<T>(&form, &[(from, x)])))
        }
    }
}
