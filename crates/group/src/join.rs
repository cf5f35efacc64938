//! How the processes of a job on one machine find each other: rank 0 listens on a socket without a file, checks who
//! comes, and hands everyone a socket to each other and a watch on each process. Nothing remains to be cleaned up.
//! Both sides ask the kernel who is at the other end: ranks of one job are processes of one user.

mod socket;
#[cfg(test)]
mod tests;

use crate::engine::mesh::{self, Mesh, Peer};
use crate::memory::last;
use crate::rendezvous::{Identity, Rendezvous};
use crate::{Error, Loss, Tag};
use serde::{Deserialize, Serialize};
use socket::{accept_within, address, credentials, holder, own_uid, process, read, write};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub rank: usize,
    pub world: usize,
    pub shards: usize,
    pub identity: Identity,
}

impl Hello {
    /// What differs from the job's, if anything.
    pub(crate) fn refused(&self, job: &Hello) -> Option<Error> {
        let fields = [
            ("version", &self.identity.version, &job.identity.version),
            ("world size", &self.world.to_string(), &job.world.to_string()),
            ("number of shards", &self.shards.to_string(), &job.shards.to_string()),
            ("model", &self.identity.model, &job.identity.model),
            ("dtype", &self.identity.dtype, &job.identity.dtype),
            ("numerics", &self.identity.numerics, &job.identity.numerics),
        ];
        let (field, got, want) = fields.into_iter().find(|(_, got, want)| got != want)?;
        Some(Error::Refused { rank: self.rank, field: field.into(), want: want.clone(), got: got.clone() })
    }
}

/// Rank 0's answer.
#[derive(Serialize, Deserialize)]
enum Answer {
    /// The process of each rank; with it come sockets to all but rank 0 and oneself, then watches on the same.
    Welcome(Vec<u32>),
    Refused(Error),
}

/// Names a job among all on this machine.
pub(crate) fn number(job: &str) -> u64 {
    Tag::default().add(job).finish().max(1)
}

/// The most ranks: each gets two descriptors for every other in one message, and a message carries 253.
const MOST: usize = 127;

/// Meets the other ranks.
pub(crate) fn meet(at: &Rendezvous, hello: Hello, deadline: Duration) -> Result<Arc<Mesh>, Error> {
    if at.world > MOST {
        return Err(Error::Crowded { ranks: at.world, most: MOST });
    }
    let until = Instant::now() + deadline;
    let peers = if at.rank == 0 {
        listen(at, &hello, deadline, until)?
    } else {
        connect(at, &hello, deadline, until)?
    };
    for peer in peers.iter().flatten() {
        mesh::limit(peer.socket.as_raw_fd(), deadline);
    }
    Mesh::new(peers)
}

/// Rank 0: waits for all others and checks who they are.
fn listen(
    at: &Rendezvous,
    own: &Hello,
    deadline: Duration,
    until: Instant,
) -> Result<Vec<Option<Peer>>, Error> {
    let listener = socket::open()?;
    let (address, length) = address(&at.job);
    // SAFETY: the address is valid for its length.
    unsafe {
        if libc::bind(listener.as_raw_fd(), (&raw const address).cast(), length) < 0 {
            let error = last("the place where the ranks of this job meet");
            return Err(holder(&at.job).unwrap_or(error));
        }
        if libc::listen(listener.as_raw_fd(), at.world as i32) < 0 {
            return Err(last("listen"));
        }
    }
    let mut peers: Vec<Option<Peer>> = (0..at.world).map(|_| None).collect();
    let missing =
        |peers: &[Option<Peer>]| -> Vec<usize> { (1..at.world).filter(|&r| peers[r].is_none()).collect() };
    while !missing(&peers).is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let came = accept_within(&listener, left.min(Duration::from_secs(1 << 20)));
        if came.is_none() && left.is_zero() {
            return Err(Error::Absent { missing: missing(&peers), after: deadline });
        }
        let Some(socket) = came else { continue };
        mesh::limit(socket.as_raw_fd(), left.max(Duration::from_millis(1)));
        let (pid, uid) = credentials(&socket)?;
        if uid != own_uid() {
            continue;
        }
        let process = match process(&socket, pid) {
            Ok(process) => process,
            // It has ended already.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
            Err(error) => return Err(Error::system("a watch on a rank", error)),
        };
        // A stranger that says nothing sensible is sent away without harm to the job.
        let Some(hello) = read::<Hello>(&socket).ok().map(|(hello, _)| hello) else { continue };
        let double = peers.get(hello.rank).is_none_or(|p| p.is_some()) || hello.rank == 0;
        let refusal = hello.refused(own).or_else(|| {
            double.then(|| Error::Refused {
                rank: hello.rank,
                field: "rank".into(),
                want: "one that is not taken".into(),
                got: hello.rank.to_string(),
            })
        });
        if let Some(error) = refusal {
            write(&socket, &Answer::Refused(error.clone()), &[]).ok();
            refuse_all(&listener, &peers, &error);
            return Err(error);
        }
        peers[hello.rank] = Some(Peer { process, socket, pid });
    }
    introduce(&peers)?;
    Ok(peers)
}

