//! Collectives by messages, where ranks share no memory: each rank sends every other its segment, combines its own in
//! tree order, and sends the result back. What carries the messages is behind [`Link`]; it keeps the order between two
//! ranks, and nothing else is asked of it.

use super::mailbox::{ABORT, LEFT, Lost, Mailbox, message, sealed};
use super::{Engine, Place, Traffic, Wait};
use crate::buffer::Buffer;
use crate::call::{Op, Signature};
use crate::memory::Region;
use crate::reduce::Fold;
use crate::{Error, Layout, Loss};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Carries messages to other processes, in order, without waiting.
pub(crate) trait Link: Send + Sync {
    fn name(&self) -> &'static str;
    fn send(&self, to: usize, message: Vec<u8>);
    /// Nothing more is expected to arrive.
    fn broken(&self) {}
}

/// The longest piece of data in one message.
const PIECE: usize = 1 << 30;
/// One rank's side of a group.
pub(crate) struct Messages {
    link: Arc<dyn Link>,
    mailbox: Arc<Mailbox>,
    group: u64,
    members: Vec<usize>,
    rank: usize,
    layout: Layout,
    program: Vec<usize>,
    parts: Vec<usize>,
    announced: AtomicU64,
    ids: AtomicU64,
    read: AtomicU64,
    written: AtomicU64,
    waited: Vec<AtomicU64>,
}

impl Messages {
    pub(crate) fn new(link: Arc<dyn Link>, mailbox: Arc<Mailbox>, place: Place) -> Messages {
        let Place { group, members, rank, layout } = place;
        Messages {
            link,
            mailbox,
            group,
            rank,
            layout,
            program: layout.program(),
            parts: (0..layout.ranks()).map(|r| layout.parts(r).len()).collect(),
            announced: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            waited: members.iter().map(|_| AtomicU64::new(0)).collect(),
            members,
        }
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.rank;
        (0..self.layout.ranks()).filter(move |&r| r != me)
    }

    fn send(&self, to: usize, content: &[&[u8]]) {
        self.link.send(self.members[to], message(self.group, content));
    }

    /// Sends payload, in pieces if it is long.
    fn give(&self, to: usize, payload: &[u8]) {
        payload.chunks(PIECE).for_each(|piece| self.send(to, &[piece]));
        self.written.fetch_add(payload.len() as u64, Relaxed);
    }

    fn receive(&self, from: usize, signature: &Signature, wait: Wait) -> Result<Vec<u8>, Error> {
        let begun = Instant::now();
        let taken = self.mailbox.take(self.group, self.members[from], wait.until);
        self.waited[from].fetch_add(begun.elapsed().as_nanos() as u64, Relaxed);
        match taken {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(Error::Deadline {
                rank: self.rank,
                call: *signature,
                after: wait.deadline,
                missing: vec![from],
                stopped: Vec::new(),
            }),
            Err(Lost::Over(error)) => Err(error),
            Err(Lost::Left(after)) => Err(Error::RankLost { rank: from, cause: Loss::Left { after } }),
        }
    }

    /// Receives that much payload.
    fn get(&self, from: usize, bytes: usize, signature: &Signature, wait: Wait) -> Result<Vec<u8>, Error> {
        let mut payload = Vec::new();
        while payload.len() < bytes {
            let piece = self.receive(from, signature, wait)?;
            if piece.is_empty() || payload.len() + piece.len() > bytes {
                return Err(Error::system("message", format!("rank {from} sent another length")));
            }
            if payload.is_empty() { payload = piece } else { payload.extend(piece) }
        }
        self.read.fetch_add(bytes as u64, Relaxed);
        Ok(payload)
    }

