//! A bucket that is being filled: each gradient is computed in its place, or copied there where the device cannot; what is
//! there from the bucket's beginning on may leave.

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
    /// Takes its memory when the first piece is computed: that of the last step is back by then, and two steps in a row
    /// go through the same cache lines.
    promise: Promise,
    /// Why the contribution is none.
    failed: Option<String>,
    /// How far each piece is, in the order of their places.
    pieces: Vec<Progress>,
    /// All pieces before this one are there.
    first: usize,
    /// Pieces that are yet to come.
    left: usize,
}

/// How many of a piece's bytes are there.
struct Progress {
    start: usize,
    there: usize,
    bytes: usize,
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
        pieces.sort_by_key(|&(_, _, start)| start);
        let progress =
            |(tensor, _, start): &Piece| Progress { start: *start, there: 0, bytes: tensor.meta().bytes() };
        let (left, progress) = (pieces.len(), pieces.iter().map(progress).collect());
        let open = Open { promise, failed: None, pieces: progress, first: 0, left };
        let filling = Arc::new(Filling { open: Mutex::new(Some(open)), copied: copied.clone() });
        for (piece, (tensor, part, _)) in pieces.iter_mut().enumerate() {
            let (filling, part) = (filling.clone(), *part);
            *tensor = tensor.computed_in(move || Filling::place(&filling, piece, part));
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
        reads.extend(pieces.into_iter().enumerate().map(|(piece, (tensor, part, _))| {
            let (filling, device) = (bucket.filling.clone(), tensor.device());
            let came = move |answer: Result<Data, Error>| {
                // All ranks are told, this one too.
                answer.as_ref().err().into_iter().for_each(|error| device.told(error));
                filling.came(piece, part, answer);
            };
            (tensor.content(), came)
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
    fn place(self: &Arc<Self>, piece: usize, part: usize) -> Option<Bytes> {
        let mut open = self.open();
        let open = open.as_mut()?;
        let &Progress { start, bytes, .. } = open.pieces.get(piece)?;
        let range = open.promise.range(part, start..start + bytes).ok()??;
        Some(Bytes::new(Place { range, filling: self.clone(), piece }))
    }

    fn came(&self, piece: usize, part: usize, answer: Result<Data, Error>) {
        let mut state = self.open();
        let Some(open) = &mut *state else { return };
        let start = open.pieces[piece].start;
        let copied = answer
            .map_err(|e| e.to_string())
            .and_then(|data| open.promise.put(part, start, &data.bytes).map_err(|e| e.to_string()));
        match copied {
            Ok(bytes) => {
                self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
                let _ = open.reach(piece, usize::MAX);
            }
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
    /// Some of a piece is there: the exchange may begin with what is there of all. As [`Promise::reach`] tells.
    fn reach(&mut self, piece: usize, there: usize) -> bool {
        let Progress { there: before, bytes, .. } = &mut self.pieces[piece];
        *before = there.min(*bytes).max(*before);
        while self.pieces.get(self.first).is_some_and(|p| p.there == p.bytes) {
            self.first += 1;
        }
        let rest = &self.pieces[self.first..];
        let Some(Progress { start, .. }) = rest.first() else { return false };
        // Several parts have one place.
        let beside = rest.iter().take_while(|p| p.start == *start);
        let end = start + beside.map(|p| p.there).min().unwrap_or(0);
        self.promise.reach(end).unwrap_or_else(|error| {
            self.failed = Some(error.to_string());
            false
        })
    }

    fn keep(self) {
        match self.failed {
            // Refused only where the group has ended, which whoever waits is told.
            None => drop(self.promise.give()),
            Some(reason) => self.promise.fail(&reason),
        }
    }
}

/// A gradient's place in a bucket, for a device to compute it there.
struct Place {
    range: Range,
    filling: Arc<Filling>,
    piece: usize,
}

#[allow(unsafe_code)]
// SAFETY: the range stays with its region. Pieces do not overlap; a piece is exchanged, which writes it, only once the device
// has told that it is there or has given its content, and the tensor that is computed there is this bucket's alone.
unsafe impl Host for Place {
    fn bytes(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { self.range.bytes() }
    }

    fn target(&self) -> Option<*mut u8> {
        Some(self.range.start())
    }

    fn reached(&self, end: usize) {
        let step_aside = self.filling.open().as_mut().is_some_and(|open| open.reach(self.piece, end));
        if step_aside {
            std::thread::yield_now();
        }
    }
}

/// A bucket's memory, lent to a device that reads the results from it.
pub(crate) struct Lent(pub Buffer);

#[allow(unsafe_code)]
// SAFETY: the buffer is back from its collective, and is written again only when this is gone.
unsafe impl kiln_tensor::Host for Lent {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn is_lent(&self) -> bool {
        true
    }
}
