//! The engine between processes of one machine: the slots and all large buffers are memfds that everyone maps.

use super::mesh::{GONE, MEMORY, Member, Mesh, Message};
use super::slots::{self, Reach, SharedSlots};
use super::{Engine, Place, Traffic, Wait};
use crate::buffer::Buffer;
use crate::call::Signature;
use crate::memory::Region;
use crate::{Error, Layout};
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

pub(crate) struct Shm(Arc<Inner>);

struct Inner {
    slots: SharedSlots,
    mesh: Arc<Mesh>,
    group: u64,
    /// The processes of the job that are in the group, by rank.
    members: Vec<usize>,
    /// Own buffers, to tell the peers when one is gone.
    own: Mutex<HashMap<u64, Weak<Region>>>,
    ids: AtomicU64,
    /// Buffers of peers that are mapped here, by process and id.
    mapped: Mutex<HashMap<(usize, u64), Arc<Region>>>,
}

/// The engine of a group of these processes; every one of them calls.
pub(crate) fn engine(
    mesh: Arc<Mesh>,
    group: u64,
    members: Vec<usize>,
    rank: usize,
    layout: Layout,
    until: Instant,
) -> Result<Box<dyn Engine>, Error> {
    let bytes = slots::bytes(members.len());
    let memory = if rank == 0 {
        let (region, fd) = Region::shared(bytes, 0)?;
        let message = Message { kind: MEMORY, group, id: 0, bytes: region.bytes() as u64 };
        for &to in &members[1..] {
            mesh.send(to, message, Some(fd.as_raw_fd()))?;
        }
        region
    } else {
        mesh.receive(members[0], group, 0, until)?
    };
    if memory.bytes() < bytes {
        return Err(Error::system("shared memory", "the slots of the group are too short"));
    }
    let inner = Arc::new(Inner {
        slots: SharedSlots::new(Arc::new(memory), rank, layout),
        mesh,
        group,
        members,
        own: Mutex::default(),
        ids: AtomicU64::new(0),
        mapped: Mutex::default(),
    });
    let member: Weak<Inner> = Arc::downgrade(&inner);
    inner.mesh.enlist(member);
    Ok(Box::new(Shm(inner)))
}

impl Engine for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        let inner = &self.0;
        let id = inner.ids.fetch_add(1, Relaxed) + 1;
        let (region, fd) = Region::shared(bytes, id)?;
        let message = Message { kind: MEMORY, group: inner.group, id, bytes: region.bytes() as u64 };
        let region = Arc::new(region);
        lock(&inner.own).insert(id, Arc::downgrade(&region));
        inner.tell(message, Some(fd.as_raw_fd()))?;
        inner.sweep()?;
        Ok(region)
    }

    fn announce(&self, signature: &Signature, buffer: &Buffer) {
        self.0.slots.announce(signature, buffer);
    }

    fn run(&self, signature: &Signature, buffer: &mut Buffer, wait: Wait) -> Result<(), Error> {
        self.0.slots.run(signature, buffer, &*self.0, wait)
    }

    fn abort(&self, error: &Error) {
        self.0.slots.abort(error);
    }

    fn subgroup(&self, place: Place, until: Instant) -> Result<Box<dyn Engine>, Error> {
        let members = place.members.iter().map(|&rank| self.0.members[rank]).collect();
        engine(self.0.mesh.clone(), place.group, members, place.rank, place.layout, until)
    }

    fn leave(&self, after: u64) {
        self.0.slots.leave(after);
    }

    fn traffic(&self) -> Traffic {
        self.0.slots.traffic()
    }
}

impl Inner {
    fn tell(&self, message: Message, fd: Option<i32>) -> Result<(), Error> {
        self.members.iter().try_for_each(|&to| self.mesh.send(to, message, fd))
    }

    /// Tells the peers which own buffers are gone, so that they unmap them.
    fn sweep(&self) -> Result<(), Error> {
        let mut gone = Vec::new();
        lock(&self.own).retain(|&id, region| {
            let here = region.strong_count() > 0;
            if !here {
                gone.push(id);
            }
            here
        });
        gone.into_iter()
            .try_for_each(|id| self.tell(Message { kind: GONE, group: self.group, id, bytes: 0 }, None))
    }
}

impl Reach for Inner {
    fn buffer(&self, rank: usize, id: u64, until: Instant) -> Result<Arc<Region>, Error> {
        let process = self.members[rank];
        if let Some(region) = lock(&self.mapped).get(&(process, id)) {
            return Ok(region.clone());
        }
        let region = Arc::new(self.mesh.receive(process, self.group, id, until)?);
        lock(&self.mapped).insert((process, id), region.clone());
        Ok(region)
    }

    fn stopped(&self, ranks: &[usize]) -> Vec<usize> {
        let stopped = self.mesh.stopped(ranks.iter().map(|&rank| self.members[rank]));
        stopped.into_iter().filter_map(|process| self.place(process)).collect()
    }
}

impl Member for Inner {
    fn slots(&self) -> &SharedSlots {
        &self.slots
    }

    fn place(&self, process: usize) -> Option<usize> {
        self.members.iter().position(|&m| m == process)
    }

    fn group(&self) -> u64 {
        self.group
    }

    fn gone(&self, process: usize, id: u64) {
        lock(&self.mapped).remove(&(process, id));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
