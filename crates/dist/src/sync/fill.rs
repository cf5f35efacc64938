//! A bucket that is being filled: each gradient goes to its place as the device computes it.

use kiln_group::{Buffer, Promise};
use kiln_tensor::{Data, Error, Tensor};
use std::sync::{Arc, Mutex};

/// What goes where in a bucket: a tensor, the part of the rank's contribution, and the first byte.
pub(crate) type Piece = (Tensor, usize, usize);

struct Filling(Mutex<Option<Open>>);

struct Open {
    buffer: Buffer,
    promise: Promise,
    /// Pieces that are yet to come.
    left: usize,
}

/// Has all pieces computed and copied into the buffer, in the background; then keeps the promise. A piece that fails
/// poisons the contribution. Returns at once. All are on one device.
pub(crate) fn fill(promise: Promise, buffer: Buffer, pieces: Vec<Piece>) {
    if pieces.is_empty() {
        return give(promise, buffer);
    }
    let left = pieces.len();
    let filling = Arc::new(Filling(Mutex::new(Some(Open { buffer, promise, left }))));
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
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let Some(open) = &mut *state else { return };
        match answer {
            Ok(data) => {
                open.buffer.part_mut(part)[start..start + data.bytes.len()].copy_from_slice(&data.bytes)
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
