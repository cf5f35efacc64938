//! The floating-point environment that results are computed in: rounding to nearest, subnormals kept, no traps.
//!
//! A thread inherits it from whoever started it, and a library built for fast mathematics may have set it otherwise. Whoever
//! computes says [`standard`] first, so that results do not depend on whose thread did it.

/// Runs `f` in the standard environment, and puts the thread's own back afterwards.
pub fn standard<T>(f: impl FnOnce() -> T) -> T {
    let _own = Own(control::get());
    control::set(control::STANDARD);
    f()
}

/// What a thread had set, put back even where a panic passes.
struct Own(control::Word);

impl Drop for Own {
    fn drop(&mut self) {
        control::set(self.0);
    }
}

#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    pub type Word = u32;
    /// All exceptions masked, everything else 0.
    pub const STANDARD: Word = 0x1f80;

    pub fn get() -> Word {
        let mut word: Word = 0;
        // SAFETY: it stores four bytes there.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack, preserves_flags)) };
        word
    }

    pub fn set(word: Word) {
        // Setting it takes longer than looking.
        if get() != word {
            // SAFETY: it reads four bytes. The word is the standard one, or what the thread had.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &word, options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    pub type Word = u64;
    pub const STANDARD: Word = 0;

    pub fn get() -> Word {
        let word: Word;
        // SAFETY: it reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub fn set(word: Word) {
        if get() != word {
            // SAFETY: the word is the standard one, or what the thread had.
            unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
        }
    }
}

/// Elsewhere the environment is taken as it is.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub type Word = ();
    pub const STANDARD: Word = ();
    pub fn get() {}
    pub fn set(_: Word) {}
}
