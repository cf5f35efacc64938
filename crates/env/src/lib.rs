//! Every `KILN_*` variable of the environment: the one place that reads them.
//!
//! In: the environment, at each call. Out: a value of the variable's form, `None` where it is unset or empty, or
//! [`Invalid`]. Switches are all written alike: `1` or `0`, `on` or `off`, `true` or `false`, `yes` or `no`. What each
//! variable does is in README's table, which `cargo xtask check` compares with [`NAMES`] and with the tree.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Once;
use std::time::Duration;

macro_rules! variables {
    ($($variable:ident $name:literal $form:ident -> $ty:ty;)*) => {
        $(
            #[doc = concat!("`", $name, "`: see README.")]
            pub static $variable: Variable<$ty> = Variable::new($name, $form);
        )*

        /// The names of all variables.
        pub const NAMES: &[&str] = &[$($name,)*];

        /// The first variable that holds what it cannot mean.
        pub fn check() -> Result<(), Invalid> {
            $($variable.read()?;)*
            Ok(())
        }
    };
}
variables! {
    DEVICE "KILN_DEVICE" text -> String;
    REMOTE_ADDRESS "KILN_REMOTE_ADDRESS" text -> String;
    TOKEN "KILN_TOKEN" text -> String;
    ANY_NUMERICS "KILN_ANY_NUMERICS" switch -> bool;
    LINEAGE "KILN_LINEAGE" bytes -> usize;
    SNAPSHOT "KILN_SNAPSHOT" bytes -> usize;
    LINEAGE_FILES "KILN_LINEAGE_FILES" bytes -> usize;
    SPILL "KILN_SPILL" path -> PathBuf;
    THREADS "KILN_THREADS" count -> usize;
    CORES "KILN_CORES" count -> usize;
    DEADLINE "KILN_DEADLINE" seconds -> Duration;
    FLIGHT "KILN_FLIGHT" path -> PathBuf;
    ENGINE "KILN_ENGINE" engine -> String;
    EAGER "KILN_EAGER" switch -> bool;
    FUSE "KILN_FUSE" switch -> bool;
    PLAN "KILN_PLAN" switch -> bool;
    CODE "KILN_CODE" switch -> bool;
    CACHE "KILN_CACHE" path -> PathBuf;
    MEMORY "KILN_MEMORY" bytes -> usize;
    GRAPH "KILN_GRAPH" switch -> bool;
    RECORD "KILN_RECORD" path -> PathBuf;
    PROFILE "KILN_PROFILE" path -> PathBuf;
    ISA "KILN_ISA" isa -> String;
    GUARD "KILN_GUARD" switch -> bool;
    // What a launcher tells each rank.
    RANK "KILN_RANK" number -> u64;
    WORLD "KILN_WORLD" number -> u64;
    LOCAL_RANK "KILN_LOCAL_RANK" number -> u64;
    LOCAL_WORLD "KILN_LOCAL_WORLD" number -> u64;
    JOB "KILN_JOB" text -> String;
    RESTART "KILN_RESTART" number -> u64;
    // For Kiln's own tests and benchmarks.
    SEED "KILN_SEED" number -> u64;
    SEEDS "KILN_SEEDS" number -> u64;
    SWEEP "KILN_SWEEP" count -> usize;
    BLESS "KILN_BLESS" switch -> bool;
    GLOO "KILN_GLOO" path -> PathBuf;
}

/// A variable that holds what it cannot mean.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{variable}={value:?} is not {want}")]
pub struct Invalid {
    /// Its name.
    pub variable: &'static str,
    /// What it holds, or `…` for a secret.
    pub value: String,
    /// What it may hold.
    pub want: &'static str,
}

/// A variable whose values are of type `T`.
pub struct Variable<T> {
    name: &'static str,
    form: Form<T>,
    told: Once,
}

/// What may be written, in words, and what that means.
type Form<T> = fn(&OsStr) -> Result<T, &'static str>;

