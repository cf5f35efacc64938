//! Memory that collectives work on: on the heap, or a mapping that other processes see.

use crate::Error;
use std::alloc::{Layout, alloc_zeroed, dealloc};
#[cfg(target_os = "linux")]
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A huge page.
const HUGE: usize = 2 << 20;

/// Zeroed memory with a fixed address.
pub(crate) struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// How peers call it; 0 if they cannot reach it.
    pub id: u64,
    home: Home,
}

enum Home {
    Heap(Layout),
    #[cfg(target_os = "linux")]
    Mapped,
}

// SAFETY: a region is plain memory; who reads and writes it when is settled by the sequence of collectives.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Memory of this process. Large ones start on a huge page.
    pub(crate) fn heap(bytes: usize, id: u64) -> Result<Region, Error> {
        let align = if bytes >= HUGE { HUGE } else { 64 };
        let size = bytes.max(1).checked_next_multiple_of(align).ok_or_else(|| none(bytes))?;
        let layout = Layout::from_size_align(size, align).map_err(|_| none(bytes))?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| none(bytes))?;
        #[cfg(target_os = "linux")]
        if align == HUGE {
            // SAFETY: advice about memory that was just allocated; a refusal changes nothing.
            unsafe { libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
        }
        Ok(Region { start, bytes: size, id, home: Home::Heap(layout) })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// There is no memory of that size.
pub(crate) fn none(bytes: usize) -> Error {
    Error::system("memory", format!("{bytes} bytes cannot be had"))
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.home {
            // SAFETY: allocated with this layout.
            Home::Heap(layout) => unsafe { dealloc(self.start.as_ptr(), layout) },
            // SAFETY: mapped with this length, and no longer used.
            #[cfg(target_os = "linux")]
            Home::Mapped => unsafe {
                libc::munmap(self.start.as_ptr().cast(), self.bytes);
            },
        }
    }
}

#[cfg(target_os = "linux")]
impl Region {
    /// New shared memory and the descriptor by which others map it. It has no name and is gone with its last user.
    pub(crate) fn shared(bytes: usize, id: u64) -> Result<(Region, OwnedFd), Error> {
        let page = if bytes >= HUGE / 2 { HUGE } else { 4096 };
        let rounded = bytes.max(1).checked_next_multiple_of(page);
        let bytes = rounded.filter(|&b| b <= isize::MAX as usize - HUGE).ok_or_else(|| none(bytes))?;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant string.
        let fd = unsafe { libc::memfd_create(c"kiln-group".as_ptr(), flags) };
        if fd < 0 {
            return Err(last("memfd_create"));
        }
        // SAFETY: just opened, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Every page is there from now on: one that could not be had later would end whoever touches it.
        // SAFETY: plain call on a descriptor that we own.
        while unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, bytes as libc::off_t) } < 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(Error::system("memory", format!("{bytes} bytes to share: {error}")));
            }
        }
        // SAFETY: as above. Sealed, so that no peer can cut memory that others map.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL) } < 0 {
            return Err(last("F_ADD_SEALS"));
        }
        let region = Region::map(fd.as_fd(), bytes, id)?;
        Ok((region, fd))
    }

    /// Maps shared memory of that size, on huge pages where it is large and the system has them. Who has sent it must
    /// have sealed it: it stays that large.
    pub(crate) fn map(fd: std::os::fd::BorrowedFd<'_>, bytes: usize, id: u64) -> Result<Region, Error> {
        // SAFETY: plain call; a descriptor of another kind is an error of its own.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(Error::system("shared memory", "it is not sealed: its owner could cut it"));
        }
        // SAFETY: zeroed stat is a valid out parameter.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) < 0 {
                return Err(last("fstat"));
            }
            stat.st_size
        };
        if size as usize != bytes || bytes == 0 || bytes > isize::MAX as usize - HUGE {
            return Err(Error::system("shared memory", format!("{size} bytes, not {bytes}")));
        }
        let huge = bytes.is_multiple_of(HUGE);
        let reserved = if huge { bytes + HUGE } else { bytes };
        // SAFETY: a fresh reservation; then a mapping inside it, the rest of which is given back.
        unsafe {
            let base = libc::mmap(
                std::ptr::null_mut(),
                reserved,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if base == libc::MAP_FAILED {
                return Err(last("mmap"));
            }
            let base = base as usize;
            let start = if huge { base.next_multiple_of(HUGE) } else { base };
            if start > base {
                libc::munmap(base as *mut _, start - base);
            }
            if base + reserved > start + bytes {
                libc::munmap((start + bytes) as *mut _, base + reserved - start - bytes);
            }
            let mapped = libc::mmap(
                start as *mut _,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                0,
            );
            if mapped == libc::MAP_FAILED {
                let error = last("mmap");
                libc::munmap(start as *mut _, bytes);
                return Err(error);
            }
            if huge {
                /// Since Linux 6.1. Pages that are there become huge ones, whatever the policy for shared memory.
                const MADV_COLLAPSE: libc::c_int = 25;
                libc::madvise(mapped, bytes, MADV_COLLAPSE);
            }
            let start = NonNull::new(mapped.cast()).expect("a mapping is not null");
            Ok(Region { start, bytes, id, home: Home::Mapped })
        }
    }
}

/// What makes it safe to map what somebody else owns.
#[cfg(target_os = "linux")]
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

#[cfg(target_os = "linux")]
pub(crate) fn last(what: &str) -> Error {
    Error::system(what, std::io::Error::last_os_error())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_its_owner_could_cut_is_not_mapped() {
        let (region, fd) = Region::shared(5000, 1).unwrap();
        assert_eq!(region.bytes(), 8192);
        assert!(Region::map(fd.as_fd(), 8192, 1).is_ok());
        assert!(Region::map(fd.as_fd(), 4096, 1).is_err(), "another size than was told");
        for seals in [0, libc::F_SEAL_GROW, libc::F_SEAL_SHRINK] {
            // SAFETY: plain calls on a descriptor of this test.
            let open = unsafe {
                let fd = libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
                assert_eq!((libc::ftruncate(fd, 8192), libc::fcntl(fd, libc::F_ADD_SEALS, seals)), (0, 0));
                OwnedFd::from_raw_fd(fd)
            };
            let error = Region::map(open.as_fd(), 8192, 1).map(drop).unwrap_err();
            assert!(error.to_string().contains("not sealed"), "{error}");
        }
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let length = file.metadata().unwrap().len() as usize;
        assert!(Region::map(file.as_fd(), length, 1).is_err(), "no shared memory at all");
    }

    #[test]
    fn a_size_that_no_memory_has_is_an_error() {
        for bytes in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096] {
            assert_eq!(Region::heap(bytes, 0).map(drop), Err(none(bytes)));
            assert!(Region::shared(bytes, 0).map(drop).is_err(), "{bytes}");
        }
    }
}
