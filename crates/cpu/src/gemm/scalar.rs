//! Element types. `gemm` names `GemmScalar` and `Half` alone; the traits behind them cannot be named outside, so nobody
//! else implements them.

use super::isa::Isa;
use super::kernel::{Kernel, Portable, Strip};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{After, Problem, route};

/// `f32` and `f64`.
pub trait GemmScalar: Compute {}

/// A type to compute in.
pub trait Compute: Copy + Default + Send + Sync + Source<Self> + 'static {
    /// `self * b + acc`, rounded once.
    fn fma(self, b: Self, acc: Self) -> Self;
    fn plus(self, other: Self) -> Self;
    /// # Safety
    /// As for `gemm_then`, and `isa` is supported.
    #[allow(private_interfaces)]
    unsafe fn run<S: Source<Self>>(isa: Isa, p: Problem<S, Self>, after: After<'_>);
    /// # Safety
    /// As for `Kernel::pack`, and `isa` is supported.
    #[allow(private_interfaces)]
    unsafe fn pack(isa: Isa, strip: Strip<Self>, width: usize, to: *mut Self);
}

/// An operand's type, that widens to T exactly.
pub trait Source<T>: Copy + Send + Sync + 'static {
    /// Whether it is T itself.
    const PLAIN: bool;
    fn plain(from: *const Self) -> Option<*const T>;
    fn widen(self) -> T;
    /// # Safety
    /// n are readable at `from` and writable at `to`.
    unsafe fn widen_line(from: *const Self, n: usize, to: *mut T);
}

/// A type to round to.
pub trait Narrow: Copy + Send + Sync + 'static {
    fn narrow(x: f32) -> Self;
    fn narrow_line(from: &[f32], to: &mut [Self]);
}

macro_rules! floats {
    ($($t:ty)*) => {$(
        impl GemmScalar for $t {}

        impl Compute for $t {
            #[inline(always)]
            fn fma(self, b: Self, acc: Self) -> Self {
                self.mul_add(b, acc)
            }

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[allow(private_interfaces)]
            unsafe fn run<S: Source<Self>>(isa: Isa, p: Problem<S, Self>, after: After<'_>) {
                // SAFETY: the caller's promise.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 => route::<x86::Avx512, S, Self>(p, after),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => route::<x86::Avx2, S, Self>(p, after),
                        #[cfg(not(target_arch = "x86_64"))]
                        Isa::Avx512 | Isa::Avx2 => route::<Portable, S, Self>(p, after),
                        Isa::Interp => route::<Portable, S, Self>(p, after),
                    }
                }
            }

            #[allow(private_interfaces)]
            unsafe fn pack(isa: Isa, strip: Strip<Self>, width: usize, to: *mut Self) {
                // SAFETY: the caller's promise.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 => <x86::Avx512 as Kernel<Self>>::pack(strip, width, to),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => <x86::Avx2 as Kernel<Self>>::pack(strip, width, to),
                        #[cfg(not(target_arch = "x86_64"))]
                        Isa::Avx512 | Isa::Avx2 => Portable::pack(strip, width, to),
                        Isa::Interp => Portable::pack(strip, width, to),
                    }
                }
            }
        }

        impl Source<$t> for $t {
            const PLAIN: bool = true;

            #[inline(always)]
            fn plain(from: *const Self) -> Option<*const $t> {
                Some(from)
            }

            #[inline(always)]
            fn widen(self) -> $t {
                self
            }

            #[inline(always)]
            unsafe fn widen_line(from: *const Self, n: usize, to: *mut $t) {
                // SAFETY: the caller's promise.
                unsafe { to.copy_from_nonoverlapping(from, n) }
            }
        }
    )*};
}
floats!(f32 f64);
