//! How the processes of a job on one machine find each other: rank 0 listens on a socket without a file, checks who
//! comes, and hands everyone a socket to each other and a watch on each process. Nothing remains to be cleaned up.
//! Both sides ask the kernel who is at the other end: ranks of one job are processes of one user.

use crate::engine::mesh::{self, Mesh, Peer};
use crate::memory::last;
use crate::rendezvous::{Identity, Rendezvous};
use crate::{Error, Loss, Tag};
use serde::{Deserialize, Serialize};
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

/// Bytes of the longest message.
const LONGEST: usize = 64 << 10;

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
        let visitor = next_visitor(&listener, left.min(Duration::from_secs(1 << 20)));
        if visitor.is_none() && left.is_zero() {
            return Err(Error::Absent { missing: missing(&peers), after: deadline });
        }
        let Some(socket) = visitor else { continue };
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
            // Without this rank the job cannot start: everyone who waits learns why.
            write(&socket, &Answer::Refused(error.clone()), &[]).ok();
            for peer in peers.iter().flatten() {
                write(&peer.socket, &Answer::Refused(error.clone()), &[]).ok();
            }
            // So do those who are at the door, or come in a moment.
            let until = Instant::now() + 10 * LINGER;
            while let Some(socket) = next_visitor(&listener, LINGER).filter(|_| Instant::now() < until) {
                if credentials(&socket).is_ok_and(|(_, uid)| uid == own_uid()) {
                    write(&socket, &Answer::Refused(error.clone()), &[]).ok();
                }
            }
            return Err(error);
        }
        peers[hello.rank] = Some(Peer { process, socket, pid });
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
        // Whoever listens there and lets nobody in is not waited for without end.
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
    let name = format!("kiln-group-{}-{:016x}", own_uid(), number(job));
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

fn own_uid() -> u32 {
    // SAFETY: plain call.
    unsafe { libc::getuid() }
}

/// Who listens in this job's place, if anybody can be asked.
fn holder(job: &str) -> Option<Error> {
    let socket = socket().ok()?;
    mesh::limit(socket.as_raw_fd(), LINGER);
    let (address, length) = address(job);
    // SAFETY: the address is valid for its length.
    let there = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) } == 0;
    let (pid, uid) = credentials(&socket).ok().filter(|_| there)?;
    Some(Error::Taken { pid, uid })
}

/// Becomes readable when the process at the other end does: that very process, where the kernel (since 6.5) can tell.
/// Before that it is whoever has its number now.
fn process(socket: &OwnedFd, pid: u32) -> std::io::Result<OwnedFd> {
    /// Of the kernels that number their options as x86 and ARM do.
    const SO_PEERPIDFD: libc::c_int = 77;
    let (mut fd, mut length): (RawFd, _) = (-1, size_of::<RawFd>() as libc::socklen_t);
    let socket = socket.as_raw_fd();
    // SAFETY: room of the length told; the descriptor is ours and closed on exec.
    unsafe {
        let to = (&raw mut fd).cast();
        if libc::getsockopt(socket, libc::SOL_SOCKET, SO_PEERPIDFD, to, &mut length) == 0 && fd >= 0 {
            return Ok(OwnedFd::from_raw_fd(fd));
        }
    }
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::ENOPROTOOPT) {
        return Err(error);
    }
    // SAFETY: plain call; the descriptor is ours and closed on exec.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) {
            fd if fd < 0 => Err(std::io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as RawFd)),
        }
    }
}

fn write(socket: &OwnedFd, value: &impl Serialize, fds: &[RawFd]) -> std::io::Result<()> {
    mesh::send_bytes(socket.as_raw_fd(), &serde_json::to_vec(value).map_err(std::io::Error::other)?, fds)
}

