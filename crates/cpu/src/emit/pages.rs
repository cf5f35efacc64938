//! Memory that holds code: written while it is data, then made executable and never written again.

use std::ptr::NonNull;

/// Executable pages, given back when dropped.
pub(super) struct Pages {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: nobody writes to the pages after `new`.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Pages with this code; `None` where the system refuses.
    #[cfg(unix)]
    pub fn new(code: &[u8]) -> Option<Pages> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping, at a place of the system's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), code.len(), access, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        let pages = Pages { at: NonNull::new(at.cast())?, bytes: code.len() };
        // SAFETY: the mapping is as long as the code, writable, and nobody else knows it.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), pages.at.as_ptr(), code.len()) };
        // SAFETY: our own mapping, of which nothing is borrowed.
        let done = unsafe { libc::mprotect(at, code.len(), libc::PROT_READ | libc::PROT_EXEC) };
        (done == 0).then_some(pages)
    }

    #[cfg(not(unix))]
    pub fn new(_: &[u8]) -> Option<Pages> {
        None
    }

    /// Where the code begins.
    pub fn start(&self) -> *const u8 {
        self.at.as_ptr()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: mapped by `new`, with this length, and used by nobody who does not hold `self`.
        unsafe {
            libc::munmap(self.at.as_ptr().cast(), self.bytes);
        }
    }
}
