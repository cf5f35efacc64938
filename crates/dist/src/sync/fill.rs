//! A bucket that is being filled: each gradient is computed in its place, or copied there where the device cannot.

use kiln_group::{Buffer, Promise, Range};
use kiln_tensor::{Bytes, Data, Error, Host, Tensor};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// What goes where in a bucket: a tensor, the part of the rank's contribution, and the first byte.
pub(crate) type Piece = (Tensor, usize, usize);

struct Filling {
    open: Mutex<Option<Open>>,
    copied: Arc<AtomicU64>,
}

struct Open {
    promise: Promise,
    /// Taken when the first piece is computed: that of the last step is back by then, and two steps in a row go through
    /// the same cache lines.
    buffer: Option<Buffer>,
    /// Why the contribution is none.
    failed: Option<String>,
    /// Pieces that are yet to come.
    left: usize,
}

/// Has all pieces computed in a buffer, or copied there, in the background; then keeps the promise. A piece that fails
/// poisons the contribution. Returns at once. All are on one device. Counts the bytes that are `copied`.
pub(crate) fn fill(promise: Promise, pieces: Vec<Piece>, copied: &Arc<AtomicU64>) {
    start([Placed::new(promise, pieces, copied)], true);
}

/// A bucket whose pieces are recorded, each with its place, and not computed yet.
pub(crate) struct Placed {
    filling: Arc<Filling>,
    pieces: Vec<Piece>,
}

impl Placed {
    pub(crate) fn new(promise: Promise, mut pieces: Vec<Piece>, copied: &Arc<AtomicU64>) -> Placed {
        let open = Open { promise, buffer: None, failed: None, left: pieces.len() };
        let filling = Arc::new(Filling { open: Mutex::new(Some(open)), copied: copied.clone() });
        for (tensor, part, start) in &mut pieces {
            let (filling, part, range) = (filling.clone(), *part, *start..*start + tensor.meta().bytes());
            *tensor = tensor.computed_in(move || filling.place(part, range.clone()));
        }
        Placed { filling, pieces }
    }
}

impl Drop for Placed {
    /// One that is not started breaks its promise, which its pieces' places hold too.
    fn drop(&mut self) {
        if !self.pieces.is_empty() {
            drop(self.filling.open().take());
        }
    }
}

/// Has them computed, in the background or when the device runs.
pub(crate) fn start(buckets: impl IntoIterator<Item = Placed>, background: bool) {
    let mut reads = Vec::new();
    for mut bucket in buckets {
        let pieces = std::mem::take(&mut bucket.pieces);
        if pieces.is_empty() {
            bucket.filling.over();
        }
        // The window ends with the first.
        reads.extend(pieces.into_iter().map(|(tensor, part, start)| {
            let filling = bucket.filling.clone();
            (tensor.to_data_async(), move |answer| filling.came(part, start, answer))
        }));
    }
    if let (Some((read, _)), true) = (reads.last(), background) {
        read.start();
    }
    for (read, came) in reads {
        read.on_answer(came);
    }
}

impl Filling {
    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Where a piece is to be computed.
    fn place(&self, part: usize, range: std::ops::Range<usize>) -> Option<Bytes> {
        let mut open = self.open();
        let buffer = open.as_mut()?.buffer().ok()?;
        Some(Bytes::new(Place(buffer.range(part, range))))
    }

    fn came(&self, part: usize, start: usize, answer: Result<Data, Error>) {
        let mut state = self.open();
        let Some(open) = &mut *state else { return };
        let copied = answer.map_err(|e| e.to_string()).and_then(|data| open.put(part, start, &data.bytes));
        match copied {
            Ok(bytes) => drop(self.copied.fetch_add(bytes, Ordering::Relaxed)),
            Err(reason) => open.failed = Some(reason),
        }
        open.left -= 1;
        if open.left == 0 {
            drop(state);
            self.over();
        }
    }

    /// Nothing more comes.
    fn over(&self) {
        let open = self.open().take();
        open.into_iter().for_each(Open::keep);
    }
}

impl Open {
    fn buffer(&mut self) -> Result<&mut Buffer, kiln_group::Error> {
        match &mut self.buffer {
            Some(buffer) => Ok(buffer),
            none => Ok(none.insert(self.promise.buffer()?)),
        }
    }

    /// Puts a piece in its place, if it is not there. Gives the number of bytes that were copied.
    fn put(&mut self, part: usize, start: usize, bytes: &[u8]) -> Result<u64, String> {
        let buffer = self.buffer().map_err(|e| e.to_string())?;
        let place = start..start + bytes.len();
        if std::ptr::eq(buffer.range(part, place.clone()).start(), bytes.as_ptr()) {
            return Ok(0);
        }
        buffer.part_mut(part)[place].copy_from_slice(bytes);
        Ok(bytes.len() as u64)
    }

    fn keep(mut self) {
        let made = self.buffer().map(|_| ()).map_err(|e| e.to_string());
        match (self.failed.or(made.err()), self.buffer) {
            (None, Some(buffer)) => {
                // Refused only where the group has ended, which whoever waits is told.
                let _ = self.promise.give(buffer);
            }
            (reason, _) => self.promise.fail(&reason.unwrap_or_default()),
        }
    }
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
