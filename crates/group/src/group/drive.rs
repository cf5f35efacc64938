//! Driving the queue: whoever waits runs the calls in their order, or the group's worker thread where nobody waits.

use super::queue::{Progress, Ticket};
use super::{Inner, lock};
use crate::Error;
use crate::buffer::Buffer;
use crate::engine::Wait;
use crate::recorder::State;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicUsize, fence};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

/// What driving once came to.
pub(super) enum Turn {
    /// A call has ended.
    Ran,
    /// The oldest call waits for its own contribution.
    Promised(Arc<Ticket>),
    /// Nothing is open.
    Idle,
}

/// How the worker is told what to do.
#[derive(Default)]
pub(super) struct Wake {
    pub state: Mutex<Request>,
    pub wakeup: Condvar,
}

#[derive(Default, PartialEq)]
pub(super) enum Request {
    #[default]
    None,
    Drive,
    Stop,
}

impl Inner {
    /// A call's contribution is there: somebody has to run it, unless it is small and next.
    pub(super) fn ready(self: &Arc<Self>, ticket: &Ticket, head: bool) {
        // Either we see that somebody drives, or they see the contribution before they go.
        fence(SeqCst);
        if self.drivers.load(SeqCst) == 0 && !(head && self.announced(ticket)) {
            self.wake();
        }
    }

    /// Whether a small contribution at the head of the queue could be announced at once.
    pub(super) fn announced(&self, ticket: &Ticket) -> bool {
        let Ok(_driver) = self.driver.try_lock() else { return false };
        match &*lock(&ticket.progress) {
            Progress::Open(buffer) if buffer.region.id == 0 => {
                self.engine.announce(&ticket.signature, buffer);
                true
            }
            Progress::Open(_) | Progress::Promised => false,
            Progress::Running | Progress::Ended(_) | Progress::Taken => true,
        }
    }

    /// Waits for a call and takes its result.
    pub(super) fn finish(self: &Arc<Self>, ticket: &Ticket) -> Result<Buffer, Error> {
        self.drive(ticket, || ())?;
        match std::mem::replace(&mut *lock(&ticket.progress), Progress::Taken) {
            Progress::Ended(result) => result,
            Progress::Promised | Progress::Open(_) | Progress::Running | Progress::Taken => {
                Err(Error::Closed)
            }
        }
    }

    /// Runs calls in order until this one has ended, but `compute` before.
    pub(super) fn drive(self: &Arc<Self>, ticket: &Ticket, compute: impl FnOnce()) -> Result<(), Error> {
        let ended = || matches!(*lock(&ticket.progress), Progress::Ended(_) | Progress::Taken);
        if ended() {
            return Ok(());
        }
        let driven = self.driving(|| {
            compute();
            while !ended() {
                match self.next(false) {
                    Turn::Ran => {}
                    Turn::Promised(ticket) => self.await_promise(&ticket),
                    Turn::Idle => return Err(lock(&self.queue).over.clone().unwrap_or(Error::Closed)),
                }
            }
            Ok(())
        });
        if self.waits() {
            self.wake();
        }
        driven
    }

    /// Runs calls in turn with other drivers. Meanwhile calls that become ready are left to the drivers, so the caller
    /// has to see to it afterwards that nothing [waits](Inner::waits).
    pub(super) fn driving<T>(&self, run: impl FnOnce() -> T) -> T {
        self.drivers.fetch_add(1, SeqCst);
        let _count = DriverCount(&self.drivers);
        let _driver = lock(&self.driver);
        run()
    }

    /// Whether so many threads of every rank have a core each.
    pub(super) fn spare(&self, threads: usize) -> bool {
        self.layout.ranks() * threads <= self.cores
    }

