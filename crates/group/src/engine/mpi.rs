//! Messages by the cluster's own MPI: point to point, from one thread, which alone calls the library.
//!
//! MPI moves bytes; it never reduces. When a rank dies, MPI ends the whole world and the launcher starts it again.

use super::mailbox::{Lost, Mailbox, message};
use super::messages::{Link, Messages};
use super::{Engine, Place};
use crate::join::Hello;
use crate::{Error, Layout, Loss};
use mpi::Threading;
use mpi::ffi;
use mpi::traits::Communicator;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// All our messages have it.
const TAG: i32 = 7717;
/// The group in which ranks greet.
const HANDSHAKE: u64 = 0;
/// How long the last messages may take to leave.
const FLUSH: Duration = Duration::from_secs(2);

/// A message and for whom.
type Order = (usize, Vec<u8>);

struct Mpi {
    outbox: Mutex<Option<Sender<Order>>>,
    failed: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Link for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn send(&self, to: usize, message: Vec<u8>) {
        if let Some(outbox) = &*self.outbox.lock().unwrap_or_else(|e| e.into_inner()) {
            // The thread ends only after this link.
            let _ = outbox.send((to, message));
        }
    }

    fn broken(&self) {
        self.failed.store(true, SeqCst);
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        self.outbox.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take() {
            let _ = thread.join();
        }
    }
}

/// Starts MPI, once in a process, and meets the other ranks.
pub(crate) fn engine(
    hello: Hello,
    layout: Layout,
    group: u64,
    deadline: Duration,
) -> Result<Box<dyn Engine>, Error> {
    let until = Instant::now() + deadline;
    let mailbox = Arc::new(Mailbox::default());
    let (outbox, orders) = mpsc::channel();
    let (ready, started) = mpsc::channel();
    let failed = Arc::new(AtomicBool::new(false));
    let (to, flag) = (mailbox.clone(), failed.clone());
    let body = move || carry(&orders, &to, &ready, &flag);
    let thread = std::thread::Builder::new().name("kiln-mpi".into()).spawn(body);
    let thread = Mutex::new(Some(thread.map_err(|e| Error::system("mpi", e))?));
    let link: Arc<dyn Link> = Arc::new(Mpi { outbox: Mutex::new(Some(outbox)), failed, thread });
    let (rank, world) = started
        .recv_timeout(deadline)
        .map_err(|_| Error::system("mpi", "it did not start"))?
        .ok_or_else(|| Error::system("mpi", "it was started before: a process joins one job"))?;
    if (rank, world) != (hello.rank, hello.world) {
        let message =
            format!("MPI says rank {rank} of {world}, the launcher {} of {}", hello.rank, hello.world);
        return Err(Error::System { what: "mpi".into(), message });
    }
    if let Err(error) = greet(&*link, &mailbox, &hello, until, deadline) {
        link.broken();
        return Err(error);
    }
    let place = Place { group, members: (0..world).collect(), rank, layout };
    Ok(Box::new(Messages::new(link, mailbox, place)))
}

/// Rank 0 checks what everyone is and tells them all.
fn greet(
    link: &dyn Link,
    mailbox: &Mailbox,
    own: &Hello,
    until: Instant,
    deadline: Duration,
) -> Result<(), Error> {
    let take = |from: usize| match mailbox.take(HANDSHAKE, from, until) {
        Ok(Some(message)) => Ok(message),
        Ok(None) => Err(Error::Absent { missing: vec![from], after: deadline }),
        Err(Lost::Over(error)) => Err(error),
        Err(Lost::Left(after)) => Err(Error::RankLost { rank: from, cause: Loss::Left { after } }),
    };
    let bad = |e: serde_json::Error| Error::system("mpi", e);
    if own.rank > 0 {
        link.send(0, message(HANDSHAKE, &[&serde_json::to_vec(own).map_err(bad)?]));
        let refusal: Option<Error> = serde_json::from_slice(&take(0)?).map_err(bad)?;
        return refusal.map_or(Ok(()), Err);
    }
    let mut refusal = None;
    for from in 1..own.world {
        match take(from).and_then(|m| serde_json::from_slice::<Hello>(&m).map_err(bad)) {
            Ok(hello) => refusal = refusal.or(hello.refused(own)),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    let answer = serde_json::to_vec(&refusal).map_err(bad)?;
    (1..own.world).for_each(|to| link.send(to, message(HANDSHAKE, &[&answer])));
    refusal.map_or(Ok(()), Err)
}

/// A message that MPI still reads from.
struct Leaving {
    request: ffi::MPI_Request,
    _message: Vec<u8>,
}

/// The one thread that calls MPI.
fn carry(
    orders: &Receiver<Order>,
    mailbox: &Mailbox,
    ready: &Sender<Option<(usize, usize)>>,
    failed: &AtomicBool,
) {
    let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = ready.send(None);
        return;
    };
    let world = universe.world();
    let _ = ready.send(Some((world.rank() as usize, world.size() as usize)));
    let mut leaving: Vec<Leaving> = Vec::new();
    let mut idle = 0u32;
    let mut ending: Option<Instant> = None;
    loop {
        idle += 1;
        loop {
            match orders.try_recv() {
                Ok((to, message)) => {
                    leaving.push(send(to, message));
                    idle = 0;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    ending.get_or_insert_with(Instant::now);
                    break;
                }
            }
        }
        while let Some((from, message)) = receive() {
            mailbox.deliver(from, message);
            idle = 0;
        }
        leaving.retain_mut(|l| !left(l));
        if let Some(since) = ending
            && (leaving.is_empty() || since.elapsed() > FLUSH)
        {
            break;
        }
        match idle {
            0..=200 => std::hint::spin_loop(),
            201..=400 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
    if failed.load(SeqCst) || !leaving.is_empty() {
        // Finalising would wait for ranks that may be gone. The launcher ends the world when this process does.
        std::mem::forget(leaving);
        std::mem::forget(universe);
    }
}

fn send(to: usize, message: Vec<u8>) -> Leaving {
    // SAFETY: MPI is initialised and called by this thread only; the message stays where it is until it has left.
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        ffi::MPI_Isend(
            message.as_ptr().cast(),
            message.len() as i32,
            ffi::RSMPI_UINT8_T,
            to as i32,
            TAG,
            ffi::RSMPI_COMM_WORLD,
            &mut request,
        );
        Leaving { request, _message: message }
    }
}

fn left(leaving: &mut Leaving) -> bool {
    let mut done = 0;
    // SAFETY: a request of `send`; null after it is done.
    unsafe { ffi::MPI_Test(&mut leaving.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
    done != 0
}

/// The next message that has come.
fn receive() -> Option<(usize, Vec<u8>)> {
    // SAFETY: MPI is initialised and called by this thread only; the room is as long as the message.
    unsafe {
        let mut there = 0;
        let mut status: ffi::MPI_Status = std::mem::zeroed();
        ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, TAG, ffi::RSMPI_COMM_WORLD, &mut there, &mut status);
        if there == 0 {
            return None;
        }
        let mut length = 0;
        ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut length);
        let from = status.MPI_SOURCE;
        let mut message = vec![0u8; usize::try_from(length).ok()?];
        ffi::MPI_Recv(
            message.as_mut_ptr().cast(),
            length,
            ffi::RSMPI_UINT8_T,
            from,
            TAG,
            ffi::RSMPI_COMM_WORLD,
            ffi::RSMPI_STATUS_IGNORE,
        );
        Some((from as usize, message))
    }
}
