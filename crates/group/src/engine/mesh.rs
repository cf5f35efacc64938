//! The processes of a job on one machine: a socket between every two of them, and a watchdog in each.
//!
//! Sockets carry descriptors of shared memory, never data. The watchdog reads them, and watches the peers' sockets and
//! processes: whoever goes without a farewell is lost, for every group of this process at once.

use super::slots::SharedSlots;
use crate::memory::{Region, last};
use crate::{Error, Loss};
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The other end of a socket.
pub(crate) struct Peer {
    pub socket: OwnedFd,
    pub process: OwnedFd,
    pub pid: u32,
}

/// A message: what it is about, and shared memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Message {
    /// 1 shared memory of a group, 2 a buffer that is gone, 3 farewell.
    pub kind: u64,
    pub group: u64,
    /// The buffer; 0 is the shared slots of the group.
    pub id: u64,
    pub bytes: u64,
}

pub(crate) const MEMORY: u64 = 1;
pub(crate) const GONE: u64 = 2;
const FAREWELL: u64 = 3;

/// Who uses the mesh to reach a group's peers.
pub(crate) trait Member: Send + Sync {
    fn slots(&self) -> &SharedSlots;
    /// The rank in the group of a process of the job.
    fn place(&self, process: usize) -> Option<usize>;
    fn group(&self) -> u64;
    fn gone(&self, process: usize, id: u64);
}

/// This process's side of all sockets.
pub(crate) struct Mesh {
    shared: Arc<Shared>,
    stop: OwnedFd,
    watchdog: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    peers: Vec<Option<Peer>>,
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    /// Memory that came and was not asked for yet, by sender, group and id.
    received: HashMap<(usize, u64, u64), (OwnedFd, usize)>,
    members: Vec<Weak<dyn Member>>,
    lost: HashMap<usize, Error>,
}

