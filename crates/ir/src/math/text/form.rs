//! How each dialect spells the operations on floats that it must do as IEEE says, f32 and f64. Every other form is
//! the same in all dialects.

use super::Dialect;

macro_rules! forms {
    ($($name:ident [$c:literal $c_wide:literal] [$cuda:literal $cuda_wide:literal];)*) => {
        /// An operation on floats.
        #[derive(Clone, Copy)]
        pub(super) enum Form { $($name,)* }

        impl Form {
            /// Its spelling, with a `#` for each operand.
            pub fn spelling(self, dialect: Dialect, wide: bool) -> &'static str {
                match (self, dialect, wide) {
                    $((Form::$name, Dialect::C, false) => $c,
                    (Form::$name, Dialect::C, true) => $c_wide,
                    (Form::$name, Dialect::Cuda, false) => $cuda,
                    (Form::$name, Dialect::Cuda, true) => $cuda_wide,)*
                }
            }
        }
    };
}
#[rustfmt::skip]
forms! {
    Add      ["# + #"              "# + #"]              ["__fadd_rn(#, #)"     "__dadd_rn(#, #)"];
    Sub      ["# - #"              "# - #"]              ["__fsub_rn(#, #)"     "__dsub_rn(#, #)"];
    Mul      ["# * #"              "# * #"]              ["__fmul_rn(#, #)"     "__dmul_rn(#, #)"];
    Div      ["# / #"              "# / #"]              ["__fdiv_rn(#, #)"     "__ddiv_rn(#, #)"];
    Fma      ["fmaf(#, #, #)"      "fma(#, #, #)"]       ["__fmaf_rn(#, #, #)"  "__fma_rn(#, #, #)"];
    Sqrt     ["sqrtf(#)"           "sqrt(#)"]            ["__fsqrt_rn(#)"       "__dsqrt_rn(#)"];
    Neg      ["-#"                 "-#"]                 ["-#"                  "-#"];
    Abs      ["fabsf(#)"           "fabs(#)"]            ["fabsf(#)"            "fabs(#)"];
    CopySign ["copysignf(#, #)"    "copysign(#, #)"]     ["copysignf(#, #)"     "copysign(#, #)"];
    Floor    ["floorf(#)"          "floor(#)"]           ["floorf(#)"           "floor(#)"];
    Ceil     ["ceilf(#)"           "ceil(#)"]            ["ceilf(#)"            "ceil(#)"];
    Trunc    ["truncf(#)"          "trunc(#)"]           ["truncf(#)"           "trunc(#)"];
    Round    ["rintf(#)"           "rint(#)"]            ["rintf(#)"            "rint(#)"];
    Fmod     ["fmodf(#, #)"        "fmod(#, #)"]         ["fmodf(#, #)"         "fmod(#, #)"];
    Max      ["kiln_max_f32(#, #)" "kiln_max_f64(#, #)"] ["kiln_max_f32(#, #)"  "kiln_max_f64(#, #)"];
    Min      ["kiln_min_f32(#, #)" "kiln_min_f64(#, #)"] ["kiln_min_f32(#, #)"  "kiln_min_f64(#, #)"];
}
