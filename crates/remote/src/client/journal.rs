//! The lineage of a client's live values: what a server was asked since the last complete snapshot.
//!
//! Run again from the snapshot, it gives the same values with the same bits. Liveness prunes nothing here (in training
//! every value descends from all before it); snapshots do.

use kiln_device::{Data, Error, Place};
use kiln_ir::Id;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::sync::Arc;

use super::moves::Move;
use super::spill::Spilled;
use crate::protocol::message::Query;

/// One thing that was asked of the server, in the order of the stream.
#[derive(Clone)]
#[allow(missing_docs)]
pub enum Entry {
    /// A batch, its structure shared with others like it.
    Batch { structure: Arc<[u8]>, bindings: Box<[u64]> },
    /// A value from the client.
    Upload { id: Id, data: Data, place: Place },
    /// A value fetched from another server, where it is kept so that it can be fetched again.
    Fetched(Arc<Move>),
    /// A value that no server was ever asked for: no frame could say how it is computed.
    Poison { id: Id, error: Error },
    /// A read; of an answered one, the checksum of what it gave.
    Read { request: u64, id: Id, digest: Option<u32> },
    /// A sync. Syncs and questions are asked again only while they are open.
    Sync { request: u64 },
    /// A question.
    Query { request: u64, query: Query },
}

impl Entry {
    fn bytes(&self) -> usize {
        std::mem::size_of::<Entry>()
            + match self {
                Entry::Batch { bindings, .. } => 8 * bindings.len(),
                Entry::Upload { data, .. } => data.bytes.len(),
                // Held by another server; a snapshot lets it go.
                Entry::Fetched(moved) => moved.meta.bytes(),
                _ => 0,
            }
    }
}

/// A snapshot that is being taken.
struct Taking {
    /// Entries before this one are covered by it.
    barrier: u64,
    values: Values,
    /// Bytes of the values in memory that the last snapshot does not hold.
    bytes: usize,
    missing: FxHashMap<Id, Place>,
    /// Everything before the barrier is known to be executed and answered.
    reached: bool,
}

/// What the journal holds and has done.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Held {
    /// Entries since the last snapshot.
    pub entries: usize,
    /// Bytes of these entries, uploads included.
    pub bytes: usize,
    /// Bytes of the snapshot, as far as they are in memory.
    pub snapshot: usize,
    /// Bytes of the snapshot in files.
    pub stored: usize,
    /// Snapshots completed.
    pub snapshots: u64,
}

/// A value of a snapshot.
#[derive(Clone)]
pub enum Kept {
    /// Its content, and where it lives.
    Data(Data, Place),
    /// The same in a file.
    Stored(Spilled, Place),
    /// It was never computed, for this reason.
    Failed(Error),
}

impl Kept {
    fn bytes(&self) -> usize {
        match self {
            Kept::Data(data, _) => data.bytes.len(),
            Kept::Stored(..) | Kept::Failed(_) => 0,
        }
    }

    fn stored(&self) -> usize {
        if let Kept::Stored(spilled, _) = self { spilled.part.len } else { 0 }
    }
}

/// Values of a snapshot.
type Values = FxHashMap<Id, Kept>;

/// Snapshot and entries since.
#[derive(Default)]
pub struct Journal {
    base: Values,
    /// Bytes of the snapshot in memory and in files.
    base_bytes: usize,
    base_stored: usize,
    entries: VecDeque<Entry>,
    /// The number of the first entry.
    first: u64,
    bytes: usize,
    /// Where live values are, and the content of those that came from here.
    live: FxHashMap<Id, (Place, Option<Data>)>,
    taking: Option<Taking>,
    /// Values that are being written to a file.
    storing: FxHashSet<Id>,
    snapshots: u64,
    /// Structures by content, so that a recurring one is held once.
    structures: FxHashSet<Arc<[u8]>>,
    /// Why the values cannot be had again, if so.
    lost: Option<String>,
    /// Moves that need not be done again.
    settled: Vec<Arc<Move>>,
}