    /// Everyone's signature, checked; and the contributions that came with them.
    fn greet(&self, signature: &Signature, own: Option<String>, wait: Wait) -> Result<Vec<Vec<u8>>, Error> {
        let mut small = vec![Vec::new(); self.layout.ranks()];
        let (mut mismatch, mut poison) = (None, None);
        for (rank, content) in small.iter_mut().enumerate() {
            if rank == self.rank {
                poison = poison.or_else(|| own.clone().map(|reason| Error::Poisoned { rank, reason }));
                continue;
            }
            let mut hello = self.receive(rank, signature, wait)?;
            let bad = || Error::system("message", format!("rank {rank} sent no signature"));
            if hello.len() < HELLO {
                return Err(bad());
            }
            let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| hello[8 * i + k]));
            let theirs = Signature::unpack(std::array::from_fn(word)).ok_or_else(bad)?;
            let reason = word(5) as usize;
            if theirs != *signature && mismatch.is_none() {
                mismatch = Some(Error::Mismatch { rank: self.rank, mine: *signature, peer: rank, theirs });
            }
            if reason > 0 {
                let text = hello.get(HELLO..HELLO + reason - 1).ok_or_else(bad)?;
                let reason = String::from_utf8_lossy(text).into_owned();
                poison.get_or_insert(Error::Poisoned { rank, reason });
            }
            hello.drain(..HELLO + reason.saturating_sub(1));
            *content = hello;
        }
        match mismatch.or(poison) {
            Some(error) => Err(error),
            None => Ok(small),
        }
    }

    /// Combines a range of all contributions into the own buffer. `theirs` has the range of each peer's parts, one
    /// after another at `step`, from `skip`.
    fn combine(
        &self,
        signature: &Signature,
        buffer: &mut Buffer,
        range: &Range<usize>,
        theirs: &[Vec<u8>],
        step: usize,
        skip: usize,
    ) -> Result<(), Error> {
        let reduce = signature.op.reduce().expect("a reduction");
        let fold = Fold::new(reduce, signature.dtype).expect("checked at the call");
        let unit = signature.dtype.size();
        let mut leaves = Vec::with_capacity(self.program.len());
        for (rank, content) in theirs.iter().enumerate() {
            for part in 0..self.parts[rank] {
                if rank == self.rank {
                    leaves.push(buffer.part(part)[range.start * unit..].as_ptr());
                    continue;
                }
                let at = part * step + skip;
                let slice = content.get(at..at + range.len() * unit);
                leaves.push(slice.ok_or_else(|| Error::system("message", "a contribution is cut"))?.as_ptr());
            }
        }
        let target = buffer.part_mut(0)[range.start * unit..].as_mut_ptr();
        // SAFETY: each leaf has the range, and so has the target, which is this rank's own first leaf.
        unsafe { fold.tree(&self.program, &leaves, &[target], range.len(), self.layout.shards()) };
        Ok(())
    }

    fn small(&self, signature: &Signature, buffer: &mut Buffer, theirs: &[Vec<u8>]) -> Result<(), Error> {
        let (units, unit) = (signature.length as usize, signature.dtype.size());
        let foreign: usize = theirs.iter().map(Vec::len).sum();
        self.read.fetch_add(foreign as u64, Relaxed);
        let stride = buffer.stride;
        let copy = |buffer: &mut Buffer, rank: usize, range: Range<usize>| {
            let bytes = range.start * unit..range.end * unit;
            let from = theirs[rank].get(bytes.clone());
            let from = from.ok_or_else(|| Error::system("message", "a contribution is cut"))?;
            buffer.part_mut(0)[bytes].copy_from_slice(from);
            Ok(())
        };
        match signature.op {
            Op::AllReduce(_) => self.combine(signature, buffer, &(0..units), theirs, stride, 0),
            Op::ReduceScatter(_) => {
                let range = self.layout.piece(self.rank, units);
                self.combine(signature, buffer, &range, theirs, stride, range.start * unit)
            }
            Op::AllGather => self.peers().try_for_each(|r| copy(buffer, r, self.layout.piece(r, units))),
            Op::Broadcast(root) if root as usize != self.rank => copy(buffer, root as usize, 0..units),
            Op::Broadcast(_) | Op::Barrier => Ok(()),
        }
    }

    fn large(&self, signature: &Signature, buffer: &mut Buffer, wait: Wait) -> Result<(), Error> {
        let (units, unit) = (signature.length as usize, signature.dtype.size());
        let bytes = |range: &Range<usize>| range.start * unit..range.end * unit;
        let exchange = |buffer: &mut Buffer, cut: &dyn Fn(usize) -> Range<usize>| -> Result<(), Error> {
            for rank in self.peers() {
                for part in 0..buffer.parts {
                    self.give(rank, &buffer.part(part)[bytes(&cut(rank))]);
                }
            }
            let range = cut(self.rank);
            let mut theirs = vec![Vec::new(); self.layout.ranks()];
            for rank in self.peers() {
                for _ in 0..self.parts[rank] {
                    theirs[rank].extend(self.get(rank, range.len() * unit, signature, wait)?);
                }
            }
            self.combine(signature, buffer, &range, &theirs, range.len() * unit, 0)
        };
        let gather = |buffer: &mut Buffer, cut: &dyn Fn(usize) -> Range<usize>| -> Result<(), Error> {
            self.peers().for_each(|rank| self.give(rank, &buffer.part(0)[bytes(&cut(self.rank))]));
            for rank in self.peers() {
                let range = bytes(&cut(rank));
                let payload = self.get(rank, range.len(), signature, wait)?;
                buffer.part_mut(0)[range].copy_from_slice(&payload);
            }
            Ok(())
        };
        match signature.op {
            Op::AllReduce(_) => {
                let cut = |rank| self.layout.segment(rank, units);
                exchange(buffer, &cut)?;
                gather(buffer, &cut)
            }
            Op::ReduceScatter(_) => exchange(buffer, &|rank| self.layout.piece(rank, units)),
            Op::AllGather => gather(buffer, &|rank| self.layout.piece(rank, units)),
            Op::Broadcast(root) if root as usize == self.rank => {
                self.peers().for_each(|rank| self.give(rank, buffer.part(0)));
                Ok(())
            }
            Op::Broadcast(root) => {
                let payload = self.get(root as usize, buffer.bytes, signature, wait)?;
                buffer.part_mut(0).copy_from_slice(&payload);
                Ok(())
            }
            Op::Barrier => Ok(()),
        }
    }
}

