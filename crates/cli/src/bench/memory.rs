//! How much memory a process takes at its largest, as the system counts it.

use std::fs;

/// A span of time over which the process's largest size is watched.
pub struct Growth {
    /// Resident bytes at its start.
    before: usize,
}

impl Growth {
    /// Starts one; `None` where the system does not tell.
    pub fn start() -> Option<Growth> {
        // 5 sets the largest size back to the present one.
        fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Growth { before: resident("VmRSS:")? })
    }

    /// By how many bytes the process grew since, at its largest.
    pub fn end(self) -> Option<usize> {
        Some(resident("VmHWM:")?.saturating_sub(self.before))
    }
}

fn resident(field: &str) -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_for_a_moment_is_seen() {
        // Other tests come and go in this process, so one look may see less; the system counts in batches.
        let seen = |_| {
            let Some(growth) = Growth::start() else { return true };
            drop(std::hint::black_box(vec![1u8; 64 << 20]));
            growth.end().unwrap() >= 60 << 20
        };
        assert!((0..10).any(seen));
    }
}
