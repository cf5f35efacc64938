//! Whether two values agree, and if not, where and by how much.

use kiln_ir::Scalar;
use kiln_tensor::{DType, Data, Shape};

/// Floats agree within `abs + rel * |want|`; NaN agrees with NaN, an infinity with its like. Everything else, dtype and
/// shape included, agrees exactly.
pub(super) fn same(got: &Data, want: &Data, rel: f64, abs: f64) -> Result<(), String> {
    if got.meta.shape != want.meta.shape {
        return Err(format!("shape {:?} instead of {:?}", got.meta.shape, want.meta.shape));
    }
    let dtype = want.meta.dtype;
    if got.meta.dtype != dtype {
        return Err(format!("dtype {} instead of {dtype}", got.meta.dtype));
    }
    let pairs = || scalars(got).zip(scalars(want)).enumerate();
    let agrees = |got: Scalar, want: Scalar| match dtype.is_float() {
        true => near(got.to_f64(), want.to_f64(), rel, abs),
        false => got == want,
    };
    let bad: Vec<(usize, (Scalar, Scalar))> =
        pairs().filter(|&(_, (got, want))| !agrees(got, want)).collect();
    // The worst is told: NaN and infinities are worse than any distance.
    let distance = |(got, want): (Scalar, Scalar)| (got.to_f64() - want.to_f64()).abs();
    let worst = bad.iter().max_by(|a, b| distance(a.1).total_cmp(&distance(b.1)));
    match worst {
        None => Ok(()),
        Some(&(at, pair)) => Err(format!(
            "at {:?} {} instead of {}, off by {:.3e}; {} of {} differ",
            place(&want.meta.shape, at),
            text(pair.0),
            text(pair.1),
            distance(pair),
            bad.len(),
            want.meta.shape.numel(),
        )),
    }
}

fn near(got: f64, want: f64, rel: f64, abs: f64) -> bool {
    // An infinite `want` would make the bound infinite too.
    got == want
        || got.is_nan() && want.is_nan()
        || want.is_finite() && (got - want).abs() <= abs + rel * want.abs()
}

fn scalars(data: &Data) -> impl Iterator<Item = Scalar> + '_ {
    let dtype = data.meta.dtype;
    data.bytes.chunks_exact(dtype.size()).map(move |bytes| {
        let mut bits = [0; 8];
        bits[..bytes.len()].copy_from_slice(bytes);
        Scalar::from_bits(dtype, u64::from_le_bytes(bits))
    })
}

fn text(value: Scalar) -> String {
    match value.dtype() {
        dtype if dtype.is_float() => value.to_f64().to_string(),
        DType::Bool => (value.bits() != 0).to_string(),
        DType::U64 => value.bits().to_string(),
        _ => value.to_i64().to_string(),
    }
}

/// The index of the `at`-th element of a row-major shape.
fn place(shape: &Shape, mut at: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &extent) in shape.iter().enumerate().rev() {
        index[i] = at % extent;
        at /= extent;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_and_nan_match_only_their_like() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        for (got, want, expect) in [
            (inf, inf, true),
            (inf, -inf, false),
            (1e300, inf, false),
            (inf, 1.0, false),
            (nan, nan, true),
            (nan, 1.0, false),
            (1.0, nan, false),
            (1.1, 1.0, true),
            (1.11, 1.0, false),
        ] {
            assert_eq!(near(got, want, 0.05, 0.05 + 1e-9), expect, "{got} {want}");
        }
    }

    #[test]
    fn the_place_is_row_major() {
        assert_eq!(place(&Shape::from([2, 3, 4]), 17), [1, 1, 1]);
        assert_eq!(place(&Shape::default(), 0), [0usize; 0]);
    }
}