impl Mesh {
    /// Takes the sockets to all other ranks and starts the watchdog.
    pub(crate) fn new(peers: Vec<Option<Peer>>) -> Result<Arc<Mesh>, Error> {
        // SAFETY: plain call.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if stop < 0 {
            return Err(last("eventfd"));
        }
        // SAFETY: just opened.
        let stop = unsafe { OwnedFd::from_raw_fd(stop) };
        let shared = Arc::new(Shared { peers, state: Mutex::default(), news: Condvar::new() });
        let (theirs, end) = (shared.clone(), stop.as_raw_fd());
        let watch =
            std::thread::Builder::new().name("kiln-watchdog".into()).spawn(move || watch(&theirs, end));
        let watchdog = Mutex::new(Some(watch.map_err(|e| Error::system("watchdog", e))?));
        Ok(Arc::new(Mesh { shared, stop, watchdog }))
    }

    /// Tells of lost ranks and returned memory from now on.
    pub(crate) fn enlist(&self, member: Weak<dyn Member>) {
        let lost: Vec<(usize, Error)> = {
            let mut state = lock(&self.shared.state);
            state.members.retain(|m| m.strong_count() > 0);
            state.members.push(member.clone());
            state.lost.iter().map(|(&rank, error)| (rank, error.clone())).collect()
        };
        if let Some(member) = member.upgrade() {
            lost.into_iter().for_each(|(process, error)| tell(&*member, process, &error));
        }
    }

    /// A peer that is gone needs nothing: the next collective names it.
    pub(crate) fn send(&self, to: usize, message: Message, fd: Option<RawFd>) -> Result<(), Error> {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
        let Some(peer) = &self.shared.peers[to] else { return Ok(()) };
        match send(peer.socket.as_raw_fd(), words(&message), fd) {
            Err(error) if !matches!(error.kind(), BrokenPipe | ConnectionReset) => {
                Err(Error::system("send", error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Waits for memory that a peer sends.
    pub(crate) fn receive(&self, from: usize, group: u64, id: u64, until: Instant) -> Result<Region, Error> {
        let mut state = lock(&self.shared.state);
        loop {
            if let Some((fd, bytes)) = state.received.remove(&(from, group, id)) {
                drop(state);
                return Region::map(fd.as_fd(), bytes, id);
            }
            if let Some(error) = state.lost.get(&from) {
                return Err(error.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::system("shared memory", format!("rank {from} sent none in time")));
            }
            state = self.shared.news.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// The processes among these that are stopped.
    pub(crate) fn stopped(&self, processes: impl Iterator<Item = usize>) -> Vec<usize> {
        let stopped = |&rank: &usize| {
            let Some(peer) = &self.shared.peers[rank] else { return false };
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", peer.pid)).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['T', 't']))
        };
        processes.filter(stopped).collect()
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        for peer in self.shared.peers.iter().flatten() {
            // Whoever is gone needs no farewell.
            let _ = send(
                peer.socket.as_raw_fd(),
                words(&Message { kind: FAREWELL, group: 0, id: 0, bytes: 0 }),
                None,
            );
        }
        // SAFETY: writes eight bytes to our eventfd.
        unsafe { libc::write(self.stop.as_raw_fd(), (&1u64 as *const u64).cast(), 8) };
        if let Some(watchdog) = lock(&self.watchdog).take()
            && watchdog.thread().id() != std::thread::current().id()
        {
            let _ = watchdog.join();
        }
    }
}

fn watch(shared: &Shared, stop: RawFd) {
    let mut here: Vec<bool> = shared.peers.iter().map(|p| p.is_some()).collect();
    loop {
        let mut polled = vec![libc::pollfd { fd: stop, events: libc::POLLIN, revents: 0 }];
        let mut who = vec![usize::MAX];
        for (rank, peer) in shared.peers.iter().enumerate() {
            if let (Some(peer), true) = (peer, here[rank]) {
                for fd in [&peer.socket, &peer.process] {
                    polled.push(libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
                    who.push(rank);
                }
            }
        }
        // SAFETY: as many entries as told.
        if unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as _, -1) } < 0 {
            continue;
        }
        if polled[0].revents != 0 {
            return;
        }
        for (entry, rank) in polled.iter().zip(who).skip(1) {
            if entry.revents == 0 || !here[rank] {
                continue;
            }
            let Some(peer) = &shared.peers[rank] else { continue };
            // A process that ended may have said farewell before: read first, in either case.
            match read_all(shared, rank, peer, entry.fd == peer.process.as_raw_fd()) {
                Read::More => {}
                Read::Farewell => here[rank] = false,
                Read::Lost => {
                    here[rank] = false;
                    let error = Error::RankLost { rank, cause: Loss::Died { pid: peer.pid } };
                    let members: Vec<_> = {
                        let mut state = lock(&shared.state);
                        state.lost.insert(rank, error.clone());
                        state.members.iter().filter_map(Weak::upgrade).collect()
                    };
                    shared.news.notify_all();
                    members.iter().for_each(|member| tell(&**member, rank, &error));
                }
            }
        }
    }
}

/// Ends the group of a member if the lost process is in it; names the rank there.
fn tell(member: &dyn Member, process: usize, error: &Error) {
    if let (Some(rank), Error::RankLost { cause, .. }) = (member.place(process), error)
        // Who has left before it ended took part in everything that it had to.
        && !member.slots().has_left(rank)
    {
        member.slots().abort(&Error::RankLost { rank, cause: cause.clone() });
    }
}

enum Read {
    More,
    Farewell,
    Lost,
}

fn read_all(shared: &Shared, rank: usize, peer: &Peer, ended: bool) -> Read {
    loop {
        match receive::<4>(peer.socket.as_raw_fd(), libc::MSG_DONTWAIT) {
            Ok(Some(([MEMORY, group, id, bytes], mut fds))) if fds.len() == 1 => {
                let fd = fds.remove(0);
                lock(&shared.state).received.insert((rank, group, id), (fd, bytes as usize));
                shared.news.notify_all();
            }
            Ok(Some(([GONE, group, id, _], _))) => {
                let members: Vec<_> = {
                    let mut state = lock(&shared.state);
                    state.received.remove(&(rank, group, id));
                    state.members.iter().filter_map(Weak::upgrade).collect()
                };
                members.iter().filter(|m| m.group() == group).for_each(|m| m.gone(rank, id));
            }
            Ok(Some(([FAREWELL, ..], _))) => return Read::Farewell,
            Ok(Some(_)) => {}
            Ok(None) => return Read::Lost,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return if ended { Read::Lost } else { Read::More };
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return Read::Lost,
        }
    }
}

fn words(message: &Message) -> [u64; 4] {
    [message.kind, message.group, message.id, message.bytes]
}

/// Room for the descriptors of one message.
const FDS: usize = 250;

/// Sends words, with a descriptor, as one message.
fn send<const N: usize>(socket: RawFd, words: [u64; N], fd: Option<RawFd>) -> std::io::Result<()> {
    send_bytes(socket, words.map(u64::to_le_bytes).as_flattened(), fd.as_slice())
}

pub(crate) fn send_bytes(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> std::io::Result<()> {
    assert!(fds.len() <= FDS);
    let mut iov = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    let mut control = [0u64; 8 + FDS / 2];
    // SAFETY: the message points at locals that outlive the call; the control buffer has room for all descriptors.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            let length = size_of_val(fds) as u32;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(length) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(length) as _;
            std::ptr::copy_nonoverlapping(
                fds.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(header),
                length as usize,
            );
        }
        match libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL) {
            n if n < 0 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

type Received<const N: usize> = Option<([u64; N], Vec<OwnedFd>)>;

/// One message of words and descriptors; nothing at the end of the stream.
fn receive<const N: usize>(socket: RawFd, flags: libc::c_int) -> std::io::Result<Received<N>> {
    let mut buffer = [[0u8; 8]; N];
    let (n, fds) = receive_bytes(socket, buffer.as_flattened_mut(), flags)?;
    Ok((n > 0).then(|| (buffer.map(u64::from_le_bytes), fds)))
}

pub(crate) fn receive_bytes(
    socket: RawFd,
    buffer: &mut [u8],
    flags: libc::c_int,
) -> std::io::Result<(usize, Vec<OwnedFd>)> {
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut control = [0u64; 8 + FDS / 2];
    // SAFETY: as in `send_bytes`; descriptors that came are ours alone.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let n = libc::recvmsg(socket, &mut message, flags | libc::MSG_CMSG_CLOEXEC);
        if n < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut fds = Vec::new();
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for i in 0..bytes / size_of::<RawFd>() {
                    let fd = libc::CMSG_DATA(header).cast::<RawFd>().add(i).read_unaligned();
                    fds.push(OwnedFd::from_raw_fd(fd));
                }
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
        Ok((n as usize, fds))
    }
}

/// How long a send may wait for a peer that does not read.
pub(crate) fn limit(socket: RawFd, time: Duration) {
    let time = libc::timeval { tv_sec: time.as_secs() as _, tv_usec: time.subsec_micros() as _ };
    for option in [libc::SO_SNDTIMEO, libc::SO_RCVTIMEO] {
        // SAFETY: an option of the size told.
        unsafe {
            libc::setsockopt(
                socket,
                libc::SOL_SOCKET,
                option,
                (&time as *const libc::timeval).cast(),
                size_of::<libc::timeval>() as _,
            )
        };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
