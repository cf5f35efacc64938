//! Memory for large answers, used again: fresh pages cost nearly as much as the bytes that come over a network.

use kiln_device::{Bytes, Host};
use std::sync::{Mutex, MutexGuard};

/// Answers below this come from the system's allocator, which has its own ways.
const LEAST: usize = 1 << 20;
/// Bytes kept at most.
const MOST: usize = 512 << 20;

static FREE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<Vec<u8>>> {
    FREE.lock().unwrap_or_else(|e| e.into_inner())
}

/// Empty memory for `len` bytes, if the system has it.
pub fn take(len: usize) -> Option<Vec<u8>> {
    if len >= LEAST {
        let mut free = lock();
        // A buffer twice as large would waste more than it saves.
        let fits = |buffer: &Vec<u8>| (len..=2 * len).contains(&buffer.capacity());
        if let Some(at) = free.iter().position(fits) {
            return Some(free.swap_remove(at));
        }
    }
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).ok()?;
    Some(buffer)
}

/// Filled memory, which comes back when nobody holds it any more.
pub fn filled(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < LEAST { Bytes::new(buffer) } else { Bytes::new(PooledBuffer(buffer)) }
}

/// Gives everything back to the system.
pub fn cleanup() {
    let free = std::mem::take(&mut *lock());
    drop(free);
}

struct PooledBuffer(Vec<u8>);

#[allow(unsafe_code)]
// SAFETY: a vector that is only shared neither moves nor changes.
unsafe impl Host for PooledBuffer {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.0);
        buffer.clear();
        let mut free = lock();
        let held: usize = free.iter().map(Vec::capacity).sum();
        if held + buffer.capacity() <= MOST {
            free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_comes_back_and_small_does_not() {
        // A size of its own: other tests share the pool.
        let size = 3 << 20;
        let mut buffer = take(size).unwrap();
        buffer.resize(size, 7);
        let address = buffer.as_ptr();
        let bytes = filled(buffer);
        let part = bytes.slice(5..9);
        drop(bytes);
        let other = take(size).unwrap();
        assert!(*part == [7; 4] && other.as_ptr() != address, "it is still held");
        drop((part, other));
        let again = take(size).unwrap();
        assert!(again.as_ptr() == address && again.is_empty());
        assert!(take(usize::MAX / 2).is_none());
    }
}
