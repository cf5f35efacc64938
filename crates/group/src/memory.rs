//! Memory that collectives work on: on the heap, or a mapping that other processes see.

use crate::Error;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
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
    pub(crate) fn heap(bytes: usize, id: u64) -> Region {
        let (size, align) = if bytes >= HUGE {
            (bytes.next_multiple_of(HUGE), HUGE)
        } else {
            (bytes.next_multiple_of(64).max(64), 64)
        };
        let layout = Layout::from_size_align(size, align).expect("a size below isize::MAX");
        // SAFETY: the size is not 0.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        if align == HUGE {
            // SAFETY: advice about memory that was just allocated; a refusal changes nothing.
            unsafe { libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
        }
        Region { start, bytes: size, id, home: Home::Heap(layout) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
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
        let bytes = bytes.max(1).next_multiple_of(page);
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant string.
        let fd = unsafe { libc::memfd_create(c"kiln-group".as_ptr(), flags) };
        if fd < 0 {
            return Err(last("memfd_create"));
        }
        // SAFETY: just opened, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain calls on a descriptor that we own. Sealed, so that no peer can cut memory that others map.
        unsafe {
            if libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) < 0 {
                return Err(last("ftruncate"));
            }
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            if libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) < 0 {
                return Err(last("F_ADD_SEALS"));
            }
        }
        let region = Region::map(fd.as_fd(), bytes, id)?;
        Ok((region, fd))
    }

    /// Maps shared memory of that size, on huge pages where it is large and the system has them.
    pub(crate) fn map(fd: std::os::fd::BorrowedFd<'_>, bytes: usize, id: u64) -> Result<Region, Error> {
        // SAFETY: zeroed stat is a valid out parameter.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) < 0 {
                return Err(last("fstat"));
            }
            stat.st_size
        };
        if size as usize != bytes || bytes == 0 {
            return Err(Error::system("shared memory", format!("{size} bytes, not {bytes}")));
        }
        let huge = bytes.is_multiple_of(HUGE);
        let room = if huge { bytes + HUGE } else { bytes };
        // SAFETY: a fresh reservation; then a mapping inside it, the rest of which is given back.
        unsafe {
            let base = libc::mmap(
                std::ptr::null_mut(),
                room,
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
            if base + room > start + bytes {
                libc::munmap((start + bytes) as *mut _, base + room - start - bytes);
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

#[cfg(target_os = "linux")]
pub(crate) fn last(what: &str) -> Error {
    Error::system(what, std::io::Error::last_os_error())
}