impl<T> Variable<T> {
    const fn new(name: &'static str, form: Form<T>) -> Variable<T> {
        Variable { name, form, told: Once::new() }
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// What it holds; `None` if it is unset or empty.
    pub fn read(&self) -> Result<Option<T>, Invalid> {
        std::env::var_os(self.name).filter(|held| !held.is_empty()).map(|held| self.parse(&held)).transpose()
    }

    /// What it holds, where nobody could be given an error: nonsense is told once, and then the variable counts as unset.
    pub fn get(&self) -> Option<T> {
        self.read().unwrap_or_else(|invalid| {
            self.told.call_once(|| eprintln!("kiln: {invalid}; it is ignored"));
            None
        })
    }

    fn parse(&self, held: &OsStr) -> Result<T, Invalid> {
        (self.form)(held).map_err(|want| {
            let secret = self.name == TOKEN.name;
            let value = if secret { "…".into() } else { held.to_string_lossy().into_owned() };
            Invalid { variable: self.name, value, want }
        })
    }
}

impl Variable<bool> {
    /// Whether a switch is on; it is off if nobody has set it.
    pub fn is_on(&self) -> bool {
        self.get().unwrap_or(false)
    }
}

fn switch(held: &OsStr) -> Result<bool, &'static str> {
    match held.to_string_lossy().trim().to_ascii_lowercase().as_str() {
        "1" | "on" | "true" | "yes" => Ok(true),
        "0" | "off" | "false" | "no" => Ok(false),
        _ => Err("1 or 0"),
    }
}

fn number(held: &OsStr) -> Result<u64, &'static str> {
    held.to_string_lossy().trim().parse().map_err(|_| "a whole number")
}

fn bytes(held: &OsStr) -> Result<usize, &'static str> {
    held.to_string_lossy().trim().parse().map_err(|_| "a number of bytes")
}

fn count(held: &OsStr) -> Result<usize, &'static str> {
    const WANT: &str = "a whole number of at least 1";
    held.to_string_lossy().trim().parse().ok().filter(|&n| n > 0).ok_or(WANT)
}

fn seconds(held: &OsStr) -> Result<Duration, &'static str> {
    let seconds = held.to_string_lossy().trim().parse().ok();
    let time = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
    time.filter(|time| !time.is_zero()).ok_or("a number of seconds above 0")
}

fn text(held: &OsStr) -> Result<String, &'static str> {
    held.to_str().map(str::to_string).ok_or("text in UTF-8")
}

fn path(held: &OsStr) -> Result<PathBuf, &'static str> {
    Ok(held.into())
}

fn engine(held: &OsStr) -> Result<String, &'static str> {
    word(held, &["shm", "mpi"]).ok_or("shm or mpi")
}

fn isa(held: &OsStr) -> Result<String, &'static str> {
    word(held, &["avx512", "avx2", "interp"]).ok_or("avx512, avx2 or interp")
}

fn word(held: &OsStr, known: &[&str]) -> Option<String> {
    known.iter().find(|word| held == **word).map(|word| word.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<T>(variable: &Variable<T>, held: &str) -> Result<T, String> {
        variable.parse(OsStr::new(held)).map_err(|invalid| invalid.to_string())
    }

    #[test]
    fn switches_are_all_written_alike() {
        for variable in [&EAGER, &FUSE, &PLAN, &CODE, &GRAPH, &GUARD, &ANY_NUMERICS] {
            assert!(["1", "on", "true", "yes", " ON "].iter().all(|held| of(variable, held) == Ok(true)));
            assert!(["0", "off", "false", "no"].iter().all(|held| of(variable, held) == Ok(false)));
        }
        assert_eq!(of(&FUSE, "maybe").unwrap_err(), "KILN_FUSE=\"maybe\" is not 1 or 0");
    }

    #[test]
    fn nonsense_is_told_with_what_is_wanted() {
        assert_eq!(of(&THREADS, "0").unwrap_err(), "KILN_THREADS=\"0\" is not a whole number of at least 1");
        assert_eq!(of(&MEMORY, "4G").unwrap_err(), "KILN_MEMORY=\"4G\" is not a number of bytes");
        for held in ["0", "-1", "nan", "inf", "1e300", "soon"] {
            assert!(of(&DEADLINE, held).unwrap_err().contains("seconds above 0"), "{held}");
        }
        assert_eq!(of(&DEADLINE, "2.5"), Ok(Duration::from_millis(2500)));
        assert_eq!(of(&ISA, "AVX2").unwrap_err(), "KILN_ISA=\"AVX2\" is not avx512, avx2 or interp");
        assert_eq!(of(&ENGINE, "mpi").as_deref(), Ok("mpi"));
    }

    #[cfg(unix)]
    #[test]
    fn a_token_that_is_no_text_is_not_repeated() {
        use std::os::unix::ffi::OsStrExt;
        let invalid = TOKEN.parse(OsStr::from_bytes(b"secret\xff")).unwrap_err();
        assert_eq!(invalid.to_string(), "KILN_TOKEN=\"…\" is not text in UTF-8");
    }
}