impl Journal {
    /// Appends an entry.
    pub fn push(&mut self, entry: Entry) {
        if self.lost.is_none() {
            self.bytes += entry.bytes();
            self.entries.push_back(entry);
        } else if let Entry::Fetched(moved) = entry {
            self.settled.push(moved);
        }
    }

    /// The shared form of a structure.
    pub fn structure(&mut self, bytes: &[u8]) -> Arc<[u8]> {
        if let Some(known) = self.structures.get(bytes) {
            return known.clone();
        }
        // Bounded: structures that nothing refers to go when there are many.
        if self.structures.len() > 1024 {
            self.structures.retain(|s| Arc::strong_count(s) > 1);
        }
        let shared: Arc<[u8]> = bytes.into();
        self.structures.insert(shared.clone());
        shared
    }

    /// A value is defined.
    pub fn define(&mut self, id: Id, place: Place) {
        self.live.insert(id, (place, None));
    }

    /// A value is defined from data of the client. They are kept for the next snapshot: a value never changes.
    pub fn upload(&mut self, id: Id, data: &Data, place: Place) {
        let data = self.lost.is_none().then(|| data.clone());
        self.live.insert(id, (place, data));
    }

    /// A value has ended.
    pub fn free(&mut self, id: Id) {
        self.live.remove(&id);
    }

    /// A read was answered with data of this checksum.
    pub fn answered(&mut self, request: u64, sum: u32) {
        let of = |e: &&mut Entry| matches!(e, Entry::Read { request: r, .. } if *r == request);
        if let Some(Entry::Read { digest, .. }) = self.entries.iter_mut().rev().find(of) {
            *digest = Some(sum);
        }
    }

    /// Snapshot values and entries, in the order in which a new server must see them; or why that is impossible.
    pub fn replay(&self) -> Result<(&Values, &VecDeque<Entry>), &str> {
        match &self.lost {
            Some(reason) => Err(reason),
            None => Ok((&self.base, &self.entries)),
        }
    }

    /// Gives up: nothing is kept from now on.
    pub fn abandon(&mut self, reason: impl Into<String>) {
        self.lost.get_or_insert(reason.into());
        self.base.clear();
        self.live.values_mut().for_each(|(_, data)| *data = None);
        let settled = self.entries.drain(..).filter_map(|entry| match entry {
            Entry::Fetched(moved) => Some(moved),
            _ => None,
        });
        self.settled.extend(settled);
        self.taking = None;
        (self.bytes, self.base_bytes, self.base_stored) = (0, 0, 0);
        self.storing.clear();
    }

    /// Whether values can be had again.
    pub fn is_kept(&self) -> bool {
        self.lost.is_none()
    }

    /// Begins a snapshot of everything that is live now and gives the values to read, before [`Journal::reached`] is
    /// said. `None` if one is under way.
    pub fn begin(&mut self) -> Option<Vec<Id>> {
        if self.taking.is_some() || self.lost.is_some() {
            return None;
        }
        let (values, missing) = (FxHashMap::default(), FxHashMap::default());
        let mut taking = Taking { barrier: self.end(), values, bytes: 0, missing, reached: false };
        for (&id, (place, data)) in &self.live {
            // A value never changes, so what is here already need not be read again.
            match (self.base.get(&id), data) {
                (Some(value), _) => drop(taking.values.insert(id, value.clone())),
                (None, Some(data)) => drop(taking.values.insert(id, Kept::Data(data.clone(), *place))),
                (None, None) => drop(taking.missing.insert(id, *place)),
            }
        }
        let ids: Vec<Id> = taking.missing.keys().copied().collect();
        self.taking = Some(taking);
        self.count();
        Some(ids)
    }

    /// The server has come to the barrier: what was asked before it is answered.
    pub fn reached(&mut self) {
        if let Some(taking) = &mut self.taking {
            taking.reached = true;
        }
        self.complete();
    }

