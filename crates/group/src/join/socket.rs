//! Sockets between processes of one machine: who is at the other end, and a watch on it.

use super::{LINGER, number};
use crate::Error;
use crate::engine::mesh;
use crate::memory::last;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Bytes of the longest message.
const LONGEST: usize = 64 << 10;

/// A socket of its own kind: messages stay whole.
pub(super) fn open() -> Result<OwnedFd, Error> {
    // SAFETY: plain call; the descriptor is ours.
    unsafe {
        match libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) {
            fd if fd < 0 => Err(last("socket")),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// A name in the abstract namespace: no file, gone with its last user.
pub(super) fn address(job: &str) -> (libc::sockaddr_un, libc::socklen_t) {
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

/// The process at the other end and its user.
pub(super) fn credentials(socket: &OwnedFd) -> Result<(u32, u32), Error> {
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

pub(super) fn own_uid() -> u32 {
    // SAFETY: plain call.
    unsafe { libc::getuid() }
}

/// Who listens at this job's address, if anybody can be asked.
pub(super) fn holder(job: &str) -> Option<Error> {
    let socket = open().ok()?;
    mesh::limit(socket.as_raw_fd(), LINGER);
    let (address, length) = address(job);
    // SAFETY: the address is valid for its length.
    let there = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) } == 0;
    let (pid, uid) = credentials(&socket).ok().filter(|_| there)?;
    Some(Error::Taken { pid, uid })
}

/// Becomes readable when the process at the other end does: that very process, where the kernel (since 6.5) can tell.
/// Before that it is whoever has its number now.
pub(super) fn process(socket: &OwnedFd, pid: u32) -> std::io::Result<OwnedFd> {
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

pub(super) fn write(socket: &OwnedFd, value: &impl Serialize, fds: &[RawFd]) -> std::io::Result<()> {
    mesh::send_bytes(socket.as_raw_fd(), &serde_json::to_vec(value).map_err(std::io::Error::other)?, fds)
}

pub(super) fn read<T: for<'a> Deserialize<'a>>(socket: &OwnedFd) -> std::io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = vec![0; LONGEST];
    let (n, fds) = mesh::receive_bytes(socket.as_raw_fd(), &mut bytes, 0)?;
    if n == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&bytes[..n])?, fds))
}

/// The next process that connects within that time.
pub(super) fn accept_within(listener: &OwnedFd, within: Duration) -> Option<OwnedFd> {
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
