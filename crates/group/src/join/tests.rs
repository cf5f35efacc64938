//! Tests of how ranks meet.

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
    let listener = socket::open().unwrap();
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
            let came = libc::accept(fd, std::ptr::null_mut(), std::ptr::null_mut());
            let mut bytes = [0u8; 64];
            libc::_exit(libc::read(came, bytes.as_mut_ptr().cast(), bytes.len()) as i32);
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
    let listener = socket::open().unwrap();
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