    /// A value of the snapshot has come, or the reason why there will never be one.
    pub fn took(&mut self, id: Id, value: Result<Data, Error>) {
        if let Some(taking) = &mut self.taking
            && let Some(place) = taking.missing.remove(&id)
        {
            let kept = value.map_or_else(Kept::Failed, |data| Kept::Data(data, place));
            taking.bytes += kept.bytes();
            taking.values.insert(id, kept);
        }
        self.complete();
    }

    /// The snapshot that is under way will not be completed.
    pub fn give_up_snapshot(&mut self) {
        self.taking = None;
    }

    fn complete(&mut self) {
        if let Some(taking) = self.taking.take_if(|t| t.reached && t.missing.is_empty()) {
            while self.first < taking.barrier {
                if let Some(entry) = self.entries.pop_front() {
                    self.bytes -= entry.bytes();
                    if let Entry::Fetched(moved) = entry {
                        self.settled.push(moved);
                    }
                }
                self.first += 1;
            }
            self.base = taking.values;
            self.count();
            self.snapshots += 1;
        }
    }

    /// Values to be written to files, so that no more than `most` bytes of snapshots are in memory. None while others
    /// wait for [`Journal::stored`].
    pub fn to_store(&mut self, most: usize) -> Vec<(Id, Data)> {
        // One file after another.
        let memory = self.base_bytes + self.taking.as_ref().map_or(0, |t| t.bytes);
        if memory <= most || !self.storing.is_empty() {
            return Vec::new();
        }
        let taking = self.taking.iter().flat_map(|t| &t.values);
        let mut held: FxHashMap<Id, &Data> = FxHashMap::default();
        for (id, kept) in self.base.iter().chain(taking) {
            if let Kept::Data(data, _) = kept {
                held.insert(*id, data);
            }
        }
        let mut bytes: usize = held.values().map(|data| data.bytes.len()).sum();
        let mut held: Vec<_> = held.into_iter().collect();
        held.sort_by_key(|(id, data)| (data.bytes.len(), *id));
        let mut out = Vec::new();
        while bytes > most
            && let Some((id, data)) = held.pop()
        {
            bytes -= data.bytes.len();
            out.push((id, data.clone()));
        }
        self.storing.extend(out.iter().map(|(id, _)| *id));
        out
    }

    /// A value has been written to a file.
    pub fn stored(&mut self, id: Id, stored: Spilled) {
        self.storing.remove(&id);
        if let Some((_, data)) = self.live.get_mut(&id) {
            *data = None;
        }
        let taking = self.taking.as_mut().map(|t| &mut t.values);
        for values in [Some(&mut self.base), taking].into_iter().flatten() {
            if let Some(kept) = values.get_mut(&id)
                && let Kept::Data(_, place) = *kept
            {
                *kept = Kept::Stored(stored.clone(), place);
            }
        }
        if self.storing.is_empty() {
            self.count();
        }
    }

    fn count(&mut self) {
        self.base_bytes = self.base.values().map(Kept::bytes).sum();
        self.base_stored = self.base.values().map(Kept::stored).sum();
        if let Some(taking) = &mut self.taking {
            let own = taking.values.iter().filter(|(id, _)| !self.base.contains_key(id));
            taking.bytes = own.map(|(_, kept)| kept.bytes()).sum();
        }
    }

    /// Moves that need not be done again. Dropping one may free its value elsewhere: not under a session's lock.
    pub fn settled(&mut self) -> Vec<Arc<Move>> {
        std::mem::take(&mut self.settled)
    }

    /// Whether everything before this place is covered by the last snapshot.
    pub fn covers(&self, place: u64) -> bool {
        self.first >= place
    }

    /// The place of the next entry.
    pub fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// What it holds.
    pub fn held(&self) -> Held {
        Held {
            entries: self.entries.len(),
            bytes: self.bytes,
            snapshot: self.base_bytes,
            stored: self.base_stored,
            snapshots: self.snapshots,
        }
    }
}
