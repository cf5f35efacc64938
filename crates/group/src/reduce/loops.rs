//! The loops over elements, compiled for each instruction set.

use super::element::{Add, Element, LANES, Max, Mean, Min, Mul, Rule};
use super::{Both, Combine, Finish};
use crate::call::Reduce;
use half::{bf16, f16};
use kiln_ir::DType;

pub fn loops(reduce: Reduce, dtype: DType) -> Option<(Combine, Both)> {
    macro_rules! by_op {
        ($t:ty) => {
            match reduce {
                Reduce::Sum => (zip::<$t, Add>(), zip_both::<$t, Add>()),
                Reduce::Mean => (zip::<$t, Add>(), zip_both::<$t, Mean>()),
                Reduce::Max => (zip::<$t, Max>(), zip_both::<$t, Max>()),
                Reduce::Min => (zip::<$t, Min>(), zip_both::<$t, Min>()),
                Reduce::Prod => (zip::<$t, Mul>(), zip_both::<$t, Mul>()),
            }
        };
    }
    Some(match dtype {
        DType::F64 => by_op!(f64),
        DType::F32 => by_op!(f32),
        DType::F16 => by_op!(f16),
        DType::BF16 => by_op!(bf16),
        DType::I64 => by_op!(i64),
        DType::I32 => by_op!(i32),
        DType::I16 => by_op!(i16),
        DType::I8 => by_op!(i8),
        DType::U64 => by_op!(u64),
        DType::U32 => by_op!(u32),
        DType::U16 => by_op!(u16),
        DType::U8 => by_op!(u8),
        // Bytes 0 and 1: the larger is "any", the smaller and the product are "all".
        DType::Bool => by_op!(u8),
        DType::Q8 | DType::Q4 => return None,
    })
}

pub fn finish(dtype: DType) -> Option<Finish> {
    unsafe fn divide<T: Element>(out: *mut u8, a: *const u8, n: usize, k: usize) {
        for i in 0..n {
            // SAFETY: promised by the caller.
            unsafe { out.cast::<T>().add(i).write(T::over(a.cast::<T>().add(i).read_unaligned(), k)) };
        }
    }
    match dtype {
        DType::F64 => Some(divide::<f64>),
        DType::F32 => Some(divide::<f32>),
        DType::F16 => Some(divide::<f16>),
        DType::BF16 => Some(divide::<bf16>),
        _ => None,
    }
}

/// The loop for this machine. The width of vectors changes no bit.
macro_rules! widest {
    ($name:ident($($arg:ident: $t:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512<T: Element, R: Rule>($($arg: $t),*) {
                // SAFETY: promised by the caller.
                unsafe { $name::<T, R>($($arg),*) }
            }
            #[target_feature(enable = "avx2")]
            unsafe fn avx2<T: Element, R: Rule>($($arg: $t),*) {
                // SAFETY: promised by the caller.
                unsafe { $name::<T, R>($($arg),*) }
            }
            if is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return avx512::<T, R>;
            }
            if is_x86_feature_detected!("avx2") {
                return avx2::<T, R>;
            }
        }
        $name::<T, R>
    }};
}

fn zip<T: Element, R: Rule>() -> Combine {
    widest!(each(out: *mut u8, a: *const u8, b: *const u8, n: usize))
}

fn zip_both<T: Element, R: Rule>() -> Both {
    widest!(each_both(a: *mut u8, b: *mut u8, n: usize, k: usize))
}

/// Bytes ahead of the loop whose lines are asked for.
const AHEAD: usize = 1024;

/// Lines are asked for with the right to write: one trip to the other core's cache, where a load and then a store take
/// two. Measured with two processes, 25 MiB: 1.1 ms, without 4.7 ms, with stores past the cache 3.8 ms.
///
/// # Safety
/// As [`Both`].
#[inline(always)]
unsafe fn each_both<T: Element, R: Rule>(a: *mut u8, b: *mut u8, n: usize, k: usize) {
    let (a, b) = (a.cast::<T>(), b.cast::<T>());
    let ended = |z: T| if R::MEAN { z.over(k) } else { z };
    let mut i = 0;
    while i + LANES <= n {
        // SAFETY: `LANES` elements from `i` are within both.
        unsafe {
            let (p, q) = (a.add(i).cast::<[T; LANES]>(), b.add(i).cast::<[T; LANES]>());
            own_soon(p.cast::<u8>().wrapping_add(AHEAD), size_of::<[T; LANES]>());
            own_soon(q.cast::<u8>().wrapping_add(AHEAD), size_of::<[T; LANES]>());
            let z = T::lanes::<R>(&p.read_unaligned(), &q.read_unaligned());
            let z: [T; LANES] = std::array::from_fn(|i| ended(z[i]));
            p.write_unaligned(z);
            q.write_unaligned(z);
        }
        i += LANES;
    }
    // SAFETY: the elements that remain.
    unsafe {
        let (a, b) = (a.add(i), b.add(i));
        each::<T, R>(a.cast(), a.cast(), b.cast(), n - i);
        (0..n - i).for_each(|i| a.add(i).write_unaligned(ended(a.add(i).read_unaligned())));
        std::ptr::copy_nonoverlapping(a.cast::<u8>(), b.cast(), (n - i) * size_of::<T>());
    }
}

/// Asks for the cache lines from `at`, to be written. They need not exist.
#[inline(always)]
fn own_soon(at: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..bytes.div_ceil(64) {
        let at = at.wrapping_add(64 * line);
        // SAFETY: a hint: it reads and writes nothing and never faults.
        unsafe { std::arch::asm!("prefetchw [{at}]", at = in(reg) at, options(nostack, preserves_flags)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, bytes);
}

/// # Safety
/// As [`Combine`].
#[inline(always)]
unsafe fn each<T: Element, R: Rule>(out: *mut u8, a: *const u8, b: *const u8, n: usize) {
    let (out, a, b) = (out.cast::<T>(), a.cast::<T>(), b.cast::<T>());
    let mut i = 0;
    while i + LANES <= n {
        // SAFETY: `LANES` elements from `i` are within all three. Both operands are read before the result is
        // written, so that they may be one place.
        unsafe {
            let x = a.add(i).cast::<[T; LANES]>().read_unaligned();
            let y = b.add(i).cast::<[T; LANES]>().read_unaligned();
            out.add(i).cast::<[T; LANES]>().write_unaligned(T::lanes::<R>(&x, &y));
        }
        i += LANES;
    }
    if i < n {
        let (mut x, mut y) = ([T::blank(); LANES], [T::blank(); LANES]);
        // SAFETY: the `n - i` elements that remain are fewer than `LANES`.
        unsafe {
            let bytes = (n - i) * size_of::<T>();
            std::ptr::copy_nonoverlapping(a.add(i).cast::<u8>(), x.as_mut_ptr().cast(), bytes);
            std::ptr::copy_nonoverlapping(b.add(i).cast::<u8>(), y.as_mut_ptr().cast(), bytes);
            let z = T::lanes::<R>(&x, &y);
            std::ptr::copy_nonoverlapping(z.as_ptr().cast(), out.add(i).cast::<u8>(), bytes);
        }
    }
}
