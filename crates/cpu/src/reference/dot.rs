//! Matrix products: each output is a chain of fused multiply-adds for each panel of K, the chains added in order.

use super::array::{Array, Value, with_floats, with_ints};
use super::cast::dequantized;
use super::number::{Number, widen};
use super::order::PANEL;
use super::view::View;
use crate::{memory, stop};
use kiln_ir::math::{Float, Num};
use kiln_ir::{Dims, Shape};

/// The elements of a matrix product of shape `out`. Quantised `b` is unpacked first and meets `a` in its wider type.
pub fn dot(transpose: bool, a: &Value, b: &Value, out: &Shape) -> Array {
    let product = Matrices::of(transpose, a, b, out);
    if a.data.dtype().is_float() {
        with_floats!(&a.data, a => product.floats(a, &b.data).into())
    } else {
        with_ints!(&a.data, a => product.ints(a, &b.data).into(),)
    }
}

struct Matrices {
    m: usize,
    n: usize,
    k: usize,
    /// Where the matrices of each batch start.
    a: Vec<usize>,
    b: Vec<usize>,
    /// Distances of b along K and along N.
    along_k: usize,
    along_n: usize,
}

impl Matrices {
    fn of(transpose: bool, a: &Value, b: &Value, out: &Shape) -> Matrices {
        let batch = Dims::collect(out[..out.len() - 2].iter().copied());
        let starts = |x: &Shape| {
            let batches = Dims::collect(x[..x.len() - 2].iter().copied());
            let size = x[x.len() - 2] * x[x.len() - 1];
            let mut starts = View::whole(&batches).expanded(&batch).offsets();
            starts.iter_mut().for_each(|i| *i *= size);
            starts
        };
        let (m, n, k) = (out[out.len() - 2], out[out.len() - 1], a.shape[a.shape.len() - 1]);
        let (along_k, along_n) = if transpose { (1, k) } else { (n, 1) };
        Matrices { m, n, k, a: starts(&a.shape), b: starts(&b.shape), along_k, along_n }
    }

    fn floats<T: Number<Wide: Float>>(&self, a: &[T], b: &Array) -> Vec<T> {
        self.run(a, &dequantized::<T>(b))
    }

    fn ints<T: Number>(&self, a: &[T], b: &Array) -> Vec<T> {
        self.run(a, &widen(b.typed::<T>()))
    }

    fn run<T: Number>(&self, a: &[T], b: &[T::Wide]) -> Vec<T> {
        let mut out = memory::with_capacity(self.a.len() * self.m * self.n);
        let mut column = memory::with_capacity(self.k * self.n);
        for (&at_a, &at_b) in self.a.iter().zip(&self.b) {
            let _mark = memory::mark();
            let a = widen(&a[at_a..at_a + self.m * self.k]);
            column.clear();
            for j in 0..self.n {
                column.extend((0..self.k).map(|l| b[at_b + j * self.along_n + l * self.along_k]));
            }
            for i in 0..self.m {
                stop::check();
                let row = &a[i * self.k..(i + 1) * self.k];
                out.extend(
                    (0..self.n).map(|j| T::narrow(chain::<T>(row, &column[j * self.k..(j + 1) * self.k]))),
                );
            }
        }
        out
    }
}

/// One output; 0 if K is 0.
fn chain<T: Number>(a: &[T::Wide], b: &[T::Wide]) -> T::Wide {
    let panel = |(a, b): (&[T::Wide], &[T::Wide])| {
        a.iter().zip(b).fold(T::Wide::ZERO, |acc, (&a, &b)| T::fma(a, b, acc))
    };
    a.chunks(PANEL).zip(b.chunks(PANEL)).map(panel).reduce(Num::add).unwrap_or(T::Wide::ZERO)
}
