//! Large blocks on huge pages, which the system gives out zeroed, and guarded ones between pages that nobody may touch.

use std::io::Write;
use std::ptr::{NonNull, null_mut};

/// The size of a huge page; smaller blocks cannot have one.
pub const LARGE: usize = 2 << 20;
const PAGE: usize = 4096;

pub fn map(size: usize) -> Option<NonNull<u8>> {
    let size = size.next_multiple_of(PAGE);
    // One huge page more than needed, so that a huge-page boundary can be cut out of it: older kernels align
    // mappings to small pages only, and then the first and last 2 MiB stay small.
    let whole = size.checked_add(LARGE)?;
    // SAFETY: a new private mapping touches no existing memory.
    let start = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), whole, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let before = start.align_offset(LARGE);
    let ptr = start.wrapping_byte_add(before);
    // SAFETY: the three ranges lie in the mapping just made, and nobody has its address yet. The advice may be
    // refused (no huge pages on this host), which changes only speed.
    unsafe {
        if before > 0 {
            libc::munmap(start, before);
        }
        if before < LARGE {
            libc::munmap(ptr.wrapping_byte_add(size), LARGE - before);
        }
        libc::madvise(ptr, size, libc::MADV_HUGEPAGE);
    }
    NonNull::new(ptr.cast())
}

/// # Safety
/// `ptr` came from `map(size)`.
pub unsafe fn unmap(ptr: NonNull<u8>, size: usize) {
    // SAFETY: the whole mapping, as `map` left it.
    unsafe { libc::munmap(ptr.as_ptr().cast(), size.next_multiple_of(PAGE)) };
}

/// Gives the whole pages of a part of a mapping back. The system may refuse, which costs only memory.
///
/// # Safety
/// The part is of a mapping of this module, and nobody uses it any more.
pub unsafe fn discard(ptr: NonNull<u8>, size: usize) {
    let before = ptr.as_ptr().align_offset(PAGE);
    let len = size.saturating_sub(before) / PAGE * PAGE;
    if len > 0 {
        // SAFETY: the caller's promise.
        unsafe { libc::madvise(ptr.as_ptr().wrapping_add(before).cast(), len, libc::MADV_DONTNEED) };
    }
}

/// What is around a guarded block up to the pages that nobody may touch.
const PATTERN: u8 = 0xa5;

/// Where the pages of a guarded block are, seen from its first byte: how far before it, and how long.
fn around(size: usize) -> Option<(usize, usize)> {
    let used = size.checked_next_multiple_of(super::ALIGN)?;
    let pages = used.checked_next_multiple_of(PAGE)?;
    Some((pages - used, pages))
}

/// A block that ends where a page begins that nobody may touch, but for what its alignment takes, and that has such a
/// page before it too.
pub fn map_guarded(size: usize) -> Option<NonNull<u8>> {
    let (before, pages) = around(size)?;
    let whole = pages.checked_add(2 * PAGE)?;
    // SAFETY: a new private mapping touches no existing memory; what is opened lies in it, and so does what is
    // filled.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let start = libc::mmap(null_mut(), whole, libc::PROT_NONE, flags, -1, 0);
        if start == libc::MAP_FAILED {
            return None;
        }
        let first = start.cast::<u8>().wrapping_add(PAGE);
        if libc::mprotect(first.cast(), pages, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            libc::munmap(start, whole);
            return None;
        }
        first.write_bytes(PATTERN, before);
        first.add(before + size).write_bytes(PATTERN, pages - before - size);
        NonNull::new(first.add(before))
    }
}

/// Ends the process if somebody wrote beside the block.
///
/// # Safety
/// `ptr` came from `map_guarded(size)`.
pub unsafe fn unmap_guarded(ptr: NonNull<u8>, size: usize) {
    let Some((before, pages)) = around(size) else { return };
    // SAFETY: the pages as `map_guarded` left them.
    unsafe {
        let first = ptr.as_ptr().sub(before);
        let all = std::slice::from_raw_parts(first, pages);
        let (front, back) = (&all[..before], &all[before + size..]);
        if front.iter().chain(back).any(|&byte| byte != PATTERN) {
            let message = format_args!("KILN_GUARD: somebody wrote beside a buffer of {size} bytes\n");
            let _ = std::io::stderr().write_fmt(message);
            std::process::abort();
        }
        libc::munmap(first.sub(PAGE).cast(), pages + 2 * PAGE);
    }
}
