//! Which instruction set products run on: the best that is here, unless `KILN_ISA` names another.

use std::sync::OnceLock;

/// Instruction sets that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// 512-bit vectors.
    Avx512,
    /// 256-bit vectors with FMA.
    Avx2,
    /// What every machine has; slow on an x86 without FMA, which then is computed in software.
    Interp,
}

impl Isa {
    /// All of them, fastest first.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Interp];

    /// As in `KILN_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Interp => "interp",
        }
    }

    /// Whether this machine has it.
    pub fn supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.supported()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
            Isa::Interp => true,
        }
    }
}

/// The instruction set in use: the best that is here, or what `KILN_ISA=avx512|avx2|interp` names if that is here, else
/// it is told on stderr, once, and not followed.
pub fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        let best = Isa::ALL.into_iter().find(|isa| isa.supported()).unwrap_or(Isa::Interp);
        kiln_env::ISA.get().map_or(Ok(best), |name| named(&name)).unwrap_or_else(|reason| {
            eprintln!("KILN_ISA: {reason}; using {}", best.name());
            best
        })
    })
}

/// The instruction set of that name, or why it cannot be had.
fn named(name: &str) -> Result<Isa, String> {
    match Isa::ALL.into_iter().find(|isa| isa.name() == name) {
        Some(isa) if isa.supported() => Ok(isa),
        Some(isa) => Err(format!("this machine has no {}", isa.name())),
        None => Err(format!("{name:?} is none of {}", Isa::ALL.map(Isa::name).join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_followed_or_refused() {
        for isa in Isa::ALL {
            assert_eq!(named(isa.name()).ok(), isa.supported().then_some(isa));
        }
        assert_eq!(named("AVX2").unwrap_err(), "\"AVX2\" is none of avx512, avx2, interp");
    }
}