/// A signature, and the length of a reason and one, or 0.
const HELLO: usize = 48;

impl Engine for Messages {
    fn name(&self) -> &'static str {
        self.link.name()
    }

    fn is_link(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<Region>, Error> {
        // The number only marks it as large.
        Ok(Arc::new(Region::heap(bytes, self.ids.fetch_add(1, Relaxed) + 1)?))
    }

    fn announce(&self, signature: &Signature, buffer: &Buffer) {
        if self.announced.load(Relaxed) >= signature.sequence {
            return;
        }
        self.announced.store(signature.sequence, Relaxed);
        let reason = buffer.poison.as_deref().map_or(&b""[..], str::as_bytes);
        let flag = if buffer.poison.is_some() { reason.len() as u64 + 1 } else { 0 };
        let head = signature.pack().map(u64::to_le_bytes);
        let mut data = Vec::new();
        if buffer.region.id == 0 {
            for part in 0..buffer.parts {
                data.extend_from_slice(buffer.part(part));
                data.resize((part + 1) * buffer.stride, 0);
            }
        }
        for rank in self.peers() {
            self.send(rank, &[head.as_flattened(), &flag.to_le_bytes(), reason, &data]);
            self.written.fetch_add(data.len() as u64, Relaxed);
        }
    }

    fn run(&self, signature: &Signature, buffer: &mut Buffer, wait: Wait) -> Result<(), Error> {
        self.announce(signature, buffer);
        let theirs = self.greet(signature, buffer.poison.take(), wait)?;
        if buffer.bytes == 0 {
            return Ok(());
        }
        if buffer.region.id == 0 {
            self.small(signature, buffer, &theirs)
        } else {
            self.large(signature, buffer, wait)
        }
    }

    fn abort(&self, error: &Error) {
        self.mailbox.end(self.group, error);
        let text = serde_json::to_vec(error).unwrap_or_default();
        for rank in self.peers() {
            self.link.send(self.members[rank], sealed(self.group, ABORT, &[&text]));
        }
        self.link.broken();
    }

    fn subgroup(&self, place: Place, _: Instant) -> Result<Box<dyn Engine>, Error> {
        let members = place.members.iter().map(|&rank| self.members[rank]).collect();
        Ok(Box::new(Messages::new(self.link.clone(), self.mailbox.clone(), Place { members, ..place })))
    }

    fn leave(&self, after: u64) {
        for rank in self.peers() {
            self.link.send(self.members[rank], sealed(self.group, LEFT, &[&after.to_le_bytes()]));
        }
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            read: self.read.load(Relaxed),
            written: self.written.load(Relaxed),
            waited: self.waited.iter().map(|ns| Duration::from_nanos(ns.load(Relaxed))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, Config, Group, Reduce};
    use kiln_ir::DType;

    /// Messages to threads of this process.
    struct Hand {
        rank: usize,
        mailboxes: Vec<Arc<Mailbox>>,
    }

    impl Link for Hand {
        fn name(&self) -> &'static str {
            "hand"
        }
        fn send(&self, to: usize, message: Vec<u8>) {
            self.mailboxes[to].deliver(self.rank, message);
        }
    }

    fn groups(ranks: usize, shards: usize) -> Vec<Group> {
        let layout = Layout::new(shards, ranks).unwrap();
        let mailboxes: Vec<Arc<Mailbox>> = (0..ranks).map(|_| Arc::default()).collect();
        let group = |rank: usize| {
            let place = Place { group: 1, members: (0..ranks).collect(), rank, layout };
            let hand = Arc::new(Hand { rank, mailboxes: mailboxes.clone() });
            let engine = Box::new(Messages::new(hand, mailboxes[rank].clone(), place));
            let config = Config {
                deadline: Duration::from_secs(5),
                shards: Some(shards),
                flight: None,
                ..Config::default()
            };
            Group::new("hand", 1, rank, layout, config, engine)
        };
        (0..ranks).map(group).collect()
    }

    fn each<T: Send>(groups: Vec<Group>, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let f = &f;
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    /// Sums of many sizes, with parts that differ from rank to rank.
    fn sums(group: Group) -> Vec<u8> {
        let mut out = Vec::new();
        for n in [0, 1, 100, 5000, 70_000] {
            let mut counter = crate::Counter::new(&group, Reduce::Mean, DType::F32, 4 * n).unwrap();
            for shard in group.layout().held(group.rank()) {
                let x = (0..n).flat_map(|i| (((shard * 977 + i) % 613) as f32 * 0.37 - 99.0).to_le_bytes());
                counter.push(&x.collect::<Vec<u8>>());
            }
            let call = Call::new(Op::AllReduce(Reduce::Mean), DType::F32);
            out.extend_from_slice(&group.run(call, counter.finish().unwrap()).unwrap());
        }
        out
    }

    #[test]
    fn messages_give_the_bits_of_shared_memory() {
        for ranks in [1, 2, 3, 5, 7] {
            let config = Config { shards: Some(7), ..Config::default() };
            let want = each(Group::local(ranks, config).unwrap(), sums);
            assert_eq!(each(groups(ranks, 7), sums), want, "{ranks}");
        }
    }

    #[test]
    fn payload_of_messages_is_twice_the_share_of_the_others() {
        let bytes = 1 << 20;
        for traffic in each(groups(4, 4), |group| {
            let call = Call::new(Op::AllReduce(Reduce::Sum), DType::F32);
            group.run(call, group.buffer(bytes).unwrap()).unwrap();
            group.traffic()
        }) {
            assert_eq!(traffic.read + traffic.written, 2 * (2 * 3 * bytes as u64 / 4));
        }
    }

    #[test]
    fn errors_reach_everyone() {
        let errors = each(groups(3, 3), |group| {
            let dtype = if group.rank() == 1 { DType::I32 } else { DType::F32 };
            let call = Call::new(Op::AllReduce(Reduce::Sum), dtype);
            group.run(call, group.buffer(400).unwrap()).unwrap_err()
        });
        assert!(errors.iter().all(|e| matches!(e, Error::Mismatch { .. })), "{errors:?}");
        let errors = each(groups(3, 3), |group| {
            let mut buffer = group.buffer(100_000).unwrap();
            if group.rank() == 1 {
                buffer.poison("why");
            }
            let error = group.run(Call::new(Op::AllReduce(Reduce::Sum), DType::F32), buffer).unwrap_err();
            group.barrier().unwrap();
            error
        });
        assert_eq!(errors, vec![Error::Poisoned { rank: 1, reason: "why".into() }; 3]);
        let errors = each(groups(2, 2), |group| if group.rank() == 0 { group.barrier() } else { Ok(()) });
        assert_eq!(errors[0], Err(Error::RankLost { rank: 1, cause: Loss::Left { after: 0 } }));
    }
}
