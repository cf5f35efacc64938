//! Stable sorting along an axis.

use super::array::{Array, Element, Value, with_plain};
use super::view::around;
use crate::{memory, stop};
use half::{bf16, f16};

/// The first `take` elements of each sorted line, and their indices.
pub fn sort(axis: usize, descending: bool, take: usize, x: &Value) -> Vec<Array> {
    let extents = around(&x.shape, axis);
    with_plain!(&x.data, x => {
        let (values, indices) = lines(x, extents, take, descending);
        vec![values.into(), indices.into()]
    })
}

fn lines<T: Rank>(
    x: &[T],
    (outer, length, inner): (usize, usize, usize),
    take: usize,
    descending: bool,
) -> (Vec<T>, Vec<i64>) {
    let mut values = memory::filled(outer * take * inner, T::default());
    let mut indices = memory::filled(outer * take * inner, 0);
    let mut line: Vec<(u64, usize)> = memory::with_capacity(length);
    for o in 0..outer {
        for i in 0..inner {
            stop::check();
            let place = |t: usize| (o * length + t) * inner + i;
            line.clear();
            for t in 0..length {
                let rank = x[place(t)].rank();
                line.push((if descending { !rank } else { rank }, t));
            }
            by_rank(&mut line);
            for (t, &(_, index)) in line[..take].iter().enumerate() {
                let at = (o * take + t) * inner + i;
                values[at] = x[place(index)];
                indices[at] = index as i64;
            }
        }
    }
    (values, indices)
}

/// Places tell equal ranks apart, so that a sort which takes no memory is stable.
fn by_rank(line: &mut [(u64, usize)]) {
    if line.len() < memory::STRETCH {
        return line.sort_unstable();
    }
    line.sort_unstable_by(|a, b| {
        stop::check();
        a.cmp(b)
    });
}

/// An element's place among all values of its type, equal for values that compare equal: so one sort serves every dtype.
trait Rank: Element {
    fn rank(self) -> u64;
}

macro_rules! ranks {
    ($($t:ident)*, |$x:ident| $rank:expr) => {$(
        impl Rank for $t {
            fn rank(self) -> u64 { let $x = self; $rank }
        }
    )*};
}
ranks!(u64 u32 u16 u8 bool, |x| x as u64);
ranks!(i64 i32 i16 i8, |x| x as i64 as u64 ^ SIGN);
ranks!(f64, |x| float(x));
ranks!(f32 f16 bf16, |x| float(x.into()));

const SIGN: u64 = 1 << 63;

/// NaN is above everything and equal to itself; -0 is 0. Among the others, larger bits are further from 0.
fn float(x: f64) -> u64 {
    match x.to_bits() {
        _ if x.is_nan() => u64::MAX,
        _ if x == 0.0 => SIGN,
        bits if x < 0.0 => !bits,
        bits => bits | SIGN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Ordering;

    #[test]
    fn ranks_order_as_values_do() {
        let inf = f64::INFINITY;
        let floats =
            [-inf, -1e300, -2.0, -1.5, -5e-324, -0.0, 0.0, 5e-324, 1.5, 2.0, 1e300, inf, f64::NAN, -f64::NAN];
        for a in floats {
            for b in floats {
                let want = a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
                assert_eq!(a.rank().cmp(&b.rank()), want, "{a} and {b}");
                assert_eq!(f16::from_f64(a).rank() == f16::from_f64(b).rank(), {
                    let (a, b) = (f16::from_f64(a), f16::from_f64(b));
                    a == b || (a.is_nan() && b.is_nan())
                });
            }
        }
        for a in [i64::MIN, -2, -1, 0, 1, 2, i64::MAX] {
            for b in [i64::MIN, -2, -1, 0, 1, 2, i64::MAX] {
                assert_eq!(a.rank().cmp(&b.rank()), a.cmp(&b));
                assert_eq!((a as i8).rank().cmp(&(b as i8).rank()), (a as i8).cmp(&(b as i8)));
            }
        }
        assert_eq!(false.rank().cmp(&true.rank()), Ordering::Less);
    }
}