fn read<T: for<'a> Deserialize<'a>>(socket: &OwnedFd) -> std::io::Result<(T, Vec<OwnedFd>)> {
    let mut buffer = vec![0; LONGEST];
    let (n, fds) = mesh::receive_bytes(socket.as_raw_fd(), &mut buffer, 0)?;
    if n == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&buffer[..n])?, fds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Launcher;

    fn place(job: &str, rank: usize, world: usize) -> Rendezvous {
        let (local_rank, local_world, job, launcher) = (rank, world, job.to_string(), Launcher::Torch);
        Rendezvous { rank, world, local_rank, local_world, job, launcher, engine: None }
    }

    fn hello(at: &Rendezvous) -> Hello {
        Hello { rank: at.rank, world: at.world, shards: at.world, identity: Identity::new("m", "f32", "") }
    }

    fn join(at: &Rendezvous) -> Error {
        meet(at, hello(at), Duration::from_secs(5)).map(drop).unwrap_err()
    }

    /// A process that listens in the place of a job as another user, and ends with the number of bytes that the first
    /// visitor has sent.
    fn squat(job: &str, uid: u32) -> libc::pid_t {
        let (address, length) = address(job);
        let listener = socket().unwrap();
        let mut pipe = [0; 2];
        // SAFETY: after fork only system calls, on memory that was there before.
        unsafe {
            assert_eq!(libc::bind(listener.as_raw_fd(), (&raw const address).cast(), length), 0);
            assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let [ready, tell] = pipe.map(|fd| OwnedFd::from_raw_fd(fd));
            let fd = listener.as_raw_fd();
            let child = libc::fork();
            if child == 0 {
                // Whatever becomes of the test.
                libc::alarm(60);
                if libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0 || libc::listen(fd, 1) < 0 {
                    libc::_exit(99);
                }
                libc::write(tell.as_raw_fd(), [1u8].as_ptr().cast(), 1);
                let visitor = libc::accept(fd, std::ptr::null_mut(), std::ptr::null_mut());
                let mut buffer = [0u8; 64];
                libc::_exit(libc::read(visitor, buffer.as_mut_ptr().cast(), buffer.len()) as i32);
            }
            let mut listening = [0u8];
            assert_eq!(libc::read(ready.as_raw_fd(), listening.as_mut_ptr().cast(), 1), 1);
            child
        }
    }

    fn status(child: libc::pid_t) -> i32 {
        let mut status = 0;
        // SAFETY: plain call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn another_user_in_the_place_of_the_job_is_named_and_told_nothing() {
        if own_uid() != 0 {
            println!("only root can be two users: the rest of this file has what others can test");
            return;
        }
        for rank in [1, 0] {
            let at = place(&format!("squatted-{rank}-{}", std::process::id()), rank, 2);
            let child = squat(&at.job, 65534);
            assert_eq!(join(&at), Error::Taken { pid: child as u32, uid: 65534 });
            assert_eq!(status(child), 0, "bytes that it has seen");
        }
    }

    #[test]
    fn a_place_that_is_taken_is_told_with_the_process() {
        let at = place(&format!("taken-{}", std::process::id()), 0, 2);
        let listener = socket().unwrap();
        let (address, length) = address(&at.job);
        // SAFETY: the address is valid for its length.
        unsafe {
            assert_eq!(libc::bind(listener.as_raw_fd(), (&raw const address).cast(), length), 0);
            assert_eq!(libc::listen(listener.as_raw_fd(), 1), 0);
        }
        assert_eq!(join(&at), Error::Taken { pid: std::process::id(), uid: own_uid() });
        // Nobody lets this one in either: it ends by its deadline.
        let visitor = place(&at.job, 1, 2);
        let deadline = Duration::from_millis(200);
        let error = meet(&visitor, hello(&visitor), deadline).map(drop).unwrap_err();
        assert_eq!(error, Error::Absent { missing: vec![0], after: deadline });
    }

    #[test]
    fn more_ranks_than_a_message_can_introduce_are_refused() {
        for rank in [0, 1, 127] {
            assert_eq!(join(&place("crowd", rank, 128)), Error::Crowded { ranks: 128, most: 127 });
        }
    }

    #[test]
    fn the_process_at_the_other_end_is_watched() {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors, which are ours.
        let ends = unsafe {
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()), 0);
            ends.map(|fd| OwnedFd::from_raw_fd(fd))
        };
        // The number is not what it goes by where the kernel can tell: nobody has this one.
        let told = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut version = told.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
        let knows = (version.next(), version.next()) >= (Some(6), Some(5));
        let pid = if knows { u32::MAX >> 1 } else { std::process::id() };
        let watch = process(&ends[0], pid).unwrap();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", watch.as_raw_fd())).unwrap();
        let own = format!("Pid:\t{}", std::process::id());
        assert!(info.lines().any(|line| line == own), "{info}");
    }
}