/// Without the rank that is refused the job cannot start: everyone who waits learns why, and so do those who connect
/// within a moment.
fn refuse_all(listener: &OwnedFd, peers: &[Option<Peer>], error: &Error) {
    for peer in peers.iter().flatten() {
        write(&peer.socket, &Answer::Refused(error.clone()), &[]).ok();
    }
    let until = Instant::now() + 10 * LINGER;
    while let Some(socket) = accept_within(listener, LINGER).filter(|_| Instant::now() < until) {
        if credentials(&socket).is_ok_and(|(_, uid)| uid == own_uid()) {
            write(&socket, &Answer::Refused(error.clone()), &[]).ok();
        }
    }
}

/// Gives every two of the ranks that have come a socket, and watches on each other.
fn introduce(peers: &[Option<Peer>]) -> Result<(), Error> {
    let world = peers.len();
    // By owner and the one at the other end.
    let mut pairs: HashMap<(usize, usize), OwnedFd> = HashMap::new();
    for a in 1..world {
        for b in a + 1..world {
            let mut ends = [0; 2];
            // SAFETY: room for two descriptors, which are ours.
            unsafe {
                let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
                if libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) < 0 {
                    return Err(last("socketpair"));
                }
                pairs.insert((a, b), OwnedFd::from_raw_fd(ends[0]));
                pairs.insert((b, a), OwnedFd::from_raw_fd(ends[1]));
            }
        }
    }
    let mut pids: Vec<u32> = peers.iter().map(|p| p.as_ref().map_or(0, |p| p.pid)).collect();
    pids[0] = std::process::id();
    for (rank, peer) in peers.iter().enumerate() {
        let Some(peer) = peer else { continue };
        let others = || (1..world).filter(move |&r| r != rank);
        let sockets = others().filter_map(|r| pairs.get(&(rank, r))).map(|fd| fd.as_raw_fd());
        let watches = others().filter_map(|r| peers[r].as_ref()).map(|p| p.process.as_raw_fd());
        let fds: Vec<RawFd> = sockets.chain(watches).collect();
        write(&peer.socket, &Answer::Welcome(pids.clone()), &fds)
            .map_err(|_| Error::RankLost { rank, cause: Loss::Died { pid: peer.pid } })?;
    }
    Ok(())
}

/// Any other rank: finds rank 0 and hears who the others are.
fn connect(
    at: &Rendezvous,
    own: &Hello,
    deadline: Duration,
    until: Instant,
) -> Result<Vec<Option<Peer>>, Error> {
    let (address, length) = address(&at.job);
    let absent = || Error::Absent { missing: vec![0], after: deadline };
    let socket = loop {
        let socket = socket::open()?;
        // Whoever listens there and accepts nobody is not waited for without end.
        let left = until.saturating_duration_since(Instant::now());
        mesh::limit(socket.as_raw_fd(), left.max(Duration::from_millis(1)));
        // SAFETY: the address is valid for its length.
        if unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) } == 0 {
            break socket;
        }
        if Instant::now() >= until {
            return Err(absent());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    // Rank 0 waits for all until its own deadline: its word comes a little later than ours would.
    let patience = until.saturating_duration_since(Instant::now()) + Duration::from_millis(500);
    mesh::limit(socket.as_raw_fd(), patience);
    // The name can be guessed where a launcher's number is the job's. Another user learns nothing from us, and sends
    // nothing that we would map.
    let (pid, uid) = credentials(&socket)?;
    if uid != own_uid() {
        return Err(Error::Taken { pid, uid });
    }
    let watched = process(&socket, pid);
    write(&socket, own, &[]).map_err(|_| absent())?;
    let lost = || Error::RankLost { rank: 0, cause: Loss::Died { pid } };
    let (answer, fds) = read::<Answer>(&socket)
        .map_err(|e| if e.kind() == std::io::ErrorKind::WouldBlock { absent() } else { lost() })?;
    let pids = match answer {
        Answer::Welcome(pids) => pids,
        Answer::Refused(error) => return Err(error),
    };
    if pids.len() != at.world || fds.len() != 2 * (at.world - 2) {
        return Err(Error::system("rendezvous", "rank 0 sent too few sockets"));
    }
    let mut peers: Vec<Option<Peer>> = (0..at.world).map(|_| None).collect();
    let process = watched.map_err(|e| Error::system("a watch on rank 0", e))?;
    peers[0] = Some(Peer { process, socket, pid });
    let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
    for (i, rank) in (1..at.world).filter(|&r| r != at.rank).enumerate() {
        let (socket, process) = (fds[i].take(), fds[at.world - 2 + i].take());
        let (Some(socket), Some(process)) = (socket, process) else { continue };
        peers[rank] = Some(Peer { socket, process, pid: pids[rank] });
    }
    Ok(peers)
}

/// How long a rank that refuses waits for others to be told.
const LINGER: Duration = Duration::from_millis(300);
