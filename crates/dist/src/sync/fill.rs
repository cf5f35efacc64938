//! A bucket that is being filled: each gradient is computed in its place, or copied there where the device cannot.

use kiln_group::{Buffer, Promise, Range};
use kiln_tensor::{Bytes, Data, Error, Host, Tensor};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What goes where in a bucket: a tensor, the part of the rank's contribution, and the first byte.
pub(crate) type Piece = (Tensor, usize, usize);

struct Filling {
    open: Mutex<Option<Open>>,
    copied: Arc<AtomicU64>,
}

struct Open {
    buffer: Buffer,
    promise: Promise,
    /// Pieces that are yet to come.
    left: usize,
}

/// Has all pieces computed in the buffer, or copied there, in the background; then keeps the promise. A piece that fails
/// poisons the contribution. Returns at once. All are on one device. Counts the bytes that are `copied`.
pub(crate) fn fill(promise: Promise, buffer: Buffer, mut pieces: Vec<Piece>, copied: &Arc<AtomicU64>) {
    if pieces.is_empty() {
        return give(promise, buffer);
    }
    for (tensor, part, start) in &mut pieces {
        let end = *start + tensor.meta().bytes();
        *tensor = tensor.computed_in(Bytes::new(Place(buffer.range(*part, *start..end))));
    }
    let left = pieces.len();
    let open = Mutex::new(Some(Open { buffer, promise, left }));
    let filling = Arc::new(Filling { open, copied: copied.clone() });
    // The window ends here, and runs while more is recorded.
    pieces[0].0.device().submit();
    let last = pieces.len() - 1;
    for (i, (tensor, part, start)) in pieces.into_iter().enumerate() {
        let read = tensor.to_data_async();
        if i == last {
            read.start();
        }
        let filling = filling.clone();
        read.on_answer(move |answer| filling.came(part, start, answer));
    }
}

impl Filling {
    fn came(&self, part: usize, start: usize, answer: Result<Data, Error>) {
        let mut state = self.open.lock().unwrap_or_else(|e| e.into_inner());
        let Some(open) = &mut *state else { return };
        match answer {
            Ok(data) => {
                let place = start..start + data.bytes.len();
                if !std::ptr::eq(open.buffer.range(part, place.clone()).start(), data.bytes.as_ptr()) {
                    self.copied.fetch_add(place.len() as u64, Ordering::Relaxed);
                    open.buffer.part_mut(part)[place].copy_from_slice(&data.bytes);
                }
            }
            Err(error) => open.buffer.poison(&error.to_string()),
        }
        open.left -= 1;
        if open.left == 0
            && let Some(Open { buffer, promise, .. }) = state.take()
        {
            give(promise, buffer);
        }
    }
}

fn give(promise: Promise, buffer: Buffer) {
    // Refused only where the group has ended, which whoever waits is told.
    let _ = promise.give(buffer);
}

/// A gradient's place in a bucket, for a device to compute it there.
struct Place(Range);

impl Host for Place {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn target(&self) -> Option<*mut u8> {
        Some(self.0.start())
    }
}

/// A bucket's memory, lent to a device that reads the results from it.
pub(crate) struct Lent(pub Buffer);

impl kiln_tensor::Host for Lent {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn is_lent(&self) -> bool {
        true
    }
}
