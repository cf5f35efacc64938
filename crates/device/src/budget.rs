//! A budget of bytes that everything which holds memory draws from, so that a process refuses with an error instead of
//! being killed.
//!
//! [`Budget::process`] is the one of this process: arenas draw from it for what they map, servers for what sessions make
//! them hold. A [`Share`] gives its bytes back when it is dropped. Shares are taken by the block, not by the tensor.

use crate::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// How many bytes may be held, and how many are.
pub struct Budget {
    limit: AtomicUsize,
    used: AtomicUsize,
    /// What it is a part of: every share is drawn from there too.
    whole: Option<Arc<Budget>>,
}

static PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(available()));

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> Arc<Budget> {
        Arc::new(Budget { limit: AtomicUsize::new(limit), used: AtomicUsize::new(0), whole: None })
    }

    /// The budget of this process: 80 % of what its control group, its resource limits and the machine's free memory
    /// allow, whichever is least, as of the first call. [`Budget::set_limit`] changes it.
    pub fn process() -> &'static Arc<Budget> {
        &PROCESS
    }

    /// A budget of `limit` bytes within this one.
    pub fn part(self: &Arc<Self>, limit: usize) -> Arc<Budget> {
        let whole = Some(self.clone());
        Arc::new(Budget { limit: AtomicUsize::new(limit), used: AtomicUsize::new(0), whole })
    }

    /// The most bytes that may be held; `usize::MAX` for no limit.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Bytes held now.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may still be taken.
    pub fn free(&self) -> usize {
        let own = self.limit().saturating_sub(self.used());
        self.whole.as_ref().map_or(own, |whole| own.min(whole.free()))
    }

    /// Changes the limit. What is held already stays.
    pub fn set_limit(&self, bytes: usize) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Takes `bytes`, until the share is dropped.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Share, Error> {
        self.draw(bytes)?;
        Ok(Share { budget: self.clone(), bytes })
    }

    fn draw(&self, bytes: usize) -> Result<(), Error> {
        let fits = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= self.limit());
        if bytes > 0 && self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return Err(Error::OutOfMemory { asked: bytes, free: self.free(), limit: self.limit() });
        }
        if let Some(whole) = &self.whole
            && let Err(error) = whole.draw(bytes)
        {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(error);
        }
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.give_back(bytes);
        }
    }
}

impl std::fmt::Debug for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} bytes used", self.used(), self.limit())
    }
}

/// Bytes taken from a [`Budget`], given back on drop.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Share {
    /// How many.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes more or gives some back, so that it holds `bytes`. After an error it is as before.
    pub fn resize(&mut self, bytes: usize) -> Result<(), Error> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.budget.draw(more)?,
            None => self.budget.give_back(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

/// 80 % of what this process may come to hold; no limit where the system does not say.
fn available() -> usize {
    let least = system::limits().into_iter().min().unwrap_or(u64::MAX);
    if least == u64::MAX { usize::MAX } else { usize::try_from(least / 5 * 4).unwrap_or(usize::MAX) }
}

/// Linux tells all of it in files; elsewhere the system is asked for nothing, and only its refusals count.
#[cfg(target_os = "linux")]
mod system {
    use std::fs::read_to_string;
    use std::path::Path;

    pub fn limits() -> Vec<u64> {
        let read = |path: &str| read_to_string(path).unwrap_or_default();
        let mut limits = resources(&read("/proc/self/limits"));
        limits.extend(free(&read("/proc/meminfo")));
        limits.extend(group(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")));
        limits
    }

    /// The soft limits of the address space and of data.
    pub fn resources(limits: &str) -> Vec<u64> {
        let of = |line: &str| {
            let rest =
                line.strip_prefix("Max address space").or_else(|| line.strip_prefix("Max data size"))?;
            rest.split_whitespace().next()?.parse().ok()
        };
        limits.lines().filter_map(of).collect()
    }

    /// What can be had without swapping.
    pub fn free(meminfo: &str) -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    }

    /// The limits of the process's control groups of both versions, and of the groups that they are in.
    pub fn group(groups: &str, root: &Path) -> Vec<u64> {
        let mut limits = Vec::new();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let (base, file) = match controllers {
                "" => (root.to_path_buf(), "memory.max"),
                list if list.split(',').any(|name| name == "memory") => {
                    (root.join("memory"), "memory.limit_in_bytes")
                }
                _ => continue,
            };
            // A container may show the host's path of a group that it sees as the root.
            let own = base.join(path.trim_start_matches('/'));
            for dir in own.ancestors().take_while(|dir| dir.starts_with(&base)) {
                let text = read_to_string(dir.join(file)).unwrap_or_default();
                limits.extend(text.trim().parse::<u64>().ok());
            }
        }
        limits
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub fn limits() -> Vec<u64> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_come_back_and_never_pass_the_limit() {
        let budget = Budget::new(100);
        let mut first = budget.take(60).unwrap();
        assert_eq!(budget.take(41).unwrap_err(), Error::OutOfMemory { asked: 41, free: 40, limit: 100 });
        assert!(budget.take(usize::MAX).is_err());
        first.resize(100).unwrap();
        assert!(first.resize(101).is_err());
        assert_eq!((first.bytes(), budget.used()), (100, 100));
        first.resize(10).unwrap();
        assert_eq!(budget.free(), 90);
        drop(first);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_part_draws_from_the_whole_and_is_bounded_by_both() {
        let whole = Budget::new(100);
        let (a, b) = (whole.part(80), whole.part(80));
        let held = a.take(70).unwrap();
        assert_eq!(b.take(40).unwrap_err(), Error::OutOfMemory { asked: 40, free: 30, limit: 100 });
        assert_eq!((b.used(), b.free(), a.free()), (0, 30, 10));
        drop(held);
        assert_eq!((a.used(), whole.used()), (0, 0));
    }

    #[test]
    fn threads_never_take_more_than_there_is() {
        let budget = Budget::new(1000);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for i in 0..10_000 {
                        let share = budget.take(i % 400);
                        assert!(budget.used() <= 1000);
                        drop(share);
                    }
                });
            }
        });
        assert_eq!(budget.used(), 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_least_of_what_the_system_says_counts() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\n\
            Max data size             unlimited            unlimited            bytes     \n\
            Max address space         4294967296           unlimited            bytes     \n";
        assert_eq!(system::resources(limits), [4 << 30]);
        assert_eq!(system::free("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        let root = std::env::temp_dir().join(format!("kiln-budget-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("a/b/memory.max", "max\n");
        put("a/memory.max", "5000\n");
        put("memory/c/memory.limit_in_bytes", "7000\n");
        put("memory/memory.limit_in_bytes", "9223372036854771712\n");
        let groups = "4:memory:/c/gone\n3:cpuset:/x\n0::/a/b\n";
        let mut found = system::group(groups, &root);
        found.sort();
        assert_eq!(found, [5000, 7000, 9_223_372_036_854_771_712]);
        std::fs::remove_dir_all(&root).unwrap();
        assert!(Budget::process().limit() > 1 << 20);
    }
}
