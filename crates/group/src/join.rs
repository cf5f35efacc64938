//! How the processes of a job on one machine find each other: rank 0 listens on a socket without a file, checks who
//! comes, and hands everyone a socket to each other and a watch on each process. Nothing remains to be cleaned up.

use crate::engine::mesh::{self, Mesh, Peer};
use crate::memory::last;
use crate::rendezvous::{Identity, Rendezvous};
use crate::{Error, Loss};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
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

/// Bytes of the longest message.
const ROOM: usize = 64 << 10;

/// Names a job among all on this machine.
pub(crate) fn number(job: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    hasher.finish().max(1)
}

/// Meets the other ranks.
pub(crate) fn meet(at: &Rendezvous, hello: Hello, deadline: Duration) -> Result<Arc<Mesh>, Error> {
    let until = Instant::now() + deadline;
    let peers =
        if at.rank == 0 { host(at, &hello, deadline, until)? } else { visit(at, &hello, deadline, until)? };
    for peer in peers.iter().flatten() {
        mesh::limit(peer.socket.as_raw_fd(), deadline);
    }
    Mesh::new(peers)
}

fn host(
    at: &Rendezvous,
    own: &Hello,
    deadline: Duration,
    until: Instant,
) -> Result<Vec<Option<Peer>>, Error> {
    let listener = socket()?;
    let (address, length) = address(&at.job);
    // SAFETY: the address is valid for its length.
    unsafe {
        if libc::bind(listener.as_raw_fd(), (&raw const address).cast(), length) < 0 {
            return Err(last("another job has the same name"));
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
        let visitor = next_visitor(&listener, left.min(Duration::from_secs(1 << 20)));
        if visitor.is_none() && left.is_zero() {
            return Err(Error::Absent { missing: missing(&peers), after: deadline });
        }
        let Some(socket) = visitor else { continue };
        mesh::limit(socket.as_raw_fd(), left.max(Duration::from_millis(1)));
        let (pid, uid) = credentials(&socket)?;
        // SAFETY: plain call.
        if uid != unsafe { libc::getuid() } {
            continue;
        }
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
            // Without this rank the job cannot start: everyone who waits learns why.
            write(&socket, &Answer::Refused(error.clone()), &[]).ok();
            for peer in peers.iter().flatten() {
                write(&peer.socket, &Answer::Refused(error.clone()), &[]).ok();
            }
            // So do those who are at the door, or come in a moment.
            while let Some(socket) = next_visitor(&listener, LINGER) {
                write(&socket, &Answer::Refused(error.clone()), &[]).ok();
            }
            return Err(error);
        }
        peers[hello.rank] = Some(Peer { process: process(pid)?, socket, pid });
    }
    introduce(&peers)?;
    Ok(peers)
}

/// How long a rank that refuses waits for others to be told.
const LINGER: Duration = Duration::from_millis(300);

/// Who knocks within that time.
fn next_visitor(listener: &OwnedFd, within: Duration) -> Option<OwnedFd> {
    let mut polled = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry.
    if unsafe { libc::poll(&mut polled, 1, within.as_millis() as i32) } <= 0 {
        return None;
    }
    let (to, length) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: plain call; the descriptor is ours.
    let fd = unsafe { libc::accept4(listener.as_raw_fd(), to, length, libc::SOCK_CLOEXEC) };
    // SAFETY: just accepted.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Gives every two visitors a socket, and watches on each other.
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

fn visit(
    at: &Rendezvous,
    own: &Hello,
    deadline: Duration,
    until: Instant,
) -> Result<Vec<Option<Peer>>, Error> {
    let (address, length) = address(&at.job);
    let absent = || Error::Absent { missing: vec![0], after: deadline };
    let socket = loop {
        let socket = socket()?;
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
    write(&socket, own, &[]).map_err(|_| absent())?;
    let (pid, _) = credentials(&socket)?;
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
    peers[0] = Some(Peer { process: process(pid)?, socket, pid });
    let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
    for (i, rank) in (1..at.world).filter(|&r| r != at.rank).enumerate() {
        let (socket, process) = (fds[i].take(), fds[at.world - 2 + i].take());
        let (Some(socket), Some(process)) = (socket, process) else { continue };
        peers[rank] = Some(Peer { socket, process, pid: pids[rank] });
    }
    Ok(peers)
}

fn socket() -> Result<OwnedFd, Error> {
    // SAFETY: plain call; the descriptor is ours.
    unsafe {
        match libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) {
            fd if fd < 0 => Err(last("socket")),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// A name in the abstract namespace: no file, gone with its last user.
fn address(job: &str) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: zero is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    // SAFETY: plain call.
    let name = format!("kiln-group-{}-{:016x}", unsafe { libc::getuid() }, number(job));
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    (address, length as _)
}

fn credentials(socket: &OwnedFd) -> Result<(u32, u32), Error> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: room of the length told.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut length,
        )
    };
    if failed != 0 { Err(last("SO_PEERCRED")) } else { Ok((peer.pid as u32, peer.uid)) }
}

/// Becomes readable when the process ends.
fn process(pid: u32) -> Result<OwnedFd, Error> {
    // SAFETY: plain call; the descriptor is ours and closed on exec.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) {
            fd if fd < 0 => Err(last("pidfd_open")),
            fd => Ok(OwnedFd::from_raw_fd(fd as RawFd)),
        }
    }
}

fn write(socket: &OwnedFd, value: &impl Serialize, fds: &[RawFd]) -> std::io::Result<()> {
    mesh::send_bytes(socket.as_raw_fd(), &serde_json::to_vec(value).map_err(std::io::Error::other)?, fds)
}

fn read<T: for<'a> Deserialize<'a>>(socket: &OwnedFd) -> std::io::Result<(T, Vec<OwnedFd>)> {
    let mut room = vec![0; ROOM];
    let (n, fds) = mesh::receive_bytes(socket.as_raw_fd(), &mut room, 0)?;
    if n == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&room[..n])?, fds))
}
