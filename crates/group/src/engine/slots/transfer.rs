//! How contributions are combined, once all ranks have met.

use super::{Reach, SharedSlots};
use crate::Error;
use crate::buffer::Buffer;
use crate::call::{Op, Reduce, Signature};
use crate::engine::Wait;
use crate::reduce::Fold;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

impl SharedSlots {
    /// A world of one has nothing to combine, but a mean of one part is still finished like any other.
    pub(super) fn alone(&self, signature: &Signature, buffer: &mut Buffer) {
        if let Some(fold) = signature.op.reduce().and_then(|reduce| Fold::new(reduce, signature.dtype)) {
            let at = buffer.at(0);
            if self.layout.ranks() == 1 {
                // SAFETY: the buffer's own elements.
                unsafe { fold.tree(&[0], &[at], &[at], signature.length as usize, self.layout.shards()) };
            }
        }
    }

    /// All contributions are in the slots: every rank takes what it needs and combines for itself.
    pub(super) fn small(&self, signature: &Signature, buffer: &mut Buffer) {
        let data = |rank: usize| self.slot(rank, signature.sequence).data.get().cast::<u8>().cast_const();
        let (bytes, units) = (buffer.bytes, signature.length as usize);
        let unit = bytes / units;
        let target = buffer.at(0);
        let reduced = |reduce: Reduce, range: Range<usize>| {
            let fold = Fold::new(reduce, signature.dtype).expect("checked at the call");
            let mut leaves = Vec::with_capacity(self.program.len());
            for rank in 0..self.layout.ranks() {
                // SAFETY: parts lie one after another in the slot and fit it: all ranks agree on the length.
                leaves.extend(
                    (0..self.parts[rank])
                        .map(|p| unsafe { data(rank).add(p * buffer.stride + range.start * unit) }),
                );
            }
            // SAFETY: leaves are slots that stay as they are; the target is this rank's own buffer.
            unsafe {
                fold.tree(
                    &self.program,
                    &leaves,
                    &[target.add(range.start * unit)],
                    range.len(),
                    self.layout.shards(),
                )
            };
            let foreign = self.program.len() - self.parts[self.rank];
            self.read.fetch_add((foreign * range.len() * unit) as u64, Relaxed);
        };
        let copy = |rank: usize, range: Range<usize>| {
            if rank != self.rank {
                // SAFETY: a slot that stays as it is, into this rank's own buffer.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        data(rank).add(range.start * unit),
                        target.add(range.start * unit),
                        range.len() * unit,
                    )
                };
                self.read.fetch_add((range.len() * unit) as u64, Relaxed);
            }
        };
        match signature.op {
            Op::AllReduce(reduce) => reduced(reduce, 0..units),
            Op::ReduceScatter(reduce) => reduced(reduce, self.layout.piece(self.rank, units)),
            Op::AllGather => {
                (0..self.layout.ranks()).for_each(|rank| copy(rank, self.layout.piece(rank, units)))
            }
            Op::Broadcast(root) => copy(root as usize, 0..units),
            Op::Barrier => {}
        }
    }

    /// Contributions are in the ranks' buffers.
    pub(super) fn large(
        &self,
        signature: &Signature,
        buffer: &mut Buffer,
        reach: &dyn Reach,
        wait: Wait,
    ) -> Result<(), Error> {
        let units = signature.length as usize;
        let unit = buffer.bytes / units;
        let mut regions = Vec::with_capacity(self.layout.ranks());
        for rank in 0..self.layout.ranks() {
            // SAFETY: stamped.
            let id = unsafe { *self.slot(rank, signature.sequence).buffer.get() };
            let region =
                if rank == self.rank { buffer.region.clone() } else { reach.buffer(rank, id, wait.until)? };
            if region.bytes() < buffer.stride * (self.parts[rank] - 1) + buffer.start + buffer.bytes {
                return Err(Error::system("slots", format!("the buffer of rank {rank} is too short")));
            }
            regions.push(region);
        }
        let reduced = |reduce: Reduce, range: Range<usize>, everywhere: bool| {
            let fold = Fold::new(reduce, signature.dtype).expect("checked at the call");
            let offset = buffer.start + range.start * unit;
            let mut leaves = Vec::with_capacity(self.program.len());
            for (rank, region) in regions.iter().enumerate() {
                for part in 0..self.parts[rank] {
                    // SAFETY: inside the region, as checked above.
                    leaves.push(unsafe { region.start().add(part * buffer.stride + offset) }.cast_const());
                }
            }
            // SAFETY: offset is inside every first part.
            let at = |rank: usize| unsafe { regions[rank].start().add(offset) };
            let mut targets = vec![at(self.rank)];
            if everywhere {
                targets.extend(self.peers().map(at));
            }
            // SAFETY: this rank alone reads and writes this range of all buffers until everyone is done.
            unsafe { fold.tree(&self.program, &leaves, &targets, range.len(), self.layout.shards()) };
            let bytes = range.len() * unit;
            self.read.fetch_add(((self.program.len() - self.parts[self.rank]) * bytes) as u64, Relaxed);
            self.written.fetch_add(((targets.len() - 1) * bytes) as u64, Relaxed);
        };
        let copy = |rank: usize, range: Range<usize>| {
            if rank != self.rank {
                let (offset, bytes) = (buffer.start + range.start * unit, range.len() * unit);
                // SAFETY: the peer leaves its range alone until everyone is done; the target is this rank's own.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        regions[rank].start().add(offset),
                        regions[self.rank].start().add(offset),
                        bytes,
                    )
                };
                self.read.fetch_add(bytes as u64, Relaxed);
            }
        };
        match signature.op {
            Op::AllReduce(reduce) => reduced(reduce, self.layout.segment(self.rank, units), true),
            Op::ReduceScatter(reduce) => reduced(reduce, self.layout.piece(self.rank, units), false),
            Op::AllGather => {
                (0..self.layout.ranks()).for_each(|rank| copy(rank, self.layout.piece(rank, units)))
            }
            Op::Broadcast(root) => copy(root as usize, 0..units),
            Op::Barrier => {}
        }
        Ok(())
    }
}