    /// Runs the oldest open call, if its contribution is there, `beside` a thread that computes or not. The
    /// caller holds the driver.
    pub(super) fn next(&self, beside: bool) -> Turn {
        let (ticket, promised) = {
            let queue = lock(&self.queue);
            let Some(ticket) = queue.open.front().cloned() else { return Turn::Idle };
            (ticket, queue.open.iter().any(|open| matches!(*lock(&open.progress), Progress::Promised)))
        };
        // What is promised is still being computed.
        let spin = self.spare(self.config.threads + usize::from(beside || promised));
        let mut buffer = {
            let mut progress = lock(&ticket.progress);
            match std::mem::replace(&mut *progress, Progress::Running) {
                Progress::Open(buffer) => buffer,
                Progress::Promised => {
                    *progress = Progress::Promised;
                    drop(progress);
                    return Turn::Promised(ticket);
                }
                // Failed by an abort meanwhile.
                before @ (Progress::Running | Progress::Ended(_) | Progress::Taken) => {
                    *progress = before;
                    drop(progress);
                    lock(&self.queue).open.pop_front();
                    return Turn::Ran;
                }
            }
        };
        self.recorder.moved(ticket.number, State::Started);
        let deadline = self.config.deadline;
        let wait = Wait { until: Instant::now() + deadline, deadline, spin, more: ticket.more };
        let begun = Instant::now();
        let result = self.engine.run(&ticket.signature, &mut buffer, wait);
        if let Some(rate) = self.config.rate {
            let takes = Duration::from_secs_f64(buffer.bytes as f64 / rate.max(1) as f64);
            self.carry(&ticket, begun, takes);
        }
        self.recorder.moved(ticket.number, if result.is_ok() { State::Done } else { State::Failed });
        buffer.poison = None;
        let error = match result {
            Ok(()) => {
                *lock(&ticket.progress) = Progress::Ended(Ok(buffer));
                None
            }
            Err(error) => {
                *lock(&ticket.progress) = Progress::Ended(Err(error.clone()));
                (!error.is_local()).then_some(error)
            }
        };
        {
            let mut queue = lock(&self.queue);
            if queue.open.front().is_some_and(|front| Arc::ptr_eq(front, &ticket)) {
                queue.open.pop_front();
            }
        }
        if let Some(error) = error {
            self.fail(&error);
        }
        Turn::Ran
    }

    /// Sleeps until a link has carried a call, begun at that time, that takes it so long. What is behind a range of the
    /// same contribution is given to the link meanwhile.
    pub(super) fn carry(&self, ticket: &Ticket, begun: Instant, takes: Duration) {
        let until = {
            let mut carried = lock(&self.carried);
            let from = match (*carried, ticket.since.get()) {
                // It was there when the one before had been carried, though that sleep took a little longer.
                (Some(free), Some(&since)) if since <= free => free,
                _ => begun,
            };
            *carried.insert(from + takes)
        };
        if !ticket.more {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Ends the group with this error: for the peers, for what is queued, and for later calls.
    pub(super) fn fail(&self, error: &Error) {
        let open = {
            let mut queue = lock(&self.queue);
            if queue.over.is_some() {
                return;
            }
            queue.over = Some(error.clone());
            std::mem::take(&mut queue.open)
        };
        self.pool.close();
        self.engine.abort(error);
        for ticket in open {
            let mut progress = lock(&ticket.progress);
            if matches!(*progress, Progress::Open(_) | Progress::Promised) {
                *progress = Progress::Ended(Err(error.clone()));
                self.recorder.moved(ticket.number, State::Failed);
            }
        }
        self.recorder.failed(error);
        let _queue = lock(&self.queue);
        self.kept.notify_all();
    }

    /// Has the worker drive what is open. It is started at the first call.
    pub(super) fn wake(self: &Arc<Self>) {
        let mut worker = lock(&self.worker);
        let wake = worker.get_or_insert_with(|| {
            let wake = Arc::new(Wake::default());
            let (inner, wakeup) = (Arc::downgrade(self), wake.clone());
            let name = format!("kiln-{}", self.name);
            let body = move || work(&inner, &wakeup);
            if let Err(error) = std::thread::Builder::new().name(name).spawn(body) {
                // Whoever waits drives; only the overlap is lost.
                eprintln!("no thread for group {}: {error}", self.name);
            }
            wake
        });
        *lock(&wake.state) = Request::Drive;
        wake.wakeup.notify_one();
    }

    pub(super) fn leave(&self) {
        let queue = lock(&self.queue);
        // A contribution that failed and has not been announced is the reason why the others wait in vain.
        let failed = queue.open.iter().find_map(|ticket| match &*lock(&ticket.progress) {
            Progress::Open(buffer) => buffer.poison.clone(),
            Progress::Promised | Progress::Running | Progress::Ended(_) | Progress::Taken => None,
        });
        if let Some(reason) = failed {
            self.engine.abort(&Error::Poisoned { rank: self.rank, reason });
        }
        self.engine.leave(queue.last);
    }
}

/// Counts one driver less when dropped.
struct DriverCount<'a>(&'a AtomicUsize);

impl Drop for DriverCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// The worker: drives the queue until it is empty, then rests. It keeps the group alive only while it drives.
fn work(inner: &Weak<Inner>, wake: &Wake) {
    loop {
        {
            let mut state = lock(&wake.state);
            while *state == Request::None {
                state = wake.wakeup.wait(state).unwrap_or_else(|e| e.into_inner());
            }
            if *state == Request::Stop {
                return;
            }
            *state = Request::None;
        }
        let Some(inner) = inner.upgrade() else { return };
        while inner.waits() {
            inner.driving(|| while matches!(inner.next(true), Turn::Ran) {});
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(wake) = lock(&self.worker).take() {
            *lock(&wake.state) = Request::Stop;
            wake.wakeup.notify_one();
        }
        self.leave();
        self.pool.close();
    }
}
