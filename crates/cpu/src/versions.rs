//! The same loops compiled once for each instruction set.
//!
//! `versions!` wraps an `#[inline(always)]` function, which is then compiled with the features of each of three callers,
//! and chooses by [`isa`](crate::gemm::isa) at every call: a call is a tile or a chunk, so the choice costs nothing.
//! Vector width changes no bit: an element's operations are the same IEEE operations, and fused multiply-adds are exact
//! on every machine.

/// `fn name(args) -> result = body;` gives `name(args)`, and `name::on(isa, args)` for a given instruction set.
macro_rules! versions {
    ($(
        $(#[$doc:meta])*
        $vis:vis fn $name:ident $(<$T:ident: $bound:path>)? ($($arg:ident: $type:ty),*) $(-> $result:ty)? = $body:expr;
    )*) => {$(
        $(#[$doc])*
        $vis fn $name $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? {
            // SAFETY: `isa` names only what this machine has.
            unsafe { $name::on $(::<$T>)? ($crate::gemm::isa(), $($arg),*) }
        }

        #[allow(unused_imports)]
        mod $name {
            use super::*;
            use $crate::gemm::Isa;

            /// # Safety
            /// This machine has the instruction set.
            pub(super) unsafe fn on $(<$T: $bound>)? (isa: Isa, $($arg: $type),*) $(-> $result)? {
                match isa {
                    // SAFETY: promised by the caller; `Isa::supported` tests for every feature named here.
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => unsafe { avx512 $(::<$T>)? ($($arg),*) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => unsafe { avx2 $(::<$T>)? ($($arg),*) },
                    #[cfg(not(target_arch = "x86_64"))]
                    Isa::Avx512 | Isa::Avx2 => $body($($arg),*),
                    Isa::Interp => $body($($arg),*),
                }
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512 $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? {
                $body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$T: $bound>)? ($($arg: $type),*) $(-> $result)? {
                $body($($arg),*)
            }
        }
    )*};
}
pub(crate) use versions;
